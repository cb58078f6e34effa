"""CIFAR-10 with `jax.pmap`: cifar10.py, including its arguments, as one program on each device of the machine.

attnlab train --config=experiments/vision/cifar10_pmap.py --workdir=runs/cifar10_pmap
attnlab eval --workdir=runs/cifar10_pmap
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config of cifar10.py, which also defines `arg`, with pmap."""
    config = runpy.run_path(str(Path(__file__).with_name('cifar10.py')))['get_config'](arg)
    config.train.parallel = 'pmap'
    return config
