"""Arrays to call attention with, and what the tests of its rules ask of a call."""

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, N, K, H = 2, 4, 5, 4, 2, 3


def arrays(dtype='float32', T=T, S=S, seed=0):
    """query, key, value drawn at random."""
    random = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def means(attend, T, S, **kwargs):
    """[T], what each query sees of the values 1, 2, ... S at equal weights."""
    value = jnp.arange(1.0, S + 1)[None, :, None, None]
    return attend(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), value, **kwargs)[0, :, 0, 0]


def run(attend, query, key, value, bias=None, weigh=1.0, **kwargs):
    """(output, residual, weights) and the gradients of a weighted sum of the output."""

    def loss(arrays):
        output, *more = attend(*arrays, **kwargs, return_residual=True, return_weights=True)
        each = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
        return jnp.sum(jnp.where(weigh != 0, output.astype(jnp.float32), 0) * each * weigh), (output, *more)

    given = (query, key, value) if bias is None else (query, key, value, bias)
    gradients, results = jax.grad(loss, has_aux=True)(given)
    return results, gradients


def same(a, b):
    """Bit-equal trees; NaN is never equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert finite(a)


def finite(tree):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))
