"""float16: operations that stay in float32, and the loss scale, in single steps and in whole runs."""

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
    overrides = {'model.mlp': 'relu'} | {key.replace('__', '.'): value for key, value in changes.items()}
    return configs.load_experiment('experiments/vision/digits.py', list((VISION | overrides).items()))


def experts(folder, **changes):
    return language(
        folder, model__experts=5, model__experts_per_token=2, model__qk_norm='rms', model__norm='rms', **changes
    )


# Operations in float32


def equations(jaxpr):
    """Yield all equations of a jaxpr, also those of inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, 'jaxpr', part)
                if hasattr(inner, 'eqns'):
                    yield from equations(inner)


# Primitives of softmax, loss and norms; `reduce_sum` occurs in all of them.  The activation is a ReLU, which has none.
FLOAT32_PRIMITIVES = ('exp', 'log', 'rsqrt', 'div', 'reduce_sum', 'reduce_max', 'top_k')


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('make_config', 'expected'), [(language, 6), (vision, 6), (experts, 7)])
def test_softmax_norms_router_and_loss_compute_in_float32(make_config, expected, tmp_path):
    task = tasks.create_task(make_config(tmp_path, model__dtype='float16'))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    dtypes, product_dtypes, router_dtypes = {}, set(), set()
    for eqn in equations(jax.make_jaxpr(task.loss)(shapes, task.batch(0), jax.random.key(0)).jaxpr):
        floats = {x.aval.dtype for x in eqn.invars if jnp.issubdtype(getattr(x.aval, 'dtype', int), jnp.floating)}
        if eqn.primitive.name in FLOAT32_PRIMITIVES:
            dtypes.setdefault(eqn.primitive.name, set()).update(floats)
        if eqn.primitive.name == 'dot_general':
            product_dtypes |= floats
            if eqn.invars[1].aval.shape == (16, 5):
                router_dtypes |= floats
    assert len(dtypes) == expected and set.union(*dtypes.values()) == {jnp.dtype('float32')}
    assert jnp.dtype(HALF) in product_dtypes  # the model does compute in float16
    assert router_dtypes == ({jnp.dtype('float32')} if make_config is experts else set())


# Whole models


def train_metrics(make_config, folder, dtype, steps=80):
    """Return the metrics of each training step."""
    config = make_config(folder, model__dtype=dtype, optimizer__learning_rate='0.02', train__duration=f'{steps} steps')
    task = tasks.create_task(config)
    setup = make_setup(task.config, task.examples)
    update = jax.jit(make_update(task.loss, setup.make_optimizer, setup.schedule), compiler_options=QUICK)
    state = jax.jit(functools.partial(setup.initial_state, task.init))(np.uint32(0))
    step_metrics = []
    for step in range(steps):
        state, values = update(state, task.batch(step), setup.hyperparameters)
        step_metrics.append({name: float(value) for name, value in values.items()})
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype('float32')}
    return step_metrics


@pytest.mark.slow
@pytest.mark.parametrize('make_config', [language, pytest.param(vision, marks=pytest.mark.slow)])
def test_training_in_float16_learns_about_as_in_float32(make_config, tmp_path):
    half, full = (train_metrics(make_config, tmp_path, dtype) for dtype in ('float16', 'float32'))
    assert 'skipped' not in full[0] and half[-1]['skipped'] <= 2
    half, full = (np.array([x['loss'] for x in step_metrics]) for step_metrics in (half, full))
    assert half[-10:].mean() < 0.88 * half[0]
    np.testing.assert_allclose(half, full, rtol=0.05)
    assert (half != full).any()


# The loss scale


def make_state(scale, params, make_optimizer):
    return TrainState(
        jnp.int32(0), params, make_optimizer(0.0, 0.0).init(params), jax.tree.map(jnp.copy, params), scale
    )


def loss_scale(factor, good=0, skipped=0):
    return precision.LossScale(jnp.float32(factor), jnp.int32(good), jnp.int32(skipped))


def small(params, batch, rng):
    """Return a loss whose gradients, x / 1e8, are too small for float16."""
    products = params['w'].astype(HALF)[None] * batch['x'].astype(HALF)
    return LossSums(jnp.sum(products.astype(jnp.float32) * 1e-8), jnp.float32(len(batch['x'])), {})


@pytest.mark.slow
def test_loss_scale_preserves_gradients_too_small_for_float16():
    batch = {'x': np.random.default_rng(0).uniform(1, 2, (8, 3)).astype(np.float32)}
    params, make_optimizer = {'w': jnp.zeros(3)}, optimizer.make_optimizer_factory(helpers.config().optimizer)
    expected = -1e-8 * batch['x'].mean(0)
    params_by_factor = {}
    for factor in (1.0, precision.INITIAL_SCALE):
        update = update_of(small, make_optimizer)
        params_by_factor[factor] = update(make_state(loss_scale(factor), params, make_optimizer), batch)[0].params['w']
    np.testing.assert_array_equal(params_by_factor[1.0], 0)
    np.testing.assert_allclose(params_by_factor[precision.INITIAL_SCALE], expected, rtol=2e-3)


def large(params, batch, rng):
    """Return (w x)^2 in float16, whose largest number is 65,504: infinite for x = 300."""
    products = (params['w'].astype(HALF)[None] * batch['x'].astype(HALF)) ** 2
    return LossSums(jnp.sum(products.astype(jnp.float32)), jnp.sum(jnp.any(batch['x'] != 0, axis=1)), {})


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(('parallel', 'accumulate'), [('jit', 1), ('jit', 2), ('pmap', 1), ('pmap', 2)])
@pytest.mark.parametrize('bad', [False, True])
def test_overflowing_step_changes_only_the_loss_scale(parallel, accumulate, bad):
    x = np.full((8, 3), 0.01, np.float32)
    if bad:
        x[5, 1] = 300  # in one row of one device and one micro-batch; the gradients of the others are finite
    layout = devices.make_layout(parallel, f'data={4 // accumulate}', 8 // accumulate)
    make_optimizer = optimizer.make_optimizer_factory(helpers.config(name='adam').optimizer)
    before = make_state(loss_scale(2.0**10, 7, 3), {'w': jnp.ones(3)}, make_optimizer)
    before = before._replace(ema_params={'w': jnp.zeros(3)})
    expected = jax.tree.map(np.asarray, before)
    state = layout.replicate(layout.initialize(lambda: before))
    step = layout.compile(update_of(large, make_optimizer, accumulate, rate=0.1, ema=0.9, layout=layout), state)
    state, values = layout.to_local(step(state, layout.put_batch({'x': x})))
    assert int(state.step) == 1 and float(values['loss_scale']) == 2.0**10
    unchanged = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), state, expected)
    if bad:
        assert not np.isfinite(values['gradient_norm']) and values['skipped'] == 4
        assert all(jax.tree.leaves((unchanged.params, unchanged.opt_state, unchanged.ema_params)))
        assert [float(x) for x in state.loss_scale] == [2.0**9, 0, 4]
    else:
        assert not any(jax.tree.leaves((unchanged.params, unchanged.ema_params))) and values['skipped'] == 3
        assert [float(x) for x in state.loss_scale] == [2.0**10, 8, 3]
        np.testing.assert_allclose(values['gradient_norm'], 2e-4 * 3**0.5, rtol=5e-3)


def test_loss_scale_doubles_after_finite_steps_and_halves_after_overflow(monkeypatch):
    monkeypatch.setattr(precision, 'GROWTH_INTERVAL', 3)
    scale, factors = loss_scale(4), []
    for good in (1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1):
        scale = precision.adjust_loss_scale(scale, jnp.bool_(good))
        factors.append(float(scale.factor))
    assert factors == [4, 4, 8, 8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1, 1]
    assert int(scale.skipped) == 6
    assert (
        float(precision.adjust_loss_scale(loss_scale(precision.MAX_SCALE, 99), jnp.bool_(1)).factor)
        == precision.MAX_SCALE
    )


def test_loss_scale_has_the_published_constants():
    assert (precision.INITIAL_SCALE, precision.GROWTH_INTERVAL) == (2**15, 2000)
    assert [float(precision.adjust_loss_scale(loss_scale(8, n), jnp.bool_(1)).factor) for n in (1998, 1999)] == [8, 16]


@pytest.mark.slow
def test_scaled_micro_batches_match_the_whole_batch():
    batch = {'x': np.random.default_rng(0).uniform(1, 2, (8, 3)).astype(np.float32)}
    batch['x'][1:4] = 0  # these rows do not count: the micro-batches have weights 1, 4 and 1, 0, 2, 2
    params, make_optimizer = {'w': jnp.ones(3)}, optimizer.make_optimizer_factory(helpers.config().optimizer)
    results = []
    for accumulate in (1, 2, 4):
        update = update_of(large, make_optimizer, accumulate)
        state, values = update(make_state(loss_scale(2.0**10), params, make_optimizer), batch)
        results.append([*state.params['w'], values['loss'], values['gradient_norm']])
    expected = 1 - 2 * (batch['x'].astype(np.float64) ** 2).sum(0) / 5
    np.testing.assert_allclose(results[0][:3], expected, rtol=2e-3)
    np.testing.assert_allclose(results[1:], results[:1] * 2, rtol=3e-3)


# Runs


def float16_task(bad=()):
    """Return the regression task in float16; bad: steps whose targets are too large for float16."""
    plain = helpers.make_task()

    def squares(params, batch, rng):
        errors = batch['x'].astype(HALF) @ params['w'].astype(HALF) - batch['y'].astype(HALF)
        total = 0.01 * jnp.sum((errors**2).astype(jnp.float32))
        return LossSums(total, jnp.sum(batch['kept']), {'squares': total})

    def batch(step):
        arrays = plain.batch(step)
        return arrays | {'y': arrays['y'] * (1e4 if step in bad else 1)}

    return helpers.make_task(loss=squares, batch=batch)


def config(dtype='float16', **changes):
    plain = helpers.config(**changes)
    common = dict(seed=plain.seed, train=plain.train, optimizer=plain.optimizer)
    return LanguageConfig(data=GrammarText(), model=LanguageModelConfig(dtype=dtype), **common)


@pytest.mark.slow
@pytest.mark.parametrize('ema', [0.0, 0.5])
def test_resumed_float16_run_matches_uninterrupted_run_bit_for_bit(tmp_path, monkeypatch, ema):
    monkeypatch.setattr(precision, 'GROWTH_INTERVAL', 2)
    task, common = float16_task(bad=(4, 11)), dict(schedule='constant', ema=ema)
    loop.run_training_loop(config(**common), task, tmp_path / 'whole')
    for steps in (5, 6, 20):  # after an overflow, and between two finite steps
        loop.run_training_loop(config(duration=f'{steps} steps', **common), task, tmp_path / 'parts')
    whole, parts = (records(tmp_path / name, 'train') for name in ('whole', 'parts'))
    assert whole == parts
    assert [x['loss_scale'] / 2**15 for x in whole[:8]] == [1, 1, 2, 2, 4, 2, 2, 4]
    assert [x['skipped'] for x in whole] == [0] * 4 + [1] * 7 + [2] * 9
    assert 'gradient_norm' not in whole[4] and 'gradient_norm' in whole[5]  # JSON has no infinity
    rates = [0.02 * min(update, 5) for update in (0, 1, 2, 3, 4, 4, 5)]  # the schedule does not count the skipped step
    np.testing.assert_allclose([x['learning_rate'] for x in whole[:7]], rates, rtol=1e-6)


def test_run_ends_if_it_overflows_at_the_smallest_scale(tmp_path):
    task = float16_task(bad=range(3, EXAMPLES))
    with pytest.raises(RunError, match='step 19: the loss is inf'):
        loop.run_training_loop(config(), task, tmp_path)
    assert [x['loss_scale'] for x in records(tmp_path, 'train')[3:]] == [2.0**n for n in range(15, 0, -1)]


@pytest.mark.slow
def test_other_dtypes_have_no_loss_scale_and_unchanged_checkpoints(tmp_path):
    for dtype in ('float32', 'bfloat16'):
        loop.run_training_loop(config(dtype), helpers.make_task(), tmp_path / dtype)
    loop.run_training_loop(helpers.config(), helpers.make_task(), tmp_path / 'none')
    same_runs(tmp_path / 'none', tmp_path / 'bfloat16')
    with checkpoint.checkpoint_manager(tmp_path / 'float32', read_only=True) as manager:
        assert 'scale' not in str(manager.item_metadata(20)['optimizer'])
