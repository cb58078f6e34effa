"""`dot_product_attention` with implementation `dense`: against the oracle, against JAX, and its own options.

The rules that it shares with other scores are in test_mask_rules.py and test_contract.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from attnlab.kernels.implementations import IMPLEMENTATIONS
from tests.kernels import oracle
from tests.kernels.calls import B, H, K, N, S, T, make_qkv
from tests.kernels.combinations import make_arguments, small_combination


def random_array(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


# The oracle


@pytest.mark.parametrize('additive', [False, True])
def test_oracle_gradients_match_finite_differences(additive):
    for seed in range(12):
        arrays, kwargs, cotangent = make_arguments(small_combination(seed, additive))
        (B, T, N, _), S = arrays['query'].shape, arrays['key'].shape[1]
        kwargs['factors'] = oracle.dropout_factors((seed, 1), 0.3, (B, N, T, S)) if seed % 2 else None
        loss = lambda arrays: np.sum(oracle.attention(**arrays, **kwargs).output * cotangent)  # noqa: B023
        gradients = oracle.attention(**arrays, **kwargs, cotangent=cotangent).gradients
        assert gradients.keys() == arrays.keys()
        for name, x in arrays.items():
            direction, step = np.random.default_rng(seed).normal(size=x.shape), 1e-5
            up, down = (loss(arrays | {name: x + sign * step * direction}) for sign in (1, -1))
            np.testing.assert_allclose(np.sum(gradients[name] * direction), (up - down) / (2 * step), atol=1e-8)


def test_oracle_sink_equals_extra_key_with_zero_value():
    query, key, value = make_qkv()
    mask, sinks = np.ones((B, N, T, S), bool), np.arange(N) - 1.5
    mask[:, 1] = False
    with_sinks = oracle.attention(query, key, value, mask=mask, sinks=sinks)
    append_zero_key = lambda x: np.concatenate([x, np.zeros((B, 1, K, H))], axis=1)
    bias = np.concatenate([np.zeros((B, N, T, S)), np.broadcast_to(sinks[:, None, None], (B, N, T, 1))], axis=3)
    mask = np.concatenate([mask, np.ones((B, N, T, 1), bool)], axis=3)
    with_extra_key = oracle.attention(query, append_zero_key(key), append_zero_key(value), bias, mask=mask)
    np.testing.assert_allclose(with_sinks.weights, with_extra_key.weights[..., :S], atol=1e-15)
    np.testing.assert_allclose(with_sinks.output, with_extra_key.output, atol=1e-15)
    np.testing.assert_allclose(with_sinks.residual, with_extra_key.residual, atol=1e-15)
    assert np.all(with_sinks.output[:, :, 1] == 0) and np.all(with_sinks.residual[:, :, 1] == sinks[1])


def test_oracle_alibi_equals_bias_and_qk_norm_equals_unit_vectors():
    query, key, value = (np.asarray(x, np.float64) for x in make_qkv())
    slopes, queries = np.arange(N) / 2, np.array([[3, 0, 9, -2]])
    bias = -slopes[:, None, None] * np.abs(queries[0][:, None] - np.arange(S))
    weights = lambda **kwargs: oracle.attention(query, key, value, **kwargs).weights
    with_alibi = weights(alibi_slopes=slopes, query_positions=queries)
    np.testing.assert_allclose(with_alibi, weights(bias=bias[None]), atol=1e-15)
    for kind, length in (('l2', 1.0), ('rms', np.sqrt(H))):
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True) * length  # noqa: B023
        expected = oracle.attention(unit(query), unit(key), value).weights
        np.testing.assert_allclose(weights(qk_norm=kind), expected, atol=1e-5 if kind == 'rms' else 1e-15)


def test_small_combinations_use_every_argument():
    names = [{name for part in make_arguments(small_combination(seed))[:2] for name in part} for seed in range(60)]
    for name in ('bias', 'mask', 'is_causal', 'query_seq_lengths', 'key_value_seq_lengths', 'local_window_size',
                 'query_positions', 'key_positions', 'query_segment_ids', 'logits_soft_cap', 'scale',
                 'sinks', 'alibi_slopes', 'qk_norm'):  # fmt: skip
        assert sum(name in used for used in names) >= 10, name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('seed', range(60))
def test_output_and_gradients_match_oracle(seed):
    oracle.check_function(dot_product_attention, make_arguments(small_combination(seed)))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('seed', range(60, 66))
def test_half_precision_matches_oracle(seed, dtype):
    oracle.check_function(dot_product_attention, make_arguments(small_combination(seed)), dtype)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('seed', range(66, 69))
def test_float64_matches_oracle(seed):
    with jax.enable_x64(True):
        oracle.check_function(dot_product_attention, make_arguments(small_combination(seed)), 'float64')


# Calls without a batch axis


@pytest.mark.slow
def test_arrays_without_batch_axis_equal_batch_of_one():
    query, key, value = make_qkv()
    unbatched = {
        'bias': random_array(N, 1, S), 'mask': random_array(1, T, S) < 1, 'key_value_seq_lengths': jnp.array([3]),
        'query_positions': jnp.arange(T)[None] + 1, 'is_causal': True,
    }  # fmt: skip
    batched = unbatched | {'bias': unbatched['bias'][None], 'mask': unbatched['mask'][None]}
    returns = {'return_residual': True, 'return_weights': True}
    for kwargs in (unbatched, batched):
        results = dot_product_attention(query[0], key[0], value[0], **kwargs, **returns)
        assert [x.shape for x in results] == [(T, N, H), (T, N), (N, T, S)]
        expected = dot_product_attention(query[:1], key[:1], value[:1], **batched, **returns)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), results, expected)
    jax_output = jax.nn.dot_product_attention(query[0], key[0], value[0], bias=batched['bias'])
    np.testing.assert_allclose(
        dot_product_attention(query[0], key[0], value[0], batched['bias']), jax_output, atol=2e-6
    )


# Precision


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('width, size', [(128, 32), (64, 100)])
def test_float16_logits_do_not_overflow(width, size):
    query, key = jnp.full((1, 1, 1, width), size, 'float16'), jnp.full((1, 2, 1, width), size, 'float16')
    value = jnp.array([1, 3], 'float16')[None, :, None, None]
    call = lambda x: dot_product_attention(*x)[0, 0, 0, 0]
    output, gradients = jax.value_and_grad(call)((query, key, value))
    assert output == 2 and output.dtype == 'float16'
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in gradients) and jnp.all(gradients[2] == 0.5)


def test_bfloat16_error_over_512_keys_is_within_eps():
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(1, 512, 2, 64)), 'bfloat16') for _ in range(3))
    output = dot_product_attention(query * 6, key, value)
    q, k, v = (np.asarray(x, np.float64)[0] for x in (query * 6, key, value))
    logits = np.einsum('tnh,snh->nts', q, k) / 8
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum('nts,snh->tnh', weights / weights.sum(-1, keepdims=True), v)
    assert output.dtype == 'bfloat16'
    assert np.abs(np.asarray(output[0], np.float64) - expected).max() <= 2**-8 * np.abs(expected).max()


# Soft cap, scale and implementation


@pytest.mark.slow
def test_soft_cap_bounds_logits_before_bias_and_mask():
    query, key, value = make_qkv()
    key = jnp.zeros_like(key).at[:, 1].set(1e4)
    query = jnp.ones_like(query)
    weights = lambda **kwargs: dot_product_attention(query, key, value, return_weights=True, **kwargs)[1][0, 0, 0]
    np.testing.assert_allclose(weights()[1], 1)
    capped = weights(logits_soft_cap=2.0)
    np.testing.assert_allclose(capped[1] / capped[0], np.exp(2), rtol=1e-5)
    bias = jnp.zeros((1, 1, 1, S)).at[..., 0].set(5.0)
    biased = weights(logits_soft_cap=2.0, bias=bias)
    np.testing.assert_allclose(biased[1] / biased[0], np.exp(2 - 5), rtol=1e-5)
    assert weights(logits_soft_cap=2.0, key_value_seq_lengths=jnp.array([1, 1]))[1] == 0


def test_default_scale_is_one_over_root_of_width():
    expected = dot_product_attention(*make_qkv(), scale=1 / np.sqrt(H))
    np.testing.assert_array_equal(dot_product_attention(*make_qkv()), expected)
    query, key, value = (x[..., :0] for x in make_qkv())  # a width of zero gives equal weights
    assert dot_product_attention(query, key, make_qkv()[2]).shape == (B, T, N, H)


def test_implementation_is_a_name_or_the_first_supported_of_a_list():
    call = lambda **kwargs: dot_product_attention(*make_qkv(), **kwargs)
    dense, blockwise = call(implementation='dense'), call(implementation='blockwise')
    assert {'dense', 'blockwise'} <= set(IMPLEMENTATIONS) and np.any(dense != blockwise)
    np.testing.assert_array_equal(call(implementation=['blockwise', 'dense']), blockwise)
    np.testing.assert_array_equal(call(implementation=['blockwise', 'dense'], return_weights=True)[0], dense)
    np.testing.assert_array_equal(call(), dense)
    np.testing.assert_array_equal(call(block_sizes=(8, 8)), call(implementation='blockwise', block_sizes=(8, 8)))
    with pytest.raises(NotImplementedError, match='blockwise: return_weights.*; dense: block_sizes'):
        call(implementation=['blockwise', 'dense'], return_weights=True, block_sizes=(8, 8))


ERRORS = {
    r"implementation is 'flash'; expected 'ring' \(.*'dense' \(.*, several of them, or None": {
        'implementation': 'flash'
    },
    r'implementation is empty; expected at least one name': {'implementation': []},
    r"qk_norm is 'layer'; expected 'l2', 'rms' or None": {'qk_norm': 'layer'},
    r'sinks has shape \(3,\) and dtype float32; expected \[N\] = \(4,\) floats': {'sinks': jnp.zeros(3)},
    r'alibi_slopes has shape \(4,\) and dtype int32; expected': {'alibi_slopes': jnp.zeros(4, int)},
    r'block_sizes is \(0, 8\); expected \(queries, keys\), both positive': {'block_sizes': (0, 8)},
    r'logits_soft_cap is 0.0; expected a positive finite number': {'logits_soft_cap': 0.0},
    r'logits_soft_cap is -1.0; expected': {'logits_soft_cap': -1.0},
    r'logits_soft_cap is nan; expected': {'logits_soft_cap': float('nan')},
    r'logits_soft_cap is inf; expected': {'logits_soft_cap': float('inf')},
    r'query has shape \(2, 2, 4, 4, 3\); expected 4 axes': {'query': jnp.zeros((2, B, T, N, H))},
    r'query has shape \(4, 4, 3\); expected 4 axes': {'query': jnp.zeros((T, N, H))},
    r'mask has shape \(4, 5\); expected 4 axes': {
        'query': jnp.zeros((T, N, H)), 'key': jnp.zeros((S, K, H)), 'value': jnp.zeros((S, K, H)),
        'mask': jnp.ones((T, S), bool),
    },
}  # fmt: skip


@pytest.mark.parametrize('message, changed', ERRORS.items())
def test_invalid_arguments_raise_with_value_and_expectation(as_used, message, changed):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(**dict(zip(('query', 'key', 'value'), make_qkv(), strict=True)) | changed)
