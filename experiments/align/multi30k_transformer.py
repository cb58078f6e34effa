"""English to French on the 29,000 captions of Multi30k, by a Transformer of the size of Transformer-Tiny.

attnlab train --config=experiments/align/multi30k_transformer.py --workdir=runs/multi30k_transformer
attnlab eval --workdir=runs/multi30k_transformer --split=test

Two cores of an AMD EPYC, shared with other work, seed 0, 47 minutes, 2,861,568 parameters, beam size 5: sacreBLEU 58.4
on test 2016 and 48.9 on test 2017; 59.4 and 50.2 in lower case, which papers report.  Wu et al. 2021 report 61.8
and 53.5 for their Transformer-Tiny (2.55 million parameters, 3.5 times as many tokens).
"""

from ml_collections import ConfigDict

from attnlab.configs import (
    AlignConfig,
    DecodeConfig,
    Multi30kData,
    OptimizerConfig,
    TrainConfig,
    TranslatorConfig,
    config_dict,
)


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.  arg: '' for pre-norm, 'post' for post-norm, as in Vaswani et al. 2017."""
    if arg not in ('', 'post'):
        raise ValueError(f"the argument is {arg!r}; expected '' or 'post'")
    return config_dict(
        AlignConfig(
            data=Multi30kData(
                vocabulary='subwords',
                vocabulary_size=6000,
                widths=(12, 16, 20, 28, 48),
            ),
            model=TranslatorConfig(
                layers=4,
                width=128,
                heads=4,
                positions='sinusoidal',
                order=arg or 'pre',
                mlp='relu',
                mlp_width=256,
                dropout=0.2,
                scaled_init=False,
                init=0.0,
                alignment_layer=3,
            ),
            optimizer=OptimizerConfig(
                b2=0.98,
                learning_rate=2e-3,
                schedule='cosine',
                warmup='500 steps',
                clip=1.0,
                weight_decay=0.0,
            ),
            train=TrainConfig(
                batch_size=128,
                duration='20 epochs',
                log_every='50 steps',
                eval_every='1 epoch',
                save_every='1 epoch',
                label_smoothing=0.1,
            ),
            decode=DecodeConfig(beams=5, length_penalty=1.0),
        )
    )
