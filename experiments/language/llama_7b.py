"""LLaMA-7B (Touvron et al. 2023, table 2): RMSNorm, SwiGLU, rotary positions, no biases; 6,738,415,616 parameters.

attnlab count --config=experiments/language/llama_7b.py
attnlab train --config=experiments/language/llama_7b.py --workdir=runs/llama --config.data.path=text.txt
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
                vocabulary_size=32000,
            ),
            model=LanguageModelConfig(
                tied=False,
                layers=32,
                width=4096,
                heads=32,
                context=2048,
                positions='rotary',
                norm='rms',
                mlp='swiglu',
                mlp_width=11008,
                use_bias=False,
                dtype='bfloat16',
                scan=True,
                remat='full',
            ),
            optimizer=OptimizerConfig(
                b2=0.95,
                learning_rate=3e-4,
                schedule='cosine',
                warmup='2000 steps',
                clip=1.0,
                weight_decay=0.1,
            ),
            train=TrainConfig(
                batch_size=2048,
                accumulate=2048,
                duration='250000 steps',
                log_every='10 steps',
                eval_every='1000 steps',
                save_every='1000 steps',
                label_smoothing=0.0,
            ),
        )
    )
