"""Attention as its definition: the whole matrix of logits, a softmax, a weighted sum.

Everything else in `attnlab.kernels` is tested against this file, and this file against NumPy in float64.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.kernels import dropout
from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.masks import mask_as_array, position_distances


def dot_product(call: AttentionCall) -> AttentionOutput:
    """softmax(scale Q K^T + bias) V (Vaswani et al. 2017, section 3.2.1), heads in groups as Ainslie et al. 2023."""
    if call.block_sizes is not None:
        raise NotImplementedError('block_sizes: dense has no blocks')
    B, T, N, H = call.query.shape
    S, K = call.key.shape[1], call.key.shape[2]
    mask = mask_as_array(call.mask, T, S)
    call, bad = zero_nonfinite(call, mask)
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    # Heads before positions: a matrix product over [T, H] x [H, S] per head is what every backend does well.
    grouped = call.query.swapaxes(1, 2).reshape(B, K, N // K, T, H)
    logits = jnp.einsum('bkgth,bskh->bkgts', grouped, call.key, preferred_element_type=wide).reshape(B, N, T, S)
    if mask is not None:  # what overflowed in a masked slot would be zero times infinity in gradients of scale and cap
        logits = jnp.where(mask, logits, 0.0)
    logits = logits * call.scale
    if call.logits_soft_cap is not None:
        logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
    if call.alibi_slopes is not None:
        logits = logits - call.alibi_slopes.astype(wide)[None, :, None, None] * position_distances(
            call.mask, T, S
        ).astype(wide)
    return attend_with_logits(logits, call, mask, bad)


def pays(call: AttentionCall, platform: str) -> bool:
    """Always: it is the last in the table."""
    return True


def attend_with_logits(
    logits: Float[Array, 'B N T S'],
    call: AttentionCall,
    mask: Bool[Array, '#B #N #T #S'] | None,
    bad: Bool[Array, 'B N T S'] | None,
) -> AttentionOutput:
    """Logits to output, with the rules that all scores share.

    Logits under the mask never matter, and a row that may attend to nothing gives zero.  `bad` marks pairs that
    hold something not finite (see `zero_nonfinite`): they come out as NaN where the mask lets them in.
    """
    B, N, T, S = logits.shape
    K = call.value.shape[2]
    if bad is not None:
        logits = jnp.where(bad, jnp.nan, logits)
    if call.bias is not None:
        logits = logits + call.bias.astype(logits.dtype)
    lowest = jnp.finfo(logits.dtype).min
    if mask is not None:
        logits = jnp.where(mask, logits, lowest)
    # A bias of -inf may rule out a row as a mask does: its maximum must stay finite, or -inf - -inf is NaN.
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    if call.sinks is not None:
        sink = call.sinks.astype(logits.dtype)[None, :, None, None]
        largest = jnp.maximum(largest, sink)
    largest = jax.lax.stop_gradient(largest)
    shifted = jnp.exp(logits - largest)
    if mask is not None:
        shifted = jnp.where(mask, shifted, 0.0)
    total = jnp.sum(shifted, axis=-1, keepdims=True)
    empty = total == 0.0
    if call.sinks is not None:
        total = total + jnp.exp(sink - largest)
    total = jnp.where(total == 0.0, 1.0, total)
    weights = shifted / total
    if mask is not None:  # once more for the gradient: a masked value's may overflow, and zero times infinity is NaN
        weights = jnp.where(mask, weights, 0.0)
    # Weights stay wide: rounded to a half precision, so would be their gradient, which overflows in float16.
    kept = drop_weights(weights, call).reshape(B, K, N // K, T, S)
    output = jnp.einsum('bkgts,bskh->bkgth', kept, call.value).reshape(B, N, T, call.value.shape[-1])
    # An empty row is zero already; cut off here, whatever gradient it is sent goes nowhere, NaN included.
    output = jnp.where(empty, 0.0, output).swapaxes(1, 2).astype(call.query.dtype)
    residual = None
    if call.return_residual:
        nothing = empty if call.sinks is None else jnp.zeros_like(empty)
        residual = jnp.where(nothing, lowest, jnp.log(total) + largest)[..., 0].swapaxes(1, 2)
        residual = jax.lax.stop_gradient(residual)
    return AttentionOutput(output, residual, weights if call.return_weights else None)


def zero_nonfinite(
    call: AttentionCall, mask: Bool[Array, '#B #N #T #S'] | None
) -> tuple[AttentionCall, Bool[Array, 'B N T S'] | None]:
    """The call with zeros for whatever is not finite, and the pairs [B, N, T, S] that held such.

    A masked slot gets the weight zero, but zero times NaN is NaN, forward and backward.  So products see finite
    numbers only, and the pairs marked here turn their logits into NaN where the mask does let them in.
    Without a mask everything comes back as it is.
    """
    if mask is None:
        return call, None
    arrays = call.query, call.key, call.value
    good_query, good_key, good_value = (jnp.isfinite(x) for x in arrays)
    bad_query = ~jnp.all(good_query, axis=-1)
    bad_key = ~(jnp.all(good_key, axis=-1) & jnp.all(good_value, axis=-1))
    # One mark per key head serves its whole group of query heads: 0, 0, 1, 1.
    bad_key = jnp.repeat(bad_key.swapaxes(1, 2), call.query.shape[2] // call.key.shape[2], axis=1)
    bad = bad_query.swapaxes(1, 2)[:, :, :, None] | bad_key[:, :, None, :]
    query, key, value = (jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in arrays)
    return call._replace(query=query, key=key, value=value), bad


def drop_weights(weights: Float[Array, 'B N T S'], call: AttentionCall) -> Float[Array, 'B N T S']:
    """Dropout on the weights, independent for every batch row, head, query and key, rescaled by 1 / (1 - rate)."""
    if call.dropout_rate == 0.0:
        return weights
    assert call.dropout_rng is not None
    B, N, T, S = weights.shape
    rows = dropout.global_row_indices(0, B * N, T, 0, T).reshape(B, N, T)
    return weights * dropout.dropout_factors(dropout.dropout_seed(call.dropout_rng), call.dropout_rate, rows, 0, S)
