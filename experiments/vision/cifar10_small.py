"""CIFAR-10 on two CPU cores in less than an hour: a compact convolutional Transformer, a ViT and a residual network.

attnlab train --config=experiments/vision/cifar10_small.py --workdir=runs/cct
attnlab train --config=experiments/vision/cifar10_small.py:vit --workdir=runs/vit
attnlab train --config=experiments/vision/cifar10_small.py:resnet --workdir=runs/resnet
attnlab eval --workdir=runs/cct

Two cores of an AMD EPYC, seed 0: the compact Transformer classifies 82.0 % of the test images correctly after 59
minutes, while tests ran on the same cores; the plain ViT 76.9 % after as many epochs (docs/vision.md).  The residual
network has not been run yet.
"""

from ml_collections import ConfigDict

from attnlab.configs import (
    VIT_SIZES,
    Cifar10Data,
    OptimizerConfig,
    ResNetConfig,
    TrainConfig,
    VisionConfig,
    VitConfig,
    config_dict,
)

MODELS = {
    # Hassani et al. 2021, CCT-2/3x2.
    '': VitConfig(
        embedding='tokenizer', convolutions=2, pool='attention', layers=2, width=128, heads=2, mlp_width=128,
        layer_drop=0.1,
    ),
    'vit': VitConfig(**VIT_SIZES['CIFAR-Ti'], mlp_width=192, layer_drop=0.1),
    'resnet': ResNetConfig(width=16, blocks=3),
}  # fmt: skip


def get_config(arg: str = '') -> ConfigDict:
    """Return the config.

    arg: '' for the compact convolutional Transformer, 'vit' for a plain ViT, 'resnet' for a residual network.
    """
    if arg not in MODELS:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, MODELS))}')
    return config_dict(
        VisionConfig(
            data=Cifar10Data(
                crop=4,
                flip=True,
            ),
            model=MODELS[arg],
            optimizer=OptimizerConfig(
                b2=0.999,
                learning_rate=2e-3,
                schedule='cosine',
                warmup='2 epochs',
                clip=1.0,
                weight_decay=0.05,
            ),
            train=TrainConfig(
                batch_size=128,
                duration='30 epochs',
                log_every='50 steps',
                eval_every='1 epoch',
                save_every='1 epoch',
                label_smoothing=0.1,
                ema=0.998,
            ),
        )
    )
