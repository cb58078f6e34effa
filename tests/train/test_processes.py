"""Runs of several processes by the command line: equal results, and all end if one ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import attnlab
from attnlab import configs, files
from attnlab.errors import RunError, UserError
from attnlab.launch import find_free_port
from attnlab.tasks.language.task import LanguageTask
from attnlab.train import metrics, processes, run
from tests.tiny import LINES, TINY_TRAINING, TINY_TRANSFORMER, tiny_language_config

CHANGES = {
    'data.documents': 'lines', 'optimizer.name': 'sgd', 'optimizer.learning_rate': '0.3', 'train.batch_size': '16',
    'train.eval_every': '5 steps', 'train.save_every': '5 steps', 'optimizer.schedule': 'constant',
}  # fmt: skip
FOUR_DEVICES = '--xla_force_host_platform_device_count=4'


def command(folder, workdir, *flags, **changes):
    """Return the command line that trains a tiny language model."""
    (folder / 'input.txt').write_text('\n'.join(LINES) + '\n')
    fields = TINY_TRANSFORMER | TINY_TRAINING | CHANGES | {'data.folder': str(folder)}
    fields |= {key.replace('__', '.'): value for key, value in changes.items()}
    experiment = Path(attnlab.__file__).parents[1] / 'experiments/language/shakespeare_char.py'
    overrides = [f'--config.{key}={value}' for key, value in fields.items()]
    return [
        sys.executable, '-m', 'attnlab', 'train', f'--config={experiment}', f'--workdir={workdir}', *flags, *overrides
    ]  # fmt: skip


def start_process(argv):
    env = {**os.environ, 'PYTHONPATH': str(Path(attnlab.__file__).parents[1]), 'XLA_FLAGS': FOUR_DEVICES}
    env['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=0'  # or the process would start again for large pages
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_to_end(argv):
    """Run a command; return its exit code and its output."""
    process = start_process(argv)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def assert_params_close(one, other, tolerance):
    for a, b in zip(*(jax.tree.leaves(run.load_run(workdir).params) for workdir in (one, other)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def train_in_this_process(folder, workdir, steps):
    changes = {key.replace('.', '__'): value for key, value in CHANGES.items()}
    run.train_run(tiny_language_config(folder, train__duration=f'{steps} steps', **changes), workdir)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['data=2,fsdp=2,tensor=2', pytest.param('data=8', marks=pytest.mark.slow)])
def test_two_processes_match_one_and_the_run_continues_with_one(tmp_path, mesh):
    train_in_this_process(tmp_path, tmp_path / 'five', 5)
    train_in_this_process(tmp_path, tmp_path / 'ten', 10)
    pair = tmp_path / 'pair'
    code, output = run_to_end(command(tmp_path, pair, '--processes=2', train__duration='5 steps', train__mesh=mesh))
    assert code == 0, output
    assert output.count('trained,') == 1
    assert_params_close(tmp_path / 'five', pair, 1e-5)
    assert [record['step'] for record in metrics.read_metrics(pair) if record['split'] == 'train'] == [1, 2, 3, 4, 5]
    one, two = (list(metrics.read_metrics(workdir))[-1] for workdir in (tmp_path / 'five', pair))
    assert one['split'] == two['split'] == 'valid' and two['loss'] == pytest.approx(one['loss'], rel=1e-5)
    (pair / 'config.json').unlink()  # it has another mesh and duration
    train_in_this_process(tmp_path, pair, 10)
    assert_params_close(tmp_path / 'ten', pair, 1e-6)


@pytest.mark.slow
def test_no_process_writes_before_all_have_read(tmp_path, monkeypatch):
    """A process must not read files that the first process has partly written."""
    files_after_call, run_in_all = [], run.processes.run_in_all

    def run_and_list_files(function):
        result = run_in_all(function)
        files_after_call.append(sorted(tmp_path.rglob('*')))
        return result

    monkeypatch.setattr(run.processes, 'run_in_all', run_and_list_files)
    config = tiny_language_config(tmp_path / 'data', train__duration='1 steps')
    run.train_run(config, tmp_path / 'run')
    assert not [path for path in files_after_call[0] if path.is_relative_to(tmp_path / 'run')]
    assert (tmp_path / 'run/vocabulary/text.json').exists()


@pytest.mark.slow
def test_locked_directory_is_refused(tmp_path):
    config, workdir = tiny_language_config(tmp_path / 'data', train__duration='1 steps'), tmp_path / 'run'
    workdir.mkdir()
    with files.lock_file(workdir / '.lock'), pytest.raises(UserError, match='run is being trained by another process'):
        run.train_run(config, workdir)
    assert list(workdir.iterdir()) == [workdir / '.lock']
    run.train_run(config, workdir)
    run.train_run(config, workdir)  # the lock was released


@pytest.mark.slow
def test_directory_trained_by_another_process_meanwhile_is_refused(tmp_path, monkeypatch):
    config, workdir = tiny_language_config(tmp_path / 'data', train__duration='1 steps'), tmp_path / 'run'
    examples = LanguageTask.examples.fget
    other = tiny_language_config(tmp_path / 'data', train__duration='1 steps', optimizer__learning_rate='0.5')

    def train_other_and_read(task):
        monkeypatch.undo()
        run.train_run(other, workdir)
        return examples(task)

    monkeypatch.setattr(LanguageTask, 'examples', property(train_other_and_read))
    with pytest.raises(UserError, match='run was trained by another process in the meantime'):
        run.train_run(config, workdir)
    assert configs.load_config(workdir / 'config.json') == other


@pytest.mark.parametrize(('mesh', 'message'), [
    pytest.param('data=8', '{workdir} is being trained by another process', marks=pytest.mark.slow),  # process 0 fails
    ('data=4', "train.mesh is 'data=4', 4 devices; expected all 8 of the processes"),  # all processes fail
])  # fmt: skip
def test_error_of_all_processes_is_printed_once(tmp_path, mesh, message):
    workdir = tmp_path / 'run'
    workdir.mkdir()
    with files.lock_file(workdir / '.lock'):
        code, output = run_to_end(command(tmp_path, workdir, '--processes=2', train__mesh=mesh))
    lines = re.findall('attnlab: .*', output)  # without the lines of the transport
    assert code == 2 and lines == [f'attnlab: process 0: {message.format(workdir=workdir)}']


@pytest.mark.parametrize(('codes', 'first_error', 'other_error'), [
    ([0, 2, 1], UserError('bad'), UserError), ([0, 1, 2], OSError('bad'), RunError),
])  # fmt: skip
def test_first_failed_process_raises_its_error_and_the_others_an_empty_one(
    monkeypatch, codes, first_error, other_error
):
    gathered = []
    monkeypatch.setattr(processes, 'is_multi_process', lambda: True)
    monkeypatch.setattr(
        multihost_utils, 'process_allgather', lambda code: gathered.append(int(code)) or np.array(codes)
    )

    def fail():
        raise first_error

    for number, function in enumerate((lambda: 7, fail, fail)):
        monkeypatch.setattr(jax, 'process_index', lambda number=number: number)
        with pytest.raises(type(first_error) if number == 1 else other_error, match='bad' if number == 1 else '^$'):
            processes.run_in_all(function)
    assert gathered == [0, codes[1], codes[1]]
    codes[:] = [0, 0, 0]
    assert processes.run_in_all(lambda: 7) == 7


@pytest.mark.slow
def test_processes_save_and_stop_when_their_launcher_is_killed(tmp_path):
    workdir = tmp_path / 'run'
    process = start_process(command(tmp_path, workdir, '--processes=2', **LONG))
    wait_for_new_checkpoint(workdir, process)
    process.kill()
    process.communicate(timeout=60)  # returns when the processes end, as they hold the pipe
    with files.lock_file(workdir / '.lock') as lock:
        assert lock is not None


def children(pid):
    listed = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True).stdout
    return sorted(map(int, listed.split()))


def steps_of(workdir):
    return {name.name for name in workdir.glob('checkpoints/*') if name.name.isdecimal()}


def wait_for_new_checkpoint(workdir, process, before=frozenset()):
    """Wait until there is a checkpoint of a step that is not in `before`."""
    deadline = time.monotonic() + 200
    while not steps_of(workdir) - before:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)


LONG = dict(train__duration='100000 steps', train__mesh='data=8', train__log_every='100 steps')


@pytest.mark.slow
@pytest.mark.parametrize('number', [0, 1])
def test_killed_process_ends_all_and_is_named(tmp_path, number):
    workdir = tmp_path / 'run'
    argv = command(tmp_path, workdir, '--processes=2', **LONG)
    process = start_process(argv)
    wait_for_new_checkpoint(workdir, process)
    os.kill(children(process.pid)[number], signal.SIGKILL)
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert f'process {number} of 2 was killed by SIGKILL' in output
    before, again = steps_of(workdir), start_process(argv)
    wait_for_new_checkpoint(workdir, again, before)
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 128 + signal.SIGTERM, output
    assert 'continues from step' in output and 'SIGTERM: saved at step' in output


@pytest.mark.slow
def test_lost_process_ends_the_run_without_a_launcher(tmp_path):
    workdir = tmp_path / 'run'
    flags = ['--processes=2', f'--coordinator=127.0.0.1:{find_free_port()}']
    pair = [start_process(command(tmp_path, workdir, *flags, f'--process={i}', **LONG)) for i in (0, 1)]
    wait_for_new_checkpoint(workdir, pair[0])
    pair[1].kill()
    start = time.monotonic()
    output, _ = pair[0].communicate(timeout=60)
    assert time.monotonic() - start < 30
    pair[1].communicate()
    assert pair[0].returncode != 0
    lost_process = 'unhealthy (stopped sending heartbeats):\n1\n'
    assert lost_process in output or 'terminate called' in output, output  # the transport of a CPU may abort first
