"""Rates and time shares by a clock under the control of the test, and the FLOP of a step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.losses import LossSums
from attnlab.tasks import create_task
from attnlab.train import clock, loop, utilisation
from attnlab.train.cost import gradient_flops
from tests.tiny import tiny_grammar_config, tiny_language_config
from tests.train.helpers import config, make_task, records


@pytest.fixture
def wait(monkeypatch):
    """Replace the clock; return a function that lets seconds pass."""
    time = [100.0]
    monkeypatch.setattr(clock.time, 'perf_counter', lambda: time[0])

    def wait(seconds):
        time[0] += seconds

    return wait


def test_clock_returns_rates_and_time_shares(wait):
    timer = clock.Clock({'a': 100.0, 'b': 300.0}.__getitem__, 1000.0)
    for _ in range(2):  # the second interval does not include the first
        with timer.measure('wait'):
            wait(1)
        for seconds in (3, 2):
            with timer.measure('save'):
                wait(seconds)
        with timer.measure('evaluate'):
            wait(12)
        wait(2)
        for shape in 'ababab':
            timer.count_step(50, shape)
        assert timer.read_rates() == {
            'steps_per_second': 2.0, 'weight_per_second': 100.0, 'data_share': 1 / 3, 'save_share': 0.25,
            'evaluate_share': 0.6, 'flops_per_second': 400.0, 'utilisation': 0.4,
        }  # fmt: skip


def test_unknown_flops_and_peak_are_left_out(wait):
    known = {'a': 200.0, 'b': math.nan}.__getitem__
    timer = clock.Clock(known)
    timer.count_step(1, 'a')
    wait(1)
    assert 'utilisation' not in (rates := timer.read_rates()) and rates['flops_per_second'] == 200.0
    timer = clock.Clock(known, 1.0)
    for shape in 'aba':
        timer.count_step(1, shape)
    wait(1)
    assert not {'utilisation', 'flops_per_second'} & timer.read_rates().keys()
    timer.count_step(1, 'a')
    wait(1)
    assert timer.read_rates()['utilisation'] == 200.0


def costs(config):
    """Return the model FLOP of a step, and a function that returns its gradient FLOP."""
    task = create_task(config)
    shapes = jax.eval_shape(task.init, jax.random.key(0)), task.batch(0), jax.random.key(0)
    count_flops = utilisation.make_flops_counter(task.loss, shapes[0], False)
    return count_flops(utilisation.batch_shape(shapes[1])), lambda: gradient_flops(
        lambda *args: task.loss(*args).total, *shapes
    )


@pytest.mark.slow
def test_model_flops_equal_gradient_flops_without_remat(tmp_path):
    plain, gradient = costs(tiny_language_config(tmp_path, model__layers=2))
    assert plain == gradient()
    remat, gradient = costs(tiny_language_config(tmp_path, model__layers=2, model__remat='full'))
    assert remat == plain < gradient()
    recurrent, gradient = costs(tiny_grammar_config())
    assert recurrent == gradient()


@pytest.mark.parametrize('change', [{'model__experts': 2}, {'model__implementation': 'blockwise'}])
def test_flops_of_opaque_kernels_are_nan(change, tmp_path):
    assert math.isnan(costs(tiny_language_config(tmp_path, **change))[0])


def product(params, batch, rng):
    assert batch['x'].ndim == 2 == params['w'].ndim
    total = jnp.sum((batch['x'] @ params['w']) ** 2)
    return LossSums(total, jnp.float32(1), {})


@pytest.mark.parametrize('mapped', [False, True])
def test_flops_counter_counts_each_batch_shape(mapped):
    count_flops = utilisation.make_flops_counter(
        product, {'w': np.zeros((2, 3, 5) if mapped else (3, 5), np.float32)}, mapped
    )
    for rows in (4, 8, 4):
        x = np.zeros((2, rows // 2, 3) if mapped else (rows, 3), np.float32)
        flops = count_flops(utilisation.batch_shape({'x': x}))
        assert flops == 2 * (2 * rows * 3 * 5)  # no gradient with respect to x


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_run_writes_flops_utilisation_and_time_shares(parallel, tmp_path, monkeypatch):
    monkeypatch.setitem(utilisation.PEAK_FLOPS, 'cpu', 1e9)
    loop.run_training_loop(config(mesh='data=2', parallel=parallel), make_task(), tmp_path)
    speed = records(tmp_path, 'speed')[7]
    assert speed['flops_per_second'] == pytest.approx(speed['steps_per_second'] * 2 * (2 * 8 * 3))
    assert speed['utilisation'] == pytest.approx(speed['flops_per_second'] / 2e9)
    # The interval that ends with step 6 contains the save and the evaluation after step 5.
    has_shares = [(x['save_share'] > 0, x['evaluate_share'] > 0) for x in records(tmp_path, 'speed')[:7]]
    assert has_shares == [(False,) * 2] * 3 + [(True, False), (False, False), (True, True), (True, False)]


def test_peak_is_none_for_unknown_devices():
    assert utilisation.peak_flops(4, 'cpu') is None
    assert utilisation.peak_flops(4, 'TPU v4') == 4 * 275e12
