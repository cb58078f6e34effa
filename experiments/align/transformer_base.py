"""The Transformer (base) of Vaswani et al. 2017, table 3, on your sentence pairs: 63,082,496 parameters.

attnlab train --config=experiments/align/transformer_base.py --workdir=runs/base \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/transformer_base.py

The languages share 37,000 sub-words; a small corpus gives fewer, and a smaller model.
"""

from ml_collections import ConfigDict

from attnlab.configs import (
    AlignConfig,
    DecodeConfig,
    OptimizerConfig,
    PairFiles,
    TrainConfig,
    TranslatorConfig,
    config_dict,
)


def get_config(arg: str = '') -> ConfigDict:
    """Return the config; there is no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    return config_dict(
        AlignConfig(
            data=PairFiles(
                vocabulary='subwords',
                vocabulary_size=37000,
                shared=True,
                widths=(16, 32, 48, 64, 96, 128, 256),
            ),
            model=TranslatorConfig(
                layers=6,
                width=512,
                heads=8,
                context=256,
                positions='sinusoidal',
                order='post',
                mlp='relu',
                mlp_width=2048,
                dropout=0.1,
                scaled_init=False,
                init=0.0,
                shared_embedding=True,
                alignment_layer=5,
            ),
            optimizer=OptimizerConfig(
                b2=0.98,
                learning_rate=7e-4,
                schedule='rsqrt',
                warmup='4000 steps',
                clip=0.0,
                weight_decay=0.0,
            ),
            train=TrainConfig(
                batch_size=800,  # about 25,000 tokens of each language
                duration='100000 steps',
                log_every='100 steps',
                eval_every='5000 steps',
                save_every='1000 steps',
                label_smoothing=0.1,
            ),
            decode=DecodeConfig(beams=4, length_penalty=0.6),
        )
    )
