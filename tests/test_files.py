"""Files that are there whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import files

KILLED = """
import os, sys
from attnlab import files
with files.replace_atomically(sys.argv[1]) as part:
    part.write_bytes(b'half')
    os.kill(os.getpid(), 9)
"""


def test_a_file_takes_the_old_ones_place(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, 'é\r\n')
    assert path.read_bytes() == b'\xc3\xa9\r\n'
    with files.replace_atomically(path) as part:
        part.write_bytes(b'new')
        assert path.read_bytes() == b'\xc3\xa9\r\n'
    assert path.read_bytes() == b'new' and list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_one_stands(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, b'old')
    with pytest.raises(OSError, match='full'), files.replace_atomically(path) as part:
        part.write_bytes(b'half')
        raise OSError('the disk is full')
    assert path.read_bytes() == b'old' and list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.write_file(tmp_path / 'none' / 'scores.json', b'')
    assert caught.value.filename == str(tmp_path / 'none' / 'scores.json')


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    with files.lock_file(tmp_path / '.lock'):
        assert files.lock_file(tmp_path / '.lock') is None
    with files.lock_file(tmp_path / '.lock') as held:
        assert held is not None


def test_a_kill_leaves_the_old_one(tmp_path):
    path = tmp_path / 'scores.json'
    files.write_file(path, b'old')
    env = {**os.environ, 'PYTHONPATH': str(Path(files.__file__).parents[1])}
    assert subprocess.run([sys.executable, '-c', KILLED, path], env=env, check=False).returncode == -9
    assert path.read_bytes() == b'old'
    files.write_file(path, b'new')
    assert path.read_bytes() == b'new'


def test_a_file_beside_a_printed_result_may_fail_and_is_told_once(tmp_path, caplog):
    (tmp_path / 'samples').touch()
    for _ in range(2):
        with files.log_write_errors(tmp_path):
            files.write_file(tmp_path / 'samples' / 'x', 'x')
    assert caplog.messages == [f'files in {tmp_path} cannot be written ({tmp_path}/samples/x: Not a directory)']
    with pytest.raises(BrokenPipeError), files.log_write_errors(tmp_path):  # whoever reads what is printed has gone
        raise BrokenPipeError


def test_a_folder_that_can_be_written_stays_as_it_was(tmp_path):
    files.check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file or directory: '.*nowhere'"):
        files.check_writable(tmp_path / 'nowhere')
