"""Locks of points, and unusable database URLs."""

import os
import signal
import subprocess

import pytest

from attnlab.errors import UserError
from attnlab.sweeps import database, storage
from tests.sweeps.processes import start_python


@pytest.mark.parametrize(('url', 'line'), [
    ('nothing', "--storage expects a URL as in postgresql://user@host/database, got 'nothing'"),
    ('postgresql://me:secret@127.0.0.1:1/x', '--storage=postgresql://me:***@127.0.0.1:1/x cannot be reached'),
    ('oracle://x/y', '--storage=oracle://x/y needs a driver that is not installed'),
    ('nonsense://', "--storage=nonsense:// cannot be reached: Can't load plugin"),
    ('postgresql://me@host:port/x', "--storage expects a URL as in postgresql://user@host/database, got 'postgresql"),
    ('sqlite://', '--storage=sqlite:// is a database in memory; expected a file, as in sqlite:///FILE'),
    ('sqlite:///:memory:', '--storage=sqlite:///:memory: is a database in memory'),
    ('sqlite:////nowhere/x.db', '--storage=sqlite:////nowhere/x.db: there is no folder /nowhere'),
    ('sqlite:////', '--storage=sqlite:////: / is not a regular file'),
    (f'sqlite:///{__file__}', f'--storage=sqlite:///{__file__}: {__file__} is not an SQLite database'),
])  # fmt: skip
def test_an_unusable_database_url_is_refused(url, line):
    with pytest.raises(UserError) as caught:
        database.check_database(url)
    assert str(caught.value).startswith(line) and 'secret' not in str(caught.value)


@pytest.mark.slow
def test_a_lock_is_free_once_its_holder_is_killed(tmp_path):
    program = 'import sys, time; from pathlib import Path; from attnlab.sweeps import storage; '
    program += 'held = storage.lock_point_file(Path(sys.argv[1])); print("held", flush=True); time.sleep(60)'
    holder = start_python('-c', program, tmp_path / 'lock', stdout=subprocess.PIPE)
    assert holder.stdout.readline() == 'held\n'
    assert storage.lock_point_file(tmp_path / 'lock') is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    with storage.lock_point_file(tmp_path / 'lock'):
        assert storage.lock_point_file(tmp_path / 'lock') is None
