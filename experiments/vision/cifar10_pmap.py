"""CIFAR-10 by `jax.pmap`: cifar10.py, with its arguments, as one program on each device of the machine.

attnlab train --config=experiments/vision/cifar10_pmap.py --workdir=runs/cifar10_pmap
attnlab eval --workdir=runs/cifar10_pmap
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """The model and training of cifar10.py, with its argument."""
    config = runpy.run_path(str(Path(__file__).with_name('cifar10.py')))['get_config'](arg)
    config.train.parallel = 'pmap'
    return config
