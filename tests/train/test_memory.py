"""Configs larger than the memory are refused before anything is compiled or written."""

import jax
import numpy as np
import pytest

from attnlab import configs, environment
from attnlab.errors import RunError, UserError
from attnlab.tasks import create_task
from attnlab.train import checkpoint, loop, memory, run
from attnlab.train.setup import make_setup

EXPERIMENTS = {'vision/digits': 'width', 'language/shakespeare_char': 'width', 'align/grammar_gru': 'hidden'}


def load(name, folder, **changes):
    """Return the config of a small experiment on little data; changes: dotted keys with `__` for the dot."""
    (folder / 'input.txt').write_text('to be or not to be\n' * 40)
    settings = {'train.mesh': 'data=1'}
    settings |= {'data.folder': str(folder)} if 'shakespeare' in name else {}
    settings |= {'data.train_examples': '64', 'data.test_examples': '8'} if 'grammar' in name else {}
    settings |= {key.replace('__', '.'): str(value) for key, value in changes.items()}
    return configs.load_experiment(f'experiments/{name}.py', list(settings.items()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('name', 'size'), [('vision/digits', 262144), *((name, 10**9) for name in EXPERIMENTS)])
def test_model_larger_than_memory_is_refused_with_both_sizes(tmp_path, name, size):
    config = load(name, tmp_path, **{f'model__{EXPERIMENTS[name]}': size})
    match = r'^parameters, optimizer and gradients take .* TiB .*; this machine has .* GiB of memory; expected a sm'
    with pytest.raises(UserError, match=match):
        run.train_run(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_batch_larger_than_memory_is_refused(tmp_path, name):
    task = create_task(load(name, tmp_path))
    assert task.examples  # the data of this task are read with a batch size that fits
    task.config = create_task(load(name, tmp_path, train__batch_size=10**12)).config
    with pytest.raises(UserError, match=r'and a batch [0-9.,]* TiB; this machine has'):
        memory.check_memory(task, make_setup(task.config, task.examples))


def test_model_size_over_63_bits_is_refused(tmp_path):
    with pytest.raises(UserError, match='^model: '):
        run.train_run(load('vision/digits', tmp_path, model__width=10**24), tmp_path / 'run')


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_cpu_devices_share_the_memory_of_the_host(tmp_path, monkeypatch, parallel):
    """Each of 4 devices has five numbers for each parameter: itself, its average, two of Adam's, and its gradient."""
    config = load('vision/digits', tmp_path, train__mesh='data=4', train__parallel=parallel)
    task = create_task(config)
    params = jax.eval_shape(task.init, jax.random.key(0))
    needed = 4 * 20 * sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    monkeypatch.setattr(environment, 'host_memory_bytes', lambda: int(needed))
    with pytest.raises(UserError, match='this machine has'):
        memory.check_memory(task, make_setup(task.config, task.examples))
    monkeypatch.setattr(environment, 'host_memory_bytes', lambda: int(1.2 * needed))
    memory.check_memory(task, make_setup(task.config, task.examples))


def test_host_memory_is_at_most_that_of_the_machine():
    with open('/proc/meminfo') as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith('MemTotal'))
    assert 1e8 < environment.host_memory_bytes() <= 1024 * kilobytes


def test_directory_without_checkpoints_can_be_used_with_another_config(tmp_path, monkeypatch):
    def failed(*args, **kwargs):
        raise RunError('no memory')

    monkeypatch.setattr(loop, 'run_training_loop', failed)
    workdir, name = tmp_path / 'run', 'language/shakespeare_char'
    first, second = load(name, tmp_path, model__width=64), load(name, tmp_path, model__width=32)
    with pytest.raises(RunError):
        run.train_run(first, workdir)
    (tmp_path / 'input.txt').write_text('what a piece of work is a man\n' * 40)
    with pytest.raises(RunError):
        run.train_run(second, workdir)
    assert configs.load_config(workdir / 'config.json') == second
    assert set(run.load_task(workdir).vocabulary.characters) == set('what a piece of work is a man\n')
    (workdir / 'checkpoints' / '1').mkdir(parents=True)
    assert checkpoint.list_steps(workdir) == [1]
    with pytest.raises(UserError, match='holds a run of another config: model.width is 64 here and 32 there'):
        run.train_run(first, workdir)
