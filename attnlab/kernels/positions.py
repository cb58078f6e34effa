"""Position encodings that are not rotary: sinusoidal encodings, ALiBi slopes, relative position buckets of T5.

Rotary encodings are in `attnlab.kernels.rotary`.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float32, Int, Int32, Real

from attnlab.kernels.masks import widen_integers
from attnlab.kernels.rotary import rotary_frequencies


def sinusoidal_encoding(positions: Real[ArrayLike, '*P'], width: int, base: float = 10000.0) -> Float32[Array, '*P D']:
    """Return sines and cosines of the positions (Vaswani et al. 2017, section 3.5).

    Columns 2i and 2i + 1 are the sine and the cosine of position * base^(-2i / D): interleaved, as in the paper (some
    code has all sines first).  An odd width ends with a sine.  Angles are float32, with the error that
    `attnlab.kernels.rotary.rotary_encoding` states.

    Args:
      positions: [*P] integers or floats, of any size and sign.
      width: D > 0, even or odd.
      base: > 1; the first pair of columns changes by one radian a position, the last almost `base` times slower.

    Returns:
      [*P, D] float32.

    Raises:
      ValueError: if the width is not positive, or the positions are not numbers.
    """
    positions = widen_integers('positions', positions)
    if width < 1:
        raise ValueError(f'width is {width}; expected a positive number of columns')
    if not (jnp.issubdtype(positions.dtype, jnp.integer) or jnp.issubdtype(positions.dtype, jnp.floating)):
        raise ValueError(f'positions have dtype {positions.dtype}; expected integers or floats')
    frequencies = jnp.asarray(rotary_frequencies(width, base), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, 2 * frequencies.size)[..., :width]


def sinusoidal_encoding_2d(rows: int, columns: int, width: int, base: float = 10000.0) -> Float32[Array, 'tokens D']:
    """Return encodings of a grid: the first half of the columns encodes the row, the second half the column.

    The numbers are those of MoCo v3 (Chen, Xie and He 2021), whose code puts the column before the row and, within
    a half, all sines before all cosines.

    Args:
      rows, columns: the size of the grid.
      width: D, a multiple of 4.
      base: as in `sinusoidal_encoding`.

    Returns:
      [rows * columns, D] float32, row-major: token t is in row t // columns, column t % columns.

    Raises:
      ValueError: if the width is not a positive multiple of 4.
    """
    if width < 1 or width % 4:
        raise ValueError(f'width is {width}; expected a positive multiple of 4, pairs of columns for rows and columns')
    row = sinusoidal_encoding(jnp.arange(rows), width // 2, base)
    column = sinusoidal_encoding(jnp.arange(columns), width // 2, base)
    shape = (rows, columns, width // 2)
    grid = jnp.concatenate([jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)], axis=-1)
    return grid.reshape(rows * columns, width)


def alibi_slopes(heads: int) -> Float32[Array, ' N']:
    """Return the slope of each head's linear bias (Press et al. 2022), for `alibi_slopes` of `dot_product_attention`.

    A power of two N has 2^(-8n / N), n = 1 .. N.  Another N takes the slopes of the power of two P below it, then
    every second slope of 2P, from the first on, as the paper's code does.

    Raises:
      ValueError: for fewer than one head.
    """
    if heads < 1:
        raise ValueError(f'heads is {heads}; expected a positive number')
    below = 2 ** (int(heads).bit_length() - 1)
    slopes = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    slopes += [2.0 ** (-8.0 * n / (2 * below)) for n in range(1, 2 * (heads - below), 2)]
    return jnp.asarray(slopes, jnp.float32)


def relative_position_buckets(
    query_positions: Int[ArrayLike, '*#B T'],
    key_positions: Int[ArrayLike, '*#B S'],
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool,
) -> Int32[Array, '*B T S']:
    """Return the bucket of each pair's distance (Raffel et al. 2020, section 2.1, as in the T5 code).

    Half of the buckets hold one distance each, 0, 1, 2 ..; the others grow geometrically up to `max_distance`, and
    the last holds all larger distances.  The bounds are computed in integers, so they do not depend on a device's
    logarithm.

    Args:
      query_positions, key_positions: [T] and [S], or [B, T] and [B, S], signed integers.
      buckets: the number of buckets.
      max_distance: the distance at which the geometric growth ends.
      bidirectional: the upper half of the buckets is for keys after the query; the first of these, for distance 0,
        stays empty, as in T5.  Otherwise keys after the query share bucket 0 with the query's own position, because
        causal attention masks them.

    Returns:
      [T, S] or [B, T, S] int32 in 0 .. buckets - 1.

    Raises:
      ValueError: if shapes or dtypes do not fit, or there are too few buckets or distances; the message has the value
        and what is expected.
    """
    queries = widen_integers('query_positions', query_positions)
    keys = widen_integers('key_positions', key_positions)
    for name, x in (('query_positions', queries), ('key_positions', keys)):
        if not jnp.issubdtype(x.dtype, jnp.signedinteger):
            raise ValueError(f'{name} has dtype {x.dtype}; expected signed integers')
    if not queries.ndim == keys.ndim > 0:
        raise ValueError(
            f'query_positions and key_positions have shapes {queries.shape}, {keys.shape}; expected [T] and [S], '
            'or [B, T] and [B, S]'
        )
    _check_buckets(buckets, max_distance, bidirectional)
    offset = queries[..., :, None] - keys[..., None, :]
    buckets_per_side = buckets // 2 if bidirectional else buckets
    distance = jnp.clip(jnp.abs(offset) if bidirectional else offset, 0, max_distance)
    # Python integers, because the powers in the table would overflow NumPy's.
    bucket = jnp.asarray(_bucket_of_distance(int(buckets_per_side), int(max_distance)))[distance]
    return jnp.where(offset < 0, bucket + buckets_per_side, bucket) if bidirectional else bucket


@functools.cache
def _bucket_of_distance(buckets: int, max_distance: int) -> Int32[np.ndarray, ' distances']:
    """Return the bucket of each distance on one side, [max_distance + 1]; the last is that of all larger distances.

    Bucket exact + k starts where steps * log(distance / exact) / log(max_distance / exact) reaches k.
    """
    exact = buckets // 2
    steps = buckets - exact
    table, k = list(range(exact)), 0
    for distance in range(exact, max_distance + 1):
        while distance**steps * exact ** (k + 1) >= max_distance ** (k + 1) * exact**steps:
            k += 1
        table.append(min(exact + k, buckets - 1))
    return np.asarray(table, np.int32)


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise ValueError unless each side has a bucket for 0 and one more, and max_distance exceeds the exact ones."""
    if buckets < (4 if bidirectional else 2) or (bidirectional and buckets % 2):
        expected = 'an even number >= 4, half for each side' if bidirectional else 'at least 2'
        raise ValueError(f'buckets is {buckets}; expected {expected}')
    exact = buckets // (4 if bidirectional else 2)
    if max_distance <= exact:
        raise ValueError(f'max_distance is {max_distance}; expected more than {exact}, the number of exact buckets')
