"""`dot_product_attention` as a replacement of `jax.nn.dot_product_attention`: the same results for its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from tests.kernels import oracle
from tests.kernels.calls import B, H, N, S, T, make_qkv


def random_array(*shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def random_mask(*shape):
    """Return a mask under which every query attends to the first key, because JAX averages all values in empty rows."""
    return (random_array(*shape) < 1).at[..., 0].set(True)


CALLS = {
    'plain': {},
    'scale': {'scale': 0.3},
    'bias': {'bias': random_array(B, N, T, S)},
    'bias for all heads': {'bias': random_array(1, 1, T, S)},
    'bias for each key': {'bias': random_array(B, 1, 1, S)},
    'mask': {'mask': random_mask(B, N, T, S)},
    'mask for each batch row': {'mask': random_mask(B, 1, 1, S)},
    'causal': {'is_causal': True},
    'query lengths': {'query_seq_lengths': jnp.array([1, T])},
    'key lengths': {'key_value_seq_lengths': jnp.array([1, 3])},
    'both lengths': {'query_seq_lengths': jnp.array([T, 2]), 'key_value_seq_lengths': jnp.array([1, 3])},
    'window': {'local_window_size': 1},
    'two-sided window': {'local_window_size': (2, 0)},
    'all': {'bias': random_array(B, 1, 1, S), 'mask': random_mask(1, N, 1, S), 'scale': 0.3, 'is_causal': True,
            'local_window_size': (3, 1), 'key_value_seq_lengths': jnp.array([3, 4])},
}  # fmt: skip
OURS = {'default': {}, 'blockwise': {'implementation': 'blockwise', 'block_sizes': (2, 4)}}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('ours', OURS.values(), ids=OURS)
@pytest.mark.parametrize('kwargs', CALLS.values(), ids=CALLS)
def test_arguments_have_the_meaning_of_jax(kwargs, ours):
    cotangent, results = random_array(B, T, N, H), []
    traced = {name: x for name, x in kwargs.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in kwargs.items() if name not in traced}
    for attend, options in ((dot_product_attention, ours), (jax.nn.dot_product_attention, {})):

        @jax.jit
        def with_gradients(arrays, traced, attend=attend, options=options):
            call = lambda arrays: attend(*arrays, **traced, **static, **options, return_residual=True)
            output, vjp, residual = jax.vjp(call, arrays, has_aux=True)
            return output, vjp(cotangent)[0], residual

        results.append(with_gradients(make_qkv(), traced))
    (output, gradients, residual), (jax_output, jax_gradients, jax_residual) = results
    np.testing.assert_allclose(output, jax_output, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), gradients, jax_gradients)
    has_keys = np.asarray(residual) > -1e30
    np.testing.assert_allclose(np.where(has_keys, residual, 0), np.where(has_keys, jax_residual, 0), atol=2e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_matches_jax(dtype):
    ours = dot_product_attention(*make_qkv(dtype), is_causal=True)
    theirs = jax.nn.dot_product_attention(*make_qkv(dtype), is_causal=True)
    assert ours.dtype == theirs.dtype == dtype
    oracle.near(ours, theirs, oracle.TOLERANCE[dtype][0], 'output')


def test_numpy_arrays_and_lists_are_accepted(as_used):
    query, key, value = (np.asarray(x, np.float64) for x in make_qkv())
    kwargs = {'bias': np.asarray(random_array(1, N, T, S)), 'mask': np.asarray(random_mask(B, 1, 1, S))}
    lengths = np.array([3, 4], np.int32)
    for attend in (dot_product_attention, jax.nn.dot_product_attention):
        output = attend(query, key, value, **kwargs, key_value_seq_lengths=lengths)
        assert output.dtype == 'float32'
        np.testing.assert_allclose(
            output, dot_product_attention(*make_qkv(), **kwargs, key_value_seq_lengths=jnp.asarray(lengths)), atol=2e-6
        )
    from_list = dot_product_attention(query, key, value, key_value_seq_lengths=[3, 4])
    np.testing.assert_array_equal(from_list, dot_product_attention(query, key, value, key_value_seq_lengths=lengths))


@pytest.mark.slow
def test_arrays_without_batch_axis_match_jax():
    query, key, value = make_qkv()
    bias = random_array(1, N, 1, S)
    for ours in OURS.values():
        alone = dot_product_attention(query[0], key[0], value[0], bias, is_causal=True, **ours, return_residual=True)
        theirs = jax.nn.dot_product_attention(query[0], key[0], value[0], bias, is_causal=True, return_residual=True)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), alone, theirs)


def test_xla_is_a_name_of_dense():
    np.testing.assert_array_equal(
        dot_product_attention(*make_qkv(), implementation='xla'),
        dot_product_attention(*make_qkv(), implementation='dense'),
    )


# Intended differences from JAX


def test_empty_row_is_zero_where_jax_returns_the_mean():
    mask = jnp.zeros((1, 1, T, S), bool)
    assert jnp.all(dot_product_attention(*make_qkv(), mask=mask) == 0)
    theirs = jax.nn.dot_product_attention(*make_qkv(), mask=mask)
    np.testing.assert_allclose(theirs[:, 0, 0], make_qkv()[2][:, :, 0].mean(1), atol=1e-6)


def test_masked_nan_is_ignored_where_jax_returns_nan():
    query, key, value = make_qkv()
    value, lengths = value.at[:, -1].set(jnp.nan), jnp.array([S - 1, S - 1])
    assert jnp.all(jnp.isfinite(dot_product_attention(query, key, value, key_value_seq_lengths=lengths)))
    assert jnp.all(jnp.isnan(jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)))


def test_residual_is_float32_where_jax_rounds_it():
    ours = dot_product_attention(*make_qkv('bfloat16'), return_residual=True)[1]
    theirs = jax.nn.dot_product_attention(*make_qkv('bfloat16'), return_residual=True)[1]
    assert ours.dtype == 'float32' and theirs.dtype == 'bfloat16'


def test_widths_and_dtypes_may_differ_where_jax_raises():
    query, key, value = make_qkv()
    value = value.astype('bfloat16')[..., :2]
    assert dot_product_attention(query, key, value).shape == (B, T, N, 2)
    with pytest.raises(ValueError):
        jax.nn.dot_product_attention(query, key, value)
