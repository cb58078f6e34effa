"""Whatever has happened to a run's folder of checkpoints: the newest one that is whole is found, or none and it is said."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.errors import UserError
from attnlab.train import checkpoint
from attnlab.train.checkpoint import Progress, Saved

OPTIMIZE = optax.adam(1e-3)


def params(step):
    drawn = np.random.default_rng(step).normal(size=(40, 7)).astype(np.float32)
    return {'layer': {'kernel': jnp.asarray(drawn), 'bias': jnp.full(7, step, jnp.bfloat16)}}


def saved(step):
    return Saved(step, params(step), OPTIMIZE.init(params(step)), Progress(0.5, 1, 0))


def shapes():
    return jax.eval_shape(lambda: (params(0), OPTIMIZE.init(params(0))))


@pytest.fixture(scope='module')
def healthy(tmp_path_factory):
    """Steps 1 and 2."""
    workdir = tmp_path_factory.mktemp('healthy')
    with checkpoint.manager(workdir) as manager:
        for step in (1, 2):
            checkpoint.save(manager, saved(step))
    return workdir


@pytest.fixture
def workdir(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / 'run')


def latest(workdir):
    with checkpoint.manager(workdir, read_only=True) as manager:
        return checkpoint.latest(manager, *shapes())


def passed_over(workdir, caplog):
    """What is said of step 2 when step 1 is what is found, bit for bit."""
    caplog.clear()
    found = latest(workdir)
    assert found.step == 1 and found.progress == saved(1).progress
    jax.tree.map(np.testing.assert_array_equal, found, saved(1))
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith('checkpoint of step 2 is damaged and passed over: ') and '\n' not in line
    return line.removeprefix('checkpoint of step 2 is damaged and passed over: ')


def files(workdir):
    return sorted(path for path in (workdir / 'checkpoints' / '2').rglob('*') if path.is_file())


def unneeded(path):
    """What orbax writes for others: nothing in it is used to restore into known shapes."""
    return path.name in ('_CHECKPOINT_METADATA', '_sharding') or 'array_metadatas' in path.parts


def test_whole(workdir, caplog):
    found = latest(workdir)
    assert found.step == 2 and not caplog.records
    jax.tree.map(np.testing.assert_array_equal, found, saved(2))


@pytest.mark.parametrize('kind', ['empty', 'cut off', 'missing'])
def test_each_file_of_the_newest_step(workdir, kind, caplog):
    for path in files(workdir):
        content = path.read_bytes()
        if kind == 'missing':
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2 if kind == 'cut off' else 0])
        print(path, unneeded(path))
        if unneeded(path):
            assert latest(workdir).step == 2
        else:
            passed_over(workdir, caplog)
        path.write_bytes(content)
    assert latest(workdir).step == 2


