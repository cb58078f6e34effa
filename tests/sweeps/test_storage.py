"""Claims of points by several processes, on SQLite and on a PostgreSQL server."""

import signal
import socket
import subprocess
import time

import pytest
from optuna.trial import TrialState

from attnlab.sweeps import storage
from attnlab.sweeps.sweep_files import Outcome
from tests.sweeps.processes import start_python, wait_for_exit

DONE = Outcome('done', 'bleu', 'max', 1.0, 3, 0.1)

# Claims points until all are done.  If two processes run the same point at once, the second one fails.
WORKER = """
import sys, time
from pathlib import Path
from attnlab.sweeps import storage
from attnlab.sweeps.sweep_files import Outcome

url, folder, count, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = storage.open_claim_store(url, 'sweep', 'max', folder / 'locks')
DONE = Outcome('done', 'bleu', 'max', 1.0, 3, 0.1)
find_outcome = lambda point: DONE if (folder / f'{point}.done').exists() else None
while not all(map(find_outcome, range(count))):
    claim = storage.claim_point(store, range(count), find_outcome, lambda point: 0)
    if claim is None:
        time.sleep(0.05)
        continue
    with claim.lock:
        running = folder / f'{claim.point}.runs'
        with running.open('x'):
            time.sleep(seconds)
        (folder / f'{claim.point}.done').open('x').close()
        running.unlink()
        storage.finish_claim(store, claim.trial, find_outcome(claim.point))
"""


def start_workers(url, folder, points, seconds, count=4):
    return [start_python('-c', WORKER, url, folder, points, seconds, stderr=subprocess.PIPE) for _ in range(count)]


def open_store(url, folder, name='sweep'):
    store = storage.open_claim_store(url, name, 'max', folder / 'locks')
    STORES.append(store)
    return store


def trial_states(store):
    return [(trial.user_attrs['point'], trial.state) for trial in store.study.trials]


STORES, CLAIMS = [], []  # opened by the current test


@pytest.fixture(autouse=True)
def close_stores(database):
    """Release all claims and close all stores before the database is deleted."""
    yield
    while CLAIMS:
        CLAIMS.pop().lock.close()
    while STORES:
        storage.close_claim_store(STORES.pop())


def claim_next(store, points=1, outcomes=None, step=0):
    claim = storage.claim_point(store, range(points), (outcomes or {}).get, lambda point: step)
    CLAIMS.extend([claim] if claim else [])
    return claim


@pytest.mark.slow
def test_processes_that_start_at_once_share_the_points(database, tmp_path):
    points = 30
    for process in start_workers(database, tmp_path, points, 0.01):
        code, _ = wait_for_exit(process)
        assert code == 0
    complete = [point for point, state in trial_states(open_store(database, tmp_path)) if state is TrialState.COMPLETE]
    assert sorted(complete) == list(range(points))


@pytest.mark.quick_cases(1)
def test_the_point_of_a_killed_worker_can_be_claimed_at_once(database, tmp_path):
    first = start_python('-c', WORKER, database, tmp_path, 1, 60)
    while not (tmp_path / '0.runs').exists():
        time.sleep(0.05)
    store = open_store(database, tmp_path)
    assert claim_next(store) is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    claim = claim_next(store)
    assert (claim.point, claim.kills) == (0, 1)
    assert trial_states(store) == [(0, TrialState.FAIL), (0, TrialState.RUNNING)]


def test_kills_without_a_new_checkpoint_are_counted(database, tmp_path):
    store = open_store(database, tmp_path)
    for kills, step in enumerate([0, 0, 0, 7, 7]):
        claim = claim_next(store, step=step)
        assert claim.kills == kills if step == 0 else claim.kills == kills - 3
        claim.lock.close()  # as if its holder were dead
    claim = claim_next(store, step=7)
    storage.release_claim(store, claim.trial, 'stopped')
    claim.lock.close()
    claim = claim_next(store, step=7)
    assert claim.kills == 0


@pytest.mark.quick_cases(1)
def test_a_worker_on_another_machine_is_dead_without_heartbeats(database, tmp_path, monkeypatch):
    store = open_store(database, tmp_path)
    claim = claim_next(store)
    claim.lock.close()
    with monkeypatch.context() as patch:
        patch.setattr(socket, 'gethostname', lambda: 'elsewhere')
        assert claim_next(store) is None
        store.storage.grace_period = 1
        time.sleep(2.5)
        second = claim_next(store)
    assert (
        second.point == 0
        and not storage.send_heartbeat(store, claim.trial)
        and storage.send_heartbeat(store, second.trial)
    )


def test_a_worker_killed_before_it_recorded_its_name_loses_the_claim(database, tmp_path, monkeypatch):
    store = open_store(database, tmp_path)
    claim = claim_next(store)
    claim.lock.close()
    [trial] = store.study.trials
    with store.storage.engine.begin() as connection:
        for table in ('trial_user_attributes', 'trial_heartbeats'):
            key = "AND key = 'owner'" if 'user' in table else ''
            connection.exec_driver_sql(f'DELETE FROM {table} WHERE trial_id = {trial._trial_id} {key}')
    other = open_store(database, tmp_path)
    assert claim_next(other) is None
    monkeypatch.setattr(storage, 'GRACE_SECONDS', 0.1)
    time.sleep(0.2)
    assert claim_next(other).point == 0


def test_a_written_outcome_ends_the_trial_of_a_dead_worker(database, tmp_path):
    store = open_store(database, tmp_path)
    claim = claim_next(store)
    claim.lock.close()
    assert claim_next(store, outcomes={0: DONE}) is None
    assert [(trial.state, trial.value) for trial in store.study.trials] == [(TrialState.COMPLETE, 1.0)]


def test_two_trials_of_one_point_run_once(database, tmp_path, monkeypatch):
    """As if two machines, which do not share file locks, had both added a trial."""
    store = open_store(database, tmp_path)
    assert claim_next(store, outcomes={0: DONE}) is None  # creates an empty study
    for _ in range(2):
        store.study.add_trial(storage._new_trial(0, None))
    claim = claim_next(store)
    with monkeypatch.context() as patch:
        patch.setattr(socket, 'gethostname', lambda: 'elsewhere')
        assert claim_next(open_store(database, tmp_path / 'elsewhere')) is None
    assert [state for _, state in trial_states(store)] == [TrialState.RUNNING, TrialState.FAIL]
    storage.finish_claim(store, claim.trial, DONE)


def test_two_sweeps_share_a_database(database, tmp_path):
    one, two = (open_store(database, tmp_path / name, name) for name in ('one', 'two'))
    assert claim_next(one).point == claim_next(two).point == 0
