"""Mixtral 8x7B (Jiang et al. 2024, table 1): 46,702,792,704 parameters, of which a token meets 12,879,925,248.

attnlab count --config=experiments/language/mixtral_8x7b.py
attnlab train --config=experiments/language/mixtral_8x7b.py --workdir=runs/mixtral --config.data.path=text.txt

The paper tells neither optimizer nor batch: these are LLaMA's.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = '') -> ConfigDict:
    """The fields of llama_7b.py, with experts and grouped heads.  It takes no argument."""
    config = runpy.run_path(str(Path(__file__).with_name('llama_7b.py')))['get_config'](arg)
    config.model.update(
        kv_heads=8, context=32768, rotary_base=1e6, mlp_width=14336, experts=8, experts_per_token=2,
    )  # fmt: skip
    config.train.update(batch_size=128, accumulate=128)
    return config
