import asyncio
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnlab.errors import RunError, Stopped, UserError
from attnlab.train import checkpoint
from attnlab.train.checkpoint import Checkpoint, RunProgress

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def params(value, width=3):
    return {'layer': {'kernel': jnp.full((2, width), value), 'bias': jnp.full((width,), value)}}


def saved(step, best=None, best_step=None):
    tree = params(float(step))
    return Checkpoint(step, tree, OPTIMIZER.init(tree), RunProgress(best, best_step, 0))


def shapes(width=3):
    return jax.eval_shape(lambda: (params(0.0, width), OPTIMIZER.init(params(0.0, width))))


def save_all(workdir, *states):
    with checkpoint.checkpoint_manager(workdir) as manager:
        for state in states:
            checkpoint.save_checkpoint(manager, state)
        return sorted(manager.all_steps())


def test_newest_two_steps_in_numerical_order_are_kept(tmp_path):
    assert save_all(tmp_path, saved(9), saved(10), saved(100)) == [10, 100]


def test_best_step_is_kept(tmp_path):
    assert save_all(tmp_path, saved(1, 0.5, 1), saved(2, 0.5, 1), saved(3, 0.5, 1), saved(4, 0.5, 1)) == [1, 3, 4]
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        assert checkpoint.restore_latest(manager, *shapes()).step == 4
        best = checkpoint.restore_best(manager, shapes()[0])
    assert best.step == 1
    np.testing.assert_array_equal(best.params['layer']['kernel'], 1.0)


@pytest.mark.parametrize('step', [50, 100])
def test_saving_an_older_or_equal_step_raises(tmp_path, step):
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        checkpoint.save_checkpoint(manager, saved(100))
        with pytest.raises(ValueError, match=f'step {step} is not newer than the saved step 100'):
            checkpoint.save_checkpoint(manager, saved(step))


def test_restored_state_equals_saved_state_and_can_be_updated(tmp_path):
    save_all(tmp_path, saved(7, 0.25, 7))
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        restored = checkpoint.restore_latest(manager, *shapes())
    expected = saved(7, 0.25, 7)
    assert restored.progress == expected.progress
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    updates, _ = OPTIMIZER.update(restored.params, restored.optimizer, restored.params)
    assert jax.tree.structure(updates) == jax.tree.structure(expected.params)


def test_restore_with_another_shape_names_the_parameter(tmp_path):
    save_all(tmp_path, saved(1))
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        with pytest.raises(UserError, match=r'params/layer/bias has shape \(3,\); this config expects \(4,\)'):
            checkpoint.restore_latest(manager, *shapes(width=4))


def test_signal_while_reading_does_not_count_as_damage(tmp_path, monkeypatch):
    save_all(tmp_path, saved(1))

    def raise_stopped(folder, tree):
        raise Stopped(15, 0)

    monkeypatch.setattr(checkpoint, '_read_arrays', raise_stopped)
    with checkpoint.checkpoint_manager(tmp_path) as manager, pytest.raises(Stopped):
        checkpoint.restore_latest(manager, *shapes())


def test_restore_without_checkpoints_returns_none(tmp_path):
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        assert checkpoint.restore_latest(manager, *shapes()) is None
        assert checkpoint.restore_best(manager, shapes()[0]) is None


@pytest.fixture
def gate(monkeypatch):
    """An event that a save waits for before it is complete."""
    event, save = threading.Event(), ocp.JsonCheckpointHandler._save_fn

    async def wait_and_save(self, *args):
        await asyncio.to_thread(event.wait, 20)
        await save(self, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, '_save_fn', wait_and_save)
    yield event
    event.set()


def test_background_save_writes_the_state_at_the_time_of_the_call(tmp_path, gate):
    trees = jax.tree.map(jnp.copy, (saved(1).params, saved(1).optimizer))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        checkpoint.save_checkpoint(manager, Checkpoint(1, *trees, RunProgress()))
        for _ in range(3):
            trees = jax.block_until_ready(step(trees))  # reuses the memory of the arrays that are being saved
        assert not (tmp_path / 'checkpoints' / '1').exists()
        gate.set()
        checkpoint.wait_for_save(manager)
        assert (tmp_path / 'checkpoints' / '1').exists()
        jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_latest(manager, *shapes()), saved(1))


def test_save_writes_a_copy_of_the_arrays(tmp_path, monkeypatch):
    """On a CPU, orbax may write from the arrays themselves at any later time."""
    trees, StandardSave, state = [], ocp.args.StandardSave, saved(1)
    monkeypatch.setattr(ocp.args, 'StandardSave', lambda tree: trees.append(tree) or StandardSave(tree))
    save_all(tmp_path, state)
    own, written = (
        {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)}
        for arrays in ([state.params, state.optimizer], trees)
    )
    assert len(written) == len(jax.tree.leaves(trees)) and not own & written


def test_closing_the_manager_waits_for_the_last_save(tmp_path, gate):
    threading.Timer(0.5, gate.set).start()
    assert save_all(tmp_path, saved(1)) == [1]
    assert (tmp_path / 'checkpoints' / '1').exists()


