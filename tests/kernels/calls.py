"""Random arrays for attention calls, and helpers that run calls and compare results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import dot_product_attention
from attnlab.kernels.masks import Mask, prefix_mask
from tests.quick import QUICK

B, T, S, N, K, H = 2, 4, 5, 4, 2, 3


def random_arrays(sizes, seed=0, **shapes):
    """Return query, key, value and the arrays of `shapes` (by name) in float64.

    sizes: B, T, S, N, K, H, Hv.  seed: a seed or a generator.
    """
    B, T, S, N, K, H, Hv = sizes
    shapes = {'query': (B, T, N, H), 'key': (B, S, K, H), 'value': (B, S, K, Hv), **shapes}
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def make_qkv(dtype='float32', T=T, S=S, seed=0):
    """Return query, key and value of a small call."""
    return tuple(jnp.asarray(x, dtype) for x in random_arrays((B, T, S, N, K, H, H), seed).values())


def cast_arrays(arrays, dtype, float32_names=('sinks', 'alibi_slopes')):
    """Cast arrays, by name, to the dtype of a call; `float32_names`, which are model parameters, stay float32."""
    return {name: jnp.asarray(x, 'float32' if name in float32_names else dtype) for name, x in arrays.items()}


def split_arrays(kwargs):
    """Split keyword arguments into NumPy arrays, which are traced, and others, which are constants of a program."""
    traced = {name: x for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    return traced, {name: x for name, x in kwargs.items() if name not in traced}


def attention_with_gradients(arrays, traced, cotangent, **static):
    """Return (output, residual, weights, gradients) of a call; residual and weights are None unless requested."""

    def attend(arrays):
        kwargs = {**traced, **static}
        if 'prefix_lengths' in kwargs:
            kwargs['mask'] = Mask(kwargs.get('mask')) & prefix_mask(kwargs.pop('prefix_lengths'))
        results = dot_product_attention(**arrays, **kwargs)
        output, *optional = results if isinstance(results, tuple) else (results,)
        names = ('return_residual', 'return_weights')
        return output, [optional.pop(0) if static.get(name) else None for name in names]

    output, vjp, optional = jax.vjp(attend, arrays, has_aux=True)
    return output, *optional, vjp(cotangent)[0]


@functools.cache
def _program(function, static, is_outermost):
    options = QUICK if is_outermost and jax.default_backend() == 'cpu' else None
    return jax.jit(lambda args, traced: function(*args, **traced, **dict(static)), compiler_options=options)


def run_compiled(function, *args, quick=True, **kwargs):
    """Return function(*args, **kwargs), run as one program that is cached for its shapes.

    Keyword arguments that are arrays are traced; others are constants.  Without compilation, each operation of a new
    shape would be compiled on its own, which takes ten times as long.
    """
    traced = {name: x for name, x in kwargs.items() if isinstance(x, jax.Array)}
    static = tuple((name, x) for name, x in kwargs.items() if name not in traced)
    # Inside another transformation a program cannot have its own compiler options; and two programs may have equal
    # bits only if both are compiled with all optimisations.
    is_outermost = quick and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, traced)))
    return _program(function, static, is_outermost)(args, traced)


def visible_means(attend, T, S, **kwargs):
    """Return [T], the mean of the values 1, 2, ... S that each query attends to, with equal weights."""
    value = jnp.arange(1.0, S + 1)[None, :, None, None]
    return attend(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), value, **kwargs)[0, :, 0, 0]


def run_with_gradients(attend, *arrays, loss_weights=None, quick=True, **kwargs):
    """Return (output, residual, weights) and the gradients of a weighted sum of the output, as one program."""
    return run_compiled(run_with_gradients_eagerly, loss_weights, *arrays, attend=attend, quick=quick, **kwargs)


def run_with_gradients_eagerly(loss_weights, *arrays, attend, **kwargs):
    """Return the same as `run_with_gradients`, operation by operation."""

    def loss(arrays):
        output, *optional = attend(*arrays, **kwargs, return_residual=True, return_weights=True)
        cotangent = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
        weight = 1 if loss_weights is None else loss_weights
        return jnp.sum(output.astype(jnp.float32) * cotangent * weight), (output, *optional)

    gradients, results = jax.grad(loss, has_aux=True)(arrays)
    return results, gradients


def same(a, b):
    """Assert that two trees are bit-equal and finite."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert finite(a)


def finite(tree):
    """Return whether all numbers of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))
