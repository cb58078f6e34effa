"""CIFAR-100 on one GPU in 200 epochs: cifar10.py, including its arguments, on other data.

attnlab train --config=experiments/vision/cifar100.py --workdir=runs/cifar100
attnlab eval --workdir=runs/cifar100
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config of cifar10.py, which also defines `arg`, with other data."""
    config = runpy.run_path(str(Path(__file__).with_name('cifar10.py')))['get_config'](arg)
    config.data.name = 'cifar100'
    return config
