"""Small inputs of attention modules, and their runs as compiled programs."""

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
ACROSS, SELF = (QUERIES, KEYS), (QUERIES,)
SQUARE, WIDE = (jnp.asarray(_RANDOM.random((B, N, T, size)) < 0.7).at[..., 0].set(True) for size in (T, S))
OURS = functools.partial(MultiHeadAttention, N)
FLAX = functools.partial(nn.MultiHeadDotProductAttention, N)


def drawn(module, *inputs, seed=0):
    """Variables of the module for these inputs, all drawn at random, biases and gains too."""
    random = np.random.default_rng(seed)
    sizes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0.0, 0.4, x.shape), x.dtype), sizes)


def program(module, **kwargs):
    """module.apply as a compiled function of variables and inputs."""
    return jax.jit(lambda variables, *inputs: module.apply(variables, *inputs, **kwargs))


def run(module, variables, *inputs, **kwargs):
    return program(module, **kwargs)(variables, *inputs)


def sloped(module, variables, *inputs, **kwargs):
    """The output and the gradients, in variables and inputs, of a weighted sum of it."""

    def loss(variables, inputs):
        output = module.apply(variables, *inputs, **kwargs)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)), output

    gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, inputs)
    return output, gradients


def close(have, want, tolerance=1e-6):
    """Trees of one shape that agree up to a part of the largest value of each leaf, or of one."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: near(a, b, tolerance, 'a leaf'), have, want)
