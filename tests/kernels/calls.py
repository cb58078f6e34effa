"""Random arrays of attention calls, and small helpers to run calls and compare results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import dot_product_attention
from attnlab.kernels.masks import Mask, prefix_mask
from tests.quick import QUICK

B, T, S, N, K, H = 2, 4, 5, 4, 2, 3


def drawn(sizes, seed=0, **more):
    """query, key, value and `more` (name to shape) in float64; sizes: B, T, S, N, K, H, Hv; seed: or a generator."""
    B, T, S, N, K, H, Hv = sizes
    shapes = {'query': (B, T, N, H), 'key': (B, S, K, H), 'value': (B, S, K, Hv), **more}
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def arrays(dtype='float32', T=T, S=S, seed=0):
    """query, key, value of a small call."""
    return tuple(jnp.asarray(x, dtype) for x in drawn((B, T, S, N, K, H, H), seed).values())


def rounded(arrays, dtype, wide=('sinks', 'alibi_slopes')):
    """The arrays in the dtype of a call, but for parameters of a model, which stay float32."""
    return {name: jnp.asarray(x, 'float32' if name in wide else dtype) for name, x in arrays.items()}


def split(kwargs):
    """Keyword arguments that are arrays of NumPy, which a program takes, and the others, which are fixed in it."""
    moving = {name: x for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    return moving, {name: x for name, x in kwargs.items() if name not in moving}


def graded(arrays, moving, cotangent, **fixed):
    """(output, residual, weights, gradients) of a call; None for residual or weights that it does not return."""

    def attend(arrays):
        kwargs = {**moving, **fixed}
        if 'prefix_lengths' in kwargs:
            kwargs['mask'] = Mask(kwargs.get('mask')) & prefix_mask(kwargs.pop('prefix_lengths'))
        results = dot_product_attention(**arrays, **kwargs)
        output, *more = results if isinstance(results, tuple) else (results,)
        return output, [more.pop(0) if fixed.get(name) else None for name in ('return_residual', 'return_weights')]

    output, back, more = jax.vjp(attend, arrays, has_aux=True)
    return output, *more, back(cotangent)[0]


@functools.cache
def _program(function, fixed, alone):
    options = QUICK if alone and jax.default_backend() == 'cpu' else None
    return jax.jit(lambda args, moving: function(*args, **moving, **dict(fixed)), compiler_options=options)


def compiled(function, *args, quick=True, **kwargs):
    """function(*args, **kwargs) as one program, made once for its shapes: arrays move, other keywords are fixed.

    Step by step, each operation of a new shape would be compiled on its own, which takes ten times as long.
    """
    moving = {name: x for name, x in kwargs.items() if isinstance(x, jax.Array)}
    fixed = tuple((name, x) for name, x in kwargs.items() if name not in moving)
    # Inside another transformation a program has no options of its own; and bits of two programs may be compared only
    # where both are compiled in full.
    alone = quick and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, moving)))
    return _program(function, fixed, alone)(args, moving)


def means(attend, T, S, **kwargs):
    """[T], what each query sees of the values 1, 2, ... S at equal weights."""
    value = jnp.arange(1.0, S + 1)[None, :, None, None]
    return attend(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), value, **kwargs)[0, :, 0, 0]


def run(attend, *arrays, weigh=None, quick=True, **kwargs):
    """(output, residual, weights) and the gradients of a weighted sum of the output."""
    return compiled(slopes, weigh, *arrays, attend=attend, quick=quick, **kwargs)


def slopes(weigh, *arrays, attend, **kwargs):
    """`run`, step by step."""

    def loss(arrays):
        output, *more = attend(*arrays, **kwargs, return_residual=True, return_weights=True)
        each = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
        return jnp.sum(output.astype(jnp.float32) * each * (1 if weigh is None else weigh)), (output, *more)

    gradients, results = jax.grad(loss, has_aux=True)(arrays)
    return results, gradients


def same(a, b):
    """Bit-equal trees; NaN is never equal."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert finite(a)


def finite(tree):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))
