"""Settings of a process: its cores and GPUs, cached programs, missing devices, interrupts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import environment
from tests.sweeps.processes import process_environment


@pytest.mark.parametrize(('items', 'count', 'parts'), [
    ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
    ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
    ([0, 1], 2, [[0], [1]]),
    ([0], 3, [[0], [0], [0]]),
    ([0, 1], 3, [[0], [1], [0]]),
    ([5, 6, 7], 1, [[5, 6, 7]]),
])  # fmt: skip
def test_split_evenly(items, count, parts):
    assert [environment._split_evenly(items, number, count) for number in range(count)] == parts


@pytest.mark.parametrize(('visible', 'count', 'number', 'expected', 'fraction'), [
    ('0,1,2,3', 2, 1, '2,3', None),
    ('GPU-a,GPU-b', 2, 0, 'GPU-a', None),
    ('7', 2, 1, '7', '0.450'),
    ('0,1', 3, 2, '0', '0.450'),
    ('-1', 2, 1, '-1', None),
    ('', 2, 1, '', None),
])  # fmt: skip
def test_restrict_hardware_sets_gpus_and_memory_fraction(monkeypatch, visible, count, number, expected, fraction):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    monkeypatch.delenv('XLA_PYTHON_CLIENT_MEM_FRACTION', raising=False)
    monkeypatch.setattr(environment.os, 'sched_setaffinity', lambda pid, cores: None, raising=False)
    environment.restrict_hardware(number, count)
    assert os.environ['CUDA_VISIBLE_DEVICES'] == expected
    assert os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION') == fraction
    monkeypatch.delenv('XLA_PYTHON_CLIENT_MEM_FRACTION', raising=False)


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='this system cannot list the cores of a process')
def test_restrict_hardware_gives_each_process_its_own_cores():
    """Together the processes have all cores, and no two share one if there are enough."""
    count = min(len(os.sched_getaffinity(0)), 2)
    program = (
        'import os, sys; from attnlab import environment; '
        'environment.restrict_hardware(int(sys.argv[1]), int(sys.argv[2])); environment.configure_process(); '
        'print(*os.sched_getaffinity(0)); print(os.environ["XLA_FLAGS"])'
    )
    env = process_environment()
    del env['XLA_FLAGS']
    core_sets = []
    for number in range(count):
        done = subprocess.run([sys.executable, '-c', program, str(number), str(count)], env=env, capture_output=True,
                              text=True, check=True)  # fmt: skip
        cores, flags = done.stdout.splitlines()
        core_sets.append(set(map(int, cores.split())))
        assert f'device_count={min(len(core_sets[-1]), environment.MAX_CPU_DEVICES)} ' in flags + ' '
    assert set.union(*core_sets) == os.sched_getaffinity(0) and sum(map(len, core_sets)) == len(set.union(*core_sets))


@pytest.mark.slow
def test_reading_cached_programs_prints_nothing(tmp_path):
    """Also on processors where jaxlib reports tuning preferences as missing features."""
    program = (
        'from attnlab import environment; environment.configure_process(); import jax; '
        'print(jax.jit(lambda x: x @ x)(jax.numpy.ones((300, 300))).sum())'
    )
    env = process_environment() | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path)}
    env.pop('TF_CPP_MIN_LOG_LEVEL', None)
    env['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    run = lambda: subprocess.run([sys.executable, '-c', program], env=env, capture_output=True, text=True, check=True)
    assert run().stdout == run().stdout != ''
    assert run().stderr == ''


@pytest.mark.slow
@pytest.mark.parametrize('platform', ['cuda', 'nonsense'])
def test_commands_report_a_missing_platform_in_one_line(tmp_path, platform):
    if platform == 'cuda' and list(Path('/proc/driver/nvidia/gpus').glob('*')):
        pytest.skip('this machine has a GPU')
    experiment = '--config=experiments/vision/digits.py'
    for argv in (
        ['train', experiment, f'--workdir={tmp_path}/run'],
        ['count', experiment],
        ['sweep', '--config=experiments/language/shakespeare_char.py', '--sweep=heads', f'--workdir={tmp_path}/sweep'],
    ):
        env = {**process_environment(), 'JAX_PLATFORMS': platform}
        done = subprocess.run([sys.executable, '-m', 'attnlab', *argv], env=env, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
        assert done.stderr.startswith(f'attnlab: JAX_PLATFORMS is {platform!r}: ')
    env = {**process_environment(), 'JAX_PLATFORMS': platform}
    argv = ['count', experiment, '--mesh=data=2']  # simulates CPU devices on any machine
    subprocess.run([sys.executable, '-m', 'attnlab', *argv], env=env, check=True, capture_output=True)
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, sys, time
from attnlab import environment
environment.exit_on_interrupt()
from attnlab.train.signals import catch_stop_signals

class InterruptsInDel:
    def __del__(self):  # Python ignores exceptions that are raised here
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

if sys.argv[1] == 'in a callback':
    InterruptsInDel()
elif sys.argv[1] == 'a second time':
    with catch_stop_signals() as stop_check:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_check(1) == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
print('it continued')
"""


@pytest.mark.parametrize('when', ['in a callback', 'a second time'])
def test_interrupt_ends_the_process_with_one_line(when):
    done = subprocess.run([sys.executable, '-c', INTERRUPTED, when], env=process_environment(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b'', b'attnlab: interrupted\n')


def test_ignored_interrupt_stays_ignored():
    program = 'import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)' + INTERRUPTED
    done = subprocess.run([sys.executable, '-c', program, 'in a callback'], env=process_environment(),
                          capture_output=True)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b'it continued\n', b'')
