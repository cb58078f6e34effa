"""GPT-3 175B (Brown et al. 2020, table 2.1): 174,604,259,328 parameters, to count.

attnlab count --config=experiments/language/gpt3_175b.py
attnlab train --config=experiments/language/gpt3_175b.py --workdir=runs/gpt3 --config.data.path=text.txt

All layers attend to the whole past; in the paper, every other layer has sparse, banded attention.
"""

from ml_collections import ConfigDict

from attnlab.configs import LanguageConfig, LanguageModelConfig, OptimizerConfig, TextFile, TrainConfig, config_dict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config; there is no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    return config_dict(
        LanguageConfig(
            data=TextFile(
                documents='paragraphs',
                vocabulary='subwords',
                vocabulary_size=50257,
            ),
            model=LanguageModelConfig(
                layers=96,
                width=12288,
                heads=96,
                context=2048,
                mlp='gelu_tanh',
                dtype='bfloat16',
                scan=True,
                remat='full',
            ),
            optimizer=OptimizerConfig(
                b2=0.95,
                learning_rate=6e-5,
                schedule='cosine',
                warmup='120 steps',
                clip=1.0,
                weight_decay=0.1,
            ),
            train=TrainConfig(
                batch_size=1536,
                accumulate=1536,
                duration='95000 steps',
                log_every='10 steps',
                eval_every='1000 steps',
                save_every='1000 steps',
                label_smoothing=0.0,
            ),
        )
    )
