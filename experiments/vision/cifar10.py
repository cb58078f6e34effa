"""CIFAR-10 on one GPU in 200 epochs: a Vision Transformer of 6 layers with patches of 4 x 4.

attnlab train --config=experiments/vision/cifar10.py --workdir=runs/cifar10
attnlab train --config=experiments/vision/cifar10.py:cct --workdir=runs/cifar10_cct
attnlab eval --workdir=runs/cifar10
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from attnlab.configs import VIT_SIZES, VitConfig, config_dict

MODELS = {
    '': VitConfig(**VIT_SIZES['CIFAR-S'], dtype='bfloat16', qk_norm='rms', layer_drop=0.1),
    # Hassani et al. 2021, CCT-7/3x1.
    'cct': VitConfig(
        embedding='tokenizer', convolutions=1, pool='attention', layers=7, width=256, heads=4,
        mlp_width=512, dtype='bfloat16', layer_drop=0.1,
    ),
}  # fmt: skip


def get_config(arg: str = '') -> ConfigDict:
    """Return the config of cifar10_small.py with more augmentation, a larger model and longer training.

    arg: '' for patches, 'cct' for a convolutional tokenizer.
    """
    if arg not in MODELS:
        raise ValueError(f'the argument is {arg!r}; expected one of {", ".join(map(repr, MODELS))}')
    config = runpy.run_path(str(Path(__file__).with_name('cifar10_small.py')))['get_config']()
    config.data.update(policy='trivial', erase=0.25, mixup=0.2, cutmix=1.0)
    config.model = config_dict(MODELS[arg])
    config.optimizer.update(learning_rate=1e-3, warmup='10 epochs', weight_decay=0.1)
    config.train.update(
        batch_size=256, duration='200 epochs', log_every='100 steps', eval_every='2 epochs', save_every='10 epochs',
        ema=0.9995,
    )  # fmt: skip
    return config
