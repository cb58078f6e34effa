"""`dot_product_attention`: one signature for every implementation in `kernels.implementations`."""

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
    """softmax(scale Q K^T + bias) V with masks, in float32 or wider inside.

    Replaces `jax.nn.dot_product_attention`: its arguments mean what they mean there, but that

    - a query row that may attend to nothing gives exactly zero and a residual of the lowest finite number (JAX: the
      mean of all values);
    - what stands in a masked slot never matters, NaN and infinity included (JAX: NaN);
    - weights stay float32 where JAX rounds them to the dtype of `key`, and so does the residual;
    - the head width of `value` may differ, and so may the dtypes of the three;
    - `implementation` knows other names, and None is not always the dense one;
    - a mask or bias whose sizes do not broadcast, a window that is negative and a rank above 4 are refused here.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key, value: [B, S, K, H] and [B, S, K, Hv] (or without B), N a multiple of K; heads are repeated 0, 0, 1, 1.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]; its gradient has the shape it came in.
      mask: boolean, True attends, broadcastable to [B, N, T, S]; or rules of `attnlab.kernels.masks`, which take no
        memory; the other arguments apply besides.
      scale: one number for all heads, which may be traced; 1 / sqrt(H) if None.
      is_causal: no key after the query; without positions rows and columns are aligned at the top left.
      query_seq_lengths, key_value_seq_lengths: [B] int; positions at and after the length take no part.
      local_window_size: keys at most so far before and after the query, one number or (left, right).
      query_positions, key_positions: [B, T], [B, S] int; what causality, windows and ALiBi compare.
      query_segment_ids, key_segment_ids: [B, T], [B, S] int, both or none; attend only where equal.
      logits_soft_cap: c gives c tanh(logits / c), before bias and mask (Gemma 2).
      sinks: [N], a logit of each head that takes part in the softmax's sum and leads nowhere (gpt-oss; with 0, the
        "softmax off by one").  A row that sees no key stays exactly zero.
      alibi_slopes: [N], minus slope times |query position - key position| is added as a bias (Press et al. 2022).
      qk_norm: 'l2' (Henry et al. 2020) or 'rms' (Dehghani et al. 2023) normalises every query and key head first.
      dropout_rate, dropout_rng: drops weights, independently for every batch row, head, query and key, and rescales;
        the same weights whatever the implementation.
      implementation: a name in `kernels.implementations`, or several, tried in order; None takes the fastest that
        serves, which is 'ring' where the mesh in context divides tokens over devices.
      block_sizes: (queries, keys) of one block, for implementations that have blocks; None lets them choose.
      return_residual: also the logarithm of the softmax's sum, [B, T, N], with no gradient.
      return_weights: also the weights [B, N, T, S], before dropout.

    Returns:
      [B, T, N, Hv] in the dtype of `query`; a tuple (output, residual, weights) of what was asked for.

    Raises:
      ValueError: for shapes, dtypes, rates and names that do not fit, naming what came and what was expected.
      NotImplementedError: where no implementation that may be tried serves the call, with the reason of each.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    unbatched = query.ndim == key.ndim == value.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    mask = mask if isinstance(mask, Mask) else _pairs(mask, unbatched)
    call = AttentionCall(
        query, key, value, mask_from_arguments(mask, mask_arguments), logit_scale(scale, query.shape[-1] if query.ndim else 1),
        _pairs(bias, unbatched), _array(sinks), _array(alibi_slopes),
        None if logits_soft_cap is None else static_number('logits_soft_cap', logits_soft_cap),
        static_number('dropout_rate', dropout_rate), dropout_rng, parse_block_sizes(block_sizes),
        return_residual, return_weights,
    )  # fmt: skip
    check_call(call)
    names = _names(implementation, call)
    attended = with_auto_axes(lambda call: _first_that_serves(names, _normalised(call, qk_norm)), call)
    return output_or_tuple(jax.tree.map(lambda x: x[0], attended) if unbatched else attended)


def _array(x: AnyArray | None) -> Array | None:
    return None if x is None else jnp.asarray(x)


def _pairs(x: AnyArray | None, unbatched: bool) -> Array | None:
    """A mask or bias; [N, T, S] beside arrays without a batch."""
    x = _array(x)
    return x[None] if x is not None and unbatched and x.ndim == 3 else x


def _normalised(call: AttentionCall, kind: str | None) -> AttentionCall:
    match kind:
        case None:
            return call
        case 'l2':
            return call._replace(query=l2_norm(call.query), key=l2_norm(call.key))
        case 'rms':
            return call._replace(query=rms_norm(call.query), key=rms_norm(call.key))
        case _:
            raise ValueError(f"qk_norm is {kind!r}; expected 'l2', 'rms' or None")


def _names(implementation: str | Sequence[str] | None, call: AttentionCall) -> list[str]:
    """The implementations to try, in order."""
    if implementation is None:
        return implementations_by_speed(call, jax.default_backend())
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS and name not in IMPLEMENTATION_ALIASES:
            known = ', '.join(f'{name!r} ({each.description})' for name, each in IMPLEMENTATIONS.items())
            raise ValueError(f'implementation is {name!r}; expected {known}, several of them, or None')
    if not names:
        raise ValueError('implementation is empty; expected at least one name, or None')
    return [IMPLEMENTATION_ALIASES.get(name, name) for name in names]


def _first_that_serves(names: list[str], call: AttentionCall) -> AttentionOutput:
    reasons = []
    for name in names:
        try:
            return load_implementation(name).dot_product(call)
        except NotImplementedError as error:
            reasons.append(f'{name}: {error}')
    raise NotImplementedError(f'no implementation serves this call; {"; ".join(reasons)}')
