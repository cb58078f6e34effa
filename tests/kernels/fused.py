"""What the tests of kernels from other libraries share: a call held against the oracle, and a program's text."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import dot_product_attention
from tests.kernels import oracle
from tests.kernels.calls import drawn, graded, rounded, split
from tests.kernels.combinations import spoil
from tests.quick import QUICK

B, N, K, H, Hv = 2, 4, 2, 12, 20


def shapes(T, S, dtype):
    """Of query, key and value, as structures."""
    return tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs(T, S).values())


def inputs(T, S, **more):
    return drawn((B, T, S, N, K, H, Hv), 7, **more)


def hold(implementation, arrays, kwargs, dtype, wide=()):
    """Output and gradients against the oracle, with NaN and infinity in the slots that nobody sees.

    Rows that see nothing are zero to the bit, and returned.  `wide` names arrays that stay float32.
    """
    cotangent = jnp.asarray(np.random.default_rng(8).normal(size=(*arrays['query'].shape[:3], Hv)), dtype)
    judged = oracle.attention(**rounded(arrays, dtype, wide), **kwargs, cotangent=cotangent)
    moving, fixed = split(kwargs)
    call = functools.partial(graded, **fixed, implementation=implementation)
    options = QUICK if jax.default_backend() == 'cpu' else None
    given = rounded(spoil(arrays, kwargs), dtype, wide)
    output, *_, gradients = results = jax.jit(call, compiler_options=options)(given, moving, cotangent)
    oracle.hold(*results, judged, given)
    empty = ~np.any(judged.weights > 0, axis=-1).swapaxes(1, 2)
    assert not np.any(np.asarray(output)[empty]) and not np.any(np.asarray(gradients['query'])[empty])
    return empty


def forward(implementation, **kwargs):
    """(query, key, value) to the output."""
    return lambda query, key, value: dot_product_attention(query, key, value, implementation=implementation, **kwargs)


def gradient(attend):
    """(query, key, value) to the gradients of a weighted sum of the output."""
    weigh = lambda output: jnp.sum(output.astype('float32') * jnp.cos(jnp.arange(output.shape[1])[None, :, None, None]))
    return jax.grad(lambda *arrays: weigh(attend(*arrays)), argnums=(0, 1, 2))


def program(function, platform, *args, targets=()):
    """The text of the function's program for a platform, which need not be there; `targets` names its custom calls."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    return jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*args).mlir_module()


def calls(text):
    """The targets of all custom calls of a program, but for those that only carry shardings."""
    return [target for target in re.findall(r'custom_call @([\w$.]+)', text) if target != 'Sharding']


def sizes(text, dtype=r'\w+'):
    """The shapes of all values of a program, or of those whose dtype it calls so."""
    return {tuple(map(int, found.split('x')[:-1])) for found in re.findall(rf'tensor<((?:\d+x)+){dtype}>', text)}
