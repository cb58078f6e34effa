"""Rotary position encoding (Su et al. 2021): pairs of channels are rotated by an angle proportional to the position.

The product of a rotated query and a rotated key depends on their positions only through the difference of the two.

Two layouts are in use, and weights trained with one are wrong with the other.  `half` pairs channel i with channel
i + R / 2 (GPT-NeoX, Llama as `transformers` stores it, and most code since); `interleaved` pairs 2i with 2i + 1 (the
paper, GPT-J, Llama as Meta published it).  Channel c of `half` is channel 2c (c < R / 2) or 2c - R + 1 of
`interleaved`.  Queries and keys take the same layout, whatever the number of their heads.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float64, Real

from attnlab.kernels.masks import widen_integers

RotaryLayout = Literal['half', 'interleaved']

# These are dataclasses because named tuples of different types are equal if their numbers are, and `jit` would reuse
# the program of one type for the other.


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): divides positions by `factor`, so all pairs rotate slower."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling (bloc97 2023): multiplies the base by factor^(R / (R - 2)).

    The first pair keeps its frequency and the last pair rotates `factor` times slower.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class YaRNScaling:
    """YaRN (Peng et al. 2023): fast pairs keep their frequency, slow pairs are interpolated, with a ramp between.

    Over `original_length` positions, those of the training, each pair makes some number of turns.  From beta_fast turns
    on it keeps its frequency; up to beta_slow turns the frequency is divided by `factor`.  The ramp between is linear
    in the index of the pair, its ends rounded outwards to whole pairs, as in the code that the authors published and
    the checkpoints were trained with; the formula in the paper is linear in the turns.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if self.original_length < 1:
            raise ValueError(f'original_length is {self.original_length}; expected a positive number of positions')
        if not 0.0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f'beta_slow is {self.beta_slow}, beta_fast {self.beta_fast}; expected 0 < beta_slow < beta_fast'
            )

    @property
    def magnitude(self) -> float:
        """The factor of rotated channels, 0.1 ln(factor) + 1 (section 3.4); logits grow by its square."""
        return 0.1 * math.log(self.factor) + 1.0


RotaryScaling = LinearScaling | NTKScaling | YaRNScaling


