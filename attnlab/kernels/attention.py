"""`dot_product_attention`: one signature for every implementation in `attnlab.kernels.implementations`."""

from collections.abc import Sequence
from typing import SupportsIndex, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from attnlab.kernels.call import (
    AttentionCall,
    AttentionOutput,
    StaticNumber,
    check_call,
    logit_scale,
    output_or_tuple,
    parse_block_sizes,
    static_number,
    with_auto_axes,
)
from attnlab.kernels.implementations import (
    IMPLEMENTATION_ALIASES,
    IMPLEMENTATIONS,
    implementations_by_speed,
    load_implementation,
)
from attnlab.kernels.masks import AnyArray, Mask, MaskArguments, mask_from_arguments
from attnlab.kernels.norms import l2_norm, rms_norm


def dot_product_attention(
    query: Float[AnyArray, '*B T N H'],
    key: Float[AnyArray, '*B S K H'],
    value: Float[AnyArray, '*B S K Hv'],
    bias: Float[AnyArray, '... #N #T #S'] | None = None,
    mask: Bool[AnyArray, '... #N #T #S'] | Mask | None = None,
    *,
    scale: StaticNumber | Float[AnyArray, ''] | None = None,
    logits_soft_cap: StaticNumber | None = None,
    sinks: Float[AnyArray, ' N'] | None = None,
    alibi_slopes: Float[AnyArray, ' N'] | None = None,
    qk_norm: str | None = None,
    dropout_rate: StaticNumber = 0.0,
    dropout_rng: PRNGKeyArray | UInt32[Array, '...'] | None = None,
    implementation: str | Sequence[str] | None = None,
    block_sizes: Sequence[SupportsIndex] | None = None,
    return_residual: bool = False,
    return_weights: bool = False,
    **mask_arguments: Unpack[MaskArguments],
) -> Float[Array, '*B T N Hv'] | tuple[Array, ...]:
    """Return softmax(scale Q K^T + bias) V with masks, computed in float32 or wider.

    Replaces `jax.nn.dot_product_attention`.  Its arguments have the same meaning here; the differences are:

    - A query row that may attend to no key has an output of exactly zero and a residual of the lowest finite number.
      (JAX returns the mean of all values.)
    - Masked entries never change the result, even if they are NaN or infinity.  (JAX returns NaN.)
    - The weights stay float32, and so does the residual.  (JAX rounds them to the dtype of `key`.)
    - The head width of `value` may differ from that of `query`, and the dtypes of the three arrays may differ.
    - `implementation` takes other names, and None does not always select the dense implementation.
    - A mask or bias that does not broadcast, a negative window and a rank above 4 raise ValueError.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key, value: [B, S, K, H] and [B, S, K, Hv] (or without B).  N is a multiple of K; heads are repeated 0, 0, 1, 1.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]; its gradient has the shape of the argument.
      mask: boolean, True attends, broadcastable to [B, N, T, S]; or a `Mask` made by the functions of
        `attnlab.kernels.masks`, which needs no [T, S] array.  It is combined with the other mask arguments.
      scale: one number for all heads, which may be a traced array; 1 / sqrt(H) if None.
      is_causal: a query attends to no later key.  Without positions, rows and columns are aligned at the top left.
      query_seq_lengths, key_value_seq_lengths: [B] int; positions at and after the length are masked.
      local_window_size: how far before and after itself a query attends: one number, or (left, right).
      query_positions, key_positions: [B, T], [B, S] int; compared by causality, windows and ALiBi.
      query_segment_ids, key_segment_ids: [B, T], [B, S] int, both or neither; a query attends only to equal ids.
      logits_soft_cap: c replaces the logits by c tanh(logits / c), before bias and mask (Gemma 2).
      sinks: [N], one extra logit a head that is part of the softmax sum but has no value (gpt-oss; with 0, the
        "softmax off by one").  A row that may attend to no key still has an output of exactly zero.
      alibi_slopes: [N]; minus slope times |query position - key position| is added as a bias (Press et al. 2022).
      qk_norm: 'l2' (Henry et al. 2020) or 'rms' (Dehghani et al. 2023) normalises every query and key head first.
      dropout_rate, dropout_rng: dropout of weights, independent for every batch row, head, query and key, rescaled.
        All implementations drop the same weights for the same `dropout_rng`.
      implementation: a name in `attnlab.kernels.implementations`, or several, tried in order.  None takes the fastest
        one that supports the call; that is 'ring' where the mesh in context divides tokens over devices.
      block_sizes: (queries, keys) of one block, for implementations that work in blocks; None lets them choose.
      return_residual: also return the logarithm of the softmax sum, [B, T, N], which has no gradient.
      return_weights: also return the weights [B, N, T, S] before dropout.

    Returns:
      [B, T, N, Hv] in the dtype of `query`, or a tuple (output, residual, weights) of the requested arrays.

    Raises:
      ValueError: if shapes, dtypes, rates or names do not fit; the message has the value and what is expected.
      NotImplementedError: if no implementation that may be tried supports the call; the message has the reason of each.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    unbatched = query.ndim == key.ndim == value.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    mask = mask if isinstance(mask, Mask) else _with_batch_axis(mask, unbatched)
    call = AttentionCall(
        query, key, value, mask_from_arguments(mask, mask_arguments),
        logit_scale(scale, query.shape[-1] if query.ndim else 1),
        _with_batch_axis(bias, unbatched), _optional_array(sinks), _optional_array(alibi_slopes),
        None if logits_soft_cap is None else static_number('logits_soft_cap', logits_soft_cap),
        static_number('dropout_rate', dropout_rate), dropout_rng, parse_block_sizes(block_sizes),
        return_residual, return_weights,
    )  # fmt: skip
    check_call(call)
    names = _implementations_to_try(implementation, call)
    outputs = with_auto_axes(lambda call: _first_supported(names, _normalise_query_key(call, qk_norm)), call)
    return output_or_tuple(jax.tree.map(lambda x: x[0], outputs) if unbatched else outputs)


def _optional_array(x: AnyArray | None) -> Array | None:
    return None if x is None else jnp.asarray(x)


def _with_batch_axis(x: AnyArray | None, unbatched: bool) -> Array | None:
    """Return a mask or bias as an array; [N, T, S] gets a batch axis if query, key and value have none."""
    x = _optional_array(x)
    return x[None] if x is not None and unbatched and x.ndim == 3 else x


def _normalise_query_key(call: AttentionCall, qk_norm: str | None) -> AttentionCall:
    match qk_norm:
        case None:
            return call
        case 'l2':
            return call._replace(query=l2_norm(call.query), key=l2_norm(call.key))
        case 'rms':
            return call._replace(query=rms_norm(call.query), key=rms_norm(call.key))
        case _:
            raise ValueError(f"qk_norm is {qk_norm!r}; expected 'l2', 'rms' or None")


def _implementations_to_try(implementation: str | Sequence[str] | None, call: AttentionCall) -> list[str]:
    """Return the names of the implementations to try, in order."""
    if implementation is None:
        return implementations_by_speed(call, jax.default_backend())
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS and name not in IMPLEMENTATION_ALIASES:
            known = ', '.join(f'{name!r} ({entry.description})' for name, entry in IMPLEMENTATIONS.items())
            raise ValueError(f'implementation is {name!r}; expected {known}, several of them, or None')
    if not names:
        raise ValueError('implementation is empty; expected at least one name, or None')
    return [IMPLEMENTATION_ALIASES.get(name, name) for name in names]


def _first_supported(names: list[str], call: AttentionCall) -> AttentionOutput:
    """Run the first implementation that supports the call."""
    reasons = []
    for name in names:
        try:
            return load_implementation(name).dot_product(call)
        except NotImplementedError as error:
            reasons.append(f'{name}: {error}')
    raise NotImplementedError(f'no implementation supports this call; {"; ".join(reasons)}')
