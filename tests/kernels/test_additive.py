"""Additive attention against the oracle, and what it has of its own; the shared rules are in test_contract.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import additive_attention
from tests.kernels import oracle


@pytest.mark.parametrize('seed', range(100, 130))
def test_equals_the_formula_forward_and_backward(seed):
    oracle.compare(additive_attention, oracle.draw(seed, additive=True))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('seed', range(130, 134))
def test_half_precision_is_wide_inside(seed, dtype):
    oracle.compare(additive_attention, oracle.draw(seed, additive=True), dtype)


@pytest.mark.parametrize('seed', range(134, 137))
def test_float64_stays_float64(seed):
    with jax.enable_x64(True):
        oracle.compare(additive_attention, oracle.draw(seed, additive=True), 'float64')