def rotary_frequencies(
    width: int, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> Float64[np.ndarray, ' pairs']:
    """Return the radians per position of each pair of channels, base^(-2i / width).

    They are computed in NumPy, so they are constants of any program.

    Args:
      width: the number of channels; if odd, the last channel is a pair of its own.
      base: > 1; pair 0 rotates by one radian a position, the last almost `base` times slower.
      scaling: changes the frequencies for sequences longer than those of the training.

    Returns:
      [ceil(width / 2)] float64; the caller rounds them to its dtype.

    Raises:
      ValueError: if the base is not a finite number above 1, the width is negative, or NTK scaling has fewer than 3
        channels.
    """
    if not 1.0 < base < math.inf:
        raise ValueError(f'base is {base}; expected a finite number > 1')
    if width < 0:
        raise ValueError(f'width is {width}; expected a number of channels')
    if isinstance(scaling, NTKScaling):
        if width <= 2:
            raise ValueError(f'NTK scaling of {width} channels; expected more than 2: the first pair is not scaled')
        base = base * scaling.factor ** (width / (width - 2))
    unscaled = base ** -(np.arange(0, width, 2) / width)
    match scaling:
        case LinearScaling():
            return unscaled / scaling.factor
        case YaRNScaling():
            ramp = _yarn_ramp(width, base, scaling)
            return unscaled * (1.0 - ramp) + unscaled / scaling.factor * ramp
        case NTKScaling() | None:
            return unscaled
        case _:
            raise ValueError(f'scaling is {scaling!r}; expected LinearScaling, NTKScaling, YaRNScaling or None')


def rotary_encoding(
    x: Float[ArrayLike, '*B T N H'],
    positions: Real[ArrayLike, '*#B T'],
    *,
    base: float = 10000.0,
    layout: RotaryLayout = 'half',
    fraction: float = 1.0,
    scaling: RotaryScaling | None = None,
) -> Float[Array, '*B T N H']:
    """Rotate each pair of channels (a, b) to (a cos - b sin, a sin + b cos), by the angle position * frequency.

    Angles and rotation are float32, whatever the dtype of x (float64 for float64).  A float32 angle is off by up to
    position * frequency * 2^-23 radians: of unit pairs of width 128, the worst came out 3e-4 off at position 10,000 and
    5e-3 off at 100,000 (tests/kernels/test_rotary.py).  Integers over 2^24 are no longer distinct.

    Args:
      x: [*B, T, N, H], queries or keys.
      positions: [*B, T], axes of B may be 1 or missing; integers or floats, also negative.
      base, scaling: as in `rotary_frequencies`.  YaRN also multiplies the rotated channels by its `magnitude`, which
        sets the temperature of the logits if both queries and keys are rotated by this function; without YaRN the
        length of each pair stays the same.
      layout: which channels are a pair; see the docstring of this module.
      fraction: only the first R = fraction * H channels are rotated, with the frequencies of width R; the others stay
        the same.

    Returns:
      [*B, T, N, H] in the dtype of x.

    Raises:
      ValueError: if the number of channels to rotate is odd, or shapes, dtypes or names do not fit.
    """
    x, positions = jnp.asarray(x), widen_integers('positions', positions)
    _check_arrays(x, positions)
    if layout not in ('half', 'interleaved'):
        raise ValueError(f"layout is {layout!r}; expected 'half' or 'interleaved'")
    R = _rotated_channels(x.shape[-1], fraction)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(R, base, scaling), wide)
    positions = positions.astype(wide).reshape((1,) * (x.ndim - 2 - positions.ndim) + positions.shape)
    angles = positions[..., None, None] * jnp.expand_dims(frequencies, tuple(range(x.ndim - 1)))
    magnitude = scaling.magnitude if isinstance(scaling, YaRNScaling) else 1.0
    cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
    pair_shape, axis = ((2, R // 2), -2) if layout == 'half' else ((R // 2, 2), -1)
    pairs = x[..., :R].astype(wide).reshape(*x.shape[:-1], *pair_shape)
    a, b = jnp.take(pairs, 0, axis=axis), jnp.take(pairs, 1, axis=axis)
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
    rotated = rotated.reshape(*x.shape[:-1], R).astype(x.dtype)
    return rotated if R == x.shape[-1] else jnp.concatenate([rotated, x[..., R:]], axis=-1)


def rotary_encoding_2d(
    x: Float[ArrayLike, '*B T N H'],
    rows: int,
    columns: int,
    *,
    base: float = 100.0,
    layout: RotaryLayout = 'half',
) -> Float[Array, '*B T N H']:
    """Axial rotary encoding of a grid: rotate the first half of the channels by the row, the second by the column.

    Each half is a `rotary_encoding` of width H / 2.  The base is that of Heo et al. 2024, because grids are small.

    Args:
      x: [*B, rows * columns, N, H], row-major: token t is in row t // columns, column t % columns.  A class token has
        no position on the grid: the caller removes it before the call and adds it again after.
      rows, columns: the size of the grid.
      base: as in `rotary_frequencies`.
      layout: which channels of each half are a pair.

    Raises:
      ValueError: if the width does not divide by 4, or the number of tokens is not rows * columns.
    """
    x = jnp.asarray(x)
    if x.ndim < 3 or x.shape[-3] != rows * columns:
        raise ValueError(
            f'x has shape {x.shape}; expected [..., T, N, H] with T = {rows * columns}, {rows} rows of {columns} tokens'
        )
    H = x.shape[-1]
    if H % 4:
        raise ValueError(f'x has heads of width {H}; expected a multiple of 4, pairs of channels for rows and columns')
    row, column = jnp.divmod(jnp.arange(rows * columns), columns) if columns else (jnp.arange(0),) * 2
    by_row = rotary_encoding(x[..., : H // 2], row, base=base, layout=layout)
    by_column = rotary_encoding(x[..., H // 2 :], column, base=base, layout=layout)
    return jnp.concatenate([by_row, by_column], axis=-1)


def _yarn_ramp(width: int, base: float, yarn: YaRNScaling) -> Float64[np.ndarray, ' pairs']:
    """Return 0 for pairs that keep their frequency, 1 for pairs that are interpolated, between them on the ramp."""

    def pair_index(turns: float) -> float:
        """Return the (fractional) index of the pair that makes so many turns over the original length."""
        return width * math.log(yarn.original_length / (2.0 * math.pi * turns)) / (2.0 * math.log(base))

    ends = math.floor(pair_index(yarn.beta_fast)), math.ceil(pair_index(yarn.beta_slow))
    first, last = max(ends[0], 0), min(ends[1], width - 1)
    if first > last:  # all pairs are on one side of the ramp; the published code would reverse the ramp here
        first, last = ends
    length = last - first if last != first else 1e-3  # the published code's guard against a ramp of length zero
    return np.clip((np.arange((width + 1) // 2) - first) / length, 0.0, 1.0)


def _rotated_channels(H: int, fraction: float) -> int:
    """Return fraction * H.  Raises ValueError unless that is an even number in 0 .. H."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f'fraction is {fraction}; expected 0 < fraction <= 1')
    R = round(fraction * H)
    if R % 2 or not math.isclose(R, fraction * H, rel_tol=1e-9):
        part = '' if fraction == 1.0 else f', of which fraction {fraction} is {fraction * H:g}'
        raise ValueError(f'x has heads of width {H}{part}; expected an even number of channels to rotate')
    return R


def _check_arrays(x: Array, positions: Array) -> None:
    """Raise ValueError unless x is [*B, T, N, H] floats and positions are numbers [*B, T]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f'x has dtype {x.dtype}; expected a float')
    if not (jnp.issubdtype(positions.dtype, jnp.integer) or jnp.issubdtype(positions.dtype, jnp.floating)):
        raise ValueError(f'positions have dtype {positions.dtype}; expected integers or floats')
    if x.ndim < 3:
        raise ValueError(f'x has shape {x.shape}; expected [..., T, N, H]')
    shape, expected = positions.shape[::-1], x.shape[-3::-1]  # from T outwards
    fits = 0 < len(shape) <= len(expected) and shape[0] == expected[0]
    if not fits or any(size not in (1, x_size) for size, x_size in zip(shape, expected, strict=False)):
        raise ValueError(f'positions have shape {positions.shape}; expected [T] or [..., T] = {x.shape[:-2]} as in x')


def _check_factor(factor: float) -> None:
    """Raise ValueError unless the factor is a finite number of at least 1."""
    if not 1.0 <= factor < math.inf:
        raise ValueError(f'factor is {factor}; expected a finite number >= 1')
