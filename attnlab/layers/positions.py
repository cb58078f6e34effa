"""Position encodings for text and images: one class for each, and a table of them, `ENCODINGS`, at the end.

To add an encoding, write a subclass of `PositionEncoding` and add it to `ENCODINGS`.  Its name is then a value of the
config field `positions`, and every model with positions supports it.  The functions without parameters that the
encodings use are in `attnlab.kernels.positions` and `attnlab.kernels.rotary`.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from attnlab.configs.block import BlockConfig, TextConfig
from attnlab.kernels.masks import Mask, causal_mask
from attnlab.kernels.positions import (
    alibi_slopes,
    relative_position_buckets,
    sinusoidal_encoding,
    sinusoidal_encoding_2d,
)
from attnlab.kernels.rotary import RotaryLayout, RotaryScaling, rotary_encoding, rotary_encoding_2d

Grid = tuple[int, int]
"""(rows, columns) of the tokens of an image; tokens are in row-major order."""

Positions = Int[ArrayLike, '*#B T']
"""The position of each token, [B, T], [1, T] or [T]."""


def positions_or_indices(positions: Positions | None, length: int) -> Positions:
    """Return `positions`, or the token indices 0, 1, .. length - 1 as [1, length] if they are None."""
    return jnp.arange(length)[None] if positions is None else positions


@dataclasses.dataclass(frozen=True)
class PositionEncoding:
    """The interface of position encodings.  The methods of this base class do nothing.

    The methods are called in a Flax module (`nn.compact`), and the parameters of the encoding become parameters of that
    module.  Positions of None stand for the token indices 0, 1, .. T - 1.

    grid: (rows, columns) of the tokens of an image; None for text.  The grid is the last rows * columns tokens; the
      tokens before it, such as a class token, have no place in it.
    """

    supports_images: ClassVar[bool] = False
    """Whether the encoding has a form for images."""

    acts_in_attention: ClassVar[bool] = False
    """Whether the encoding acts in attention, and so needs the mixer 'attention'."""

    grid: Grid | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> 'PositionEncoding':
        """Return the encoding with the hyperparameters of a config."""
        return cls(grid=grid)

    @property
    def max_length(self) -> int | None:
        """Maximum number of positions in a text; None: no limit."""
        return None

    def position_embeddings(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        """Return the array to add to the token embeddings x; None: nothing is added.

        prefix: number of tokens before x that also get position embeddings; the result has prefix + T rows.
        """
        return None

    def rotate(self, x: Float[Array, 'B T N H'], positions: Positions | None = None) -> Float[Array, 'B T N H']:
        """Return queries or keys x [B, T, N, H], transformed by their positions."""
        return x

    def bias(
        self,
        heads: int,
        lengths: tuple[int, int],
        positions: tuple[Positions | None, Int[ArrayLike, '*#B S'] | None],
        bidirectional: bool,
    ) -> Float[Array, 'b N T S'] | None:
        """Return the bias of the attention logits, [1, N, T, S] or [B, N, T, S]; None: no bias.

        Args:
          heads: N.
          lengths: (T, S).
          positions: the positions of queries [B, T] and of keys [B, S].
          bidirectional: whether queries attend to later keys.
        """
        return None

    def alibi_slopes(self, heads: int) -> Float[Array, ' N'] | None:
        """Return the slope [N] at which each head's logits decrease with the distance; None: no such bias."""
        return None


class NoEncoding(PositionEncoding):
    """No positions: only a causal mask distinguishes the order of tokens; on a grid nothing does."""

    supports_images = True


