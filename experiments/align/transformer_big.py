"""The Transformer (big) of Vaswani et al. 2017, table 3, on sentence pairs of yours: 214,245,376 parameters.

attnlab train --config=experiments/align/transformer_big.py --workdir=runs/big \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
attnlab count --config=experiments/align/transformer_big.py

With 37,000 sub-words that both languages share; a small corpus gives fewer.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """The fields of transformer_base.py, wider and trained for longer.  It takes no argument."""
    config = runpy.run_path(str(Path(__file__).with_name('transformer_base.py')))['get_config'](arg)
    config.model.update(width=1024, heads=16, mlp_width=4096)
    config.optimizer.learning_rate = 5e-4
    config.train.duration = '300000 steps'
    return config
