"""GPT-2 small on your text (Radford et al. 2019; the optimizer settings are nanoGPT's): 124,439,808 parameters.

attnlab train --config=experiments/language/gpt2_small.py --workdir=runs/gpt2 --config.data.path=text.txt
attnlab count --config=experiments/language/gpt2_small.py

The sub-words are learned from the text, so a small text gives fewer sub-words, and a smaller model.
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
                layers=12,
                width=768,
                heads=12,
                context=1024,
                mlp='gelu_tanh',
            ),
            optimizer=OptimizerConfig(
                b2=0.95,
                learning_rate=6e-4,
                schedule='cosine',
                warmup='2000 steps',
                clip=1.0,
                weight_decay=0.1,
            ),
            train=TrainConfig(
                batch_size=480,
                accumulate=40,
                duration='600000 steps',
                log_every='10 steps',
                eval_every='1000 steps',
                save_every='1000 steps',
                label_smoothing=0.0,
            ),
        )
    )
