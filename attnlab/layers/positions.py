"""Learned positions: a row of a table each, and T5's bias of distances.

Positions without parameters are functions: `attnlab.kernels.positions`, `attnlab.kernels.rotary`.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int

from attnlab.kernels.positions import relative_buckets


class LearnedPositions(nn.Module):
    """A table [size, D], one learned row a position (Gehring et al. 2017; Devlin et al. 2019; Dosovitskiy et al. 2021).

    For a grid of rows x columns tokens, size is rows * columns and token t, in row t // columns and column
    t % columns, takes row t of the table.
    """

    size: int
    features: int

    @nn.compact
    def __call__(self, positions: int | Int[ArrayLike, '*P']) -> Float[Array, '*P D']:
        """The rows of these positions [*P, D]; a Python number T stands for 0, 1, .. T - 1.

        A position that is known while tracing is checked here.  One that comes as an argument of a compiled function
        is not: whoever makes the positions (the batches, the decoder's loop) checks them against `size`.  Should one
        slip through, its row is NaN, so that the loss tells, and neither the nearest row nor, for -1, the last one.

        Raises:
          ValueError: for a length or a position outside the table, naming it and the table's size.
        """
        table = self.param('table', nn.initializers.normal(0.02), (self.size, self.features))
        if isinstance(positions, int):
            if not 0 <= positions <= self.size:
                raise ValueError(f'length is {positions}; expected at most {self.size}, the rows of the position table')
            return table[:positions]
        if not isinstance(positions, Tracer):
            positions = np.asarray(positions)
            _check_range(positions, self.size)
        positions = jnp.asarray(positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f'positions have dtype {positions.dtype}; expected integers')
        return table.at[positions].get(mode='fill', fill_value=jnp.nan, wrap_negative_indices=False)


class RelativeBias(nn.Module):
    """One learned number a head and bucket of distances (Raffel et al. 2020, section 2.1), to be `bias` of attention.

    It is an array of T S N numbers: ALiBi or rotary positions take no such memory.
    """

    heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    @nn.compact
    def __call__(
        self, query_positions: Int[ArrayLike, '*#B T'], key_positions: Int[ArrayLike, '*#B S']
    ) -> Float[Array, 'b N T S']:
        """Positions [T] and [S] give [1, N, T, S], positions [B, T] and [B, S] give [B, N, T, S]."""
        found = relative_buckets(
            query_positions, key_positions,
            buckets=self.buckets, max_distance=self.max_distance, bidirectional=self.bidirectional,
        )  # fmt: skip
        init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        table = self.param('table', init, (self.buckets, self.heads))
        bias = jnp.moveaxis(table[found], -1, -3)
        return bias if bias.ndim == 4 else bias[None]


def _check_range(positions: np.ndarray, size: int) -> None:
    """Raises ValueError naming the first position outside 0 .. size - 1."""
    outside = positions[(positions < 0) | (positions >= size)]
    if outside.size:
        raise ValueError(f'position {outside[0]} is outside the position table; expected 0 .. {size - 1}')
