"""Dropout of attention weights as a function of their position, so that any block of them can be drawn again."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32


def dropout_seed(rng: PRNGKeyArray | UInt32[Array, '...']) -> UInt32[Array, '2']:
    """Return the seed for `dropout_factors`, two random 32-bit words, from a typed or raw PRNG key."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def dropout_factors(
    seed: UInt32[Array, '2'], rate: float, rows: UInt32[Array, '*rows'], first: int | Int[Array, ''], size: int
) -> Float[Array, '*rows size']:
    """Return the float32 factors of the weights: 0 with probability `rate`, else 1 / (1 - rate).

    The factor for query t and key s in head n of batch row b depends only on the seed, on the row index
    (b N + n) T + t and on s.  So every implementation, block size and pass draws the same factors (threefry 2x32,
    Salmon et al. 2011).

    Args:
      seed: from `dropout_seed`.
      rate: the probability of dropping a weight.
      rows: row indices, of any shape.
      first: the index of the first key; even.
      size: the number of keys.
    """
    # One threefry counter gives two words: one for an even key, one for the odd key after it.
    pair_count = (size + 1) // 2
    shape = (*rows.shape, pair_count)
    row = jax.lax.broadcast_in_dim(rows, shape, tuple(range(rows.ndim)))
    pair = jax.lax.broadcasted_iota(jnp.uint32, shape, rows.ndim) + jnp.uint32(first) // 2
    bits = threefry_2x32((seed[0], seed[1]), jnp.stack([row, pair]))
    bits = jnp.moveaxis(bits, 0, -1).reshape(*rows.shape, 2 * pair_count)[..., :size]
    return jnp.where(bits >= jnp.uint32(round(rate * 2**32)), jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0.0))


def global_row_indices(
    batch_row: int | Int[Array, ''], N: int, T: int, first: int | Int[Array, ''], size: int
) -> UInt32[Array, 'N size']:
    """Return (b N + n) T + t modulo 2^32 for batch row b, its N heads n and `size` queries t from `first` on."""
    heads = jnp.uint32(batch_row) * jnp.uint32(N) + jnp.arange(N, dtype=jnp.uint32)
    return heads[:, None] * jnp.uint32(T) + (jnp.uint32(first) + jnp.arange(size, dtype=jnp.uint32))[None]
