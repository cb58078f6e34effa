"""The pure training step: its arguments, and the weighting of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.losses import LossSums
from attnlab.train import optimizer
from attnlab.train.setup import make_setup
from attnlab.train.step import initial_state
from tests.train.helpers import EXAMPLES, config, make_task, update_of


def apply_once(accumulate, batch, loss):
    make_optimizer = optimizer.make_optimizer_factory(config().optimizer)
    state = initial_state(lambda rng: {'w': jnp.zeros(())}, make_optimizer, 0)
    return jax.jit(update_of(loss, make_optimizer, accumulate))(state, batch)


def test_seed_learning_rate_and_weight_decay_are_program_arguments():
    programs = []
    for seed, rate, decay in ((0, 0.1, 0.2), (4, 0.05, 0.3)):
        setup = make_setup(config(seed, learning_rate=rate, weight_decay=decay, ema=0.9), EXAMPLES)
        state = setup.initial_state(make_task().init, np.uint32(0))
        step = setup.compile_step(make_task().loss, state)
        programs.append(str(jax.make_jaxpr(step)(state, make_task().batch(0))))
    assert programs[0] == programs[1]


def linear(params, batch, rng):
    """Return a loss whose total has as gradient the sum of the `g` that count."""
    counted = jnp.where(batch['counts'], params['w'] * batch['g'] + batch['loss'], 0.0)
    return LossSums(jnp.sum(counted), jnp.sum(batch['counts']), {})


def test_micro_batches_are_weighted_by_tokens():
    # 1 token of loss 4 and 3 tokens of loss 1: the mean is 7 / 4, and not 2.5, the mean of the means.
    batch = {
        'g': np.array([4.0, 9, 9, 1, 1, 1], np.float32),
        'loss': np.array([4.0, 9, 9, 1, 1, 1], np.float32),
        'counts': np.array([1, 0, 0, 1, 1, 1], bool),
    }
    for accumulate in (1, 2):
        state, values = apply_once(accumulate, batch, linear)
        assert float(values['loss']) == 1.75
        assert float(state.params['w']) == -1.75


def test_gradients_of_micro_batches_are_averaged():
    batch = {'g': np.array([1.0, 3.0], np.float32), 'loss': np.zeros(2, np.float32), 'counts': np.ones(2, bool)}
    assert float(apply_once(2, batch, linear)[0].params['w']) == -2.0


def test_batch_of_padding_changes_nothing():
    batch = {'g': np.ones(2, np.float32), 'loss': np.ones(2, np.float32), 'counts': np.zeros(2, bool)}
    state, values = apply_once(1, batch, linear)
    assert float(values['loss']) == 0.0 and float(state.params['w']) == 0.0


@pytest.mark.slow
def test_accumulated_gradient_equals_that_of_the_whole_batch():
    def noiseless(params, batch, rng):  # the noise depends on the division into micro-batches: subtract it
        return make_task().loss(params, batch | {'x': batch['x'] - 0.1 * jax.random.normal(rng, batch['x'].shape)}, rng)

    make_optimizer = optimizer.make_optimizer_factory(config(name='adam').optimizer)
    batch, state = make_task().batch(0), initial_state(lambda rng: {'w': jnp.ones(3)}, make_optimizer, 0)
    results = []
    for accumulate in (1, 2, 4):
        results.append(update_of(noiseless, make_optimizer, accumulate, rate=0.1)(state, batch)[0].params['w'])
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], atol=1e-6)
