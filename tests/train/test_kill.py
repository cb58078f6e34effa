"""A run that is killed with SIGKILL again and again, at any moment: the run that nobody killed, bit for bit."""

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
"""So many steps from one save to the next."""

# Imports once for all starts, which takes longer than the training; a fork is safe as long as there is no device.
# Reads a log's path and a command line, prints the number of its process and, when that has ended, its exit code.
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
    os.setpgid(child, child)  # here too, as it may be killed before it comes to that
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
    """A training of so many steps in so many processes."""
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
    """Starts a command and returns its exit code; `kill()` says when to kill it."""
    log.write_text('')  # it may be killed before it has opened it
    process.stdin.write('\t'.join([str(log), *argv, '']).removesuffix('\t').encode() + b'\n')
    process.stdin.flush()
    group = int(process.stdout.readline())
    while kill is not None and not select.select([process.stdout], [], [], 0.002)[0]:
        if kill():
            os.killpg(group, signal.SIGKILL)
            break
    return int(process.stdout.readline())


def complete(workdir):
    """The newest step that stands there under its own name; 0 if there is none."""
    names = [path.name for path in (workdir / 'checkpoints').glob('*')]
    return max((int(name) for name in names if name.isdigit()), default=0)


def reached(workdir):
    return max((record['step'] for record in metrics.read_metrics(workdir)), default=0)


def moment(workdir, draw):
    """A moment of the next start: of its first seconds, or a little behind one of its next steps."""
    if draw.random() < 0.2:
        end = time.monotonic() + draw.uniform(0, 3)
        return lambda: time.monotonic() > end
    step, wait = complete(workdir) + draw.randrange(1, 3 * EVERY), draw.uniform(0, 0.2)

    def came():
        if reached(workdir) < step:
            return False
        time.sleep(wait)
        return True

    return came


def lines(workdir):
    return [json.dumps(record) for record in metrics.read_metrics(workdir) if record['split'] != 'speed']


@pytest.mark.parametrize(('kills', 'processes'), [  # one kill among the others is in test_resume.py
    pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(10, 2, marks=pytest.mark.slow),
    pytest.param(100, 2, marks=pytest.mark.long),
])  # fmt: skip
def test_run_killed_at_random_moments_matches_uninterrupted_run(tmp_path, kills, processes, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=2')
    # More than all starts together can do, however fast: the last one has to be killed too.
    steps, draw = 6 + (12 if processes == 1 else 4) * kills, random.Random(kills)
    whole, broken, log = tmp_path / 'whole', tmp_path / 'broken', tmp_path / 'log.txt'
    with starter() as process:
        assert start(process, log, command(whole, steps, processes)) == 0, log.read_text()
        for _ in range(kills):
            before = complete(broken)
            code = start(process, log, command(broken, steps, processes), moment(broken, draw))
            assert code == -signal.SIGKILL, log.read_text()
            begun = re.search(r'continues from step (\d+)', log.read_text())
            assert begun is None or int(begun[1]) == before
            assert 'damaged' not in log.read_text()
            assert reached(broken) - complete(broken) <= 2 * EVERY  # one save to wait for, and one under way
        before = complete(broken)
        assert start(process, log, command(broken, steps, processes)) == 0, log.read_text()
        assert f'continues from step {before}' in log.read_text() and before > 0
    config = tiny_grammar_config(**{key.replace('.', '__'): value for key, value in changes(steps, processes).items()})
    left, right = newest_of(config, whole), newest_of(config, broken)
    assert left.step == right.step == steps and left.progress == right.progress
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert lines(whole) == lines(broken)
