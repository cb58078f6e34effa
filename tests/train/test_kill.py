"""A run that is killed with SIGKILL many times, at random moments, matches the uninterrupted run bit for bit."""

import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

import attnlab
from attnlab.train import metrics
from tests.tiny import TINY_GRAMMAR, tiny_grammar_config
from tests.train.helpers import newest_of

EVERY = 2
"""Number of steps from one save to the next."""

# Imports the modules once for all starts, as this takes longer than the training; a fork is safe while JAX has no
# device yet.  Reads the path of a log and a command line, prints the process number and, at its end, the exit code.
STARTER = """
import os, sys
from attnlab import cli, environment
environment.configure_process()
import orbax.checkpoint, tensorboardX
from attnlab.tasks.align import task
from attnlab.train import run

for line in sys.stdin:
    log, *argv = line.rstrip('\\n').split('\\t')
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(log, 'wb') as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.argv = ['attnlab', *argv]
            environment.exit_now(cli.main(argv))
    os.setpgid(child, child)  # here too, as the child may be killed before it does this
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def changes(steps, processes):
    return {
        'train.mesh': f'data={2 * processes}' if processes > 1 else 'data=1', 'model.dropout': '0.2',
        'train.duration': f'{steps} steps', 'train.save_every': f'{EVERY} steps',
        'train.eval_every': '45 steps',
    }  # fmt: skip


def command(workdir, steps, processes):
    """Return the command that trains `steps` steps in `processes` processes."""
    fields = [f'--config.{key}={value}' for key, value in (TINY_GRAMMAR | changes(steps, processes)).items()]
    fields += [f'--processes={processes}'] if processes > 1 else []
    return ['train', '--config=experiments/align/grammar_gru.py', f'--workdir={workdir}', *fields]


@contextmanager
def starter():
    env = {
        **os.environ,
        'PYTHONPATH': str(Path(attnlab.__file__).parents[1]),
        'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0',
    }
    with subprocess.Popen(
        [sys.executable, '-c', STARTER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.stdin.close()


def start(process, log, argv, kill=None):
    """Start a command and return its exit code; the process is killed once `kill()` returns True."""
    log.write_text('')  # the process may be killed before it has opened the file
    process.stdin.write('\t'.join([str(log), *argv, '']).removesuffix('\t').encode() + b'\n')
    process.stdin.flush()
    group = int(process.stdout.readline())
    while kill is not None and not select.select([process.stdout], [], [], 0.002)[0]:
        if kill():
            os.killpg(group, signal.SIGKILL)
            break
    return int(process.stdout.readline())


def newest_complete_step(workdir):
    """Return the newest complete step; 0 if there is none."""
    names = [path.name for path in (workdir / 'checkpoints').glob('*')]
    return max((int(name) for name in names if name.isdigit()), default=0)


def newest_recorded_step(workdir):
    return max((record['step'] for record in metrics.read_metrics(workdir)), default=0)


def random_moment(workdir, draw):
    """Return a function that is True from a random moment on: in the first 3 seconds, or soon after a next step."""
    if draw.random() < 0.2:
        end = time.monotonic() + draw.uniform(0, 3)
        return lambda: time.monotonic() > end
    step, wait = newest_complete_step(workdir) + draw.randrange(1, 3 * EVERY), draw.uniform(0, 0.2)

    def has_come():
        if newest_recorded_step(workdir) < step:
            return False
        time.sleep(wait)
        return True

    return has_come


def lines(workdir):
    return [json.dumps(record) for record in metrics.read_metrics(workdir) if record['split'] != 'speed']


@pytest.mark.parametrize(('kills', 'processes'), [  # a single kill is tested in test_resume.py
    pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(10, 2, marks=pytest.mark.slow),
    pytest.param(100, 2, marks=pytest.mark.long),
])  # fmt: skip
def test_run_killed_at_random_moments_matches_uninterrupted_run(tmp_path, kills, processes, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=2')
    # More steps than all starts together can take, so that also the last start is killed.
    steps, draw = 6 + (12 if processes == 1 else 4) * kills, random.Random(kills)
    whole, broken, log = tmp_path / 'whole', tmp_path / 'broken', tmp_path / 'log.txt'
    with starter() as process:
        assert start(process, log, command(whole, steps, processes)) == 0, log.read_text()
        for _ in range(kills):
            before = newest_complete_step(broken)
            code = start(process, log, command(broken, steps, processes), random_moment(broken, draw))
            assert code == -signal.SIGKILL, log.read_text()
            continued = re.search(r'continues from step (\d+)', log.read_text())
            assert continued is None or int(continued[1]) == before
            assert 'damaged' not in log.read_text()
            # The run waits for one save, and another may be in progress.
            assert newest_recorded_step(broken) - newest_complete_step(broken) <= 2 * EVERY
        before = newest_complete_step(broken)
        assert start(process, log, command(broken, steps, processes)) == 0, log.read_text()
        assert f'continues from step {before}' in log.read_text() and before > 0
    config = tiny_grammar_config(**{key.replace('.', '__'): value for key, value in changes(steps, processes).items()})
    left, right = newest_of(config, whole), newest_of(config, broken)
    assert left.step == right.step == steps and left.progress == right.progress
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert lines(whole) == lines(broken)
