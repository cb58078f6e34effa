"""Positions in a model: what is added to embeddings, T5's bias of distances, and those that go on with a cache.

Positions without parameters are functions: `attnlab.kernels.positions`, `attnlab.kernels.rotary`.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from attnlab.kernels.masks import Visibility, causal
from attnlab.kernels.positions import relative_buckets, sinusoidal


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
        table = self.param('table', nn.initializers.normal(0.02), (self.size, self.features), jnp.float32)
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


class AddedPositions(nn.Module):
    """Embeddings with their positions: 'learned' adds a table `positions` of `size` rows, 'sinusoidal' a formula.

    Encodings that act in attention add nothing here.
    """

    kind: str
    size: int

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B T D'], at: Int[Array, '#B T'] | None = None
    ) -> Float[Array, 'B T D']:
        """x [B, T, D] with the codes of positions `at` [B, T], the places in the row if None.

        Raises:
          ValueError: for a kind that is none, and for rows longer than `size` where positions are learned.
        """
        T, D = x.shape[1:]
        match self.kind:
            case 'learned':
                table = LearnedPositions(self.size, D, name='positions')
                return x + (table(T)[None] if at is None else table(at))
            case 'sinusoidal':
                return x + sinusoidal(jnp.arange(T)[None] if at is None else at, D)
            case other if other in ENCODINGS:
                return x
            case other:
                raise ValueError(f'positions is {other!r}; expected one of {", ".join(ENCODINGS)}')


class Past(nn.Module):
    """Positions of new tokens, which continue after the `length` [B] tokens already in the cache."""

    cache_length: int

    @nn.compact
    def __call__(self, real: Bool[Array, 'B T']) -> Visibility:
        """Causality from the positions of real tokens (-1 for padding) to the slots of the cache."""
        length = self.variable('cache', 'length', jnp.zeros, real.shape[:1], jnp.int32)
        at = jnp.where(real, length.value[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, -1)
        length.value = length.value + jnp.sum(real, axis=1, dtype=jnp.int32)
        return causal(at, jnp.arange(self.cache_length)[None])


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
        table = self.param('table', init, (self.buckets, self.heads), jnp.float32)
        bias = jnp.moveaxis(table[found], -1, -3)
        return bias if bias.ndim == 4 else bias[None]


def _check_range(positions: np.ndarray, size: int) -> None:
    """Raises ValueError naming the first position outside 0 .. size - 1."""
    outside = positions[(positions < 0) | (positions >= size)]
    if outside.size:
        raise ValueError(f'position {outside[0]} is outside the position table; expected 0 .. {size - 1}')


ENCODINGS = ('learned', 'sinusoidal', 'rotary', 'alibi', 'relative', 'none')
