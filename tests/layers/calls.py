"""Small inputs of attention modules, and helpers that run modules as compiled programs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attnlab.layers import MultiHeadAttention
from tests.kernels.oracle import near

B, T, S, D, C, N = 2, 4, 5, 8, 6, 4
_RANDOM = np.random.default_rng(0)
QUERIES, KEYS = (jnp.asarray(_RANDOM.normal(size=size), jnp.float32) for size in ((B, T, D), (B, S, C)))
CROSS_INPUTS, SELF_INPUTS = (QUERIES, KEYS), (QUERIES,)
SELF_MASK, CROSS_MASK = (
    jnp.asarray(_RANDOM.random((B, N, T, keys)) < 0.7).at[..., 0].set(True) for keys in (T, S)
)  # fmt: skip
make_attention = functools.partial(MultiHeadAttention, N)
make_flax_attention = functools.partial(nn.MultiHeadDotProductAttention, N)


def random_variables(module, *inputs, seed=0):
    """Return random variables of the module for these inputs, including biases and norm scales."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0.0, 0.4, x.shape), x.dtype), shapes)


def compiled_apply(module, **kwargs):
    """Return `module.apply` as a compiled function of variables and inputs."""
    return jax.jit(lambda variables, *inputs: module.apply(variables, *inputs, **kwargs))


def run(module, variables, *inputs, **kwargs):
    """Return the output of the compiled module."""
    return compiled_apply(module, **kwargs)(variables, *inputs)


def run_with_gradients(module, variables, *inputs, **kwargs):
    """Return the output, and the gradients of a weighted sum of it with respect to (variables, inputs)."""

    def loss(variables, inputs):
        output = module.apply(variables, *inputs, **kwargs)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)), output

    gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, inputs)
    return output, gradients


def assert_close(actual, expected, tolerance=1e-6):
    """Assert that two trees agree, relative to the largest absolute value of each leaf, or to 1."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: near(a, b, tolerance, 'a leaf'), actual, expected)
