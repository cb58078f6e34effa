"""A tiny run of the grammar's experiment, trained once a session."""

import pytest

from attnlab import config as configs
from attnlab.train import run

TINY = {
    'data.train_examples': '128', 'data.test_examples': '24', 'data.widths': '12,20',
    'model.embedding': '8', 'model.hidden': '12',
    'optimizer.learning_rate': '0.01', 'optimizer.warmup': '2 steps',
    'train.batch_size': '16', 'train.duration': '20 steps', 'train.eval_every': '10 steps',
    'train.save_every': '3 steps', 'train.log_every': '1 steps',
}  # fmt: skip


def tiny_config(arg='', **changes):
    """The grammar experiment cut down to a second or two; changes: dotted keys with `__` for the dot."""
    overrides = TINY | {key.replace('__', '.'): value for key, value in changes.items()}
    return configs.load(f'experiments/align/grammar_gru.py{":" + arg if arg else ""}', list(overrides.items()))


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    """The work directory of a trained tiny run."""
    workdir = tmp_path_factory.mktemp('runs') / 'tiny'
    run.train(tiny_config(), workdir)
    return workdir
