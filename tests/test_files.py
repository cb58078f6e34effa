"""Atomic writes, locks and checks of folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import files

KILLED = """
import os, sys
from attnlab import files
with files.replace_atomically(sys.argv[1]) as temporary:
    temporary.write_bytes(b'half')
    os.kill(os.getpid(), 9)
"""


def test_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, 'é\r\n')
    assert path.read_bytes() == b'\xc3\xa9\r\n'
    with files.replace_atomically(path) as temporary:
        temporary.write_bytes(b'new')
        assert path.read_bytes() == b'\xc3\xa9\r\n'
    assert path.read_bytes() == b'new' and list(tmp_path.iterdir()) == [path]


def test_error_keeps_the_old_file(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, b'old')
    with pytest.raises(OSError, match='full'), files.replace_atomically(path) as temporary:
        temporary.write_bytes(b'half')
        raise OSError('the disk is full')
    assert path.read_bytes() == b'old' and list(tmp_path.iterdir()) == [path]


def test_error_names_the_requested_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.write_file(tmp_path / 'none' / 'scores.json', b'')
    assert caught.value.filename == str(tmp_path / 'none' / 'scores.json')


def test_lock_is_held_until_the_file_is_closed(tmp_path):
    with files.lock_file(tmp_path / '.lock'):
        assert files.lock_file(tmp_path / '.lock') is None
    with files.lock_file(tmp_path / '.lock') as file:
        assert file is not None


def test_kill_keeps_the_old_file(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, b'old')
    env = {**os.environ, 'PYTHONPATH': str(Path(files.__file__).parents[1])}
    assert subprocess.run([sys.executable, '-c', KILLED, path], env=env, check=False).returncode == -9
    assert path.read_bytes() == b'old'
    files.write_file(path, b'new')
    assert path.read_bytes() == b'new'


def test_write_errors_are_logged_once_for_a_folder(tmp_path, caplog):
    (tmp_path / 'samples').touch()
    for _ in range(2):
        with files.log_write_errors(tmp_path):
            files.write_file(tmp_path / 'samples' / 'x', 'x')
    assert caplog.messages == [f'files in {tmp_path} cannot be written ({tmp_path}/samples/x: Not a directory)']
    with pytest.raises(BrokenPipeError), files.log_write_errors(tmp_path):  # the reader of the output is gone
        raise BrokenPipeError


def test_check_writable_leaves_the_folder_unchanged(tmp_path):
    files.check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file or directory: '.*nowhere'"):
        files.check_writable(tmp_path / 'nowhere')
