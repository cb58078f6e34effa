"""A small Vision Transformer on handwritten digits that are drawn by a program; nothing is downloaded.

attnlab train --config=experiments/vision/digits.py --workdir=runs/digits
attnlab eval --workdir=runs/digits
attnlab attend --workdir=runs/digits 0 1 2

Two cores of an AMD EPYC, seed 0: 98.6 % of 1,000 test images classified correctly after 48 seconds.
"""

from ml_collections import ConfigDict

from attnlab.configs import DigitsData, OptimizerConfig, TrainConfig, VisionConfig, VitConfig, config_dict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config; there is no argument."""
    if arg:
        raise ValueError(f"the argument is {arg!r}; expected ''")
    return config_dict(
        VisionConfig(
            data=DigitsData(
                train_examples=12000,
                test_examples=1000,
                crop=1,
                operations=1,
                strength=0.0,
            ),
            model=VitConfig(
                image=(16, 16),
                layers=3,
                width=64,
                heads=4,
                mlp_width=128,
            ),
            optimizer=OptimizerConfig(
                b2=0.999,
                learning_rate=3e-3,
                schedule='cosine',
                warmup='100 steps',
                clip=1.0,
                weight_decay=0.05,
            ),
            train=TrainConfig(
                batch_size=64,
                duration='12 epochs',
                log_every='50 steps',
                eval_every='2 epochs',
                save_every='2 epochs',
                label_smoothing=0.0,
                ema=0.99,
            ),
        )
    )
