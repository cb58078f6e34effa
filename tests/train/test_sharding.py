"""Rules that say where parameters lie, and runs on meshes of eight devices: all the same as on one."""

import functools

import jax
import numpy as np
import pytest

from attnlab import tasks
from attnlab.train import loop
from tests.tasks.conftest import tiny_language

STEPS = 5
SGD = dict(optimizer__name='sgd', optimizer__learning_rate='0.3', optimizer__warmup='1 steps', train__batch_size='16')
LANGUAGE = SGD | dict(
    data__documents='lines', model__layers='2', model__heads='4', model__norm='rms', model__mlp='swiglu',
    model__qk_norm='rms', model__sinks='true',
)  # fmt: skip
EXPERTS = LANGUAGE | dict(model__experts='4', model__active='2')


def trained(config, workdir):
    """The parameters after a few steps, and the last values, as the host has them."""
    task = tasks.module(config).build(config, workdir)
    _, _, optimize = loop.recipe(config, task.examples)
    layout = loop.layout_of(config)
    state = layout.state(layout.start(functools.partial(loop.initial, task, optimize, config.seed, 0.5)))
    update = loop.make_update(
        task.loss, optimize, config.seed, config.train.accumulate, 0.5, layout.constrain, layout.axis
    )
    update = layout.compile(update, state)
    values = {}
    for step in range(STEPS):
        state, values = update(state, layout.batch(task.batch(step)))
    whole = layout.local(state)
    return jax.tree.map(np.asarray, (whole.params, whole.average, layout.local(values)))


def language(folder, changes, mesh, **more):
    return trained(tiny_language(folder, train__mesh=mesh, **changes, **more), folder / 'run')


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return language(tmp_path_factory.mktemp('plain'), LANGUAGE, 'data=1')


@pytest.fixture(scope='module')
def experts(tmp_path_factory):
    return language(tmp_path_factory.mktemp('experts'), EXPERTS, 'data=1')


def test_the_last_batch_is_uneven(tmp_path):
    config = tiny_language(tmp_path, **LANGUAGE)
    task = tasks.module(config).build(config, tmp_path)
    full = [int(np.sum(np.any(task.batch(step)['segments'], axis=1))) for step in range(STEPS)]
    assert 0 < min(full) < max(full) == 16


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_rows_over_eight_devices(plain, tmp_path, parallel):
    same(plain, language(tmp_path, LANGUAGE, 'data=8', train__parallel=parallel))


@pytest.mark.parametrize(
    'mesh', ['fsdp=8', 'data=2,tensor=4', 'data=2,sequence=4', 'fsdp=2,tensor=2,sequence=2']
)
def test_parts_of_a_model_over_eight_devices(plain, tmp_path, mesh):
    same(plain, language(tmp_path, LANGUAGE, mesh))


@pytest.mark.parametrize('mesh', ['data=2,expert=4', 'fsdp=2,expert=2,tensor=2'])
def test_experts_over_eight_devices(experts, tmp_path, mesh):
    same(experts, language(tmp_path, EXPERTS, mesh))
