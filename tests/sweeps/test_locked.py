"""A database that another process locks, or that fails: the worker waits, stops, or ends with an error of one line."""

import sqlite3
import threading
import time
from contextlib import closing

import pytest

from attnlab.errors import RunError, Stopped
from attnlab.sweeps import database, points, progress, storage, sweep_directory, sweep_files, worker
from tests.sweeps.experiments import SEARCHED
from tests.sweeps.trainer import Trainer

FOLDERS = ['[x]*', 'a b', '~', '100%', 'a%20b', 'a?b=1', 'a#b', '{x}', 'ü', '\'"', 'a:b@c', '$HOME', '\\', 'two\nlines']


@pytest.fixture
def file(tmp_path):
    """An SQLite file with the tables of a sweep."""
    storage.close_claim_store(open_store(tmp_path / 'claims.db'))
    return tmp_path / 'claims.db'


@pytest.fixture(autouse=True)
def short_sqlite_timeout(monkeypatch):
    monkeypatch.setattr(database, '_SQLITE_TIMEOUT', 0.05)


def open_store(file, check=lambda: None):
    return storage.open_claim_store(f'sqlite:///{file}', 'sweep', 'max', file.parent / 'locks', check=check)


def claim_first_point(store):
    return storage.claim_point(store, range(1), lambda number: None, lambda number: 0)


def lock_database(file, seconds=None):
    """Lock the file as a backup or a viewer may, for some seconds or until the returned connection is closed."""
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    connection.execute('BEGIN EXCLUSIVE')
    if seconds:
        threading.Timer(seconds, connection.close).start()
    return connection


def test_a_locked_file_is_waited_for_and_logged(file, caplog):
    lock_database(file, 0.4)
    start = time.monotonic()
    store = open_store(file)
    assert time.monotonic() - start >= 0.3
    assert caplog.messages == [f'{file} is locked by another process; waiting for it']
    lock_database(file, 0.4)
    claim = claim_first_point(store)
    lock_database(file, 0.4)
    assert storage.send_heartbeat(store, claim.trial)
    lock_database(file, 0.4)
    storage.release_claim(store, claim.trial, 'failed')
    claim.lock.close()
    assert caplog.messages == [f'{file} is locked by another process; waiting for it'] * 4
    storage.close_claim_store(store)


def test_a_reader_delays_only_the_commit(file, caplog):
    store = open_store(file)
    reader = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    reader.execute('BEGIN')
    reader.execute('SELECT * FROM studies').fetchall()
    threading.Timer(0.4, reader.close).start()
    claim = claim_first_point(store)
    claim.lock.close()
    assert claim.point == 0 and 'is locked by another process' in caplog.text
    storage.close_claim_store(store)


def test_a_file_that_stays_locked_is_an_error_of_one_line(file, monkeypatch):
    monkeypatch.setattr(database, 'MAX_LOCK_WAIT', 0.2)
    store = open_store(file)
    with closing(lock_database(file)):
        for call in (
            lambda: open_store(file),
            lambda: claim_first_point(store),
            lambda: storage.send_heartbeat(store, 1),
        ):
            with pytest.raises(RunError, match=r'claims.db has been locked by another process for \d s; run the same'):
                call()
    storage.close_claim_store(store)


def test_a_signal_ends_the_wait_for_a_lock(file):
    received = []

    def check():
        if received:
            raise Stopped(15)

    store = open_store(file, check)
    with closing(lock_database(file)):
        received.append(15)
        with pytest.raises(Stopped):
            claim_first_point(store)
    storage.close_claim_store(store)


def test_a_claim_is_kept_when_a_lock_delays_its_heartbeats(file, monkeypatch):
    """After a lock of more than a minute all heartbeats are old, although their workers are alive."""
    store = open_store(file)
    claim = claim_first_point(store)
    claim.lock.close()
    monkeypatch.setattr(storage, '_machine_id', lambda: 'elsewhere')
    other = open_store(file)
    monkeypatch.setattr(storage, 'HEARTBEAT_SECONDS', 0.2)
    other.storage.grace_period = 1
    time.sleep(1.1)
    lock_database(file, 0.4)
    assert claim_first_point(other) is None and storage.send_heartbeat(store, claim.trial)
    assert claim_first_point(other) is None and storage.send_heartbeat(store, claim.trial)
    for opened in (store, other):
        storage.close_claim_store(opened)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize('name', FOLDERS)
def test_a_folder_name_may_have_any_characters(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    database.check_database(f'sqlite:///{folder}/sweep.db')
    store = open_store(folder / 'sweep.db')
    claim = claim_first_point(store)
    claim.lock.close()
    storage.close_claim_store(store)
    assert sorted(path.name for path in folder.iterdir()) == ['locks', 'sweep.db']
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.parametrize(('failing', 'statuses'), [
    ('draw', []), ('report_evaluation', ['waiting']), ('claim_point', []), ('finish_claim', ['done']),
])  # fmt: skip
def test_a_failing_database_ends_the_worker_and_does_not_fail_the_point(
    experiment, tmp_path, monkeypatch, failing, statuses
):
    config, trainer = experiment(SEARCHED), Trainer()
    plan = points.make_sweep_plan(config, [], ['rate'], {'trials': 2, 'sampler': 'random'})
    spec = sweep_directory.ensure_sweep_directory(tmp_path / 'sweep', plan)
    url = f'sqlite:///{tmp_path}/sweep/sweep.db'
    work = lambda: worker.run_points(progress.SweepProgress(tmp_path / 'sweep', plan), spec['id'], url)
    monkeypatch.setattr(worker.run, 'train_run', trainer)

    def failing_query(*args):
        engine = database.sqlalchemy.create_engine('sqlite://', poolclass=database.sqlalchemy.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql('SELECT 1 FROM nowhere')

    with monkeypatch.context() as patch:
        if failing == 'draw':
            patch.setattr(storage.optuna.samplers.RandomSampler, 'sample_independent', failing_query)
        else:
            patch.setattr(storage, failing, failing_query)
        with pytest.raises(RunError, match=r'--storage=sqlite:.* fails: no such table: nowhere'):
            work()
        assert [row.status for row in sweep_files.read_sweep(tmp_path / 'sweep').rows] == statuses
    work()
    assert [row.status for row in sweep_files.read_sweep(tmp_path / 'sweep').rows] == ['done'] * 2