# Orbax closes its event loop while writes of the failed save are still running.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('where', ['finish', 'save', 'end'])
def test_failed_save_raises_in_one_line_and_keeps_older_steps(tmp_path, where, gate):
    folder, aside = tmp_path / 'checkpoints', tmp_path / 'aside'
    gate.set()
    save_all(tmp_path, saved(1), saved(2))
    gate.clear()
    with pytest.raises(RunError, match=f'^a checkpoint could not be saved in {folder}: .*$') as caught:
        with checkpoint.checkpoint_manager(tmp_path) as manager:
            checkpoint.save_checkpoint(manager, saved(3))
            # The files _METADATA are written last; earlier writes would create the folder again.
            while len(list(folder.glob('3.*/*/_METADATA'))) < 2:
                time.sleep(0.01)
            folder.rename(aside)
            folder.touch()
            gate.set()
            if where == 'finish':
                checkpoint.wait_for_save(manager)
            elif where == 'save':
                checkpoint.save_checkpoint(manager, saved(4))
    assert '\n' not in str(caught.value)
    folder.unlink()
    aside.rename(folder)
    assert {'1', '2'} <= {path.name for path in folder.iterdir()} and not (folder / '3').exists()
    with checkpoint.checkpoint_manager(tmp_path, read_only=True) as manager:
        jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_latest(manager, *shapes()), saved(2))


def test_damaged_newer_steps_are_renamed(tmp_path, caplog):
    save_all(tmp_path, saved(1), saved(2), saved(3))
    (tmp_path / 'checkpoints' / '3' / 'params' / 'manifest.ocdbt').unlink()
    (tmp_path / 'checkpoints' / '7').mkdir()
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        assert checkpoint.restore_latest(manager, *shapes()).step == 2
        checkpoint.set_aside_damaged(manager, 2)
        folder = tmp_path / 'checkpoints'
        assert [line for line in caplog.messages if 'is now' in line] == [
            f'checkpoint of step {step} is now {folder}/{step}.damaged: the run continues from step 2'
            for step in (3, 7)
        ]
        checkpoint.save_checkpoint(manager, saved(3))
        jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_latest(manager, *shapes()), saved(3))
        checkpoint.set_aside_damaged(manager, 2)  # once more: the folder renamed before is kept
        assert (folder / '3.damaged').is_dir() and (folder / '3.damaged-1').is_dir()
        assert not (folder / '3.damaged/params/manifest.ocdbt').exists()
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        assert checkpoint.restore_latest(manager, *shapes()).step == 2


def grid(count):
    """Return a mesh of `count` devices in two columns, or of one device."""
    return Mesh(np.array(jax.devices()[:count]).reshape(-1, 2 if count > 1 else 1), ('x', 'y'))


def shardings(tree, count):
    """Return shardings of matrices over both mesh axes, as in fully sharded training; other arrays are replicated."""
    axes = lambda leaf: PartitionSpec('x', 'y') if leaf.ndim == 2 else PartitionSpec()
    return jax.tree.map(lambda leaf: NamedSharding(grid(count), axes(leaf)), tree)


def test_arrays_are_restored_on_other_devices(tmp_path):
    kernel = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    tree = {'kernel': jnp.asarray(kernel), 'bias': jnp.arange(3.0)}
    state = tree, OPTIMIZER.init(tree)
    many = len(jax.devices())
    for step, count in enumerate([many, 1, many // 2, many], 1):
        placed = jax.device_put(state, shardings(state, count))
        save_all(tmp_path, Checkpoint(step, *placed, RunProgress()))
        for other in (1, many // 2, many):
            expected = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                state,
                shardings(state, other),
            )
            with checkpoint.checkpoint_manager(tmp_path) as manager:
                restored = checkpoint.restore_latest(manager, *expected)
            assert restored.step == step
            jax.tree.map(np.testing.assert_array_equal, (restored.params, restored.optimizer), state)
            assert restored.params['kernel'].sharding == expected[0]['kernel'].sharding
            assert restored.optimizer[1][0].mu['kernel'].sharding == expected[0]['kernel'].sharding
    unsharded = jax.eval_shape(lambda: state)
    with checkpoint.checkpoint_manager(tmp_path) as manager:
        restored = checkpoint.restore_latest(manager, *unsharded)
    jax.tree.map(np.testing.assert_array_equal, (restored.params, restored.optimizer), state)
    assert restored.params['kernel'].devices() == {jax.devices()[0]}


@pytest.mark.parametrize(
    'name', ['run[1]', '[1e-3]', '[x]*', '**', 'a?b', 'above[0]/run', 'a b', '%41#', 'né漢', '{x}$H']
)
def test_checkpoints_in_a_folder_of_any_name_can_be_read_also_after_a_rename(tmp_path, name):
    workdir = tmp_path / name
    workdir.mkdir(parents=True)
    save_all(workdir, saved(1))
    for moved in (False, True):
        folder = workdir.rename(tmp_path / 'renamed') if moved else workdir
        with checkpoint.checkpoint_manager(folder, read_only=True) as manager:
            jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_latest(manager, *shapes()), saved(1))


@pytest.mark.parametrize('name', ['a\\b', 'gs:', 'gs:/x', '\udcff'])
def test_folder_name_that_libraries_would_change_is_refused(tmp_path, name):
    with pytest.raises(UserError, match='checkpoints cannot be saved in .*; expected a path in UTF-8 without'):
        checkpoint.checkpoint_folder(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('where', ['finish', 'save'])
def test_save_that_cannot_be_read_raises(tmp_path, where):
    with pytest.raises(RunError, match='^a checkpoint could not be saved in .*params.*$'):
        with checkpoint.checkpoint_manager(tmp_path) as manager:
            checkpoint.save_checkpoint(manager, saved(1))
            manager.wait_until_finished()
            (tmp_path / 'checkpoints' / '1' / 'params' / 'manifest.ocdbt').unlink()
            if where == 'finish':
                checkpoint.wait_for_save(manager)
            else:
                checkpoint.save_checkpoint(manager, saved(2))
