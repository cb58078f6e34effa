"""Position encodings: one class each, in a table at the end, for text and for images.

To add an encoding, write a subclass of `PositionEncoding` and add it to `ENCODINGS`: its name becomes a value of the
config field `positions`, and every model that has positions takes it. The functions behind them, which have no
parameters, are in `attnlab.kernels.positions` and `attnlab.kernels.rotary`.
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
"""(rows, columns) of the tokens of an image, which are in row-major order."""

Positions = Int[ArrayLike, '*#B T']


@dataclasses.dataclass(frozen=True)
class PositionEncoding:
    """The interface of position encodings, with methods that do nothing.

    The methods are called inside of a Flax module (`nn.compact`); parameters of the encoding become parameters of that
    module. Positions of None stand for 0, 1, .. T - 1.

    grid: None for text. For an image, the last rows * columns tokens are those of the grid; the tokens before them,
      such as a class token, have no place in it.
    """

    supports_images: ClassVar[bool] = False
    """Whether there is a form for images."""

    acts_in_attention: ClassVar[bool] = False
    """Whether the encoding acts in attention, so that other mixers cannot have it."""

    grid: Grid | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> 'PositionEncoding':
        """The encoding with the hyperparameters of a config."""
        return cls(grid=grid)

    @property
    def longest(self) -> int | None:
        """The most positions that a text may have; None: no limit."""
        return None

    def codes(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        """What is added to the embeddings x; None: nothing.

        prefix: number of tokens in front of x that are added to as well; the codes then have prefix + T rows.
        """
        return None

    def rotate(self, x: Float[Array, 'B T N H'], positions: Positions | None = None) -> Float[Array, 'B T N H']:
        """Queries or keys x, changed by their positions."""
        return x

    def bias(
        self,
        heads: int,
        lengths: tuple[int, int],
        positions: tuple[Positions | None, Int[ArrayLike, '*#B S'] | None],
        bidirectional: bool,
    ) -> Float[Array, 'b N T S'] | None:
        """A learned bias of the attention logits; None: no bias.

        lengths, positions: (T, S), and the positions of (queries, keys).  bidirectional: whether keys may stand after
        the query.
        """
        return None

    def slopes(self, heads: int) -> Float[Array, ' N'] | None:
        """The slope of each head, by which attention logits fall with the distance; None: no such bias."""
        return None


class NoEncoding(PositionEncoding):
    """No positions: the order of tokens shows in a causal mask alone, and on a grid not at all."""

    supports_images = True


@dataclasses.dataclass(frozen=True)
class LearnedEncoding(PositionEncoding):
    """A table of codes that are added to the embeddings.

    size: rows of the table; with a grid it has one for each token.
    """

    supports_images = True

    size: int = 0

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> PositionEncoding:
        return cls(config.context if isinstance(config, TextConfig) else 0, grid=grid)

    @property
    def longest(self) -> int | None:
        return None if self.grid else self.size

    def codes(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        length, D = prefix + x.shape[1], x.shape[2]
        table = PositionTable(length if self.grid else self.size, D, name='positions')
        return table(length)[None] if positions is None else table(positions)


@dataclasses.dataclass(frozen=True)
class SinusoidalEncoding(PositionEncoding):
    """Sines and cosines that are added to the embeddings (Vaswani et al. 2017); half of them for rows on a grid."""

    supports_images = True

    def codes(
        self, x: Float[Array, 'B T D'], positions: Positions | None = None, prefix: int = 0
    ) -> Float[Array, '#B length D'] | None:
        T, D = x.shape[1:]
        if self.grid is None:
            return sinusoidal_encoding(jnp.arange(T)[None] if positions is None else positions, D)
        codes = sinusoidal_encoding_2d(*self.grid, D).astype(x.dtype)
        return jnp.concatenate([jnp.zeros((prefix, D), x.dtype), codes])[None]


@dataclasses.dataclass(frozen=True)
class RotaryEncoding(PositionEncoding):
    """Queries and keys turn by their positions (Su et al. 2021); on a grid, half of the channels turn by the row.

    The fields are those of `attnlab.kernels.rotary.rotary_encoding`; on a grid, `rotary_2d` has a base and a layout alone.
    """

    supports_images = True
    acts_in_attention = True

    base: float = 10000.0
    layout: RotaryLayout = 'half'
    fraction: float = 1.0
    scaling: RotaryScaling | None = None

    @classmethod
    def from_config(cls, config: BlockConfig, grid: Grid | None) -> PositionEncoding:
        return cls(config.rotary_base, grid=grid)

    def rotate(self, x: Float[Array, 'B T N H'], positions: Positions | None = None) -> Float[Array, 'B T N H']:
        if self.grid is None:
            positions = jnp.arange(x.shape[1]) if positions is None else positions
            return rotary_encoding(
                x, positions, base=self.base, layout=self.layout, fraction=self.fraction, scaling=self.scaling
            )
        rows, columns = self.grid
        prefix = x.shape[1] - rows * columns
        turned = rotary_encoding_2d(x[:, prefix:], rows, columns, base=self.base, layout=self.layout)
        return jnp.concatenate([x[:, :prefix], turned], axis=1) if prefix else turned


@dataclasses.dataclass(frozen=True)
class AlibiEncoding(PositionEncoding):
    """Attention logits that fall linearly with the distance, by a slope for each head (Press et al. 2022)."""

    acts_in_attention = True

    def slopes(self, heads: int) -> Float[Array, ' N'] | None:
        return alibi_slopes(heads)


@dataclasses.dataclass(frozen=True)
class RelativeEncoding(PositionEncoding):
    """A learned bias of the distance (Raffel et al. 2020): a table `relative_bias` in each layer, where they share one.

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
        queries, keys = (
            jnp.arange(length)[None] if at is None else at for length, at in zip(lengths, positions, strict=True)
        )
        bias = RelativePositionBias(heads, self.buckets, self.max_distance, bidirectional, name='relative_bias')
        return bias(queries, keys)


