"""Translation from your own files: for each split two files X.en and X.fr, plain or .gz, or one tab-separated file.

attnlab train --config=experiments/align/files_gru.py --workdir=runs/mine \
    --config.data.train=path/train --config.data.valid=path/valid --config.data.test=path/test
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from attnlab.configs import PairFiles, config_dict


def get_config(arg: str = '') -> ConfigDict:
    """Return the config of multi30k_gru.py, which also defines `arg`, with other data."""
    config = runpy.run_path(str(Path(__file__).with_name('multi30k_gru.py')))['get_config'](arg)
    config.data = config_dict(PairFiles(vocabulary='subwords', vocabulary_size=6000, widths=(12, 16, 20, 28, 48)))
    return config
