"""Workers and the master killed at random moments: every point is done once, as in a sweep that nobody killed."""

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


def workers(master):
    """The numbers of the processes that a process has started."""
    try:
        return [int(each) for each in Path(f'/proc/{master}/task/{master}/children').read_text().split()]
    except FileNotFoundError:
        return []


def begun(folder, since, process):
    """Whether a point is run by now that was not at that time, or the process has ended."""
    files = (folder / 'points').glob('*/running.json')
    return process.poll() is not None or any(path.stat().st_mtime > since for path in files)


def ended(folder):
    return {path.parent.name: path.read_text() for path in (folder / 'points').glob('*/outcome.json')}


@pytest.mark.slow
def test_every_point_is_done_once_after_ten_kills(trainable, tmp_path):
    config, draw = trainable(SWEEPS), random.Random(7)
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    assert wait_for_exit(start_sweep(config, whole, *FLAGS))[0] == 0
    process, killed, before = start_sweep(config, broken, *FLAGS, stdout=subprocess.DEVNULL), {'worker': 0, 'master': 0}, {}
    while sum(killed.values()) < KILLS:
        since = time.time()
        if draw.random() < 0.7:  # else in the first seconds of a start, before anything runs
            wait_until(partial(begun, broken, since, process))
        time.sleep(draw.uniform(0, 3))
        now = ended(broken)
        assert before.items() <= now.items()  # none is done twice
        before = now
        if process.poll() is not None:
            break
        if draw.random() < 0.6 and (found := workers(process.pid)):
            os.kill(draw.choice(found), signal.SIGKILL)
            killed['worker'] += 1
        else:
            process.kill()
            process.wait()
            killed['master'] += 1
            process = start_sweep(config, broken, *FLAGS, stdout=subprocess.DEVNULL)
    assert sum(killed.values()) == KILLS and min(killed.values()) > 1, killed
    assert process.wait() == 0 or wait_for_exit(start_sweep(config, broken, *FLAGS))[0] == 0
    rows = sweep_files.read_sweep(broken).rows
    assert [row.status for row in rows] == ['done'] * 8 and before.items() <= ended(broken).items()
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
