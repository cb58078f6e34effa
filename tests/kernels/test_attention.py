import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import dot_product_attention
from tests.kernels import oracle


@pytest.mark.parametrize('seed', range(60))
def test_equals_the_formula_forward_and_backward(seed):
    oracle.compare(dot_product_attention, oracle.draw(seed))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('seed', range(60, 66))
def test_half_precision_is_wide_inside(seed, dtype):
    oracle.compare(dot_product_attention, oracle.draw(seed), dtype)


@pytest.mark.parametrize('seed', range(66, 70))
def test_float64_stays_float64(seed):
    with jax.enable_x64(True):
        oracle.compare(dot_product_attention, oracle.draw(seed), 'float64')