class AddPositionEmbeddings(nn.Module):
    """Embeddings plus the codes of an encoding; parameters of the encoding are those of this module."""

    encoding: PositionEncoding

    @nn.compact
    def __call__(self, x: Float[Array, 'B T D'], positions: Positions | None = None) -> Float[Array, 'B T D']:
        codes = self.encoding.codes(x, positions)
        return x if codes is None else x + codes


class PositionTable(nn.Module):
    """A table [size, D], one learned row a position (Gehring et al. 2017; Devlin et al. 2019; Dosovitskiy et al. 2021).

    For a grid of rows x columns tokens, size is rows * columns and token t, in row t // columns and column
    t % columns, takes row t of the table.
    """

    size: int
    features: int

    @nn.compact
    def __call__(self, positions: int | Int[ArrayLike, '*P']) -> Float[Array, '*P D']:
        """The rows of these positions [*P, D]; a Python number T stands for 0, 1, .. T - 1.

        A position whose value is known while tracing is checked here.  One that is an argument of a compiled function
        cannot be: the code that makes positions (batches, the decoding loop) checks them against `size`.  A position
        outside the table gives NaN, which shows in the loss, and not the nearest row or, for -1, the last one.

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


class RelativePositionBias(nn.Module):
    """One learned number a head and bucket of distances (Raffel et al. 2020, section 2.1), as the bias of attention.

    It is an array of T S N numbers; ALiBi and rotary positions take no such memory.
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
        bucket = relative_position_buckets(
            query_positions, key_positions,
            buckets=self.buckets, max_distance=self.max_distance, bidirectional=self.bidirectional,
        )  # fmt: skip
        init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        table = self.param('table', init, (self.buckets, self.heads), jnp.float32)
        bias = jnp.moveaxis(table[bucket], -1, -3)
        return bias if bias.ndim == 4 else bias[None]


def _check_range(positions: np.ndarray, size: int) -> None:
    """Raises ValueError naming the first position outside 0 .. size - 1."""
    outside = positions[(positions < 0) | (positions >= size)]
    if outside.size:
        raise ValueError(f'position {outside[0]} is outside the position table; expected 0 .. {size - 1}')


class CachePositions(nn.Module):
    """Positions of new tokens, which continue after the `length` [B] tokens already in the cache."""

    cache_length: int

    @nn.compact
    def __call__(self, token_mask: Bool[Array, 'B T']) -> Mask:
        """A causal mask from the positions of real tokens (-1 for padding) to the slots of the cache."""
        length = self.variable('cache', 'length', jnp.zeros, token_mask.shape[:1], jnp.int32)
        after = length.value[:, None] + jnp.cumsum(token_mask, axis=1, dtype=jnp.int32)
        positions = jnp.where(token_mask, after - 1, -1)
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
"""Encodings by the value of the config field `positions`."""


def make_position_encoding(config: BlockConfig, grid: Grid | None = None) -> PositionEncoding:
    """The encoding that a config names, for the tokens of a text or of an image.

    Raises ValueError for a name that is not in `ENCODINGS`, for an encoding that has no form for images, and for one
    that acts in attention where the config has another mixer.
    """
    encoding = ENCODINGS.get(config.positions)
    if encoding is None or grid and not encoding.supports_images:
        allowed = [repr(name) for name, one in ENCODINGS.items() if one.supports_images or not grid]
        where = ' for the tokens of an image' if grid else ''
        raise ValueError(f'positions is {config.positions!r}; expected {", ".join(allowed)}{where}')
    if encoding.acts_in_attention and config.mixer != 'attention':
        raise ValueError(f'positions is {config.positions!r}, which acts in attention, but mixer is {config.mixer!r}')
    return encoding.from_config(config, grid)
