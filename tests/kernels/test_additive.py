"""Additive attention against the oracle, and what only it has; shared rules: test_mask_rules.py, test_contract.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import additive_attention
from tests.kernels import oracle
from tests.kernels.combinations import make_arguments, small_combination


@pytest.mark.parametrize('seed', range(100, 124))
def test_equals_the_formula_forward_and_backward(seed):
    oracle.check_function(additive_attention, make_arguments(small_combination(seed, additive=True)))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('seed', range(124, 127))
def test_half_precision_is_wide_inside(seed, dtype):
    oracle.check_function(additive_attention, make_arguments(small_combination(seed, additive=True)), dtype)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        oracle.check_function(additive_attention, make_arguments(small_combination(124, additive=True)), 'float64')


def test_the_score_is_a_vector_times_the_tanh_of_the_sum():
    """One head of width one: logits v tanh(q + k), no scale."""
    query, key = jnp.array([0.5])[None, :, None, None], jnp.array([-0.5, 1.5])[None, :, None, None]
    _, weights = additive_attention(query, key, key, jnp.array([[3.0]]), return_weights=True)
    logits = 3 * np.tanh([0.0, 2.0])
    np.testing.assert_allclose(weights[0, 0, 0], np.exp(logits) / np.exp(logits).sum(), rtol=1e-6)


def test_scores_saturate_and_never_overflow():
    query, key = jnp.full((1, 1, 1, 4), 6e4, 'float16'), jnp.full((1, 2, 1, 4), 6e4, 'float16')
    score, value = jnp.full((1, 4), 6e4, 'float16'), jnp.array([1, 3], 'float16')[None, :, None, None]
    output, slopes = jax.value_and_grad(lambda x: additive_attention(*x)[0, 0, 0, 0])((query, key, value, score))
    assert output == 2 and output.dtype == 'float16'
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in slopes)


@pytest.mark.parametrize('shape', [(3, 4), (2, 3), (4, 1), (3,)])
def test_a_score_of_another_shape_is_refused(as_used, shape):
    query, key = jnp.zeros((1, 2, 4, 3)), jnp.zeros((1, 2, 2, 3))
    with pytest.raises(ValueError, match=r'score has shape .*; expected \[N, H\] = \(4, 3\)'):
        additive_attention(query, key, key, jnp.zeros(shape))
