"""The Transformer (big) of Vaswani et al. 2017, table 3, on your sentence pairs: 214,245,376 parameters.

attnlab train --config=experiments/align/transformer_big.py --workdir=runs/big \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/transformer_big.py

The languages share 37,000 sub-words; a small corpus gives fewer, and a smaller model.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config of transformer_base.py with a larger width and longer training; no argument."""
    config = runpy.run_path(str(Path(__file__).with_name('transformer_base.py')))['get_config'](arg)
    config.model.update(width=1024, heads=16, mlp_width=4096)
    config.optimizer.learning_rate = 5e-4
    config.train.duration = '300000 steps'
    return config
