"""Layouts: a batch on one device or divided among several gives the same run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.kernels import mesh_axes
from attnlab.kernels.losses import LossSums
from attnlab.train import checkpoint, devices, loop
from attnlab.train.setup import make_setup
from tests.train.helpers import config, make_task, records


def assert_records_close(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name != 'split':
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-7, err_msg=name)


def task_with_empty_rows():
    """Return the regression task without noise, with empty last rows in its batches."""

    def squares(params, batch, rng):
        errors = jnp.where(batch['kept'], (batch['x'] @ params['w'] - batch['y']) ** 2, 0.0)
        return LossSums(jnp.sum(errors), jnp.sum(batch['kept']), {'squares': jnp.sum(errors)})

    full_batch = make_task().batch
    return make_task(loss=squares, batch=lambda step: full_batch(step) | {'kept': np.arange(8) < 8 - step % 4})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('accumulate', [1, 2])
@pytest.mark.parametrize(('parallel', 'count'), [('jit', 2), ('jit', 4), ('pmap', 1), ('pmap', 4)])
def test_training_on_several_devices_matches_one_device(tmp_path, parallel, count, accumulate):
    assert len(jax.devices()) == 8
    one, other = tmp_path / 'one', tmp_path / 'other'
    common = dict(accumulate=accumulate, duration='5 steps', ema=0.5)
    task = make_task() if parallel == 'jit' else task_with_empty_rows()
    loop.run_training_loop(config(mesh='data=1', **common), task, one)
    loop.run_training_loop(config(mesh=f'data={count}', parallel=parallel, **common), task, other)
    for split in ('train', 'valid'):
        assert_records_close(records(one, split), records(other, split))
    with (
        checkpoint.checkpoint_manager(one, read_only=True) as a,
        checkpoint.checkpoint_manager(other, read_only=True) as b,
    ):
        shapes = jax.eval_shape(lambda: {'w': jnp.zeros(3)})
        saved = [checkpoint.restore_best(manager, shapes).params['w'] for manager in (a, b)]
    np.testing.assert_allclose(*saved, atol=1e-5)


def test_pmap_devices_draw_their_own_noise():
    random_loss = lambda params, batch, rng: LossSums(
        params['w'][0] + 1.0 * jax.random.bits(rng, (), jnp.uint16), jnp.float32(1), {}
    )
    task = make_task(loss=random_loss)
    losses = []
    for count in (1, 4):
        setup = make_setup(config(parallel='pmap', mesh=f'data={count}'), 32)
        layout = setup.layout
        state = layout.replicate(setup.initial_state(task.init, np.uint32(0)))
        update = setup.compile_step(task.loss, state)
        losses.append(float(layout.to_local(update(state, layout.put_batch(task.batch(0)))[1])['loss']))
    assert losses[0] != losses[1]  # the mean of four different draws, not of one draw four times


@pytest.mark.slow
def test_run_continues_with_another_number_of_devices(tmp_path):
    loop.run_training_loop(config(mesh='data=1', schedule='constant'), make_task(), tmp_path / 'whole')
    for number, steps in ((1, 7), (4, 12), (2, 20)):
        settings = config(mesh=f'data={number}', duration=f'{steps} steps', schedule='constant')
        loop.run_training_loop(settings, make_task(), tmp_path / 'parts')
    assert_records_close(records(tmp_path / 'whole', 'train'), records(tmp_path / 'parts', 'train'))


@pytest.mark.parametrize(('parallel', 'count'), [('jit', 4), ('pmap', 1)])
def test_evaluation_uses_all_devices_with_jit_and_one_with_pmap(tmp_path, parallel, count):
    device_counts = []

    def evaluate(params):
        device_counts.append(len(params['w'].devices()))
        return {'loss': float(jnp.sum(params['w']))}

    changes = dict(mesh='data=4', parallel=parallel, duration='1 steps')
    loop.run_training_loop(config(**changes), make_task(evaluate=evaluate), tmp_path)
    assert device_counts == [count]


def test_training_on_several_devices_is_deterministic(tmp_path):
    for name in ('one', 'other'):
        loop.run_training_loop(config(mesh='data=4'), make_task(), tmp_path / name)
    assert records(tmp_path / 'one', 'train') == records(tmp_path / 'other', 'train')


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_replicate_and_to_local_are_inverse(parallel):
    layout = devices.make_layout(parallel, 'data=4', 8)
    plain = {'w': np.arange(3.0, dtype=np.float32), 'n': np.int32(7)}
    state = layout.replicate(layout.initialize(lambda: jax.tree.map(jnp.asarray, plain)))
    for tree in (layout.to_local(state), layout.unreplicate(state)):
        jax.tree.map(np.testing.assert_array_equal, tree, plain)
    assert len(state['w'].devices()) == 4
    assert layout.to_local(state)['w'].devices() == {jax.devices()[0]}
    rows = layout.put_batch({'x': np.arange(16).reshape(8, 2)})['x']
    if parallel == 'jit':
        assert [shard.data.shape for shard in rows.addressable_shards] == [(2, 2)] * 4
    np.testing.assert_array_equal(np.asarray(rows).reshape(8, 2), np.arange(16).reshape(8, 2))


def test_put_batch_takes_whole_batch_or_process_rows():
    layout = devices.make_layout('jit', 'data=2,sequence=2', 8)
    assert layout.process_rows(8) == slice(0, 8)
    rows = np.arange(48).reshape(8, 6)
    for array in (layout.put_batch({'x': rows})['x'], layout.put_batch({'x': rows}, 8)['x']):
        np.testing.assert_array_equal(array, rows)
        assert [shard.data.shape for shard in array.addressable_shards] == [(4, 3)] * 4


@pytest.mark.parametrize(('rows', 'count'), [(8, 8), (6, 6), (11, 1), (2, 2), (12, 6)])
def test_data_0_takes_as_many_devices_as_divide_the_rows(rows, count):
    assert devices.make_layout('jit', 'data=0', rows).device_count == count


@pytest.mark.parametrize(('parallel', 'mesh', 'rows', 'message'), [
    ('jit', 'data=9', 18, r"train.mesh is 'data=9', 9 devices; there are 8"),
    ('jit', 'data=2,tensor=8', 18, r"train.mesh is 'data=2,tensor=8', 16 devices; there are 8"),
    ('jit', 'data=4', 6, r"train.mesh is 'data=4', rows in 4; expected a divisor of the 6 rows of a \(micro-\)batch"),
    ('jit', 'data=0,fsdp=4', 6, r"'data=0,fsdp=4', rows in 4; expected a divisor of the 6 rows"),
    ('jit', 'date=2', 6, "train.mesh has 'date=2'; expected sizes as in 'data=2,tensor=4', of data, fsdp"),
    ('jit', 'data=-1', 6, "train.mesh has 'data=-1'"),
    ('jit', 'data', 6, "train.mesh has 'data'"),
    ('jit', '', 6, "train.mesh has ''"),
    ('jit', 'tensor=0', 6, "train.mesh has 'tensor=0'"),
    ('pmap', 'data=2,tensor=2', 6, "train.parallel is 'pmap' and train.mesh 'data=2,tensor=2'; expected data alone"),
])  # fmt: skip
def test_invalid_mesh_is_refused(parallel, mesh, rows, message):
    with pytest.raises(UserError, match=message):
        devices.make_layout(parallel, mesh, rows)


def test_count_mesh_devices_refuses_open_and_too_large_meshes():
    for mesh in ('fsdp=1000000', 'data=2049', 'data=2048,tensor=2'):
        with pytest.raises(UserError, match=f'{mesh}.* devices; expected at most 2048, as many as XLA compiles for'):
            devices.count_mesh_devices(mesh)
    assert devices.count_mesh_devices('data=512,tensor=4') == 2048
    with pytest.raises(UserError, match='expected a size of data once'):
        devices.count_mesh_devices('data=2,data=2')
    for size in ('9' * 5000, '٣', '1e3', '-1', ''):
        with pytest.raises(UserError, match=f"train.mesh has 'data={size}'; expected sizes"):
            devices.count_mesh_devices(f'data={size}')


@pytest.mark.parametrize(('limit', 'count', 'no_mesh', 'cpu', 'gpu'), [
    (250, 5000, 250, 248, 1000), (250, 30, 30, 32, 32), (1, 100, 1, 4, 4), (8, 6, 6, 8, 8),
])  # fmt: skip
def test_evaluation_batch_size_depends_on_the_mesh(monkeypatch, limit, count, no_mesh, cpu, gpu):
    batch_size = lambda params: mesh_axes.evaluation_batch_size(limit, count)
    layout = devices.make_layout('jit', 'data=2,fsdp=2,tensor=2', 8)
    assert batch_size(None) == no_mesh and layout.evaluate(batch_size, None) == cpu
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')  # GPUs each have their own memory
    assert layout.evaluate(batch_size, None) == gpu
