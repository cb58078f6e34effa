"""Descriptions of steps that are not finite, for models with deliberate faults."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import RunError
from attnlab.kernels.losses import LossSums
from attnlab.train import loop, nans
from attnlab.train.step import noise_keys
from tests.train.helpers import config, make_task, same_runs

LAYERS, HUGE = 3, 3e38


class Layer(nn.Module):
    """x + W sqrt(gain), which at a gain of zero is finite and has an infinite gradient."""

    @nn.compact
    def __call__(self, x, _):
        gain = self.param('gain', nn.initializers.ones, (4,))
        inside = nn.Dense(4, name='into')(x)
        return x + nn.Dense(4, name='out')(jnp.sqrt(gain[None] * inside**2)), None


class Model(nn.Module):
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        x = nn.Dense(4, name='first')(x) / self.param('divisor', nn.initializers.ones, ())
        if self.scan:
            x, _ = nn.scan(
                layer, variable_axes={'params': 0}, split_rngs={'params': True}, length=LAYERS,
                check_constancy_invariants=False,
            )(name='layers')(x, None)  # fmt: skip
        else:
            for i in range(LAYERS):
                x, _ = layer(name=f'layer_{i}')(x, None)
        return nn.Dense(1, name='head')(x)


def set_parameter(params, path, value, layer=None):
    """Return the tree with one parameter set to a value; `layer`: in one layer of stacked parameters."""
    name, *rest = path
    if rest:
        return {**params, name: set_parameter(params[name], rest, value, layer)}
    return {**params, name: jnp.full_like(params[name], value) if layer is None else params[name].at[layer].set(value)}


def describe_failure(model, change=lambda params: params, batch=None, log=False):
    def loss(params, batch, rng):
        output = model.apply({'params': params}, batch['x'])
        return LossSums(jnp.sum(jnp.log(0 * output)) if log else jnp.sum(output), jnp.float32(1), {})

    batch = {'x': np.ones((2, 4), np.float32)} if batch is None else batch
    params = change(model.init(jax.random.key(1), jnp.ones((2, 4)))['params'])
    return nans.find_nonfinite(loss, params, [(batch, jax.random.key(0))])


@pytest.mark.slow
@pytest.mark.parametrize(('remat', 'layer'), [(False, 0), (True, 2)])
def test_layer_whose_output_overflows_is_named(remat, layer):
    stacked = lambda params: set_parameter(params, ('layers', 'out', 'kernel'), HUGE, layer)
    name = f'layers/out in iteration {layer} (of 0 to 2) of its scan'
    message = describe_failure(Model(True, remat), stacked)
    assert message == f'the first output that is not finite is that of {name}, from finite inputs'
    unstacked = lambda params: set_parameter(params, (f'layer_{layer}', 'out', 'kernel'), HUGE)
    assert f'that of layer_{layer}/out, from finite inputs' in describe_failure(Model(False, remat), unstacked)


@pytest.mark.slow
def test_nonfinite_value_between_modules_is_reported_as_input():
    message = describe_failure(Model(True, False), lambda params: set_parameter(params, ('divisor',), 0))
    name = 'layers/into in iteration 0 (of 0 to 2) of its scan'
    assert message == f'the first input that is not finite is that of {name}; it was computed between modules'


@pytest.mark.slow
@pytest.mark.parametrize(('remat', 'layer'), [(False, 0), (True, 2)])
def test_nonfinite_gradient_nearest_to_the_output_is_named(remat, layer):
    # The gradients of `into` of the same layer and of all layers before it are not finite either.
    start = 'the forward pass is finite; nearest to the output, the gradient of '
    stacked = lambda params: set_parameter(params, ('layers', 'gain'), 0, layer)
    assert describe_failure(Model(True, remat), stacked) == f'{start}layers/gain[{layer}] is not'
    unstacked = lambda params: set_parameter(params, (f'layer_{layer}', 'gain'), 0)
    assert describe_failure(Model(False, remat), unstacked) == f'{start}layer_{layer}/gain is not'


@pytest.mark.slow
def test_nonfinite_parameter_input_and_loss_are_named():
    model = Model(True, False)
    with_nan = lambda params: set_parameter(params, ('layers', 'into', 'bias'), np.nan, 1)
    assert describe_failure(model, with_nan) == 'the parameter layers/into/bias was not finite before the step'
    assert describe_failure(model, batch={'x': np.full((2, 4), np.inf, np.float32)}) == 'the input x is not finite'
    nonfinite_loss = 'the outputs of all modules are finite, the loss computed from them is -inf'
    assert describe_failure(model, log=True) == nonfinite_loss
    assert describe_failure(model) == 'run again on one device, every gradient is finite'


# In runs


def task_with_fatal_noise(step, micro_batch, device):
    """Return a task whose loss is infinite only for the noise of one micro-batch of one device."""
    fatal = jax.random.bits(noise_keys(3, 2, step, device)[micro_batch])

    def loss(params, batch, rng):
        total = jnp.sum((batch['x'] @ params['w']) ** 2) + jnp.where(jax.random.bits(rng) == fatal, jnp.inf, 0.0)
        return LossSums(total, jnp.sum(batch['kept']), {})

    return make_task(loss=loss)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(('parallel', 'device'), [('jit', None), ('pmap', 1)])
def test_debug_nans_repeats_the_failed_step_with_its_noise(tmp_path, parallel, device):
    settings = config(accumulate=2, parallel=parallel, mesh='data=2')
    with pytest.raises(RunError, match='step 5: the loss is inf; the .* loss computed from them is inf$'):
        loop.run_training_loop(settings, task_with_fatal_noise(4, 1, device), tmp_path, debug_nans=True)


def test_debug_nans_names_the_parameter_that_the_previous_step_spoilt(tmp_path):
    spoilt = config(learning_rate=3e38, warmup='0 steps', schedule='constant')
    message = 'step 2: the loss is (inf|nan); the parameter w was not finite before the step$'
    with pytest.raises(RunError, match=message):
        loop.run_training_loop(spoilt, make_task(), tmp_path, debug_nans=True)


def test_debug_nans_does_not_change_results(tmp_path):
    for name, debug_nans in (('plain', False), ('debug', True)):
        loop.run_training_loop(config(mesh='data=2'), make_task(), tmp_path / name, debug_nans=debug_nans)
    same_runs(tmp_path / 'plain', tmp_path / 'debug')
