"""Norms and their gradients against NumPy in float64: at zero, for very small and large numbers, and next to NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.norms import l2_norm, rms_norm

NORMS = {'rms': jax.jit(rms_norm, static_argnames='epsilon'), 'l2': jax.jit(l2_norm, static_argnames='epsilon')}


def reference(kind, x, gain=None, epsilon=1e-6):
    """Return the formula in float64."""
    if kind == 'l2':
        return x / np.maximum(np.sqrt(np.sum(x**2, axis=-1, keepdims=True)), epsilon)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * (1 if gain is None else gain)


def finite_differences(f, x, step=1e-6):
    """Return the gradient of f at x by central differences in float64; the step is relative to x if x is small."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        h = step * min(1.0, np.abs(x).max())
        up, down = x.copy(), x.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (f(up) - f(down)) / (2 * h)
    return gradient


def output_and_gradients(norm, *args, **kwargs):
    """Return the output and the gradients of a weighted sum of it, computed by one program."""

    @jax.jit
    def run(args):
        output, vjp = jax.vjp(lambda args: norm(*args, **kwargs), args)
        return output, *vjp(loss_weights(output.shape).astype(output.dtype))

    output, gradients = run(args)
    return (output, *gradients)


def loss_weights(shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


@pytest.mark.parametrize('kind', NORMS)
@pytest.mark.parametrize('size', [1e-7, 1e-3, 1.0, 1e3])
def test_output_and_gradients_match_reference(kind, size):
    x = size * np.random.default_rng(0).normal(size=(2, 3, 5))
    args = (x,) if kind == 'l2' else (x, np.linspace(-1, 2, 5))
    output, *gradients = output_and_gradients(NORMS[kind], *(jnp.asarray(x, 'float32') for x in args))
    np.testing.assert_allclose(output, reference(kind, *args), rtol=1e-6)
    d_output = np.asarray(loss_weights(x.shape), np.float64)
    for i, gradient in enumerate(gradients):
        loss = lambda changed, i=i: np.sum(d_output * reference(kind, *args[:i], changed, *args[i + 1 :]))
        expected = finite_differences(loss, args[i])
        np.testing.assert_allclose(gradient, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize('kind', NORMS)
def test_float64_matches_reference(kind):
    with jax.enable_x64(True):
        x = np.random.default_rng(1).normal(size=(3, 4))
        output = NORMS[kind](jnp.asarray(x))
        assert output.dtype == 'float64'
        np.testing.assert_allclose(output, reference(kind, x), rtol=1e-14)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('kind', NORMS)
def test_half_precision_rounds_only_the_result(kind, dtype):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 300)), dtype)
    gain = () if kind == 'l2' else (jnp.ones(300, 'float32'),)
    output, derivative, *_ = output_and_gradients(NORMS[kind], x, *gain)
    assert output.dtype == derivative.dtype == dtype
    np.testing.assert_array_equal(output, NORMS[kind](x.astype('float32')).astype(dtype))


# Zero, small and large


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('kind, derivative', [('rms', 1e3), ('l2', 0.0)])
def test_zero_row_gives_zero_and_the_documented_gradient(kind, derivative, dtype):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 4)), dtype).at[0, 1].set(0)
    with jax.debug_nans(True), jax.debug_infs(True):
        output, gradient = output_and_gradients(NORMS[kind], x)
    assert jnp.all(output[0, 1] == 0) and jnp.all(jnp.isfinite(output)) and jnp.all(jnp.isfinite(gradient))
    np.testing.assert_allclose(gradient[0, 1], derivative * loss_weights(x.shape).astype(dtype)[0, 1], rtol=2**-7)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('norm, derivative', [(rms_norm, 1e3), (l2_norm, 0.0)])
def test_intermediate_values_at_zero_are_finite(norm, derivative):
    """Run operation by operation, because JAX checks only the results of a compiled program."""
    with jax.debug_nans(True), jax.debug_infs(True):
        gradient = jax.grad(lambda x: jnp.sum(norm(x)))(jnp.zeros((1, 4)))
    np.testing.assert_allclose(gradient, np.full((1, 4), derivative), rtol=1e-6)


def test_epsilon_is_outside_or_inside_the_root():
    """With epsilon outside the root a row of 3e-5 gets length one; inside, it stays far from one (case 25)."""
    x = jnp.array([3e-5])
    np.testing.assert_allclose(l2_norm(x), [1.0], rtol=1e-6)
    np.testing.assert_allclose(l2_norm(x, epsilon=1e-3), [0.03], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, epsilon=1e-8), [0.287348], rtol=1e-5)
    np.testing.assert_allclose(rms_norm(x), [0.0299865], rtol=1e-5)


@pytest.mark.parametrize('kind', NORMS)
def test_norms_do_not_depend_on_scale_of_input(kind):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(5, 64)), 'float32')
    np.testing.assert_allclose(NORMS[kind](1000 * x), NORMS[kind](x), rtol=1e-5, atol=0)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('kind, one', [('rms', 1.0), ('l2', 1 / 8)])
