"""Norms over the last axis, in float32 or wider inside.

A row that holds NaN or infinity gives NaN and sends no gradient: where nobody looks at it, it harms nobody.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def rms_norm(
    x: Float[Array, '*B H'], gain: Float[Array, ' H'] | None = None, *, epsilon: float = 1e-6
) -> Float[Array, '*B H']:
    """gain * x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019), with epsilon inside the root.

    Args:
      x: [*B, H], any float.
      gain: [H], ones if None.
      epsilon: shrinks rows whose mean square is not far above it.

    Returns:
      [*B, H] in the dtype of `x`.  A zero row gives zero, with the gradient of the formula: gain / sqrt(epsilon).

    Raises:
      ValueError: for an `x` without axes or floats, a gain that does not fit, an epsilon that is not positive.
    """
    _check(x, epsilon)
    if gain is not None and gain.shape != x.shape[-1:]:
        raise ValueError(f'gain has shape {gain.shape}; expected [H] = {x.shape[-1:]}, the last axis of x')
    rows, largest, finite = _rows(x)
    scale = _divisor(largest, 1.0)  # only down, as epsilon matters to what is small
    scaled = rows / scale
    mean = jnp.sum(scaled * scaled, axis=-1, keepdims=True) / max(x.shape[-1], 1)
    normed = scaled * jax.lax.rsqrt(mean + epsilon / scale / scale)
    if gain is not None:
        normed = normed * jnp.broadcast_to(gain.astype(normed.dtype), normed.shape)
    return jnp.where(finite, normed, jnp.nan).astype(x.dtype)


def l2_norm(x: Float[Array, '*B H'], *, epsilon: float = 1e-6) -> Float[Array, '*B H']:
    """x / max(||x||, epsilon), with epsilon outside the root: a short row still gets length one (Henry et al. 2020).

    Args:
      x: [*B, H], any float.
      epsilon: rows shorter than it are divided by it.

    Returns:
      [*B, H] in the dtype of `x`.  A zero row (or one of subnormal numbers) has no direction: it gives zero,
      and sends a gradient of zero.

    Raises:
      ValueError: for an `x` without axes or floats, an epsilon that is not positive.
    """
    _check(x, epsilon)
    rows, largest, finite = _rows(x)
    tiny = float(jnp.finfo(rows.dtype).tiny)
    zero = largest < tiny
    scale = _divisor(largest, tiny)
    scaled = rows / scale
    # The root of zero has no slope, and what is infinite would come through the `where` below as NaN.
    length = jnp.sqrt(jnp.where(zero, 1.0, jnp.sum(scaled * scaled, axis=-1, keepdims=True)))
    normed = jnp.where(zero, 0.0, scaled / jnp.maximum(length, epsilon / scale))
    return jnp.where(finite, normed, jnp.nan).astype(x.dtype)


def _rows(x: Float[Array, '*B H']) -> tuple[Float[Array, '*B H'], Float[Array, '*B 1'], Bool[Array, '*B 1']]:
    """Wide rows with zeros for those that are not finite, their largest magnitudes, and which were finite."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(wide)), axis=-1, keepdims=True, initial=0.0)
    # Not from the largest alone: on a CPU XLA's maximum of a large array loses NaN.
    finite = jnp.all(jnp.isfinite(wide), axis=-1, keepdims=True)
    return jnp.where(finite, wide, 0.0), jnp.where(finite, largest, 0.0), finite


def _divisor(largest: Float[Array, '*B 1'], lowest: float) -> Float[Array, '*B 1']:
    """What to divide rows by so that their squares neither overflow nor vanish; at least `lowest`.

    The norms do not depend on it, so it is a constant to the gradient.  Its reciprocal must be a normal number too:
    XLA multiplies by that, and takes subnormal numbers for zero.
    """
    return jnp.clip(largest, lowest, 1.0 / float(jnp.finfo(largest.dtype).tiny))


def _check(x: Array, epsilon: float) -> None:
    if x.ndim == 0:
        raise ValueError('x has no axes; expected [..., H]')
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f'x has dtype {x.dtype}; expected a float')
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f'epsilon is {epsilon}; expected a positive finite number')
