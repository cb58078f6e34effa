"""One-dimensional convolution over a sequence, with masks for padding and packed segments."""

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
    """Return y_t = sum over w of x_(t + offset(w)) kernel_w, with zeros beyond both ends of the sequence.

    offset(w) = w dilation - left.  If causal, left = (W - 1) dilation: the last kernel position is the token itself and
    the others are earlier tokens (WaveNet, van den Oord et al. 2016).  Otherwise the kernel is centred: left is half of
    that, rounded down.  Padding and kernel positions are those of `flax.linen.Conv` with 'CAUSAL' and 'SAME'.

    Args:
      x: [B, T, D], any float.
      kernel: [W, D / groups, F], as in `flax.linen.Conv`; W is the kernel size.
      is_causal: y_t depends on x_1 ... x_t only.
      lengths: [B] int; tokens at and after the length never change the result, even if NaN, and their output is zero.
      segment_ids: [B, T] int; tokens of another segment count as zero.
      dilation: the distance between kernel positions.
      groups: the number of channel groups that are convolved separately, with F / groups outputs each; D groups make it
        depthwise.

    Returns:
      [B, T, F] in the dtype of `x`; sums are float32 or wider.

    Raises:
      ValueError: if shapes, dtypes or numbers do not fit; the message has the value and what is expected.
    """
    _check_arguments(x, kernel, lengths, segment_ids, dilation, groups)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    reach = (kernel.shape[0] - 1) * dilation
    left = reach if is_causal else reach // 2
    token_mask = None if lengths is None else length_mask(lengths, x.shape[1])[:, :, None]
    masked_x = (x if token_mask is None else jnp.where(token_mask, x, jnp.zeros_like(x))).astype(wide)
    if segment_ids is None:
        output = _convolve(masked_x, kernel.astype(wide), (left, reach - left), dilation, groups)
    else:
        output = _convolve_segments(masked_x, kernel.astype(wide), segment_ids, left, dilation, groups)
    return (output if token_mask is None else jnp.where(token_mask, output, 0.0)).astype(x.dtype)


def _convolve(x: Array, kernel: Array, padding: tuple[int, int], dilation: int, groups: int) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, window_strides=(1,), padding=[padding], rhs_dilation=(dilation,),
        dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count=groups,
    )  # fmt: skip


def _convolve_segments(x: Array, kernel: Array, segment_ids: Array, left: int, dilation: int, groups: int) -> Array:
    """Convolve within segments: one product for each kernel position, because each has its own mask."""
    T = x.shape[1]
    output: Any = 0.0
    for w in range(kernel.shape[0]):
        source = jnp.arange(T) + w * dilation - left
        clipped_source = jnp.clip(source, 0, max(T - 1, 0))
        is_inside = ((source >= 0) & (source < T))[None]
        same_segment = is_inside & (segment_ids[:, clipped_source] == segment_ids)
        shifted_x = jnp.where(same_segment[..., None], x[:, clipped_source], 0.0)
        output = output + _convolve(shifted_x, kernel[w : w + 1], (0, 0), 1, groups)
    return output


def _check_arguments(
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
        expected = f'[W, D / groups, F] = [1 or more, {D // groups}, any]'
        raise ValueError(f'kernel has shape {kernel.shape}; expected {expected}')
    for name, array, shape in (('lengths', lengths, (B,)), ('segment_ids', segment_ids, (B, T))):
        if array is not None and (array.shape != shape or not jnp.issubdtype(array.dtype, jnp.signedinteger)):
            axes = '[B]' if name == 'lengths' else '[B, T]'
            raise ValueError(
                f'{name} has shape {array.shape} and dtype {array.dtype}; expected {axes} = {shape} signed integers'
            )