@pytest.mark.parametrize('dtype, value', [
    ('float16', 100.0), ('float16', 60000.0), ('float32', 1e20), ('float32', 3.4e38), ('bfloat16', 3.3e38),
])  # fmt: skip
def test_squares_do_not_overflow(kind, one, dtype, value):
    with jax.debug_nans(True), jax.debug_infs(True):
        output, gradient = output_and_gradients(NORMS[kind], jnp.full((1, 64), value, dtype))
    np.testing.assert_allclose(output, np.full((1, 64), one), rtol=2**-20)
    assert jnp.all(jnp.isfinite(gradient)) and jnp.max(jnp.abs(gradient)) <= 2 / value


def test_squares_do_not_vanish():
    x = jnp.array([3e-30, 4e-30])
    np.testing.assert_allclose(NORMS['l2'](x, epsilon=1e-32), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(NORMS['l2'](x), x * 1e6, rtol=1e-6)
    with jax.debug_nans(True):
        output, gradient = output_and_gradients(l2_norm, jnp.array([1e-40, 0.0]))  # flushed to zero by XLA
    assert jnp.all(output == 0) and jnp.all(gradient == 0)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('kind', NORMS)
def test_nonfinite_row_is_nan_and_changes_no_other_row(kind, bad):
    x = jnp.asarray(np.random.default_rng(5).normal(size=(3, 4)), 'float32')
    args = (x,) if kind == 'l2' else (x, jnp.ones(4))

    def masked_norm(*args):  # the non-finite row is masked, as padding is
        output = NORMS[kind](*args)
        return jnp.where(jnp.array([[True], [False], [True]]), output, 0.0)

    spoiled = (x.at[1, 2].set(bad), *args[1:])
    assert jnp.all(jnp.isnan(NORMS[kind](*spoiled)) == jnp.array([[False], [True], [False]]))
    have, want = output_and_gradients(masked_norm, *spoiled), output_and_gradients(masked_norm, *args)
    assert jnp.all(have[1][1] == 0)
    jax.tree.map(np.testing.assert_array_equal, have, want)


# Transformations, sizes, errors


@pytest.mark.parametrize('shape', [(0, 4), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize('kind', NORMS)
def test_axes_of_size_zero(kind, shape):
    with jax.debug_nans(True):
        output, gradient = output_and_gradients(NORMS[kind], jnp.zeros(shape))
    assert output.shape == gradient.shape == shape


@pytest.mark.parametrize('kind', NORMS)
def test_vmap_and_batch_equal_single_rows(kind):
    x = jnp.asarray(np.random.default_rng(6).normal(size=(3, 4)), 'float32')
    rows = jnp.stack([NORMS[kind](row) for row in x])
    np.testing.assert_allclose(jax.vmap(NORMS[kind])(x), rows, rtol=1e-6)
    np.testing.assert_allclose(NORMS[kind](x), rows, rtol=1e-6)


ERRORS = {
    r'x has dtype int32; expected a float': (rms_norm, (jnp.zeros((2, 3), int),), {}),
    r'x has dtype bool; expected a float': (l2_norm, (jnp.zeros((2, 3), bool),), {}),
    r'x has no axes; expected': (l2_norm, (jnp.zeros(()),), {}),
    r'gain has shape \(2,\); expected \[H\] = \(3,\)': (rms_norm, (jnp.zeros((2, 3)), jnp.ones(2)), {}),
    r'gain has shape \(2, 3\); expected \[H\] = \(3,\)': (rms_norm, (jnp.zeros((2, 3)), jnp.ones((2, 3))), {}),
    r'epsilon is 0.0; expected a positive': (rms_norm, (jnp.zeros((2, 3)),), {'epsilon': 0.0}),
    r'epsilon is nan; expected a positive': (l2_norm, (jnp.zeros((2, 3)),), {'epsilon': float('nan')}),
    r'epsilon is -1.0; expected a positive': (l2_norm, (jnp.zeros((2, 3)),), {'epsilon': -1.0}),
}


@pytest.mark.parametrize('message, call', ERRORS.items())
def test_invalid_arguments_raise_with_value_and_expectation(as_used, message, call):
    norm, args, kwargs = call
    with pytest.raises(ValueError, match=message):
        norm(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize('norm', [rms_norm, l2_norm])
def test_nan_in_large_array_gives_nan(norm):
    """On a CPU, XLA uses another maximum for large arrays than for small ones, and that maximum ignores NaN."""
    x = jnp.ones((2, 127, 2, 31)).at[..., 0].set(jnp.nan)
    output, back = jax.vjp(norm, x)
    assert jnp.all(jnp.isnan(output)) and jnp.all(back(jnp.zeros_like(x))[0] == 0)
