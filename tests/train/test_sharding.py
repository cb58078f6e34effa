"""Sharding rules of parameters, and runs on meshes of eight devices compared with one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attnlab import tasks
from attnlab.train import sharding
from attnlab.train.setup import make_setup
from tests.tiny import tiny_language_config

STEPS = 5
SGD = dict(optimizer__name='sgd', optimizer__learning_rate='0.3', optimizer__warmup='1 steps', train__batch_size='16',
           train__ema='0.5')  # fmt: skip
LANGUAGE = SGD | dict(
    data__documents='lines', model__layers='2', model__heads='4', model__norm='rms', model__mlp='swiglu',
    model__qk_norm='rms', model__sinks='true',
)  # fmt: skip
EXPERTS = LANGUAGE | dict(model__experts='4', model__experts_per_token='2')


def train_few_steps(config):
    """Return parameters, their moving average and the last metrics after a few steps, as host arrays."""
    task = tasks.create_task(config)
    setup = make_setup(task.config, task.examples)
    layout = setup.layout
    make_state = functools.partial(setup.initial_state, task.init)
    state = layout.replicate(layout.initialize(make_state, np.uint32(config.seed)))
    update = setup.compile_step(task.loss, state)
    step_metrics = {}
    for step in range(STEPS):
        state, step_metrics = update(state, layout.put_batch(task.batch(step)))
    local = layout.to_local(state)
    return jax.tree.map(np.asarray, (local.params, local.ema_params, layout.to_local(step_metrics)))


def train_language(folder, changes, mesh, **more):
    return train_few_steps(tiny_language_config(folder, train__mesh=mesh, **changes, **more))


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return train_language(tmp_path_factory.mktemp('plain'), LANGUAGE, 'data=1')


@pytest.fixture(scope='module')
def experts(tmp_path_factory):
    return train_language(tmp_path_factory.mktemp('experts'), EXPERTS, 'data=1')


def test_language_task_has_an_uneven_last_batch(tmp_path):
    config = tiny_language_config(tmp_path, **LANGUAGE)
    task = tasks.create_task(config)
    full = [int(np.sum(np.any(task.batch(step)['segments'], axis=1))) for step in range(STEPS)]
    assert 0 < min(full) < max(full) == 16


@pytest.mark.slow
@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_data_parallel_mesh_matches_one_device(plain, tmp_path, parallel, quickly):
    assert_close(plain, train_language(tmp_path, LANGUAGE, 'data=8', train__parallel=parallel))


def slow(mesh):
    return pytest.param(mesh, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    'mesh', ['fsdp=8', 'data=2,sequence=4', *map(slow, ('fsdp=2,tensor=2,sequence=2', 'data=2,tensor=4'))]
)
def test_model_parallel_mesh_matches_one_device(plain, tmp_path, mesh, quickly):
    assert_close(plain, train_language(tmp_path, LANGUAGE, mesh))


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['data=2,expert=4', slow('fsdp=2,expert=2,tensor=2')])
def test_expert_parallel_mesh_matches_one_device(experts, tmp_path, mesh, quickly):
    assert_close(experts, train_language(tmp_path, EXPERTS, mesh))


@pytest.mark.parametrize(('path', 'shape', 'spec'), [
    ('stack/block_0/attention/query/kernel', (64, 4, 16), P('fsdp', 'tensor', None)),
    ('stack/blocks/attention/query/kernel', (3, 64, 4, 16), P(None, 'fsdp', 'tensor', None)),
    ('1/mu/stack/block_0/attention/out/kernel', (4, 16, 64), P('tensor', None, 'fsdp')),
    ('stack/block_0/attention/key/kernel', (64, 3, 16), P('fsdp', None, None)),  # three heads are not divisible
    ('stack/block_0/experts/up/kernel', (6, 64, 32), P('expert', 'fsdp', 'tensor')),
    ('stack/block_0/experts/shared_expert/up/kernel', (64, 32), P('fsdp', 'tensor')),
    ('embedding/embedding', (65, 64), P(None, 'fsdp')),
    ('stack/block_0/mlp_norm/scale', (64,), P()),
    ('0/count', (), P()),
])  # fmt: skip
def test_parameter_spec_of_arrays(path, shape, spec):
    result = sharding.parameter_spec(path, shape, {'fsdp': 2, 'tensor': 2, 'expert': 2})
    assert tuple(result) == tuple(spec) + (None,) * (len(result) - len(spec))


def test_parameter_without_a_rule_raises():
    with pytest.raises(ValueError, match=r'no sharding rule matches odd/thing \(4,\); add one to'):
        sharding.parameter_spec('odd/thing', (4,), {'fsdp': 2})
    message = r'the sharding rule for attention/query/kernel has 3 axes; the array has shape \(4,\)'
    with pytest.raises(ValueError, match=message):
        sharding.parameter_spec('attention/query/kernel', (4,), {'fsdp': 2})
