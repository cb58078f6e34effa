"""`jax.nn.dot_product_attention` replaced by ours: the same results in every call that JAX documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from tests.kernels import oracle
from tests.kernels.calls import B, H, N, S, T, make_qkv


def drawn(*shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def some(*shape):
    """A mask under which every query sees the first key: JAX averages all values where there is none."""
    return (drawn(*shape) < 1).at[..., 0].set(True)


CALLS = {
    'nothing': {},
    'scale': {'scale': 0.3},
    'bias': {'bias': drawn(B, N, T, S)},
    'bias of one head': {'bias': drawn(1, 1, T, S)},
    'bias of a key': {'bias': drawn(B, 1, 1, S)},
    'mask': {'mask': some(B, N, T, S)},
    'mask of a row': {'mask': some(B, 1, 1, S)},
    'causal': {'is_causal': True},
    'query lengths': {'query_seq_lengths': jnp.array([1, T])},
    'key lengths': {'key_value_seq_lengths': jnp.array([1, 3])},
    'both lengths': {'query_seq_lengths': jnp.array([T, 2]), 'key_value_seq_lengths': jnp.array([1, 3])},
    'window': {'local_window_size': 1},
    'window of two sides': {'local_window_size': (2, 0)},
    'all': {'bias': drawn(B, 1, 1, S), 'mask': some(1, N, 1, S), 'scale': 0.3, 'is_causal': True,
            'local_window_size': (3, 1), 'key_value_seq_lengths': jnp.array([3, 4])},
}  # fmt: skip
OURS = {'default': {}, 'blockwise': {'implementation': 'blockwise', 'block_sizes': (2, 4)}}


@pytest.mark.parametrize('ours', OURS.values(), ids=OURS)
@pytest.mark.parametrize('kwargs', CALLS.values(), ids=CALLS)
def test_arguments_mean_what_they_mean_in_jax(kwargs, ours):
    cotangent, results = drawn(B, T, N, H), []
    given = {name: x for name, x in kwargs.items() if isinstance(x, jax.Array)}
    fixed = {name: x for name, x in kwargs.items() if name not in given}
    for attend, more in ((dot_product_attention, ours), (jax.nn.dot_product_attention, {})):

        @jax.jit
        def graded(arrays, given, attend=attend, more=more):
            call = lambda arrays: attend(*arrays, **given, **fixed, **more, return_residual=True)
            output, vjp, residual = jax.vjp(call, arrays, has_aux=True)
            return output, vjp(cotangent)[0], residual

        results.append(graded(make_qkv(), given))
    (output, gradients, residual), (expected, slopes, other) = results
    np.testing.assert_allclose(output, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), gradients, slopes)
    seen = np.asarray(residual) > -1e30
    np.testing.assert_allclose(np.where(seen, residual, 0), np.where(seen, other, 0), atol=2e-6)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precisions_are_as_in_jax(dtype):
    ours = dot_product_attention(*make_qkv(dtype), is_causal=True)
    theirs = jax.nn.dot_product_attention(*make_qkv(dtype), is_causal=True)
    assert ours.dtype == theirs.dtype == dtype
    oracle.near(ours, theirs, oracle.TOLERANCE[dtype][0], 'output')


def test_arrays_of_the_host_are_taken_as_in_jax(as_used):
    query, key, value = (np.asarray(x, np.float64) for x in make_qkv())
    kwargs = {'bias': np.asarray(drawn(1, N, T, S)), 'mask': np.asarray(some(B, 1, 1, S))}
    lengths = np.array([3, 4], np.int32)
    for attend in (dot_product_attention, jax.nn.dot_product_attention):
        output = attend(query, key, value, **kwargs, key_value_seq_lengths=lengths)
        assert output.dtype == 'float32'
        np.testing.assert_allclose(
            output, dot_product_attention(*make_qkv(), **kwargs, key_value_seq_lengths=jnp.asarray(lengths)), atol=2e-6
        )
    listed = dot_product_attention(query, key, value, key_value_seq_lengths=[3, 4])
    np.testing.assert_array_equal(listed, dot_product_attention(query, key, value, key_value_seq_lengths=lengths))


def test_three_axes_are_a_batch_of_one():
    query, key, value = make_qkv()
    bias = drawn(1, N, 1, S)
    for ours in OURS.values():
        alone = dot_product_attention(query[0], key[0], value[0], bias, is_causal=True, **ours, return_residual=True)
        theirs = jax.nn.dot_product_attention(query[0], key[0], value[0], bias, is_causal=True, return_residual=True)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), alone, theirs)


def test_the_name_that_jax_gives_the_dense_one_is_known():
    np.testing.assert_array_equal(
        dot_product_attention(*make_qkv(), implementation='xla'),
        dot_product_attention(*make_qkv(), implementation='dense'),
    )


# Where the contract says otherwise


def test_a_row_without_keys_is_zero_where_jax_gives_the_mean_of_all():
    nothing = jnp.zeros((1, 1, T, S), bool)
    assert jnp.all(dot_product_attention(*make_qkv(), mask=nothing) == 0)
    theirs = jax.nn.dot_product_attention(*make_qkv(), mask=nothing)
    np.testing.assert_allclose(theirs[:, 0, 0], make_qkv()[2][:, :, 0].mean(1), atol=1e-6)


def test_what_is_not_finite_in_a_masked_slot_does_no_harm_and_in_jax_does():
    query, key, value = make_qkv()
    value, lengths = value.at[:, -1].set(jnp.nan), jnp.array([S - 1, S - 1])
    assert jnp.all(jnp.isfinite(dot_product_attention(query, key, value, key_value_seq_lengths=lengths)))
    assert jnp.all(jnp.isnan(jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)))


def test_the_residual_is_wide_where_jax_rounds_it_to_the_dtype_of_the_keys():
    ours = dot_product_attention(*make_qkv('bfloat16'), return_residual=True)[1]
    theirs = jax.nn.dot_product_attention(*make_qkv('bfloat16'), return_residual=True)[1]
    assert ours.dtype == 'float32' and theirs.dtype == 'bfloat16'


def test_widths_and_dtypes_may_differ_where_jax_refuses():
    query, key, value = make_qkv()
    value = value.astype('bfloat16')[..., :2]
    assert dot_product_attention(query, key, value).shape == (B, T, N, 2)
    with pytest.raises(ValueError):
        jax.nn.dot_product_attention(query, key, value)
