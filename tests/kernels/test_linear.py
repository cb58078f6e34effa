"""Linear attention against its formula in NumPy, and the masking rules of all attention functions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.kernels.linear import linear_attention

B, T, S, N, K, H, Hv = 2, 7, 6, 4, 2, 3, 2
STATIC = ('is_causal', 'feature_map', 'chunk_size')
attend = jax.jit(linear_attention, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def output_and_gradients(query, key, value, **kwargs):
    """Return (output, d_query, d_key, d_value), with gradients of a weighted sum of the output."""
    output, vjp = jax.vjp(lambda *args: linear_attention(*args, **kwargs), query, key, value)
    return output, *vjp(loss_weights(output.shape).astype(output.dtype))


def loss_weights(shape):
    return jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)


def random_inputs(T=T, S=S, dtype='float32', seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def with_entries(x, *entries):
    """Return x with some entries replaced, (index, value) each; done in NumPy, which needs no compilation."""
    x = np.array(x)
    for index, value in entries:
        x[index] = value
    return jnp.asarray(x)


def reference(
    query, key, value, *, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None, feature_map='elu'
):  # fmt: skip
    """Return the formula in float64, with the matrix of all pairs."""
    features = lambda x: np.maximum(x, 0) + (np.exp(np.minimum(x, 0)) if feature_map == 'elu' else 0)
    (B, T, N, _), (S, K, Hv) = query.shape, value.shape[1:]
    output = np.zeros((B, T, N, Hv))
    for b, n in np.ndindex(B, N):
        visible = np.tril(np.ones((T, S), bool)) if is_causal else np.ones((T, S), bool)
        if query_seq_lengths is not None:
            visible[query_seq_lengths[b] :] = False
        if key_value_seq_lengths is not None:
            visible[:, key_value_seq_lengths[b] :] = False
        k = n // (N // K)  # heads in groups: 0, 0, 1, 1
        pairs = np.where(visible, features(query[b, :, n]) @ features(key[b, :, k]).T, 0.0)
        divisor = pairs.sum(axis=1, keepdims=True)
        output[b, :, n] = pairs @ value[b, :, k] / np.where(divisor == 0, 1, divisor)
    return output


def reference_and_gradients(args, **kwargs):
    """Return the output of the formula and gradients of a weighted sum of it, by central differences."""
    args = [np.array(x, np.float64) for x in args]
    kwargs = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in kwargs.items()}
    d_output = np.asarray(loss_weights((*args[0].shape[:3], args[2].shape[-1])), np.float64)
    gradients = [np.zeros_like(x) for x in args]
    for x, gradient in zip(args, gradients, strict=True):
        for index in np.ndindex(x.shape):
            original, losses = x[index], []
            for x[index] in (original + 1e-5, original - 1e-5):
                losses.append(np.sum(d_output * reference(*args, **kwargs)))
            x[index] = original
            gradient[index] = (losses[0] - losses[1]) / 2e-5
    return reference(*args, **kwargs), *gradients


def near(have, want, tolerance=2e-6):
    for x, y in zip(have, want, strict=True):
        assert x.shape == y.shape
        bound = tolerance * max(1, np.abs(y).max(initial=0))
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=bound, rtol=0)


LENGTHS = {'query_seq_lengths': jnp.array([6, 3]), 'key_value_seq_lengths': jnp.array([4, 0])}
CALLS = {
    'full': (T, S, {'is_causal': False}),
    'full, lengths': (T, S, {'is_causal': False} | LENGTHS),
    'full, relu': (T, S, {'is_causal': False, 'feature_map': 'relu', 'key_value_seq_lengths': jnp.array([9, 1])}),
    'causal, one chunk': (T, S, {'is_causal': True, 'chunk_size': 64}),
    'causal, chunks': (T, S, {'is_causal': True}),
    'causal, chunks, lengths': (T, S, {'is_causal': True} | LENGTHS),
    'causal, more keys, lengths': (4, 9, {'is_causal': True, 'key_value_seq_lengths': jnp.array([3, 8])}),
    'causal, fewer keys': (9, 4, {'is_causal': True}),
    'causal, relu': (T, S, {'is_causal': True, 'feature_map': 'relu'}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('call', CALLS)
def test_output_and_gradients_match_reference(call):
    t, s, kwargs = CALLS[call]
    args = random_inputs(t, s)
    want = reference_and_gradients(args, **{name: x for name, x in kwargs.items() if name != 'chunk_size'})
    near(output_and_gradients(*args, **{'chunk_size': 3} | kwargs), want)
    assert all(np.any(x != 0) for x in want)


def test_float64_matches_reference():
    with jax.enable_x64(True):
        args = random_inputs(dtype='float64')
        have = output_and_gradients(*args, is_causal=True, chunk_size=3)
        assert all(x.dtype == 'float64' for x in have)
        near(have[:1], [reference(*map(np.asarray, args), is_causal=True)], 1e-14)
        near(have, reference_and_gradients(args, is_causal=True), 1e-8)


def test_equal_features_give_means_and_heads_are_grouped():
    """All features are equal (cases 3 and 8)."""
    value = jnp.stack([jnp.arange(1.0, 6), 10 * jnp.arange(1.0, 6)], axis=-1)[None, :, :, None]
    query, key = jnp.zeros((1, 2, 4, 3)), jnp.zeros((1, 5, 2, 3))
    rows = attend(query, key, value)[0, :, :, 0], attend(query, key, value, is_causal=True)[0, :, :, 0]
    np.testing.assert_allclose(rows[0], [[3, 3, 30, 30]] * 2, rtol=1e-6)
    np.testing.assert_allclose(rows[1], [[1, 1, 10, 10], [1.5, 1.5, 15, 15]], rtol=1e-6)


# Masks and non-finite numbers


def test_output_does_not_depend_on_later_keys():
    """Tested by gradients, and by equal bits, inside a chunk and across chunks."""
    query, key, value = random_inputs(T, T)
    call = lambda key, value: linear_attention(query, key, value, is_causal=True, chunk_size=3)[0, :, 0]
    for jacobian in map(np.asarray, jax.jit(jax.jacobian(call, argnums=(0, 1)))(key, value)):  # [T, Hv, B, T, K, width]
        depends = np.any(jacobian != 0, axis=(1, 5))
        np.testing.assert_array_equal(depends[1:, 0, :, 0], np.tril(np.ones((T, T), bool))[1:])
        assert not np.any(depends[0, 0, 1:])
        assert not np.any(depends[:, 1]) and not np.any(depends[:, :, :, 1])
    before = np.asarray(attend(query, key, value, is_causal=True, chunk_size=3))
    for s in (T - 1, T - 3):
        changed = [with_entries(x, ((slice(None), s), 5.0)) for x in (key, value)]
        after = np.asarray(attend(query, *changed, is_causal=True, chunk_size=3))
        np.testing.assert_array_equal(after[:, :s], before[:, :s])
        assert np.all(after[:, s:] != before[:, s:])


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_padding_is_ignored(bad, is_causal):
    query, key, value = random_inputs()
    kwargs = LENGTHS | {'is_causal': is_causal, 'chunk_size': 3}
    padding_0, padding_1 = (0, slice(4, None)), 1
    spoiled = [with_entries(x, (padding_0, bad), (padding_1, bad)) for x in (key, value)]
    have = output_and_gradients(
        with_entries(query, ((0, slice(6, None)), bad), ((1, slice(3, None)), bad)), *spoiled, **kwargs
    )
    want = output_and_gradients(query, key, value, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, have, want)
    output, dquery, dkey, dvalue = map(np.asarray, have)
    assert all(np.all(x[1] == 0) for x in (output, dquery, dkey, dvalue))
    assert all(np.all(x[0, 6:] == 0) for x in (output, dquery)) and all(np.all(x[0, 4:] == 0) for x in (dkey, dvalue))
    expected = reference(*(np.asarray(x, np.float64)[:1] for x in (query[:, :6], key[:, :4], value[:, :4])),
                       is_causal=is_causal)  # fmt: skip
    np.testing.assert_allclose(output[:1, :6], expected, atol=2e-6)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('name', ['key', 'value'])
def test_nonfinite_numbers_reach_only_rows_that_attend_to_them(name, bad):
    query, key, value = random_inputs()
    spoiled = {'key': key, 'value': value}
    spoiled[name] = with_entries(spoiled[name], ((0, 4, 0, 1), bad))
    for is_causal, first in ((True, 4), (False, 0)):
        call = lambda *args, is_causal=is_causal: np.asarray(attend(*args, is_causal=is_causal, chunk_size=3))
        clean, output = call(query, key, value), call(query, spoiled['key'], spoiled['value'])
        assert np.all(np.isnan(output[0, first:, :2]))
        np.testing.assert_array_equal(output[0, :first, :2], clean[0, :first, :2])
        np.testing.assert_array_equal(output[:, :, 2:], clean[:, :, 2:])
        np.testing.assert_array_equal(output[1], clean[1])
        output = call(with_entries(query, ((0, 2, 1, 0), bad)), key, value)
        assert np.argwhere(np.isnan(output[..., 0])).tolist() == [[0, 2, 1]]


def test_empty_row_with_nan_cotangent_has_no_gradient():
    def loss(args, cotangent):
        return jnp.sum(linear_attention(*args, is_causal=True, chunk_size=3, **LENGTHS) * cotangent)

    cotangent = with_entries(np.ones((B, T, N, 1), np.float32), ((0, slice(6, None)), np.nan), (1, np.nan))
    gradients = jax.jit(jax.grad(loss))(random_inputs(), cotangent)
    assert all(np.all(np.isfinite(x)) for x in gradients) and np.any(np.asarray(gradients[0]) != 0)


# Precision


@pytest.mark.parametrize('dtype, is_causal', [('bfloat16', True), ('float16', False)])
def test_half_precision_sums_are_float32(dtype, is_causal):
    args = random_inputs(dtype=dtype)
    have = output_and_gradients(*args, is_causal=is_causal, chunk_size=3)
    want = output_and_gradients(*(x.astype('float32') for x in args), is_causal=is_causal, chunk_size=3)
    assert all(x.dtype == dtype for x in have)
    np.testing.assert_array_equal(have[0], want[0].astype(dtype))
    zeros, ones = jnp.zeros((1, 4096, 1, 1), dtype), jnp.ones((1, 4096, 1, 1), dtype)
    assert np.all(np.asarray(attend(zeros, zeros, ones, is_causal=is_causal)) == 1)


def test_results_have_dtype_of_query():
    query, key, value = random_inputs()
    for dtypes in (('bfloat16', 'float32', 'float32'), ('float32', 'bfloat16', 'float16')):
        args = [x.astype(dtype) for x, dtype in zip((query, key, value), dtypes, strict=True)]
        assert jax.eval_shape(linear_attention, *args).dtype == dtypes[0]


@pytest.mark.parametrize('is_causal', [True, False])
def test_large_float16_inputs_do_not_overflow(is_causal):
    for size in (100, 60000):
        query, key = jnp.full((1, 2, 1, 64), size, 'float16'), jnp.full((1, 2, 1, 64), size, 'float16')
        value = jnp.array([1, 3], 'float16')[None, :, None, None]
        output, *gradients = output_and_gradients(query, key, value, is_causal=is_causal)
        assert output[0, 1, 0, 0] == 2 and all(jnp.all(jnp.isfinite(x)) for x in gradients)


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('query, key', [(-3e4, -1.0), (-50.0, -60.0), (-200.0, -70.0), (-20.0, -20.0)])
def test_features_far_below_zero_are_exact(query, key, is_causal):
    """exp(x) - 1 + 1 is zero from -17 on; a derivative of the quotient that squares the divisor fails from -44 on."""
    random = np.random.default_rng(7)
    args = [size + random.normal(size=shape) for size, shape in
            ((query, (B, T, N, H)), (key, (B, S, K, H)), (0.0, (B, S, K, Hv)))]  # fmt: skip
    args = [x.astype(np.float32).astype(np.float64) for x in args]
    have = output_and_gradients(*(jnp.asarray(x, 'float32') for x in args), is_causal=is_causal, chunk_size=3)
    args[0] -= args[0].max(axis=-1, keepdims=True)  # features at -3e4 underflow in float64; their scale cancels
    near(have, reference_and_gradients(args, is_causal=is_causal), 2e-5)


def test_derivative_of_features_at_zero_is_one():
    """At zero the two halves of elu meet, and the largest component of a shifted query is zero."""
    query, key, value = random_inputs()
    for changed_query in (jnp.zeros_like(query), -jnp.abs(query)):
        args = changed_query, jnp.zeros_like(key), value
        near(output_and_gradients(*args, is_causal=False, chunk_size=3), reference_and_gradients(args), 1e-5)


def test_rows_with_zero_features_give_zero():
    query, key, value = random_inputs()
    with jax.debug_nans(True):
        for args in ((-jnp.abs(query), key, value), (query, -jnp.abs(key), value)):
            output, *gradients = output_and_gradients(*args, feature_map='relu', is_causal=True, chunk_size=3)
            assert all(np.all(np.asarray(x) == 0) for x in (output, *gradients))


# Memory and time


def operations(jaxpr, times=1):
    """Yield every operation of a program and how often it runs, including those inside loops and calls."""
    for equation in jaxpr.eqns:
        yield equation, times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            inner = getattr(inner, 'jaxpr', inner)
            if hasattr(inner, 'eqns'):
                yield from operations(inner, times * equation.params.get('length', 1))


def cost(function, *args):
    """Return (number of elements of the largest array, number of multiplications in matrix products)."""
    largest, products = 0, 0
    for equation, times in operations(jax.make_jaxpr(function)(*args).jaxpr):
        sizes = [math.prod(x.aval.shape) for x in equation.outvars]
        largest = max(largest, *sizes)
        if equation.primitive.name == 'dot_general':
            shape, (summed, _) = equation.invars[0].aval.shape, equation.params['dimension_numbers'][0]
            products += times * sizes[0] * math.prod(shape[axis] for axis in summed)
    return largest, products


@pytest.mark.parametrize('is_causal', [True, False])
def test_memory_and_time_are_linear_in_length_with_gradient(is_causal):
    loss = lambda args: jnp.sum(jnp.sin(linear_attention(*args, is_causal=is_causal)))
    shapes = lambda T: [jax.ShapeDtypeStruct((1, T, heads, 32), 'float32') for heads in (4, 2, 2)]
    # Passes over the products: forward; and with the gradient also recomputed, and two gradients of each product.
    for program, passes in ((loss, 1), (jax.grad(loss), 4)):
        (largest, products), cost_of_longer = cost(program, shapes(1024)), cost(program, shapes(4096))
        assert cost_of_longer == (4 * largest, 4 * products)
        # The largest array has the sums with their column of ones; the states of chunks of 64 have fewer elements.
        assert largest <= 1024 * 4 * 33
        assert 1024 * 4 * 33 * 32 <= products <= passes * 1024 * 4 * 33 * (2 * 64 + 2 * 32)


# Transformations, sizes, errors


def loss_of(args):
    return jnp.sum(jnp.sin(linear_attention(*args, is_causal=True, chunk_size=3, **LENGTHS)))


@pytest.mark.slow
def test_jit_remat_and_vmap_do_not_change_gradients():
    batch = jax.tree.map(lambda *x: jnp.stack(x), *(random_inputs(seed=i) for i in range(4)))
    gradient = jax.jit(jax.grad(loss_of))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(gradient(random_inputs(seed=i)) for i in range(4)))
    mapped = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss_of))))(batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mapped, expected)


@pytest.mark.slow
def test_second_derivatives_match_finite_differences():
    query, key, value = random_inputs(3, 3)
    loss_of_gradient = lambda query: jnp.sum(jnp.sin(output_and_gradients(query, key, value)[1]))
    have, step = jax.jit(jax.grad(loss_of_gradient))(query), 1e-3 * loss_weights(query.shape)
    want = (jax.jit(loss_of_gradient)(query + step) - jax.jit(loss_of_gradient)(query - step)) / 2
    np.testing.assert_allclose(jnp.sum(have * step), want, rtol=2e-3)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('sizes', [(0, 3, 3, 2), (1, 0, 3, 2), (1, 3, 0, 2), (1, 3, 3, 0)])
def test_axes_of_size_zero(sizes, is_causal):
    b, t, s, h = sizes
    shapes = (b, t, N, h), (b, s, K, h), (b, s, K, 1)
    args = [jnp.asarray(np.ones(shape, np.float32)) for shape in shapes]
    output, *gradients = output_and_gradients(
        *args, is_causal=is_causal, key_value_seq_lengths=jnp.asarray([2] * b, 'int32')
    )
    assert output.shape == (b, t, N, 1) and all(np.all(np.asarray(x) == 0) for x in (output, *gradients))


ERRORS = {
    r'query has shape \(4, 3\); expected 4 axes': {'query': jnp.zeros((4, 3))},
    r'key has shape \(2, 6, 2, 4\); expected .* B = 2, H = 3': {'key': jnp.zeros((B, S, K, 4))},
    r'3 query heads do not divide .* over 2': {'query': jnp.zeros((B, T, 3, H))},
    r'value has dtype int32; expected a float': {'value': jnp.zeros((B, S, K, Hv), int)},
    r'key_value_seq_lengths has shape \(1,\); expected \(2,\)': {'key_value_seq_lengths': jnp.array([1])},
    r"feature_map is 'exp'; expected one of \['elu', 'relu'\]": {'feature_map': 'exp'},
    r'chunk_size is 0; expected a positive number of tokens or None': {'chunk_size': 0},
}


@pytest.mark.parametrize('message, arguments', ERRORS.items())
def test_invalid_arguments_raise_with_value_and_expectation(as_used, message, arguments):
    query, key, value = random_inputs()
    with pytest.raises(ValueError, match=message):
        linear_attention(**({'query': query, 'key': key, 'value': value} | arguments))