@dataclasses.dataclass(frozen=True)
class LearnedEncoding(PositionEncoding):
    """A learned table of position embeddings.

    size: the number of rows of the table; with a grid the table has one row for each token instead.
    """

    supports_images = True

    size: int = 0

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> PositionEncoding:
        """Return the encoding; the size of the table is the `context` of a model of text."""
        return cls(config.context if isinstance(config, TextConfig) else 0, grid=grid)

    @property
    def max_length(self) -> int | None:
        """The size of the table; None on a grid."""
        return None if self.grid else self.size

    def position_embeddings(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        """Return the rows of the table for the positions."""
        length, D = prefix + x.shape[1], x.shape[2]
        table = PositionTable(length if self.grid else self.size, D, name='positions')
        return table(length)[None] if positions is None else table(positions)


@dataclasses.dataclass(frozen=True)
class SinusoidalEncoding(PositionEncoding):
    """Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017).

    On a grid, half of the channels encode the row and half the column.
    """

    supports_images = True

    def position_embeddings(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        """Return the sines and cosines; on a grid, zeros for the prefix."""
        T, D = x.shape[1:]
        if self.grid is None:
            return sinusoidal_encoding(positions_or_indices(positions, T), D)
        codes = sinusoidal_encoding_2d(*self.grid, D).astype(x.dtype)
        return jnp.concatenate([jnp.zeros((prefix, D), x.dtype), codes])[None]


@dataclasses.dataclass(frozen=True)
class RotaryEncoding(PositionEncoding):
    """Rotation of queries and keys by their positions (Su et al. 2021).

    On a grid, half of the channels rotate by the row and half by the column.

    The fields are the arguments of `attnlab.kernels.rotary.rotary_encoding`.  On a grid, only `base` and `layout` are
    used, the arguments of `rotary_encoding_2d`.
    """

    supports_images = True
    acts_in_attention = True

    base: float = 10000.0
    layout: RotaryLayout = 'half'
    fraction: float = 1.0
    scaling: RotaryScaling | None = None

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> PositionEncoding:
        """Return the encoding with the `rotary_base` of a config."""
        return cls(config.rotary_base, grid=grid)

    def rotate(self, x: Float[Array, 'B T N H'], positions: Positions | None = None) -> Float[Array, 'B T N H']:
        """Return the rotated queries or keys; tokens before a grid are not rotated."""
        if self.grid is None:
            positions = jnp.arange(x.shape[1]) if positions is None else positions
            return rotary_encoding(
                x, positions, base=self.base, layout=self.layout, fraction=self.fraction, scaling=self.scaling
            )
        rows, columns = self.grid
        prefix = x.shape[1] - rows * columns
        rotated = rotary_encoding_2d(x[:, prefix:], rows, columns, base=self.base, layout=self.layout)
        return jnp.concatenate([x[:, :prefix], rotated], axis=1) if prefix else rotated


@dataclasses.dataclass(frozen=True)
class AlibiEncoding(PositionEncoding):
    """ALiBi: attention logits decrease linearly with the distance, at a fixed slope per head (Press et al. 2022)."""

    acts_in_attention = True

    def alibi_slopes(self, heads: int) -> Float[Array, ' N'] | None:
        """Return the slope of each head [N]."""
        return alibi_slopes(heads)


@dataclasses.dataclass(frozen=True)
class RelativeEncoding(PositionEncoding):
    """A learned bias for each distance bucket and head (Raffel et al. 2020).

    Each layer has a table `relative_bias` of its own; the paper shares one between all layers.

    buckets, max_distance: as in `attnlab.kernels.positions.relative_position_buckets`.
    """

    acts_in_attention = True

    buckets: int = 32
    max_distance: int = 128

    def bias(
        self,
        heads: int,
        lengths: tuple[int, int],
        positions: tuple[Positions | None, Int[ArrayLike, '*#B S'] | None],
        bidirectional: bool,
    ) -> Float[Array, 'b N T S'] | None:
        """Return the bias of the attention logits."""
        query_positions, key_positions = map(positions_or_indices, positions, lengths)
        bias = RelativePositionBias(heads, self.buckets, self.max_distance, bidirectional, name='relative_bias')
        return bias(query_positions, key_positions)


class AddPositionEmbeddings(nn.Module):
    """Adds the position embeddings of an encoding, whose parameters become parameters of this module."""

    encoding: PositionEncoding

    @nn.compact
    def __call__(self, x: Float[Array, 'B T D'], positions: Positions | None = None) -> Float[Array, 'B T D']:
        """Return the token embeddings x [B, T, D] with the position embeddings added, if the encoding has any."""
        embeddings = self.encoding.position_embeddings(x, positions)
        return x if embeddings is None else x + embeddings


class PositionTable(nn.Module):
    """A table [size, D] with one learned row for each position.

    Sources: Gehring et al. 2017; Devlin et al. 2019; Dosovitskiy et al. 2021.

    For a grid of rows x columns tokens, size is rows * columns: token t, in row t // columns and column t % columns,
    has row t of the table.
    """

    size: int
    features: int

    @nn.compact
    def __call__(self, positions: int | Int[ArrayLike, '*P']) -> Float[Array, '*P D']:
        """Return the rows of the positions [*P, D]; a Python int T stands for the positions 0, 1, .. T - 1.

        Positions that are known while tracing are checked here.  Traced positions cannot be: the code that makes them
        (batches, the decoding loop) checks them against `size`.  A traced position outside the table gives NaN, which
        shows in the loss; JAX's default would give the nearest row, or the last one for -1.

        Raises:
          ValueError: if a length or a known position is outside the table, or the positions are not integers.
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


class RelativePositionBias(nn.Module):
    """A learned attention bias for each distance bucket and head (Raffel et al. 2020, section 2.1).

    The bias is an array of T * S * N numbers.  ALiBi and rotary positions need no array of that size.
    """

    heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    @nn.compact
    def __call__(
        self, query_positions: Int[ArrayLike, '*#B T'], key_positions: Int[ArrayLike, '*#B S']
    ) -> Float[Array, 'b N T S']:
        """Return the bias: [1, N, T, S] for positions [T] and [S], [B, N, T, S] for positions [B, T] and [B, S]."""
        bucket = relative_position_buckets(
            query_positions, key_positions,
            buckets=self.buckets, max_distance=self.max_distance, bidirectional=self.bidirectional,
        )  # fmt: skip
        init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        table = self.param('table', init, (self.buckets, self.heads), jnp.float32)
        bias = jnp.moveaxis(table[bucket], -1, -3)
        return bias if bias.ndim == 4 else bias[None]


def _check_range(positions: np.ndarray, size: int) -> None:
    """Raise ValueError if a position is outside 0 .. size - 1, with the first such position."""
    outside = positions[(positions < 0) | (positions >= size)]
    if outside.size:
        raise ValueError(f'position {outside[0]} is outside the position table; expected 0 .. {size - 1}')


class CachePositions(nn.Module):
    """Positions of new tokens, which continue after the `length` [B] tokens already in the cache.

    cache_length: the number of tokens that the cache can hold.
    """

    cache_length: int

    @nn.compact
    def __call__(self, token_mask: Bool[Array, 'B T']) -> Mask:
        """Return a causal mask from new tokens to the tokens in the cache, and add the new tokens to `length`.

        The query positions [B, T] of the mask are those of the real tokens, and -1 for padding.
        """
        length = self.variable('cache', 'length', jnp.zeros, token_mask.shape[:1], jnp.int32)
        new_lengths = length.value[:, None] + jnp.cumsum(token_mask, axis=1, dtype=jnp.int32)
        positions = jnp.where(token_mask, new_lengths - 1, -1)
        length.value = length.value + jnp.sum(token_mask, axis=1, dtype=jnp.int32)
        return causal_mask(positions, jnp.arange(self.cache_length)[None])


ENCODINGS: dict[str, type[PositionEncoding]] = {
    'learned': LearnedEncoding,
    'sinusoidal': SinusoidalEncoding,
    'rotary': RotaryEncoding,
    'alibi': AlibiEncoding,
    'relative': RelativeEncoding,
    'none': NoEncoding,
}
"""Position encodings by the value of the config field `positions`."""


def make_position_encoding(config: BlockConfig, grid: Grid | None = None) -> PositionEncoding:
    """Return the encoding that `config.positions` names, for text, or for the `grid` of an image.

    Raises:
      ValueError: if the name is not in `ENCODINGS`, the encoding has no form for images, or the encoding acts in
        attention and the config has another mixer.
    """
    encoding = ENCODINGS.get(config.positions)
    if encoding is None or grid and not encoding.supports_images:
        allowed = [repr(name) for name, cls in ENCODINGS.items() if cls.supports_images or not grid]
        purpose = ' for the tokens of an image' if grid else ''
        raise ValueError(f'positions is {config.positions!r}; expected {", ".join(allowed)}{purpose}')
    if encoding.acts_in_attention and config.mixer != 'attention':
        raise ValueError(f'positions is {config.positions!r}, which acts in attention, but mixer is {config.mixer!r}')
    return encoding.from_config(config, grid)
