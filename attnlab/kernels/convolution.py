"""A convolution that slides over a sequence: the third way to read one, beside recurrence and attention."""

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
      dilation: the distance between taps.
      groups: channels in so many groups of their own, F / groups outputs each; D makes it depthwise.

    Returns:
      [B, T, F] in the dtype of `x`; sums are float32 or wider.

    Raises:
      ValueError: for shapes, dtypes and numbers that do not fit, naming what came and what was expected.
    """
    _check(x, kernel, lengths, dilation, groups)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    reach = (kernel.shape[0] - 1) * dilation
    left = reach if is_causal else reach // 2
    inside = None if lengths is None else length_mask(lengths, x.shape[1])[:, :, None]
    output = jax.lax.conv_general_dilated(
        (x if inside is None else jnp.where(inside, x, jnp.zeros_like(x))).astype(wide),
        kernel.astype(wide),
        window_strides=(1,),
        padding=[(left, reach - left)],
        rhs_dilation=(dilation,),
        dimension_numbers=('NWC', 'WIO', 'NWC'),
        feature_group_count=groups,
    )
    return (output if inside is None else jnp.where(inside, output, 0.0)).astype(x.dtype)


def _check(x: Array, kernel: Array, lengths: Array | None, dilation: int, groups: int) -> None:
    for name, array, axes in (('x', x, '[B, T, D]'), ('kernel', kernel, '[W, D / groups, F]')):
        if array.ndim != 3:
            raise ValueError(f'{name} has shape {array.shape}; expected 3 axes {axes}')
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f'{name} has dtype {array.dtype}; expected a float')
    if dilation < 1:
        raise ValueError(f'dilation is {dilation}; expected at least 1')
    B, _, D = x.shape
    W, C, F = kernel.shape
    if groups < 1 or D % groups or F % groups:
        raise ValueError(f'groups is {groups}; expected a divisor of the {D} channels of x and the {F} of the output')
    if W < 1 or C * groups != D:
        want = f'[W, D / groups, F] = [1 or more, {D // groups}, any]'
        raise ValueError(f'kernel has shape {kernel.shape}; expected {want}')
    if lengths is not None and (lengths.shape != (B,) or not jnp.issubdtype(lengths.dtype, jnp.signedinteger)):
        came = f'shape {lengths.shape} and dtype {lengths.dtype}'
        raise ValueError(f'lengths has {came}; expected [B] = ({B},) signed integers')
