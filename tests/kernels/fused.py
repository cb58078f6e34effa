"""Helpers for tests of other libraries' kernels: comparison of a call with the oracle, and texts of programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import dot_product_attention
from tests.kernels import oracle
from tests.kernels.calls import attention_with_gradients, cast_arrays, random_arrays, split_arrays
from tests.kernels.combinations import poison_masked_entries
from tests.quick import QUICK

B, N, K, H, Hv = 2, 4, 2, 12, 20


def array_shapes(T, S, dtype):
    """Return the shapes of query, key and value."""
    return tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in random_inputs(T, S).values())


def random_inputs(T, S, **shapes):
    return random_arrays((B, T, S, N, K, H, Hv), 7, **shapes)


def check_against_oracle(implementation, arrays, kwargs, dtype, float32_names=()):
    """Compare output and gradients with the oracle, with NaN and infinity in the entries that are masked for all.

    Rows that may attend to no key must be exactly zero; returns which rows these are.
    """
    cotangent = np.random.default_rng(8).normal(size=(*arrays['query'].shape[:3], Hv))
    cotangent = jnp.asarray(cotangent, dtype)
    expected = oracle.attention(**cast_arrays(arrays, dtype, float32_names), **kwargs, cotangent=cotangent)
    traced, static = split_arrays(kwargs)
    call = functools.partial(attention_with_gradients, **static, implementation=implementation)
    options = QUICK if jax.default_backend() == 'cpu' else None
    poisoned = cast_arrays(poison_masked_entries(arrays, kwargs), dtype, float32_names)
    output, *_, gradients = results = jax.jit(call, compiler_options=options)(poisoned, traced, cotangent)
    oracle.check_results(*results, expected, poisoned)
    is_empty = ~np.any(expected.weights > 0, axis=-1).swapaxes(1, 2)
    assert not np.any(np.asarray(output)[is_empty]) and not np.any(np.asarray(gradients['query'])[is_empty])
    return is_empty


def attention_of(implementation, **kwargs):
    """Return a function from (query, key, value) to the output."""
    return lambda query, key, value: dot_product_attention(query, key, value, implementation=implementation, **kwargs)


def gradient_of(attend):
    """Return a function from (query, key, value) to the gradients of a weighted sum of the output."""

    def loss(*arrays):
        output = attend(*arrays)
        weights = jnp.cos(jnp.arange(output.shape[1])[None, :, None, None])
        return jnp.sum(output.astype('float32') * weights)

    return jax.grad(loss, argnums=(0, 1, 2))


def exported_program(function, platform, *args, targets=()):
    """Return the text of the function's program for a platform, which this machine need not have.

    targets: the names of the custom calls that the program may contain.
    """
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    return jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*args).mlir_module()


def custom_calls(text):
    """Return the targets of all custom calls of a program, except those that only carry shardings."""
    return [target for target in re.findall(r'custom_call @([\w$.]+)', text) if target != 'Sharding']


def value_shapes(text, dtype=r'\w+'):
    """Return the shapes of all values of a program, or of those whose dtype matches a pattern."""
    return {tuple(map(int, shape.split('x')[:-1])) for shape in re.findall(rf'tensor<((?:\d+x)+){dtype}>', text)}
