"""Bytes on each device and communication of a mesh, counted without running, compared with measured ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import cli, tasks
from attnlab.errors import UserError
from attnlab.train import communication
from attnlab.train.setup import make_setup
from tests.tiny import tiny_language_config

WIDE = dict(model__layers='1', model__width='64', model__heads='4', train__batch_size='8')


def compiled_text(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def shard_over(*axes):
    mesh = jax.make_mesh((8,), ('x',), (AxisType.Auto,))
    return NamedSharding(mesh, P(*axes))


def test_all_reduce_and_all_gather_are_counted():
    replicated, sharded = shard_over(), shard_over('x')
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharded)
    assert communication.parse_collectives(compiled_text(lambda x: jnp.sum(x * 2, axis=0), x)) == [
        ('all-reduce', 1, 16)
    ]
    gathered = jax.jit(lambda x: x * 2, out_shardings=replicated).lower(x).compile().as_text()
    assert communication.parse_collectives(gathered) == [('all-gather', 1, 256)]
    assert communication.parse_collectives(compiled_text(lambda x: x * 2, x)) == []


def test_collectives_in_a_loop_count_once_for_each_iteration():
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=shard_over('x'))

    def f(x):
        return jax.lax.scan(lambda y, _: (y + jnp.sum(y * x, axis=0, keepdims=True), None), x, length=5)[0]

    def nested(x):
        return jax.lax.scan(lambda y, _: (f(y), None), x, length=3)[0]

    [cost] = communication.parse_collectives(compiled_text(f, x))
    assert cost == ('all-reduce', 5, 5 * 64)
    [cost] = communication.parse_collectives(compiled_text(nested, x))
    assert cost == ('all-reduce', 15, 15 * 64)


def test_collectives_in_a_loop_of_unknown_length_raise():
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=shard_over('x'))
    f = lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y + 1, x)
    with pytest.raises(ValueError, match='in a loop whose number of iterations is not known'):
        communication.parse_collectives(compiled_text(f, x))


@pytest.mark.parametrize('mesh', [pytest.param('fsdp=8', marks=pytest.mark.slow), 'fsdp=2,tensor=4'])
def test_counted_bytes_equal_measured_bytes_on_each_device(tmp_path, mesh, quickly):
    config = tiny_language_config(tmp_path, train__mesh=mesh, **WIDE)
    task = tasks.create_task(config)
    setup = make_setup(task.config, task.examples)
    state = setup.layout.initialize(functools.partial(setup.initial_state, task.init), np.uint32(config.seed))
    bytes_by_part, collectives = communication.count_communication(config, mesh)

    def measured_bytes(tree, device):
        shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    for device in jax.devices():
        assert measured_bytes(state.params, device) == bytes_by_part['parameters']
        assert measured_bytes(state.opt_state, device) == bytes_by_part['optimizer state']
    whole = communication.count_communication(config, 'data=1')[0]['parameters']
    assert bytes_by_part['parameters'] < 0.25 * whole
    assert {cost.kind for cost in collectives} >= {'all-gather', 'all-reduce'}


@pytest.mark.slow
def test_experts_communicate_outside_of_loops_of_unknown_length(tmp_path, quickly):
    """Communication inside of these loops could not be counted."""
    config = tiny_language_config(tmp_path, model__experts='4', model__experts_per_token='2', **WIDE)
    one_device, (bytes_by_part, collectives) = (
        communication.count_communication(config, 'data=1')[0],
        communication.count_communication(config, 'data=2,expert=2,tensor=2'),
    )
    assert bytes_by_part['parameters'] < 0.45 * one_device['parameters']
    assert {cost.kind for cost in collectives} >= {'all-gather', 'reduce-scatter', 'all-reduce'}


@pytest.mark.slow
def test_count_command_with_a_mesh(capsys, monkeypatch):
    monkeypatch.setattr('attnlab.environment.simulate_cpu_devices', lambda count: None)
    common = ['count', '--config=experiments/vision/digits.py', '--config.model.layers=1']
    assert cli.main([*common, '--mesh=data=4,tensor=2']) == 0
    printed = capsys.readouterr().out
    assert 'on each device' in printed and 'all-reduce' in printed and 'optimizer state' in printed
    assert cli.main([*common, '--mesh=data=0']) == 2
    assert "--mesh is 'data=0'; expected a number of devices for data too" in capsys.readouterr().err
    assert cli.main([*common, '--mesh=data=3']) == 2
    assert 'rows in 3; expected a divisor of the 64 rows' in capsys.readouterr().err


def test_mesh_that_does_not_divide_the_rows_raises(tmp_path):
    with pytest.raises(UserError, match='expected a divisor of the 8 rows'):
        communication.count_communication(tiny_language_config(tmp_path, **WIDE), 'data=3')
