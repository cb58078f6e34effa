"""Norms over the last axis, in float32 or wider inside.

A row that holds NaN or infinity gives NaN and has a gradient of zero, so that a masked row harms no other row.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def rms_norm(
    x: Float[Array, '*B H'], gain: Float[Array, ' H'] | None = None, *, epsilon: float = 1e-6
) -> Float[Array, '*B H']:
    """Return gain * x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019), with epsilon inside the root.

    Args:
      x: [*B, H], any float.
      gain: [H], ones if None.
      epsilon: shrinks rows whose mean square is not far above it.

    Returns:
      [*B, H] in the dtype of `x`.  A zero row gives zero, with the gradient of the formula: gain / sqrt(epsilon).

    Raises:
      ValueError: if `x` has no axes or is not a float, `gain` has another shape, or `epsilon` is not positive.
    """
    _check_arguments(x, epsilon)
    if gain is not None and gain.shape != x.shape[-1:]:
        raise ValueError(f'gain has shape {gain.shape}; expected [H] = {x.shape[-1:]}, the last axis of x')
    rows, largest, is_finite = _finite_rows(x)
    divisor = _safe_divisor(largest, 1.0)  # at least 1: a small row must not be enlarged, because epsilon applies to it
    scaled = rows / divisor
    mean_square = jnp.sum(scaled * scaled, axis=-1, keepdims=True) / max(x.shape[-1], 1)
    normalised = scaled * jax.lax.rsqrt(mean_square + epsilon / divisor / divisor)
    if gain is not None:
        normalised = normalised * jnp.broadcast_to(gain.astype(normalised.dtype), normalised.shape)
    return jnp.where(is_finite, normalised, jnp.nan).astype(x.dtype)


def l2_norm(x: Float[Array, '*B H'], *, epsilon: float = 1e-6) -> Float[Array, '*B H']:
    """Return x / max(||x||, epsilon).

    epsilon is outside the root, so a row of length epsilon or more gets length one (Henry et al. 2020).

    Args:
      x: [*B, H], any float.
      epsilon: rows shorter than it are divided by it.

    Returns:
      [*B, H] in the dtype of `x`.  A zero row (or one of subnormal numbers) has no direction: it gives zero and has a
      gradient of zero.

    Raises:
      ValueError: if `x` has no axes or is not a float, or `epsilon` is not positive.
    """
    _check_arguments(x, epsilon)
    rows, largest, is_finite = _finite_rows(x)
    tiny = float(jnp.finfo(rows.dtype).tiny)
    is_zero = largest < tiny
    divisor = _safe_divisor(largest, tiny)
    scaled = rows / divisor
    # The derivative of the root is infinite at zero, and the `where` below would turn that into NaN.
    length = jnp.sqrt(jnp.where(is_zero, 1.0, jnp.sum(scaled * scaled, axis=-1, keepdims=True)))
    normalised = jnp.where(is_zero, 0.0, scaled / jnp.maximum(length, epsilon / divisor))
    return jnp.where(is_finite, normalised, jnp.nan).astype(x.dtype)


def _finite_rows(x: Float[Array, '*B H']) -> tuple[Float[Array, '*B H'], Float[Array, '*B 1'], Bool[Array, '*B 1']]:
    """Return wide rows with zeros for non-finite rows, the largest magnitude of each, and which were finite."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(wide)), axis=-1, keepdims=True, initial=0.0)
    # `largest` alone does not show NaN: on a CPU, XLA's maximum of a large array ignores NaN.
    is_finite = jnp.all(jnp.isfinite(wide), axis=-1, keepdims=True)
    return jnp.where(is_finite, wide, 0.0), jnp.where(is_finite, largest, 0.0), is_finite


def _safe_divisor(largest: Float[Array, '*B 1'], lowest: float) -> Float[Array, '*B 1']:
    """Return a divisor of the rows, at least `lowest`, such that their squares neither overflow nor underflow.

    The norms do not depend on it, so it is a constant to the gradient.  Its reciprocal must be a normal number too,
    because XLA multiplies by the reciprocal and flushes subnormal numbers to zero.
    """
    return jnp.clip(largest, lowest, 1.0 / float(jnp.finfo(largest.dtype).tiny))


def _check_arguments(x: Array, epsilon: float) -> None:
    if x.ndim == 0:
        raise ValueError('x has no axes; expected [..., H]')
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f'x has dtype {x.dtype}; expected a float')
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f'epsilon is {epsilon}; expected a positive finite number')
