"""Time from a second start of a small experiment to the end of its first step."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnlab

ROOT = Path(attnlab.__file__).parents[1]
LIMIT = 5.0
EXPERIMENTS = {
    'vision/digits': '', 'language/shakespeare_char': 'tinyshakespeare', 'align/grammar_gru': '',
    'vision/cifar10_small': 'cifar10', 'align/multi30k_gru': 'multi30k', 'align/grammar_transformer': '',
}  # fmt: skip
"""The small experiments, and the folder of real data that each reads."""


def seconds(name, folder):
    """Return the seconds from the start of the command to the record of its first step."""
    flags = f'--config={ROOT}/experiments/{name}.py', f'--workdir={folder}/run'
    settings = {'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(folder / 'cache')}
    env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS' and not key.startswith('JAX_')}
    shutil.rmtree(folder / 'run', ignore_errors=True)
    start, file = time.monotonic(), folder / 'run' / 'metrics.jsonl'
    argv = [sys.executable, '-m', 'attnlab', 'train', *flags]
    with subprocess.Popen(argv, env=env | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (file.exists() and file.stat().st_size):
            assert process.poll() is None
            time.sleep(0.01)
        duration = time.monotonic() - start
        time.sleep(5)  # programs that are compiled in this time are cached
        process.kill()
    return duration


@pytest.mark.timing
@pytest.mark.parametrize('name', EXPERIMENTS)
def test_second_start_reaches_the_first_step_in_time(name, tmp_path, shared):
    if EXPERIMENTS[name]:
        shared(EXPERIMENTS[name])
    first, *others = (seconds(name, tmp_path) for _ in range(3))
    message = f'{name}: the first {first:.1f} s, then {", ".join(f"{other:.2f} s" for other in others)}'
    print(message)
    assert min(others) < LIMIT, message
