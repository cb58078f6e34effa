"""A convolution that slides over a sequence: the third way to read one, beside recurrence and attention."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.kernels.masks import length_mask


def sliding_convolution(
    x: Float[Array, 'B T D'],
    kernel: Float[Array, 'W C F'],
    *,
    is_causal: bool = False,
    lengths: Int[Array, ' B'] | None = None,
    segment_ids: Int[Array, 'B T'] | None = None,
    dilation: int = 1,
    groups: int = 1,
) -> Float[Array, 'B T F']:
    """y_t = sum over w of x_(t + offset(w)) kernel_w, with zeros beyond both ends of the sequence.

    offset(w) = w dilation - left, where left = (W - 1) dilation for a causal one, so that the last tap is the token
    itself and the others are its past (WaveNet, van den Oord et al. 2016), and half of that, rounded down, for a
    centred one.  Padding and taps are those of `flax.linen.Conv` with 'CAUSAL' and 'SAME'.

    Args:
      x: [B, T, D], any float.
      kernel: [W, D / groups, F], as in `flax.linen.Conv`.
      is_causal: y_t sees x_1 ... x_t only.
      lengths: [B] int; tokens at and after the length never matter, NaN included, and give zero.
      segment_ids: [B, T] int; a tap on a token of another segment gives zero.
      dilation: the distance between taps.
      groups: channels in so many groups of their own, F / groups outputs each; D makes it depthwise.

    Returns:
      [B, T, F] in the dtype of `x`; sums are float32 or wider.

    Raises:
      ValueError: for shapes, dtypes and numbers that do not fit, naming what came and what was expected.
    """
    _check(x, kernel, lengths, segment_ids, dilation, groups)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    reach = (kernel.shape[0] - 1) * dilation
    left = reach if is_causal else reach // 2
    inside = None if lengths is None else length_mask(lengths, x.shape[1])[:, :, None]
    clean = (x if inside is None else jnp.where(inside, x, jnp.zeros_like(x))).astype(wide)
    if segment_ids is None:
        output = _convolved(clean, kernel.astype(wide), (left, reach - left), dilation, groups)
    else:
        output = _within(clean, kernel.astype(wide), segment_ids, left, dilation, groups)
    return (output if inside is None else jnp.where(inside, output, 0.0)).astype(x.dtype)


def _convolved(x: Array, kernel: Array, sides: tuple[int, int], dilation: int, groups: int) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, window_strides=(1,), padding=[sides], rhs_dilation=(dilation,),
        dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=groups,
    )  # fmt: skip


def _within(x: Array, kernel: Array, segment_ids: Array, left: int, dilation: int, groups: int) -> Array:
    """Tap by tap, as each has a mask of its own."""
    T = x.shape[1]
    output: Any = 0.0
    for tap in range(kernel.shape[0]):
        at = jnp.arange(T) + tap * dilation - left
        there = jnp.clip(at, 0, max(T - 1, 0))
        same = ((at >= 0) & (at < T))[None] & (segment_ids[:, there] == segment_ids)
        moved = jnp.where(same[..., None], x[:, there], 0.0)
        output = output + _convolved(moved, kernel[tap : tap + 1], (0, 0), 1, groups)
    return output


def _check(
    x: Array, kernel: Array, lengths: Array | None, segment_ids: Array | None, dilation: int, groups: int
) -> None:
    for name, array, axes in (('x', x, '[B, T, D]'), ('kernel', kernel, '[W, D / groups, F]')):
        if array.ndim != 3:
            raise ValueError(f'{name} has shape {array.shape}; expected 3 axes {axes}')
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f'{name} has dtype {array.dtype}; expected a float')
    if dilation < 1:
        raise ValueError(f'dilation is {dilation}; expected at least 1')
    B, T, D = x.shape
    W, C, F = kernel.shape
    if groups < 1 or D % groups or F % groups:
        raise ValueError(f'groups is {groups}; expected a divisor of the {D} channels of x and the {F} of the output')
    if W < 1 or C * groups != D:
        want = f'[W, D / groups, F] = [1 or more, {D // groups}, any]'
        raise ValueError(f'kernel has shape {kernel.shape}; expected {want}')
    for name, ids, shape in (('lengths', lengths, (B,)), ('segment_ids', segment_ids, (B, T))):
        if ids is not None and (ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.signedinteger)):
            came = f'shape {ids.shape} and dtype {ids.dtype}'
            axes = '[B]' if name == 'lengths' else '[B, T]'
            raise ValueError(f'{name} has {came}; expected {axes} = {shape} signed integers')
