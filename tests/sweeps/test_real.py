"""The cost of a sweep, and the steps that pruning saves, with models that are really trained."""

import os
import time

import pytest

from attnlab.sweeps import sweep_files
from attnlab.train import metrics
from tests.sweeps.experiments import LANGUAGE
from tests.sweeps.processes import start_sweep, wait_for_exit

SWEEPS = """
def sweep_sixty(): return grid({'seed': range(60)})
def sweep_ones(): return grid({'seed': range(5), 'train.duration': ('1 steps',)})
"""
SEARCH = """
def search_rate(trial):
    return {'optimizer.learning_rate': trial.suggest_float('optimizer.learning_rate', 1e-5, 4e-3, log=True)}
"""
FIELDS = {
    'model.layers': 2, 'model.width': 32, 'model.heads': 2, 'model.context': 64, 'train.batch_size': 16,
    'train.duration': '300 steps', 'train.eval_every': '30 steps', 'train.save_every': '150 steps',
    'train.log_every': '30 steps', 'data.share': 0.98, 'train.mesh': 'data=1', 'optimizer.warmup': '20 steps',
}  # fmt: skip


@pytest.mark.slow
def test_a_point_starts_within_three_seconds(trainable, tmp_path):
    """Points of one step each, in a worker that has run a point before."""
    config = trainable(SWEEPS)
    code, text = wait_for_exit(start_sweep(config, tmp_path / 'sweep', '--sweep=ones'))
    assert code == 0, text
    rows = sweep_files.read_sweep(tmp_path / 'sweep').rows
    seconds = [row.seconds for row in rows[1:]]
    print('seconds of a point of one step:', *seconds)
    assert max(seconds) < 3


@pytest.mark.timing
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason='needs two cores')
def test_two_workers_are_faster_than_one(trainable, tmp_path):
    """For short points.  A single worker has both cores, and uses them better the longer a step is."""
    config, seconds = trainable(SWEEPS), {}
    flags = ('--config.train.duration=30 steps', '--config.train.eval_every=15 steps',
             '--config.train.save_every=15 steps', '--config.train.log_every=10 steps')  # fmt: skip
    for count in (1, 2):
        start = time.monotonic()
        code, text = wait_for_exit(
            start_sweep(config, tmp_path / str(count), '--sweep=sixty', f'--workers={count}', *flags), 900
        )
        seconds[count] = time.monotonic() - start
        assert code == 0, text
    print('seconds by workers:', seconds)
    assert seconds[1] > 1.7 * seconds[2]


@pytest.mark.slow
def test_pruning_finds_the_same_best_point_in_half_the_steps(tmp_path, shared):
    """For learning rates up to the best one: there a larger rate learns faster from the first evaluation to the last.

    Above the best rate, the order of the first evaluations is not that of the last: see docs/sweeps.md.
    """
    config, measured = tmp_path / 'experiment.py', {}
    fields = FIELDS | {'data.folder': str(shared('tinyshakespeare'))}
    config.write_text(LANGUAGE.format(fields=fields) + SEARCH)
    for pruner in ('none', 'asha'):
        flags = ('--sweep=rate', '--trials=20', '--sampler=random', f'--pruner={pruner}', '--workers=2')
        code, text = wait_for_exit(start_sweep(config, tmp_path / pruner, *flags), 1800)
        assert code == 0, text
        rows = sweep_files.read_sweep(tmp_path / pruner).rows
        done = [row for row in rows if row.status == 'done']
        steps = sum(metrics.read_metrics(row.run)[-1]['step'] for row in rows)
        measured[pruner] = min(done, key=lambda row: row.value).number, steps, len(done)
    print('(winner, steps, done) by pruner:', measured)
    assert measured['asha'][0] == measured['none'][0] and measured['none'][1:] == (20 * 300, 20)
    assert measured['asha'][1] <= measured['none'][1] / 2
