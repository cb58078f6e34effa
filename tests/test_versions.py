"""Programs that some releases of JAX compute incorrectly, without an error, or crash on, on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Releases that setup.cfg excludes: jaxlib 0.10.2 (jax issues 39103, 40412) and 0.11.0 (39257).


def test_reduction_of_small_products_is_right() -> None:
    rows = np.zeros((32_769, 3), np.float32)
    rows[:, 0] = np.arange(len(rows))
    sums = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
    np.testing.assert_array_equal(sums, np.float32(rows[:, 0]) ** 2)


@pytest.mark.parametrize('shape', [(3, 1, 2, 2, 8, 8, 8), (1, 3, 2, 2, 8, 8, 8), (2, 1, 3, 2, 4, 1, 4, 8)], ids=str)
def test_products_of_many_axes_are_summed(shape: tuple[int, ...]) -> None:
    left, right = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    sums = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(left, right)
    np.testing.assert_allclose(sums, np.sum(left.astype(np.float64) * right, axis=3), atol=1e-5)
