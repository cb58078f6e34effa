"""Dropout of attention weights as a function of where they stand, so that any block of them can be drawn again."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32


def dropout_seed(rng: PRNGKeyArray | UInt32[Array, '...']) -> UInt32[Array, '2']:
    """Two words of any kind of key; `dropout_factors` counts from them."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def dropout_factors(
    words: UInt32[Array, '2'], rate: float, rows: UInt32[Array, '*rows'], first: int | Int[Array, ''], size: int
) -> Float[Array, '*rows size']:
    """What dropout multiplies weights by: 0 with probability `rate`, else 1 / (1 - rate), in float32.

    The weight of query t and key s in head n of batch row b depends on `words`, its row number (b N + n) T + t and s
    alone: every implementation, block size and pass draws the same (threefry 2x32, Salmon et al. 2011).

    rows: row numbers, of any shape.  first: the first key, even.  size: how many keys.
    """
    # One draw of threefry gives two words: those of an even key and of the odd one after it.
    pairs = (size + 1) // 2
    shape = (*rows.shape, pairs)
    row = jax.lax.broadcast_in_dim(rows, shape, tuple(range(rows.ndim)))
    pair = jax.lax.broadcasted_iota(jnp.uint32, shape, rows.ndim) + jnp.uint32(first) // 2
    drawn = threefry_2x32((words[0], words[1]), jnp.stack([row, pair]))
    drawn = jnp.moveaxis(drawn, 0, -1).reshape(*rows.shape, 2 * pairs)[..., :size]
    return jnp.where(drawn >= jnp.uint32(round(rate * 2**32)), jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0.0))


def global_row_indices(
    rows: int | Int[Array, ''], N: int, T: int, first: int | Int[Array, ''], size: int
) -> UInt32[Array, 'N size']:
    """(b N + n) T + t modulo 2^32, for the batch row b = `rows`, its N heads and `size` queries from `first` on."""
    heads = jnp.uint32(rows) * jnp.uint32(N) + jnp.arange(N, dtype=jnp.uint32)
    return heads[:, None] * jnp.uint32(T) + (jnp.uint32(first) + jnp.arange(size, dtype=jnp.uint32))[None]
