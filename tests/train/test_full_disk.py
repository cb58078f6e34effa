"""A run on a disk that fills up: a small file system, mounted in a separate namespace."""

import os
import shutil
import subprocess
import sys

import pytest

# Fills the disk before step 8, so that the save of step 9 fails, and continues when there is space again.
RUN = """
import sys
from pathlib import Path
from attnlab.errors import RunError
from attnlab.train import loop
from tests.train.helpers import config, make_task, same_runs

disk, whole = Path(sys.argv[1]), Path(sys.argv[2])
plain = make_task()

def batch_that_fills_the_disk(step):
    if step == 7:
        while not (disk / 'run' / 'checkpoints' / '6').exists():
            pass
        with open(disk / 'filled', 'wb', buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return plain.batch(step)

loop.run_training_loop(config(), plain, whole)
try:
    loop.run_training_loop(config(), make_task(batch=batch_that_fills_the_disk), disk / 'run')
    sys.exit('nothing was raised')
except RunError as error:
    print(error)
steps = {path.name for path in (disk / 'run' / 'checkpoints').iterdir() if path.name.isdigit()}
assert steps and max(map(int, steps)) < 20, steps  # one more may have used the space of a deleted one
(disk / 'filled').unlink()
loop.run_training_loop(config(), plain, disk / 'run')
same_runs(whole, disk / 'run')
"""
MOUNT = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$0" -c "$RUN" "$@"'
IN_A_NAMESPACE = ['unshare', '--map-root-user', '--mount', 'sh', '-c']


@pytest.fixture
def disk(tmp_path):
    (tmp_path / 'disk').mkdir()
    mount = [*IN_A_NAMESPACE, 'mount -t tmpfs tmpfs "$0"', str(tmp_path / 'disk')]
    if not shutil.which('unshare') or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('needs a Linux on which users may mount a file system in a separate namespace')
    return tmp_path / 'disk'


@pytest.mark.slow
def test_full_disk_ends_the_run_and_it_continues_when_there_is_space(disk, tmp_path):
    argv = [sys.executable, str(disk), str(tmp_path / 'whole')]
    done = subprocess.run(
        [*IN_A_NAMESPACE, MOUNT, *argv], env={**os.environ, 'RUN': RUN}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    first = f'a checkpoint could not be saved in {disk}/run/checkpoints: '  # or the metrics, if they need space first
    assert line.startswith((first, f'{disk}/run/metrics.jsonl cannot be written: '))
    assert line.endswith('No space left on device')
