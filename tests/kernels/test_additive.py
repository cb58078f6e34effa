"""Additive attention against the oracle, and its own score.

The rules that it shares with the dot product are in test_mask_rules.py and test_contract.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import additive_attention
from tests.kernels import oracle
from tests.kernels.combinations import make_arguments, small_combination


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('seed', range(100, 124))
def test_output_and_gradients_match_oracle(seed):
    oracle.check_function(additive_attention, make_arguments(small_combination(seed, additive=True)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('seed', range(124, 127))
def test_half_precision_matches_oracle(seed, dtype):
    oracle.check_function(additive_attention, make_arguments(small_combination(seed, additive=True)), dtype)


def test_float64_matches_oracle():
    with jax.enable_x64(True):
        oracle.check_function(additive_attention, make_arguments(small_combination(124, additive=True)), 'float64')


def test_logits_are_score_times_tanh_of_sum():
    """One head of width one: the logits are v tanh(q + k), without a scale."""
    query, key = jnp.array([0.5])[None, :, None, None], jnp.array([-0.5, 1.5])[None, :, None, None]
    _, weights = additive_attention(query, key, key, jnp.array([[3.0]]), return_weights=True)
    logits = 3 * np.tanh([0.0, 2.0])
    np.testing.assert_allclose(weights[0, 0, 0], np.exp(logits) / np.exp(logits).sum(), rtol=1e-6)


@pytest.mark.slow
def test_large_float16_inputs_do_not_overflow():
    query, key = jnp.full((1, 1, 1, 4), 6e4, 'float16'), jnp.full((1, 2, 1, 4), 6e4, 'float16')
    score, value = jnp.full((1, 4), 6e4, 'float16'), jnp.array([1, 3], 'float16')[None, :, None, None]
    output, gradients = jax.value_and_grad(lambda x: additive_attention(*x)[0, 0, 0, 0])((query, key, value, score))
    assert output == 2 and output.dtype == 'float16'
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in gradients)


@pytest.mark.parametrize('shape', [(3, 4), (2, 3), (4, 1), (3,)])
def test_score_of_wrong_shape_raises(as_used, shape):
    query, key = jnp.zeros((1, 2, 4, 3)), jnp.zeros((1, 2, 2, 3))
    with pytest.raises(ValueError, match=r'score has shape .*; expected \[N, H\] = \(4, 3\)'):
        additive_attention(query, key, key, jnp.zeros(shape))
