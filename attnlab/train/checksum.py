"""Checksums of arrays, computed where they lie: the same however an array is divided among devices and processes."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def path_string(keys: Any) -> str:
    """Keys, indices and field names alike, since what is on disk has lost the difference."""
    return jax.tree_util.keystr(keys, simple=True, separator='/')


def tree_checksums(tree: Any) -> dict[str, str]:
    """16 hexadecimal digits for every leaf, by its path; of an array that several processes share, all of them call."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get([_of_array(leaf) for _, leaf in leaves])
    return {
        path_string(keys): f'{first:08x}{second:08x}' for (keys, _), (first, second) in zip(leaves, sums, strict=True)
    }


@jax.jit  # one small program for each shape: one for a whole tree of 900 leaves takes 13 s to compile
def _of_array(array: jax.Array) -> jax.Array:
    """The two sums of an array, uint32 [2]."""
    words = _words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        # Not a reshaped range: that would gather an array that is divided among devices.
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride) if size else 0
    # For a given index each is a bijection of the word, so that no change of one word alone can go unseen; addition
    # modulo 2^32 does not ask in which order.
    first = _mixed(words ^ (index * jnp.uint32(0x9E3779B1)))
    second = _mixed(first ^ (index * jnp.uint32(0x85EBCA77) + jnp.uint32(1)))
    add = lambda one, other: (one[0] + other[0], one[1] + other[1])
    # Both in one pass: on two CPU cores 8 ms for 30 million words, as two sums 90 ms.
    return jnp.stack(jax.lax.reduce((first, second), (jnp.uint32(0), jnp.uint32(0)), add, range(words.ndim)))


def _mixed(word: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Appleby, 32 bits): every bit of the word changes about half of the result's."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array as uint32 of its shape, behind which another axis holds the words of what takes several."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    narrow = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, narrow).astype(jnp.uint32)
