"""Additive attention: the score is a one-hidden-layer network (Bahdanau, Cho and Bengio 2015, appendix A.1.2)."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from attnlab.kernels import dense
from attnlab.kernels.call import (
    AttentionCall,
    AttentionOutput,
    StaticNumber,
    check_call,
    output_or_tuple,
    static_number,
    with_auto_axes,
)
from attnlab.kernels.masks import AnyArray, MaskArguments, mask_as_array, mask_from_arguments


def additive_attention(
    query: Float[AnyArray, 'B T N H'],
    key: Float[AnyArray, 'B S K H'],
    value: Float[AnyArray, 'B S K Hv'],
    score: Float[AnyArray, 'N H'],
    bias: Float[AnyArray, '#B #N #T #S'] | None = None,
    mask: Bool[AnyArray, '#B #N #T #S'] | None = None,
    *,
    dropout_rate: StaticNumber = 0.0,
    dropout_rng: PRNGKeyArray | UInt32[Array, '2'] | None = None,
    return_residual: bool = False,
    return_weights: bool = False,
    **mask_arguments: Unpack[MaskArguments],
) -> Float[Array, 'B T N Hv'] | tuple[Array, ...]:
    """Return the weighted sum of the values, with weights softmax over i of score . tanh(query_t + key_i).

    Args:
      query: [B, T, N, H], the decoder states after their projection W_a s.
      key: [B, S, K, H], the source states after their projection U_a h.  The caller computes it once for each sentence.
      value: [B, S, K, Hv], the vectors that are averaged: the source states h themselves.
      score: [N, H], the vector v_a of each head.
      The other arguments are those of `attnlab.dot_product_attention`, with the same rules.

    Returns:
      [B, T, N, Hv] in the dtype of `query`, or a tuple (output, residual, weights) of the requested arrays.

    Raises:
      ValueError: if shapes, dtypes or rates do not fit; the message has the value and what is expected.
    """
    query, key, value, score = map(jnp.asarray, (query, key, value, score))
    call = AttentionCall(
        query, key, value, mask_from_arguments(mask, mask_arguments), scale=1.0,
        bias=None if bias is None else jnp.asarray(bias),
        dropout_rate=static_number('dropout_rate', dropout_rate), dropout_rng=dropout_rng,
        return_residual=return_residual, return_weights=return_weights,
    )  # fmt: skip
    check_call(call)
    if score.shape != query.shape[2:]:
        raise ValueError(f'score has shape {score.shape}; expected [N, H] = {query.shape[2:]}')
    return output_or_tuple(with_auto_axes(_attend, call, score))


def _attend(call: AttentionCall, score: Float[Array, 'N H']) -> AttentionOutput:
    N, K = call.query.shape[2], call.key.shape[2]
    mask = mask_as_array(call.mask, call.query.shape[1], call.key.shape[1])
    call, nonfinite = dense.zero_nonfinite(call, mask)
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    queries = call.query.astype(wide).swapaxes(1, 2)[:, :, :, None, :]
    keys = jnp.repeat(call.key.astype(wide).swapaxes(1, 2), N // K, axis=1)[:, :, None, :, :]
    logits = jnp.sum(jnp.tanh(queries + keys) * score.astype(wide)[None, :, None, None, :], axis=-1)
    return dense.attend_with_logits(logits, call, mask, nonfinite)
