"""Attention by its definition: the whole matrix of logits, a softmax, a weighted sum.

The other implementations in `attnlab.kernels` are tested against this file, and this file against NumPy in float64.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.kernels import dropout
from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.masks import mask_as_array, position_distances


def dot_product(call: AttentionCall) -> AttentionOutput:
    """Return softmax(scale Q K^T + bias) V (Vaswani et al. 2017, section 3.2.1).

    Heads are grouped as in Ainslie et al. 2023.  Raises NotImplementedError if the call has block sizes.
    """
    if call.block_sizes is not None:
        raise NotImplementedError('block_sizes: dense has no blocks')
    B, T, N, H = call.query.shape
    S, K = call.key.shape[1], call.key.shape[2]
    mask = mask_as_array(call.mask, T, S)
    call, nonfinite = zero_nonfinite(call, mask)
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    # Heads before positions: every backend is fast at a matrix product [T, H] x [H, S] for each head.
    grouped_query = call.query.swapaxes(1, 2).reshape(B, K, N // K, T, H)
    logits = jnp.einsum('bkgth,bskh->bkgts', grouped_query, call.key, preferred_element_type=wide)
    logits = logits.reshape(B, N, T, S)
    if mask is not None:  # a masked logit that overflowed would be zero times infinity in gradients of scale and cap
        logits = jnp.where(mask, logits, 0.0)
    logits = logits * call.scale
    if call.logits_soft_cap is not None:
        logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
    if call.alibi_slopes is not None:
        distances = position_distances(call.mask, T, S).astype(wide)
        logits = logits - call.alibi_slopes.astype(wide)[None, :, None, None] * distances
    return attend_with_logits(logits, call, mask, nonfinite)


def is_preferred(call: AttentionCall, platform: str) -> bool:
    """Return True: `dense` is the last in the table of implementations, and supports every platform."""
    return True


def attend_with_logits(
    logits: Float[Array, 'B N T S'],
    call: AttentionCall,
    mask: Bool[Array, '#B #N #T #S'] | None,
    nonfinite: Bool[Array, 'B N T S'] | None,
) -> AttentionOutput:
    """Return softmax(logits + bias) V, with sinks and dropout.

    Masked logits never change the result, and a row that may attend to no key has an output of zero.
    `nonfinite` marks pairs whose query, key or value is not finite (see `zero_nonfinite`): unless masked, they become
    NaN.
    """
    B, N, T, S = logits.shape
    K = call.value.shape[2]
    if nonfinite is not None:
        logits = jnp.where(nonfinite, jnp.nan, logits)
    if call.bias is not None:
        logits = logits + call.bias.astype(logits.dtype)
    lowest = jnp.finfo(logits.dtype).min
    if mask is not None:
        logits = jnp.where(mask, logits, lowest)
    # A bias of -inf may hide a whole row as a mask does: the maximum must stay finite, because -inf - -inf is NaN.
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    if call.sinks is not None:
        sink = call.sinks.astype(logits.dtype)[None, :, None, None]
        largest = jnp.maximum(largest, sink)
    largest = jax.lax.stop_gradient(largest)
    exponentials = jnp.exp(logits - largest)
    if mask is not None:
        exponentials = jnp.where(mask, exponentials, 0.0)
    softmax_sum = jnp.sum(exponentials, axis=-1, keepdims=True)
    is_empty = softmax_sum == 0.0
    if call.sinks is not None:
        softmax_sum = softmax_sum + jnp.exp(sink - largest)
    softmax_sum = jnp.where(softmax_sum == 0.0, 1.0, softmax_sum)
    weights = exponentials / softmax_sum
    if mask is not None:  # again, for the gradient: that of a masked value may overflow, and zero times infinity is NaN
        weights = jnp.where(mask, weights, 0.0)
    # Weights stay wide.  In a half precision their gradient would be rounded too, and would overflow in float16.
    dropped_weights = drop_weights(weights, call).reshape(B, K, N // K, T, S)
    output = jnp.einsum('bkgts,bskh->bkgth', dropped_weights, call.value).reshape(B, N, T, call.value.shape[-1])
    # The output of an empty row is zero already; this `where` also stops its gradient, even if it is NaN.
    output = jnp.where(is_empty, 0.0, output).swapaxes(1, 2).astype(call.query.dtype)
    residual = None
    if call.return_residual:
        has_empty_sum = is_empty if call.sinks is None else jnp.zeros_like(is_empty)
        residual = jnp.where(has_empty_sum, lowest, jnp.log(softmax_sum) + largest)[..., 0].swapaxes(1, 2)
        residual = jax.lax.stop_gradient(residual)
    return AttentionOutput(output, residual, weights if call.return_weights else None)


def zero_nonfinite(
    call: AttentionCall, mask: Bool[Array, '#B #N #T #S'] | None
) -> tuple[AttentionCall, Bool[Array, 'B N T S'] | None]:
    """Return the call with its non-finite numbers replaced by zero, and which pairs [B, N, T, S] had any.

    A masked pair has the weight zero, but zero times NaN is NaN, forward and backward.  So the products get finite
    numbers only, and `attend_with_logits` sets the logits of the marked pairs to NaN unless they are masked.
    Without a mask the call is returned as it is, with None.
    """
    if mask is None:
        return call, None
    arrays = call.query, call.key, call.value
    finite_query, finite_key, finite_value = (jnp.isfinite(x) for x in arrays)
    bad_query = ~jnp.all(finite_query, axis=-1)
    bad_key = ~(jnp.all(finite_key, axis=-1) & jnp.all(finite_value, axis=-1))
    # Each key head serves a whole group of query heads: 0, 0, 1, 1.
    bad_key = jnp.repeat(bad_key.swapaxes(1, 2), call.query.shape[2] // call.key.shape[2], axis=1)
    bad_pairs = bad_query.swapaxes(1, 2)[:, :, :, None] | bad_key[:, :, None, :]
    query, key, value = (jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in arrays)
    return call._replace(query=query, key=key, value=value), bad_pairs


def drop_weights(weights: Float[Array, 'B N T S'], call: AttentionCall) -> Float[Array, 'B N T S']:
    """Apply dropout, independent for every batch row, head, query and key, and rescale by 1 / (1 - rate)."""
    if call.dropout_rate == 0.0:
        return weights
    assert call.dropout_rng is not None
    B, N, T, S = weights.shape
    rows = dropout.global_row_indices(0, B * N, T, 0, T).reshape(B, N, T)
    return weights * dropout.dropout_factors(dropout.dropout_seed(call.dropout_rng), call.dropout_rate, rows, 0, S)
