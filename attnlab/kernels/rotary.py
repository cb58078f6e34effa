"""Rotary position encoding (Su et al. 2021): pairs of channels turn by an angle that grows with the position.

After it, the product of a query and a key depends on their positions only through the difference of the two.

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

# Dataclasses and not named tuples: those of equal numbers are equal, so `jit` would take one for another.


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`, all pairs turn slower."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling (bloc97 2023): base factor^(R / (R - 2)), so the first pair keeps its speed and the last pair
    turns `factor` times slower."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class YaRNScaling:
    """YaRN (Peng et al. 2023): fast pairs keep their speed, slow ones are interpolated, a ramp lies between.

    Over `original_length` positions, those the model was trained with, a pair turns some number of times: from
    beta_fast turns on it is kept, up to beta_slow turns its speed is divided by `factor`.  The ramp between is linear
    in the number of the pair, its ends rounded outwards to whole pairs, as in the code that its authors published and
    that the checkpoints were trained with; the paper's formula is linear in the turns.
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
        """0.1 ln(factor) + 1, by which rotated channels grow (section 3.4): the logits grow by its square."""
        return 0.1 * math.log(self.factor) + 1.0


RotaryScaling = LinearScaling | NTKScaling | YaRNScaling


def rotary_frequencies(
    width: int, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> Float64[np.ndarray, ' pairs']:
    """Radians per position of each pair of channels, base^(-2i / width), made in NumPy: a constant in any program.

    Args:
      width: the number of channels; an odd one leaves its last channel a pair of its own.
      base: > 1; pair 0 turns by one radian a position, the last almost `base` times slower.
      scaling: stretches them for sequences longer than those of the training.

    Returns:
      [ceil(width / 2)] float64; whoever uses them rounds them.

    Raises:
      ValueError: for a base that is not a finite number over 1, a negative width, and NTK over fewer than 3 channels.
    """
    if not 1.0 < base < math.inf:
        raise ValueError(f'base is {base}; expected a finite number > 1')
    if width < 0:
        raise ValueError(f'width is {width}; expected a number of channels')
    if isinstance(scaling, NTKScaling):
        if width <= 2:
            raise ValueError(f'NTK scaling of {width} channels; expected more than 2: the first pair keeps its speed')
        base = base * scaling.factor ** (width / (width - 2))
    plain = base ** -(np.arange(0, width, 2) / width)
    match scaling:
        case LinearScaling():
            return plain / scaling.factor
        case YaRNScaling():
            slowed = _yarn_ramp(width, base, scaling)
            return plain * (1.0 - slowed) + plain / scaling.factor * slowed
        case NTKScaling() | None:
            return plain
        case _:
            raise ValueError(f'scaling is {scaling!r}; expected Linear, NTK, YaRN or None')


def rotary_encoding(
    x: Float[ArrayLike, '*B T N H'],
    positions: Real[ArrayLike, '*#B T'],
    *,
    base: float = 10000.0,
    layout: RotaryLayout = 'half',
    fraction: float = 1.0,
    scaling: RotaryScaling | None = None,
) -> Float[Array, '*B T N H']:
    """Turns each pair of channels (a, b) to (a cos - b sin, a sin + b cos), the angle position * frequency.

    Angles and the turn are float32, whatever the dtype of x (float64 for float64).  A float32 angle is off by up to
    position * frequency * 2^-23 radians: of unit pairs of width 128, the worst came out 3e-4 off at position 10,000 and
    5e-3 off at 100,000 (tests/kernels/test_rotary.py).  Integers over 2^24 are no longer told apart.

    Args:
      x: [*B, T, N, H], queries or keys.
      positions: [*B, T], axes of B may be 1 or missing; integers or floats, negative ones too.
      base, scaling: as in `rotary_frequencies`.  YaRN also multiplies what it turns by its `magnitude`, which gives the
        logits their temperature when queries and keys are both turned here; other turns keep lengths.
      layout: which channels are a pair; see the top of this file.
      fraction: only the first R = fraction * H channels turn, with the frequencies of width R; the rest pass untouched.

    Returns:
      [*B, T, N, H] in the dtype of x.

    Raises:
      ValueError: for an odd number of channels to turn, and for shapes, dtypes and names that do not fit.
    """
    x, positions = jnp.asarray(x), widen_integers('positions', positions)
    _check_arrays(x, positions)
    if layout not in ('half', 'interleaved'):
        raise ValueError(f"layout is {layout!r}; expected 'half' or 'interleaved'")
    R = _channels_to_turn(x.shape[-1], fraction)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    speeds = jnp.asarray(rotary_frequencies(R, base, scaling), wide)
    where = positions.astype(wide).reshape((1,) * (x.ndim - 2 - positions.ndim) + positions.shape)
    angles = where[..., None, None] * jnp.expand_dims(speeds, tuple(range(x.ndim - 1)))
    magnitude = scaling.magnitude if isinstance(scaling, YaRNScaling) else 1.0
    cos, sin = magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
    shape, axis = ((2, R // 2), -2) if layout == 'half' else ((R // 2, 2), -1)
    pairs = x[..., :R].astype(wide).reshape(*x.shape[:-1], *shape)
    a, b = jnp.take(pairs, 0, axis=axis), jnp.take(pairs, 1, axis=axis)
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
    turned = turned.reshape(*x.shape[:-1], R).astype(x.dtype)
    return turned if R == x.shape[-1] else jnp.concatenate([turned, x[..., R:]], axis=-1)


def rotary_encoding_2d(
    x: Float[ArrayLike, '*B T N H'],
    rows: int,
    columns: int,
    *,
    base: float = 100.0,
    layout: RotaryLayout = 'half',
) -> Float[Array, '*B T N H']:
    """Axial rotary encoding of a grid: the first half of the channels turns by the row, the second by the column.

    Each half is a `rotary_encoding` of width H / 2.  The base is that of Heo et al. 2024, as grids are small.

    Args:
      x: [*B, rows * columns, N, H], row-major: token t stands in row t // columns, column t % columns.  A class token
        has no place on the grid: the caller takes it off and puts it back.
      rows, columns: the size of the grid.
      layout: which channels of each half are a pair.

    Raises:
      ValueError: for a width that does not divide by 4, and for a number of tokens other than rows * columns.
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
    """0 for pairs that keep their speed, 1 for those that are interpolated."""

    def pair_of(turns: float) -> float:
        """The (fractional) number of the pair that makes so many turns over the original length."""
        return width * math.log(yarn.original_length / (2.0 * math.pi * turns)) / (2.0 * math.log(base))

    ends = math.floor(pair_of(yarn.beta_fast)), math.ceil(pair_of(yarn.beta_slow))
    first, last = max(ends[0], 0), min(ends[1], width - 1)
    if first > last:  # all pairs lie on one side of the ramp, which the published code turns round
        first, last = ends
    length = last - first if last != first else 1e-3  # the published code's guard against a ramp of no length
    return np.clip((np.arange((width + 1) // 2) - first) / length, 0.0, 1.0)


def _channels_to_turn(H: int, fraction: float) -> int:
    """fraction * H; raises ValueError unless that is an even number in 0 .. H."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f'fraction is {fraction}; expected 0 < fraction <= 1')
    R = round(fraction * H)
    if R % 2 or not math.isclose(R, fraction * H, rel_tol=1e-9):
        part = '' if fraction == 1.0 else f', of which fraction {fraction} is {fraction * H:g}'
        raise ValueError(f'x has heads of width {H}{part}; expected an even number of channels to turn')
    return R


def _check_arrays(x: Array, positions: Array) -> None:
    """Raises ValueError unless x is [*B, T, N, H] floats and positions are numbers [*B, T]."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f'x has dtype {x.dtype}; expected a float')
    if not (jnp.issubdtype(positions.dtype, jnp.integer) or jnp.issubdtype(positions.dtype, jnp.floating)):
        raise ValueError(f'positions have dtype {positions.dtype}; expected integers or floats')
    if x.ndim < 3:
        raise ValueError(f'x has shape {x.shape}; expected [..., T, N, H]')
    shape, want = positions.shape[::-1], x.shape[-3::-1]  # from T outwards
    fits = 0 < len(shape) <= len(want) and shape[0] == want[0]
    if not fits or any(have not in (1, size) for have, size in zip(shape, want, strict=False)):
        raise ValueError(f'positions have shape {positions.shape}; expected [T] or [..., T] = {x.shape[:-2]} as in x')


def _check_factor(factor: float) -> None:
    """Raises ValueError unless the factor stretches: a finite number, at least 1."""
    if not 1.0 <= factor < math.inf:
        raise ValueError(f'factor is {factor}; expected a finite number >= 1')
