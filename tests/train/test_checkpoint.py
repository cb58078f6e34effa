import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.errors import UserError
from attnlab.train import checkpoint
from attnlab.train.checkpoint import Progress, Saved

OPTIMIZE = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def params(value, width=3):
    return {'layer': {'kernel': jnp.full((2, width), value), 'bias': jnp.full((width,), value)}}


def saved(step, best=None, best_step=None):
    tree = params(float(step))
    return Saved(step, tree, OPTIMIZE.init(tree), Progress(best, best_step, 0))


def shapes(width=3):
    return jax.eval_shape(lambda: (params(0.0, width), OPTIMIZE.init(params(0.0, width))))


def save_all(workdir, *many):
    with checkpoint.manager(workdir) as manager:
        for one in many:
            checkpoint.save(manager, one)
        return sorted(manager.all_steps())


def test_steps_are_numbers_and_the_newest_two_stay(tmp_path):
    assert save_all(tmp_path, saved(9), saved(10), saved(100)) == [10, 100]


def test_the_best_stays_too(tmp_path):
    assert save_all(tmp_path, saved(1, 0.5, 1), saved(2, 0.5, 1), saved(3, 0.5, 1), saved(4, 0.5, 1)) == [1, 3, 4]
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.latest(manager, *shapes()).step == 4
        best = checkpoint.best(manager, shapes()[0])
    assert best.step == 1
    np.testing.assert_array_equal(best.params['layer']['kernel'], 1.0)


@pytest.mark.parametrize('step', [50, 100])
def test_an_older_or_equal_step_is_not_dropped_in_silence(tmp_path, step):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved(100))
        with pytest.raises(ValueError, match=f'step {step} is not newer than the saved step 100'):
            checkpoint.save(manager, saved(step))


def test_what_comes_back_is_what_went_in_and_can_be_updated(tmp_path):
    save_all(tmp_path, saved(7, 0.25, 7))
    with checkpoint.manager(tmp_path) as manager:
        back = checkpoint.latest(manager, *shapes())
    want = saved(7, 0.25, 7)
    assert back.progress == want.progress
    assert jax.tree.structure(back) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, back, want)
    updates, _ = OPTIMIZE.update(back.params, back.optimizer, back.params)
    assert jax.tree.structure(updates) == jax.tree.structure(want.params)


def test_another_shape_is_refused_by_the_name_of_the_parameter(tmp_path):
    save_all(tmp_path, saved(1))
    with checkpoint.manager(tmp_path) as manager:
        with pytest.raises(UserError, match=r'params/layer/bias has shape \(3,\); this config expects \(4,\)'):
            checkpoint.latest(manager, *shapes(width=4))


def test_nothing_saved_is_none(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.latest(manager, *shapes()) is None
        assert checkpoint.best(manager, shapes()[0]) is None


def damage(step_folder, kind):
    files = sorted(path for path in step_folder.rglob('*') if path.is_file() and path.stat().st_size > 50)
    match kind:
        case 'empty':
            for path in files:
                path.write_bytes(b'')
        case 'truncated':
            for path in files:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case 'item missing':
            shutil.rmtree(step_folder / 'params')


@pytest.mark.parametrize('kind', ['empty', 'truncated', 'item missing'])
def test_a_damaged_newest_step_gives_way_to_the_one_before(tmp_path, kind, caplog):
    save_all(tmp_path, saved(1), saved(2))
    damage(tmp_path / 'checkpoints' / '2', kind)
    with checkpoint.manager(tmp_path) as manager:
        back = checkpoint.latest(manager, *shapes())
    assert back.step == 1
    assert 'checkpoint of step 2 is damaged and passed over' in caplog.text


def test_a_changed_value_is_noticed(tmp_path, monkeypatch, caplog):
    save_all(tmp_path, saved(1))
    real = checkpoint.digest
    monkeypatch.setattr(checkpoint, 'digest', lambda tree: 'a wrong sum')
    save_all(tmp_path, saved(2))
    monkeypatch.setattr(checkpoint, 'digest', real)
    with checkpoint.manager(tmp_path) as manager:
        assert checkpoint.latest(manager, *shapes()).step == 1
    assert 'checksum' in caplog.text


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    save_all(tmp_path, saved(1))
    damage(tmp_path / 'checkpoints' / '1', 'item missing')
    with checkpoint.manager(tmp_path) as manager, pytest.raises(UserError, match='no checkpoint in .* can be read'):
        checkpoint.latest(manager, *shapes())


def test_saved_on_several_devices_restores_on_one(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), 'x')
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
    tree = {'kernel': jax.device_put(jnp.arange(8.0), sharding)}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, Saved(1, tree, OPTIMIZE.init(tree), Progress()))
    plain = jax.eval_shape(lambda: ({'kernel': jnp.arange(8.0)}, OPTIMIZE.init({'kernel': jnp.arange(8.0)})))
    with checkpoint.manager(tmp_path) as manager:
        back = checkpoint.latest(manager, *plain)
    np.testing.assert_array_equal(back.params['kernel'], np.arange(8.0))
    assert len(back.params['kernel'].devices()) == 1
