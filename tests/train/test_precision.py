"""float16: what stays float32, and the loss's scale, by hand and in whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import configs, tasks
from attnlab.configs.language import GrammarText, LanguageConfig, LanguageModelConfig
from attnlab.errors import RunError
from attnlab.kernels.losses import LossSums
from attnlab.train import checkpoint, devices, loop, optimizer, precision
from attnlab.train.setup import make_setup
from attnlab.train.step import TrainState, make_update
from tests.quick import QUICK
from tests.tiny import tiny_language_config
from tests.train import helpers
from tests.train.helpers import EXAMPLES, records, same_runs, update_of

HALF = jnp.float16
VISION = {
    'data.train_examples': '90', 'data.test_examples': '30', 'model.layers': '1', 'model.width': '16',
    'model.heads': '2', 'model.mlp_width': '16', 'train.batch_size': '16', 'optimizer.warmup': '2 steps',
}  # fmt: skip


def language(folder, **changes):
    return tiny_language_config(folder, **{'model__mlp': 'relu', **changes})


def vision(folder, **changes):
    changed = {'model.mlp': 'relu'} | {key.replace('__', '.'): value for key, value in changes.items()}
    return configs.load_experiment('experiments/vision/digits.py', list((VISION | changed).items()))


def experts(folder, **changes):
    return language(folder, model__experts=5, model__active=2, model__qk_norm='rms', model__norm='rms', **changes)


# What stays float32


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, 'jaxpr', part)
                if hasattr(inner, 'eqns'):
                    yield from equations(inner)


# Of softmax, loss and norms; `reduce_sum` is in all of them.  The activation is a ReLU, which has none of these.
WIDE = ('exp', 'log', 'rsqrt', 'div', 'reduce_sum', 'reduce_max', 'top_k')


@pytest.mark.parametrize(('made', 'expected'), [(language, 6), (vision, 6), (experts, 7)])
def test_softmax_norms_router_and_loss_compute_in_float32(made, expected, tmp_path):
    task = tasks.create_task(made(tmp_path, model__dtype='float16'))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    found, products, routers = {}, set(), set()
    for eqn in equations(jax.make_jaxpr(task.loss)(shapes, task.batch(0), jax.random.key(0)).jaxpr):
        floats = {x.aval.dtype for x in eqn.invars if jnp.issubdtype(getattr(x.aval, 'dtype', int), jnp.floating)}
        if eqn.primitive.name in WIDE:
            found.setdefault(eqn.primitive.name, set()).update(floats)
        if eqn.primitive.name == 'dot_general':
            products |= floats
            if eqn.invars[1].aval.shape == (16, 5):
                routers |= floats
    assert len(found) == expected and set.union(*found.values()) == {jnp.dtype('float32')}
    assert jnp.dtype(HALF) in products  # or nothing would be tested
    assert routers == ({jnp.dtype('float32')} if made is experts else set())


# Whole models


def losses(made, folder, dtype, steps=80):
    config = made(folder, model__dtype=dtype, optimizer__learning_rate='0.02', train__duration=f'{steps} steps')
    task = tasks.create_task(config)
    setup = make_setup(task.config, task.examples)
    update = jax.jit(make_update(task.loss, setup.make_optimizer, setup.schedule), compiler_options=QUICK)
    state = jax.jit(functools.partial(setup.initial_state, task.init))(np.uint32(0))
    told = []
    for step in range(steps):
        state, values = update(state, task.batch(step), setup.hyperparameters)
        told.append({name: float(value) for name, value in values.items()})
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype('float32')}
    return told


@pytest.mark.parametrize('made', [language, pytest.param(vision, marks=pytest.mark.slow)])
def test_training_in_float16_learns_about_as_in_float32(made, tmp_path):
    half, full = (losses(made, tmp_path, dtype) for dtype in ('float16', 'float32'))
    assert 'skipped' not in full[0] and half[-1]['skipped'] <= 2
    half, full = (np.array([each['loss'] for each in told]) for told in (half, full))
    assert half[-10:].mean() < 0.88 * half[0]
    np.testing.assert_allclose(half, full, rtol=0.05)
    assert (half != full).any()


# The scale


def stated(scale, params, optimize):
    return TrainState(jnp.int32(0), params, optimize(0.0, 0.0).init(params), jax.tree.map(jnp.copy, params), scale)


def scale_of(factor, good=0, skipped=0):
    return precision.LossScale(jnp.float32(factor), jnp.int32(good), jnp.int32(skipped))


def small(params, batch, rng):
    """A loss whose gradient, x / 1e8 each, is too small for float16 on the way to the parameters."""
    products = params['w'].astype(HALF)[None] * batch['x'].astype(HALF)
    return LossSums(jnp.sum(products.astype(jnp.float32) * 1e-8), jnp.float32(len(batch['x'])), {})


def test_loss_scale_preserves_gradients_too_small_for_float16():
    batch = {'x': np.random.default_rng(0).uniform(1, 2, (8, 3)).astype(np.float32)}
    params, optimize = {'w': jnp.zeros(3)}, optimizer.make_optimizer_factory(helpers.config().optimizer)
    expected = -1e-8 * batch['x'].mean(0)
    found = {}
    for factor in (1.0, precision.INITIAL_SCALE):
        update = update_of(small, optimize)
        found[factor] = update(stated(scale_of(factor), params, optimize), batch)[0].params['w']
    np.testing.assert_array_equal(found[1.0], 0)
    np.testing.assert_allclose(found[precision.INITIAL_SCALE], expected, rtol=2e-3)


def large(params, batch, rng):
    """(w x)^2 in float16, whose largest number is 65,504: too large for x = 300."""
    products = (params['w'].astype(HALF)[None] * batch['x'].astype(HALF)) ** 2
    return LossSums(jnp.sum(products.astype(jnp.float32)), jnp.sum(jnp.any(batch['x'] != 0, axis=1)), {})


@pytest.mark.parametrize(('parallel', 'accumulate'), [('jit', 1), ('jit', 2), ('pmap', 1), ('pmap', 2)])
@pytest.mark.parametrize('bad', [False, True])
def test_overflowing_step_changes_only_the_loss_scale(parallel, accumulate, bad):
    x = np.full((8, 3), 0.01, np.float32)
    if bad:
        x[5, 1] = 300  # one row of one device and one micro-batch; the gradient of the others is finite
    layout = devices.make_layout(parallel, f'data={4 // accumulate}', 8 // accumulate)
    optimize = optimizer.make_optimizer_factory(helpers.config(name='adam').optimizer)
    before = stated(scale_of(2.0**10, 7, 3), {'w': jnp.ones(3)}, optimize)
    before = before._replace(average={'w': jnp.zeros(3)})
    expected = jax.tree.map(np.asarray, before)
    state = layout.replicate(layout.initialize(lambda: before))
    step = layout.compile(update_of(large, optimize, accumulate, rate=0.1, ema=0.9, layout=layout), state)
    state, values = layout.to_local(step(state, layout.put_batch({'x': x})))
    assert int(state.step) == 1 and float(values['loss_scale']) == 2.0**10
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), state, expected)
    if bad:
        assert not np.isfinite(values['gradient_norm']) and values['skipped'] == 4
        assert all(jax.tree.leaves((same.params, same.opt_state, same.ema_params)))
        assert [float(x) for x in state.loss_scale] == [2.0**9, 0, 4]
    else:
        assert not any(jax.tree.leaves((same.params, same.ema_params))) and values['skipped'] == 3
        assert [float(x) for x in state.loss_scale] == [2.0**10, 8, 3]
        np.testing.assert_allclose(values['gradient_norm'], 2e-4 * 3**0.5, rtol=5e-3)


def test_loss_scale_doubles_after_finite_steps_and_halves_after_overflow(monkeypatch):
    monkeypatch.setattr(precision, 'GROWTH_INTERVAL', 3)
    scale, found = scale_of(4), []
    for good in (1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1):
        scale = precision.adjust_loss_scale(scale, jnp.bool_(good))
        found.append(float(scale.factor))
    assert found == [4, 4, 8, 8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1, 1]
    assert int(scale.skipped) == 6
    assert (
        float(precision.adjust_loss_scale(scale_of(precision.MAX_SCALE, 99), jnp.bool_(1)).factor)
        == precision.MAX_SCALE
    )


def test_loss_scale_has_the_published_constants():
    assert (precision.INITIAL_SCALE, precision.GROWTH_INTERVAL) == (2**15, 2000)
    assert [float(precision.adjust_loss_scale(scale_of(8, n), jnp.bool_(1)).factor) for n in (1998, 1999)] == [8, 16]


def test_scaled_micro_batches_match_the_whole_batch():
    batch = {'x': np.random.default_rng(0).uniform(1, 2, (8, 3)).astype(np.float32)}
    batch['x'][1:4] = 0  # rows that do not count: micro-batches weigh 1, 4 and 1, 0, 2, 2
    params, optimize = {'w': jnp.ones(3)}, optimizer.make_optimizer_factory(helpers.config().optimizer)
    found = []
    for accumulate in (1, 2, 4):
        update = update_of(large, optimize, accumulate)
        state, values = update(stated(scale_of(2.0**10), params, optimize), batch)
        found.append([*state.params['w'], values['loss'], values['gradient_norm']])
    expected = 1 - 2 * (batch['x'].astype(np.float64) ** 2).sum(0) / 5
    np.testing.assert_allclose(found[0][:3], expected, rtol=2e-3)
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=3e-3)


# Runs


def halved_task(bad=()):
    """The line of the loop's tests in float16, with targets that are too large at some steps."""
    plain = helpers.make_task()

    def squares(params, batch, rng):
        errors = batch['x'].astype(HALF) @ params['w'].astype(HALF) - batch['y'].astype(HALF)
        total = 0.01 * jnp.sum((errors**2).astype(jnp.float32))
        return LossSums(total, jnp.sum(batch['kept']), {'squares': total})

    def batch(step):
        made = plain.batch(step)
        return made | {'y': made['y'] * (1e4 if step in bad else 1)}

    return helpers.make_task(loss=squares, batch=batch)


