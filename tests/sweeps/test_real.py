"""What a sweep costs, and what pruning saves, on trainings that learn something."""

import os
import time

import pytest

from attnlab.sweeps import sweep_files
from attnlab.train import metrics
from tests.sweeps.experiments import LANGUAGE
from tests.sweeps.processes import start_sweep, wait_for_exit

SWEEPS = '''
def sweep_sixty(): return grid({'seed': range(60)})
def sweep_ones(): return grid({'seed': range(5), 'train.duration': ('1 steps',)})
'''
SEARCH = '''
def search_rate(trial):
    return {'optimizer.learning_rate': trial.suggest_float('optimizer.learning_rate', 1e-5, 4e-3, log=True)}
'''
FIELDS = {
    'model.layers': 2, 'model.width': 32, 'model.heads': 2, 'model.context': 64, 'train.batch_size': 16,
    'train.duration': '300 steps', 'train.eval_every': '30 steps', 'train.save_every': '150 steps',
    'train.log_every': '30 steps', 'data.share': 0.98, 'train.mesh': 'data=1', 'optimizer.warmup': '20 steps',
}  # fmt: skip


@pytest.mark.slow
def test_a_point_starts_within_three_seconds(trainable, tmp_path):
    """Of one step each, by a worker that has run one before."""
    config = trainable(SWEEPS)
    code, text = wait_for_exit(start_sweep(config, tmp_path / 'sweep', '--sweep=ones'))
    assert code == 0, text
    rows = sweep_files.read_sweep(tmp_path / 'sweep').rows
    took = [row.seconds for row in rows[1:]]
    print('seconds of a point of one step:', *took)
    assert max(took) < 3


@pytest.mark.timing
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason='needs two cores')
def test_two_workers_are_faster_than_one(trainable, tmp_path):
    """Of points that are soon done.  One worker alone has both cores, which it uses the better the longer a step is."""
    config, took = trainable(SWEEPS), {}
    flags = ('--config.train.duration=30 steps', '--config.train.eval_every=15 steps',
             '--config.train.save_every=15 steps', '--config.train.log_every=10 steps')  # fmt: skip
    for count in (1, 2):
        start = time.monotonic()
        code, text = wait_for_exit(start_sweep(config, tmp_path / str(count), '--sweep=sixty', f'--workers={count}', *flags), 900)
        took[count] = time.monotonic() - start
        assert code == 0, text
    print('seconds by workers:', took)
    assert took[1] > 1.7 * took[2]


@pytest.mark.slow
def test_pruning_finds_the_same_best_point_in_half_the_steps(tmp_path, shared):
    """Of rates up to the best one, of which the larger learns faster from the first evaluation to the last.  Above it
    the early order is not that of the end: see docs/sweeps.md."""
    config, found = tmp_path / 'experiment.py', {}
    fields = FIELDS | {'data.folder': str(shared('tinyshakespeare'))}
    config.write_text(LANGUAGE.format(fields=fields) + SEARCH)
    for pruner in ('none', 'asha'):
        flags = ('--sweep=rate', '--trials=20', '--sampler=random', f'--pruner={pruner}', '--workers=2')
        code, text = wait_for_exit(start_sweep(config, tmp_path / pruner, *flags), 1800)
        assert code == 0, text
        rows = sweep_files.read_sweep(tmp_path / pruner).rows
        done = [row for row in rows if row.status == 'done']
        steps = sum(metrics.read_metrics(row.run)[-1]['step'] for row in rows)
        found[pruner] = min(done, key=lambda row: row.value).number, steps, len(done)
    print('(winner, steps, done) by pruner:', found)
    assert found['asha'][0] == found['none'][0] and found['none'][1:] == (20 * 300, 20)
    assert found['asha'][1] <= found['none'][1] / 2
