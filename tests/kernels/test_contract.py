"""Precision, weights, dropout, transformations and errors of every attention function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.calls import B, H, K, N, S, T, make_qkv, run_with_gradients, same

# Precision


@pytest.mark.quick_cases(1)
def test_results_have_dtype_of_query(attend):
    for dtype in ('float32', 'bfloat16', 'float16'):
        for other in ('float32', 'bfloat16'):
            query, key, value = make_qkv()
            key, value = key.astype(other), value.astype(other)
            output, residual, weights = attend(
                query.astype(dtype), key, value, return_residual=True, return_weights=True
            )
            assert output.dtype == dtype and residual.dtype == weights.dtype == jnp.float32


@pytest.mark.quick_cases(1)
def test_float16_gradients_do_not_overflow(attend):
    query, key, value = jnp.zeros((1, 1, 1, 128)), jnp.zeros((1, 2, 1, 128)), jnp.full((1, 2, 1, 128), 100.0)
    query, key, value = (x.astype('float16') for x in (query, key, value))
    gradients = jax.grad(lambda x: 16 * jnp.sum(attend(*x).astype('float32')))((query, key, value))
    assert jnp.all(gradients[0] == 0) and jnp.all(gradients[1] == 0) and jnp.all(gradients[2] == 8)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_long_sums_are_accumulated_in_float32(attend, dtype):
    zeros, ones = jnp.zeros((1, 4096, 1, 1), dtype), jnp.ones((1, 4096, 1, 1), dtype)
    assert jnp.all(attend(zeros[:, :1], zeros, ones) == 1)


# Weights


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('rate', [0.0, 0.5])
def test_weights_are_before_dropout_and_do_not_change_output(attend, rate):
    query, key, value = make_qkv()
    kwargs = {'key_value_seq_lengths': jnp.array([S - 1, 0]), 'dropout_rate': rate, 'dropout_rng': jax.random.key(0)}
    output, weights = attend(query, key, value, return_weights=True, **kwargs)
    same(output, attend(query, key, value, **kwargs))
    np.testing.assert_allclose(weights.sum(-1)[0], 1, atol=1e-6)
    assert weights.shape == (B, N, T, S) and jnp.all(weights[:, :, :, -1] == 0) and jnp.all(weights[1] == 0)
    mean = jnp.einsum('bnts,bsnh->btnh', weights, jnp.repeat(value, N // K, axis=2))
    assert bool(jnp.allclose(mean, output, atol=1e-6)) == (rate == 0)
    same(weights, attend(query, key, value, return_weights=True, **kwargs | {'dropout_rate': 0.0})[1])


def test_requested_results_come_in_order(attend):
    output, residual, weights = attend(*make_qkv(), return_residual=True, return_weights=True)
    assert (output.shape, residual.shape, weights.shape) == ((B, T, N, H), (B, T, N), (B, N, T, S))
    same(attend(*make_qkv(), return_residual=True), (output, residual))
    same(attend(*make_qkv(), return_weights=True), (output, weights))
    same(attend(*make_qkv()), output)


@pytest.mark.quick_cases(1)
def test_residual_has_no_gradient(attend):
    gradients = jax.grad(lambda x: jnp.sum(attend(*x, return_residual=True)[1]))(make_qkv())
    assert not any(jnp.any(x != 0) for x in gradients)


# Dropout


def weights_before_and_after_dropout(attend, rate, key, S=64):
    """Return the weights [B, N, T, S] before and after dropout.

    The values are unit vectors, so the output equals the weights after dropout.
    """
    query, keys, _ = make_qkv(S=S)
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None, :], (B, S, K, S))
    output, weights = attend(query, keys, value, dropout_rate=rate, dropout_rng=key, return_weights=True)
    return np.asarray(weights), np.asarray(output.swapaxes(1, 2))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('rate', [0.1, 0.5])
def test_dropout_is_independent_for_each_weight(attend, rate):
    weights, after = weights_before_and_after_dropout(attend, rate, jax.random.key(1))
    is_kept = after != 0
    np.testing.assert_allclose(after, is_kept * weights / (1 - rate), rtol=1e-6)
    deviation = np.sqrt(rate * (1 - rate) / is_kept.size)
    assert abs(is_kept.mean() - (1 - rate)) < 5 * deviation
    rows = is_kept.reshape(-1, is_kept.shape[-1])
    assert len(np.unique(rows, axis=0)) == len(rows)  # no two batch rows, heads or queries share their dropout
    standardised = (rows - (1 - rate)) / np.sqrt(rate * (1 - rate))
    correlations = (standardised @ standardised.T)[~np.eye(len(rows), dtype=bool)] / rows.shape[1]
    assert np.abs(correlations).max() < 6 / np.sqrt(rows.shape[1])


def test_dropout_is_a_function_of_its_prng_key(attend):
    _, first = weights_before_and_after_dropout(attend, 0.5, jax.random.key(1))
    np.testing.assert_array_equal(first, weights_before_and_after_dropout(attend, 0.5, jax.random.key(1))[1])
    assert np.mean((first != 0) != (weights_before_and_after_dropout(attend, 0.5, jax.random.key(2))[1] != 0)) > 0.4
    weights_before_and_after_dropout(attend, 0.5, jax.random.PRNGKey(1))  # a raw key


@pytest.mark.quick_cases(1)
def test_mean_over_dropout_keys_is_output_without_dropout(attend):
    call = lambda key: attend(*make_qkv(), dropout_rate=0.5, dropout_rng=key)
    draws = np.asarray(jax.jit(jax.vmap(call))(jax.random.split(jax.random.key(0), 4000)))
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - attend(*make_qkv())) <= 5 * error) and np.all(error > 0)


@pytest.mark.quick_cases(1)
def test_gradients_use_the_dropped_weights(attend):
    query, key, value = make_qkv()
    kwargs = {'dropout_rate': 0.5, 'dropout_rng': jax.random.key(3)}
    eye = jnp.broadcast_to(jnp.eye(S)[None, :, None, :], (B, S, K, S))
    dropped_weights, weights = attend(query, key, eye, return_weights=True, **kwargs)
    factors = dropped_weights.swapaxes(1, 2) / weights

    def expected(query, key, value, **returns):
        _, residual, weights = attend(query, key, value, **returns)
        values = jnp.repeat(value, N // K, axis=2)
        return jnp.einsum('bnts,bsnh->btnh', weights * factors, values), residual, weights

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        run_with_gradients(attend, query, key, value, **kwargs), run_with_gradients(expected, query, key, value),
    )  # fmt: skip


def test_rate_zero_needs_no_prng_key(attend):
    same(attend(*make_qkv(), dropout_rate=0.0), attend(*make_qkv()))
    same(attend(*make_qkv(), dropout_rate=0.0, dropout_rng=jax.random.key(0)), attend(*make_qkv()))


@pytest.mark.parametrize('rate', [-0.5, float('nan'), 1.0, 1.5])
def test_invalid_dropout_rate_raises(attend, rate):
    with pytest.raises(ValueError, match=f'dropout_rate is {rate}; expected 0 <= rate < 1'):
        attend(*make_qkv(), dropout_rate=rate, dropout_rng=jax.random.key(0))


def test_positive_rate_without_prng_key_raises(attend):
    with pytest.raises(ValueError, match='dropout_rng is None; pass a key'):
        attend(*make_qkv(), dropout_rate=0.5)


# Transformations and sizes


LENGTHS = jnp.array([S, 2])


def loss_of(attend, query, key, value):
    return jnp.sum(jnp.sin(attend(query, key, value, is_causal=True, key_value_seq_lengths=LENGTHS)))


@pytest.mark.slow
def test_jit_and_remat_do_not_change_gradients(attend):
    loss = lambda x: loss_of(attend, *x)
    expected = jax.grad(loss)(make_qkv())
    for transformed in (jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss)), jax.jit(jax.grad(jax.remat(loss)))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), transformed(make_qkv()), expected)


@pytest.mark.quick_cases(1)
def test_vmap_pmap_and_map_equal_a_loop(attend):
    many = jax.tree.map(lambda *x: jnp.stack(x), *(make_qkv(seed=i) for i in range(4)))
    gradient = jax.grad(lambda x: loss_of(attend, *x))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(gradient(make_qkv(seed=i)) for i in range(4)))
    assert jax.device_count() >= 4
    mapped = jax.jit(jax.vmap(jax.checkpoint(gradient))), jax.pmap(gradient), lambda x: jax.lax.map(gradient, x)
    for transformed in mapped:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), transformed(many), expected)


@pytest.mark.parametrize('sizes', [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
@pytest.mark.parametrize('masked', [False, True])
def test_axes_of_size_zero(attend, sizes, masked):
    b, t, s = sizes
    kwargs = {'is_causal': True, 'key_value_seq_lengths': jnp.full(b, 2)} if masked else {}
    (output, _, weights), gradients = run_with_gradients(
        attend, jnp.ones((b, t, N, H)), jnp.ones((b, s, K, H)), jnp.ones((b, s, K, H)), **kwargs
    )
    assert output.shape == (b, t, N, H) and weights.shape == (b, N, t, s)
    assert jnp.all(output == 0) and all(jnp.all(x == 0) for x in gradients)


# Errors


def arguments_with(**changed):
    query, key, value = make_qkv()
    return {'query': query, 'key': key, 'value': value} | changed


ERRORS = {
    r'query has shape \(4, 3\); expected 4 axes': arguments_with(query=jnp.zeros((4, 3))),
    r'key has shape \(2, 5, 2, 4\); expected .* B = 2, H = 3': arguments_with(key=jnp.zeros((B, S, K, 4))),
    r'key has shape \(1, 5, 2, 3\); expected': arguments_with(key=jnp.zeros((1, S, K, H))),
    r'value has shape \(2, 4, 2, 3\); expected .*\[2, 5, 2, any\]': arguments_with(value=jnp.zeros((B, 4, K, H))),
    r'3 query heads do not divide .* over 2': arguments_with(query=jnp.zeros((B, T, 3, H))),
    r'query has dtype int32; expected a float': arguments_with(query=jnp.zeros((B, T, N, H), int)),
    r'value has dtype bool; expected a float': arguments_with(value=jnp.zeros((B, S, K, H), bool)),
    r'mask has dtype float32; expected boolean': arguments_with(mask=jnp.zeros((B, 1, 1, S))),
    r'mask has shape \(2, 5\); expected 4 axes .*\(2, 4, 4, 5\)': arguments_with(mask=jnp.ones((B, S), bool)),
    r'mask has shape \(2, 4, 5\); expected 4 axes': arguments_with(mask=jnp.ones((B, T, S), bool)),
    r'mask has shape \(2, 1, 1, 4\); expected': arguments_with(mask=jnp.ones((B, 1, 1, T), bool)),
    r'bias has dtype int32; expected a float': arguments_with(bias=jnp.zeros((1, 1, 1, S), int)),
    r'bias has shape \(1, 2, 1, 5\); expected': arguments_with(bias=jnp.zeros((1, K, 1, S))),
    r'query_seq_lengths has shape \(1,\); expected \(2,\)': arguments_with(query_seq_lengths=jnp.array([1])),
    r'key_value_seq_lengths has dtype float32; expected': arguments_with(key_value_seq_lengths=jnp.array([1.0, 2])),
    r'key_positions has shape \(5,\); expected \(2, 5\) or \(1, 5\)': arguments_with(key_positions=jnp.arange(S)),
    r'query_positions has dtype uint32; expected signed': arguments_with(
        query_positions=jnp.arange(T, dtype='uint32')[None]
    ),
    r'go together; got only one': arguments_with(query_segment_ids=jnp.zeros((B, T), int)),
    r'local_window_size is \(-1, 0\); expected': arguments_with(local_window_size=(-1, 0)),
    r'local_window_size is \(1, 2, 3\); expected': arguments_with(local_window_size=(1, 2, 3)),
}


@pytest.mark.parametrize('message, arguments', ERRORS.items())
def test_invalid_arguments_raise_with_value_and_expectation(attend, as_used, message, arguments):
    with pytest.raises(ValueError, match=message):
        attend(**arguments)
