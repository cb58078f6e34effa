"""Attention as its definition: the whole matrix of logits, a softmax, a weighted sum.

Everything else in `attnlab.kernels` is tested against this file, and this file against NumPy in float64.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from attnlab.kernels.masks import Visibility, as_array


class Attended(NamedTuple):
    """What an implementation gives back.

    output: [B, T, N, Hv] in the query's dtype.  weights: [B, N, T, S], before dropout.
    residual: [B, T, N], the log of the softmax's sum of exponentials; the lowest finite number for an empty row.
    """

    output: Float[Array, 'B T N Hv']
    residual: Float[Array, 'B T N']
    weights: Float[Array, 'B N T S']


def dot_product(
    query: Float[Array, 'B T N H'],
    key: Float[Array, 'B S K H'],
    value: Float[Array, 'B S K Hv'],
    bias: Float[Array, '#B #N #T #S'] | None,
    rules: Visibility,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout_rate: float,
    dropout_rng: PRNGKeyArray | UInt32[Array, '2'] | None,
) -> Attended:
    """softmax(scale Q K^T + bias) V (Vaswani et al. 2017, section 3.2.1), heads in groups as Ainslie et al. 2023."""
    B, T, N, H = query.shape
    S, K = key.shape[1], key.shape[2]
    mask = as_array(rules, T, S)
    query, key, value, bad = clean(query, key, value, mask)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    # Heads before positions: a matrix product over [T, H] x [H, S] per head is what every backend does well.
    grouped = query.swapaxes(1, 2).reshape(B, K, N // K, T, H)
    logits = jnp.einsum('bkgth,bskh->bkgts', grouped, key, preferred_element_type=wide).reshape(B, N, T, S) * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    return attend(logits, value, bias, mask, bad, query.dtype, dropout_rate=dropout_rate, dropout_rng=dropout_rng)


def attend(
    logits: Float[Array, 'B N T S'],
    value: Float[Array, 'B S K Hv'],
    bias: Float[Array, '#B #N #T #S'] | None,
    mask: Bool[Array, '#B #N #T #S'] | None,
    bad: Bool[Array, 'B N T S'] | None,
    dtype: jnp.dtype,
    *,
    dropout_rate: float,
    dropout_rng: PRNGKeyArray | UInt32[Array, '2'] | None,
) -> Attended:
    """Logits to output, with the rules that all scores share.

    Logits under the mask never matter, and a row that may attend to nothing gives zero.  `bad` marks pairs that
    hold something not finite (see `clean`): they come out as NaN where the mask lets them in.
    """
    B, N, T, S = logits.shape
    K = value.shape[2]
    if bad is not None:
        logits = jnp.where(bad, jnp.nan, logits)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    lowest = jnp.finfo(logits.dtype).min
    if mask is not None:
        logits = jnp.where(mask, logits, lowest)
    # A bias of -inf may rule out a row as a mask does: its maximum must stay finite, or -inf - -inf is NaN.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=lowest))
    shifted = jnp.exp(logits - largest)
    if mask is not None:
        shifted = jnp.where(mask, shifted, 0.0)
    total = jnp.sum(shifted, axis=-1, keepdims=True)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    weights = shifted / total
    if mask is not None:  # once more for the gradient: a masked value's may overflow, and zero times infinity is NaN
        weights = jnp.where(mask, weights, 0.0)
    residual = jax.lax.stop_gradient(jnp.where(empty, lowest, jnp.log(total) + largest)[..., 0].swapaxes(1, 2))
    kept = drop(weights, dropout_rate, dropout_rng)
    # Weights stay wide: rounded to a half precision, so would be their gradient, which overflows in float16.
    output = jnp.einsum('bkgts,bskh->bkgth', kept.reshape(B, K, N // K, T, S), value)
    # An empty row is zero already; cut off here, whatever gradient it is sent goes nowhere, NaN included.
    output = jnp.where(empty, 0.0, output.reshape(B, N, T, value.shape[-1])).swapaxes(1, 2)
    return Attended(output.astype(dtype), residual, weights)


def clean(
    query: Float[Array, 'B T N H'],
    key: Float[Array, 'B S K H'],
    value: Float[Array, 'B S K Hv'],
    mask: Bool[Array, '#B #N #T #S'] | None,
) -> tuple[Array, Array, Array, Bool[Array, 'B N T S'] | None]:
    """query, key and value with zeros for whatever is not finite, and the pairs [B, N, T, S] that held such.

    A masked slot gets the weight zero, but zero times NaN is NaN, forward and backward.  So products see finite
    numbers only, and the pairs marked here turn their logits into NaN where the mask does let them in.
    Without a mask everything comes back as it is.
    """
    if mask is None:
        return query, key, value, None
    good_query, good_key, good_value = (jnp.isfinite(x) for x in (query, key, value))
    bad_query = ~jnp.all(good_query, axis=-1)
    bad_key = ~(jnp.all(good_key, axis=-1) & jnp.all(good_value, axis=-1))
    # One mark per key head serves its whole group of query heads: 0, 0, 1, 1.
    bad_key = jnp.repeat(bad_key.swapaxes(1, 2), query.shape[2] // key.shape[2], axis=1)
    bad = bad_query.swapaxes(1, 2)[:, :, :, None] | bad_key[:, :, None, :]
    query, key, value = (
        jnp.where(good, x, jnp.zeros_like(x))
        for good, x in ((good_query, query), (good_key, key), (good_value, value))
    )
    return query, key, value, bad


def drop(
    weights: Float[Array, 'B N T S'], rate: float, rng: PRNGKeyArray | UInt32[Array, '2'] | None
) -> Float[Array, 'B N T S']:
    """Dropout on the weights, independent for every batch row, head, query and key, rescaled by 1 / (1 - rate)."""
    if rate == 0.0:
        return weights
    assert rng is not None
    keep = jax.random.bernoulli(rng, 1.0 - rate, weights.shape)
    return jnp.where(keep, weights / (1.0 - rate), 0.0)
