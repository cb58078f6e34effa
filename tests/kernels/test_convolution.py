"""The sliding convolution against NumPy and Flax; its masks are tested by gradients and by NaN in masked tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.convolution import sliding_convolution

B, T, D, F = 2, 7, 4, 6
convolve = jax.jit(sliding_convolution, static_argnames=('is_causal', 'dilation', 'groups'))


def reference(x, kernel, *, is_causal, lengths=None, dilation=1, groups=1):
    """Return (output, dx, dkernel) in float64: the sum over kernel positions, and gradients of a weighted sum of it."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    (B, T, _), (W, C, F) = x.shape, kernel.shape
    left = (W - 1) * dilation // (1 if is_causal else 2)
    output, dx, dkernel = np.zeros((B, T, F)), np.zeros(x.shape), np.zeros(kernel.shape)
    d_output = np.asarray(loss_weights((B, T, F)), np.float64)
    for b, t, w in np.ndindex(B, T, W):
        end = T if lengths is None else min(lengths[b], T)
        s = t + w * dilation - left
        if t >= end or not 0 <= s < end:
            continue
        for f in range(F):
            channels = slice((first := f // (F // groups) * C), first + C)  # of the output's own group
            output[b, t, f] += x[b, s, channels] @ kernel[w, :, f]
            dx[b, s, channels] += d_output[b, t, f] * kernel[w, :, f]
            dkernel[w, :, f] += d_output[b, t, f] * x[b, s, channels]
    return output, dx, dkernel


def loss_weights(shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def random_inputs(W, groups=1, T=T, dtype='float32'):
    random = np.random.default_rng(W)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in ((B, T, D), (W, D // groups, F)))


def output_and_gradients(x, kernel, **kwargs):
    """Return (output, dx, dkernel), with gradients of a weighted sum of the output, computed by one program."""

    @jax.jit
    def run(x, kernel):
        output, vjp = jax.vjp(lambda *args: sliding_convolution(*args, **kwargs), x, kernel)
        return output, *vjp(loss_weights(output.shape).astype(output.dtype))

    return run(x, kernel)


CALLS = {
    'kernel size 1': (1, {}),
    'kernel size 2': (2, {}),
    'kernel size 3': (3, {}),
    'kernel size 2, lengths': (2, {'lengths': jnp.array([5, 0])}),
    'kernel size 3, lengths': (3, {'lengths': jnp.array([9, 1])}),
    'dilation, lengths': (4, {'dilation': 2, 'lengths': jnp.array([7, 4])}),
    'wider than the sequence': (5, {'dilation': 4}),
    'groups': (3, {'groups': 2, 'dilation': 2, 'lengths': jnp.array([3, 6])}),
}


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('call', CALLS)
def test_output_and_gradients_match_reference(call, is_causal):
    W, kwargs = CALLS[call]
    args = random_inputs(W, kwargs.get('groups', 1))
    have = output_and_gradients(*args, is_causal=is_causal, **kwargs)
    want = reference(*args, is_causal=is_causal, **kwargs)
    for x, y in zip(have, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert all(np.any(y != 0) for y in want)


@pytest.mark.parametrize('groups', [1, 2])
@pytest.mark.parametrize('W, dilation', [(1, 1), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize('padding', ['CAUSAL', 'SAME'])
def test_matches_flax_conv(padding, W, dilation, groups):
    x, kernel = random_inputs(W, groups)
    conv = nn.Conv(F, W, padding=padding, kernel_dilation=dilation, feature_group_count=groups, use_bias=False)
    expected = jax.jit(conv.apply)({'params': {'kernel': kernel}}, x)
    output = convolve(x, kernel, is_causal=padding == 'CAUSAL', dilation=dilation, groups=groups)
    np.testing.assert_allclose(output, expected, atol=1e-6)


def test_kernel_positions_of_causal_and_centred_convolution():
    """A kernel 1, 10, 100 over tokens 1, 2, 3, 4: its last entry is for the token itself, or its middle entry is."""
    x, kernel = jnp.arange(1.0, 5)[None, :, None], jnp.array([1.0, 10, 100])[:, None, None]
    np.testing.assert_array_equal(convolve(x, kernel, is_causal=True)[0, :, 0], [100, 210, 321, 432])
    np.testing.assert_array_equal(convolve(x, kernel)[0, :, 0], [210, 321, 432, 43])
    # Of two entries, the first is for the token itself.
    np.testing.assert_array_equal(convolve(x, kernel[:2])[0, :, 0], [21, 32, 43, 4])
    np.testing.assert_array_equal(convolve(x, kernel, is_causal=True, dilation=2)[0, :, 0], [100, 200, 310, 420])


@pytest.mark.parametrize('is_causal, reach', [(True, (4, 0)), (False, (2, 2))])
def test_output_depends_only_on_tokens_in_reach(is_causal, reach):
    """d y[t] / d x[s] is zero except at kernel positions, and NaN at other tokens does not change y[t]."""
    x, kernel = random_inputs(3)
    call = lambda x: sliding_convolution(x, kernel, is_causal=is_causal, dilation=2)
    jacobian = jax.jit(jax.jacobian(lambda x: call(x[None])[0]))(x[0])  # [T, F, T, D]
    depends = np.any(jacobian != 0, axis=(1, 3))
    distance = np.arange(T)[None, :] - np.arange(T)[:, None]
    assert np.all(depends == ((distance >= -reach[0]) & (distance <= reach[1]) & (distance % 2 == 0)))
    is_nan = np.any(np.isnan(convolve(x.at[:, 3].set(jnp.nan), kernel, is_causal=is_causal, dilation=2)), axis=(0, 2))
    assert np.all(is_nan == depends[:, 3])


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('is_causal', [True, False])
def test_padding_is_ignored_and_its_output_is_zero(is_causal, bad):
    x, kernel = random_inputs(3)
    lengths = jnp.array([T - 2, 0])
    have = output_and_gradients(x.at[0, T - 2 :].set(bad).at[1].set(bad), kernel, is_causal=is_causal, lengths=lengths)
    want = output_and_gradients(x, kernel, is_causal=is_causal, lengths=lengths)
    jax.tree.map(np.testing.assert_array_equal, have, want)
    assert jnp.all(have[0][0, T - 2 :] == 0) and jnp.all(have[0][1] == 0)
    alone = convolve(x[:1, : T - 2], kernel, is_causal=is_causal)
    np.testing.assert_allclose(have[0][:1, : T - 2], alone, atol=1e-6)


IDS = jnp.array([[1, 1, 2, 2, 2, 2, 0], [5, 5, 5, 5, 3, 3, 3]])
RUNS = [(0, slice(0, 2)), (0, slice(2, 6)), (0, slice(6, 7)), (1, slice(0, 4)), (1, slice(4, 7))]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize('W, options', [(2, {}), (3, {'dilation': 2}), (4, {'groups': 2})], ids=str)
@pytest.mark.parametrize('is_causal', [True, False])
def test_each_segment_is_convolved_alone(is_causal, W, options):
    x, kernel = random_inputs(W, options.get('groups', 1))
    output = convolve(x, kernel, is_causal=is_causal, segment_ids=IDS, **options)
    for b, part in RUNS:
        alone, *_ = reference(np.asarray(x)[b : b + 1, part], kernel, is_causal=is_causal, **options)
        np.testing.assert_allclose(output[b, part], alone[0], atol=1e-5)


@pytest.mark.parametrize('is_causal', [True, False])
def test_no_gradient_or_nan_crosses_segments(is_causal):
    x, kernel = random_inputs(4)
    call = lambda x: sliding_convolution(x, kernel, is_causal=is_causal, segment_ids=IDS)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(call(x)[0, 2:6]))))(x)
    np.testing.assert_array_equal(np.any(gradient != 0, axis=-1), IDS == 2)
    is_nan = np.isnan(convolve(x.at[0, 3].set(jnp.nan), kernel, is_causal=is_causal, segment_ids=IDS))
    # Tokens 3 to 6, or 1 to 4, have token 3 in reach; its segment is tokens 2 to 5.
    expected = [3, 4, 5] if is_causal else [2, 3, 4]
    assert np.argwhere(np.any(is_nan, axis=-1)).tolist() == [[0, t] for t in expected]


def test_segments_combined_with_lengths():
    x, kernel = random_inputs(3)
    output = convolve(x.at[0, 4:].set(jnp.nan), kernel, lengths=jnp.array([4, 7]), segment_ids=IDS)
    expected = convolve(x.at[0, 4:].set(0), kernel, segment_ids=IDS).at[0, 4:].set(0)
    np.testing.assert_allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_sums_are_float32(dtype):
    x, kernel = random_inputs(3, dtype=dtype)
    output, dx, dkernel = output_and_gradients(x, kernel)
    assert output.dtype == dx.dtype == dkernel.dtype == dtype
    program = jax.make_jaxpr(sliding_convolution)(x, kernel)  # a CPU sums in float32 whatever dtype is requested
    assert [
        equation.outvars[0].aval.dtype for equation in program.eqns
        if equation.primitive.name == 'conv_general_dilated'
    ] == ['float32']  # fmt: skip
    np.testing.assert_array_equal(output, convolve(x.astype('float32'), kernel.astype('float32')).astype(dtype))
    ones = convolve(jnp.ones((1, 1, 4096), dtype), jnp.full((1, 4096, 1), 2**-12, dtype))
    assert ones.dtype == dtype and ones[0, 0, 0] == 1


def test_result_has_dtype_of_x():
    x, kernel = random_inputs(3)
    assert convolve(x.astype('bfloat16'), kernel).dtype == 'bfloat16'
    assert convolve(x, kernel.astype('bfloat16')).dtype == 'float32'
    with jax.enable_x64(True):
        x, kernel = random_inputs(3, dtype='float64')
        output = convolve(x, kernel)
        assert output.dtype == 'float64'
        np.testing.assert_allclose(output, reference(x, kernel, is_causal=False)[0], rtol=1e-12)


@pytest.mark.parametrize('shape', [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_axes_of_size_zero(shape):
    lengths = jnp.full(shape[0], 2)
    results = output_and_gradients(jnp.zeros(shape), jnp.ones((3, shape[2], F)), is_causal=True, lengths=lengths)
    assert results[0].shape == (*shape[:2], F) and all(jnp.all(x == 0) for x in results)


def test_vmap_equals_batch():
    x, kernel = random_inputs(3)
    mapped = jax.jit(jax.vmap(lambda x: sliding_convolution(x[None], kernel, is_causal=True)[0]))(x)
    np.testing.assert_allclose(mapped, convolve(x, kernel, is_causal=True), atol=1e-6)


def zeros(*shape, dtype='float32'):
    return jnp.zeros(shape, dtype)


ERRORS = {
    r'x has shape \(7, 4\); expected 3 axes': {'x': zeros(T, D)},
    r'kernel has shape \(3, 4\); expected 3 axes': {'kernel': zeros(3, D)},
    r'x has dtype int32; expected a float': {'x': zeros(B, T, D, dtype=int)},
    r'kernel has dtype int32; expected a float': {'kernel': zeros(3, D, F, dtype=int)},
    r'kernel has shape \(3, 5, 6\); expected \[W, D / groups, F\] = \[1 or more, 4, any\]': {'kernel': zeros(3, 5, F)},
    r'kernel has shape \(3, 4, 6\); expected .* \[1 or more, 2, any\]': {'groups': 2},
    r'kernel has shape \(0, 4, 6\); expected': {'kernel': zeros(0, D, F)},
    r'groups is 3; expected a divisor of the 4 channels of x and the 6 of the output': {'groups': 3},
    r'groups is 4; expected a divisor': {'groups': 4},
    r'groups is 0; expected a divisor': {'groups': 0},
    r'dilation is 0; expected at least 1': {'dilation': 0},
    r'lengths has shape \(3,\) and dtype int32; expected \[B\] = \(2,\) signed': {'lengths': jnp.array([1, 2, 3])},
    r'lengths has shape \(2,\) and dtype float32; expected': {'lengths': jnp.array([1.0, 2.0])},
    r'segment_ids has shape \(7,\) and dtype int32; expected \[B, T\] = \(2, 7\) signed': {'segment_ids': IDS[0]},
    r'segment_ids has shape \(2, 6\) and dtype int32; expected': {'segment_ids': IDS[:, 1:]},
    r'segment_ids has shape \(2, 7\) and dtype bool; expected': {'segment_ids': IDS == 1},
}  # fmt: skip


@pytest.mark.parametrize('message, changed', ERRORS.items())
def test_invalid_arguments_raise_with_value_and_expectation(as_used, message, changed):
    x, kernel = random_inputs(3)
    with pytest.raises(ValueError, match=message):
        sliding_convolution(**({'x': x, 'kernel': kernel} | changed))