def config(dtype='float16', **changes):
    plain = helpers.config(**changes)
    common = dict(seed=plain.seed, train=plain.train, optimizer=plain.optimizer)
    return LanguageConfig(data=GrammarText(), model=LanguageModelConfig(dtype=dtype), **common)


@pytest.mark.parametrize('ema', [0.0, 0.5])
def test_resumed_float16_run_matches_uninterrupted_run_bit_for_bit(tmp_path, monkeypatch, ema):
    monkeypatch.setattr(precision, 'GROWTH_INTERVAL', 2)
    task, common = halved_task(bad=(4, 11)), dict(schedule='constant', ema=ema)
    loop.run_training_loop(config(**common), task, tmp_path / 'whole')
    for steps in (5, 6, 20):  # after an overflow, and between two good steps
        loop.run_training_loop(config(duration=f'{steps} steps', **common), task, tmp_path / 'parts')
    whole, parts = (records(tmp_path / name, 'train') for name in ('whole', 'parts'))
    assert whole == parts
    assert [each['loss_scale'] / 2**15 for each in whole[:8]] == [1, 1, 2, 2, 4, 2, 2, 4]
    assert [each['skipped'] for each in whole] == [0] * 4 + [1] * 7 + [2] * 9
    assert 'gradient_norm' not in whole[4] and 'gradient_norm' in whole[5]  # infinity is no JSON
    rates = [0.02 * min(update, 5) for update in (0, 1, 2, 3, 4, 4, 5)]  # the one after a skipped one is its own
    np.testing.assert_allclose([each['learning_rate'] for each in whole[:7]], rates, rtol=1e-6)


def test_run_ends_if_it_overflows_at_the_smallest_scale(tmp_path):
    task = halved_task(bad=range(3, EXAMPLES))
    with pytest.raises(RunError, match='step 19: the loss is inf'):
        loop.run_training_loop(config(), task, tmp_path)
    assert [each['loss_scale'] for each in records(tmp_path, 'train')[3:]] == [2.0**n for n in range(15, 0, -1)]


def test_other_dtypes_have_no_loss_scale_and_unchanged_checkpoints(tmp_path):
    for dtype in ('float32', 'bfloat16'):
        loop.run_training_loop(config(dtype), helpers.make_task(), tmp_path / dtype)
    loop.run_training_loop(helpers.config(), helpers.make_task(), tmp_path / 'none')
    same_runs(tmp_path / 'none', tmp_path / 'bfloat16')
    with checkpoint.checkpoint_manager(tmp_path / 'float32', read_only=True) as manager:
        assert 'scale' not in str(manager.item_metadata(20)['optimizer'])
