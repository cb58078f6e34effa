"""Workers and the master killed at random moments: every point is done once, with the results of an unkilled sweep."""

import json
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from optuna.trial import TrialState

from attnlab.sweeps import storage, sweep_files
from tests.sweeps.processes import read_run_records, start_sweep, wait_for_exit, wait_until

SWEEPS = "def sweep_eight(): return grid({'seed': range(4), 'optimizer.learning_rate': (0.01, 0.02)})"
KILLS = 10
FLAGS = ('--sweep=eight', '--workers=2', '--config.train.duration=60 steps', '--config.train.eval_every=20 steps')


def child_pids(parent):
    """Return the ids of the processes that a process has started."""
    try:
        return [int(pid) for pid in Path(f'/proc/{parent}/task/{parent}/children').read_text().split()]
    except FileNotFoundError:
        return []


def has_started(folder, since, process):
    """Return whether a point has been running since that time, or the process has ended."""
    files = (folder / 'points').glob('*/running.json')
    return process.poll() is not None or any(path.stat().st_mtime > since for path in files)


def read_outcomes(folder):
    return {path.parent.name: path.read_text() for path in (folder / 'points').glob('*/outcome.json')}


@pytest.mark.slow
def test_every_point_is_done_once_after_ten_kills(trainable, tmp_path):
    config, draw = trainable(SWEEPS), random.Random(7)
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert wait_for_exit(start_sweep(config, whole, *FLAGS))[0] == 0
    process = start_sweep(config, broken, *FLAGS, stdout=subprocess.DEVNULL)
    killed, before = {'worker': 0, 'master': 0}, {}
    while sum(killed.values()) < KILLS:
        since = time.time()
        if draw.random() < 0.7:  # otherwise the kill comes in the first seconds after a start, before a point runs
            wait_until(partial(has_started, broken, since, process))
        time.sleep(draw.uniform(0, 3))
        now = read_outcomes(broken)
        assert before.items() <= now.items()  # no point is done twice
        before = now
        if process.poll() is not None:
            break
        if draw.random() < 0.6 and (pids := child_pids(process.pid)):
            os.kill(draw.choice(pids), signal.SIGKILL)
            killed['worker'] += 1
        else:
            process.kill()
            process.wait()
            killed['master'] += 1
            process = start_sweep(config, broken, *FLAGS, stdout=subprocess.DEVNULL)
    assert sum(killed.values()) == KILLS and min(killed.values()) > 1, killed
    assert process.wait() == 0 or wait_for_exit(start_sweep(config, broken, *FLAGS))[0] == 0
    rows = sweep_files.read_sweep(broken).rows
    assert [row.status for row in rows] == ['done'] * 8 and before.items() <= read_outcomes(broken).items()
    assert read_run_records(broken) == read_run_records(whole)
    assert [(row.value, row.step) for row in rows] == [
        (row.value, row.step) for row in sweep_files.read_sweep(whole).rows
    ]
    spec = json.loads((broken / 'sweep.json').read_text())
    store = storage.open_claim_store(f'sqlite:///{broken}/sweep.db', spec['id'], 'max', broken / 'locks')
    states = [(trial.user_attrs['point'], trial.state) for trial in store.study.trials]
    storage.close_claim_store(store)
    assert sorted(point for point, state in states if state is TrialState.COMPLETE) == list(range(8))
    lost = [point for point, state in states if state is TrialState.FAIL]
    assert len(lost) == len(states) - 8 and len(lost) >= 3
