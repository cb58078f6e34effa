"""Checksums of arrays, computed on the devices.

They do not depend on how an array is sharded over devices and processes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp


def path_string(keys: Any) -> str:
    """Return the path of a leaf, such as 'params/layer/kernel'.

    Keys, indices and field names look the same in it, because a checkpoint does not keep the difference.
    """
    return jax.tree_util.keystr(keys, simple=True, separator='/')


def tree_checksums(tree: Any) -> dict[str, str]:
    """Return the checksum of every leaf, 16 hexadecimal digits, by its path.

    If processes share an array, all of them must call this function.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get([_array_checksum(leaf) for _, leaf in leaves])
    return {
        path_string(keys): f'{first:08x}{second:08x}' for (keys, _), (first, second) in zip(leaves, sums, strict=True)
    }


@jax.jit  # one small program for each shape: a single program for a tree of 900 leaves takes 13 s to compile
def _array_checksum(array: jax.Array) -> jax.Array:
    """Return the two sums of an array, [2] uint32."""
    words = _to_words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        # Not a reshaped range, for which a sharded array would be gathered.
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride) if size else 0
    # At a given index both functions map words one-to-one, so any change of a single word changes the checksum.
    # Addition modulo 2^32 does not depend on the order of the words.
    first = _mix_bits(words ^ (index * jnp.uint32(0x9E3779B1)))
    second = _mix_bits(first ^ (index * jnp.uint32(0x85EBCA77) + jnp.uint32(1)))
    add_pairs = lambda left, right: (left[0] + right[0], left[1] + right[1])
    # Both sums in one pass: for 30 million words on two CPU cores 8 ms, as two separate sums 90 ms.
    return jnp.stack(jax.lax.reduce((first, second), (jnp.uint32(0), jnp.uint32(0)), add_pairs, range(words.ndim)))


def _mix_bits(word: jax.Array) -> jax.Array:
    """Finalizer of MurmurHash3 (Appleby, 32 bits): each bit of the word changes about half of the result's bits."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _to_words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32 of the same shape, with a last axis added for elements of several words."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    word_dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, word_dtype).astype(jnp.uint32)
