"""`dot_product_attention`: one signature, the rules that every implementation keeps, and the table of them."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from attnlab.kernels import dense
from attnlab.kernels.masks import Visibility

IMPLEMENTATIONS = {'dense': dense.dot_product}
"""Name to function; the order is the order in which `implementation=None` tries them."""


def dot_product_attention(
    query: Float[Array, '*B T N H'],
    key: Float[Array, '*B S K H'],
    value: Float[Array, '*B S K Hv'],
    bias: Float[Array, '... #N #T #S'] | None = None,
    mask: Bool[Array, '... #N #T #S'] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, ' B'] | None = None,
    key_value_seq_lengths: Int[Array, ' B'] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_positions: Int[Array, '#B T'] | None = None,
    key_positions: Int[Array, '#B S'] | None = None,
    query_segment_ids: Int[Array, '#B T'] | None = None,
    key_segment_ids: Int[Array, '#B S'] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | UInt32[Array, '2'] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    return_weights: bool = False,
) -> Float[Array, '*B T N Hv'] | tuple[Array, ...]:
    """softmax(scale Q K^T + bias) V with masks, in float32 or wider inside.

    The arguments of `jax.nn.dot_product_attention` mean what they mean there, and differ in two places: a query row
    that may attend to nothing gives exactly zero (JAX: the mean of all values), and what stands in a masked slot
    never matters, NaN and infinity included.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key, value: [B, S, K, H] and [B, S, K, Hv] (or without B), N a multiple of K; heads are repeated 0, 0, 1, 1.
      bias: added to the scaled logits, broadcastable to [B, N, T, S]; its gradient has the shape it came in.
      mask: boolean, True attends, broadcastable to [B, N, T, S].
      scale: 1 / sqrt(H) if None.
      is_causal: no key after the query; without positions rows and columns are aligned at the top left.
      query_seq_lengths, key_value_seq_lengths: [B] int; positions at and after the length take no part.
      local_window_size: keys at most so far before and after the query, one number or (left, right).
      query_positions, key_positions: [B, T], [B, S] int; what causality and windows compare.
      query_segment_ids, key_segment_ids: [B, T], [B, S] int, both or none; attend only where equal.
      logits_soft_cap: c gives c tanh(logits / c), before bias and mask.
      dropout_rate, dropout_rng: drops weights, independently for every batch row, head, query and key, and rescales.
      implementation: a name in `IMPLEMENTATIONS`; None takes the first that serves the call.
      return_residual: also the logarithm of the softmax's sum, [B, T, N], with no gradient.
      return_weights: also the weights [B, N, T, S], before dropout.

    Returns:
      [B, T, N, Hv] in the dtype of `query`; a tuple (output, residual, weights) of what was asked for.

    Raises:
      ValueError: for shapes, dtypes, rates and names that do not fit, naming what came and what was expected.
    """
    unbatched = query.ndim == key.ndim == value.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
        bias, mask = (x[None] if x is not None and x.ndim == 3 else x for x in (bias, mask))
    rules = Visibility(
        mask, query_seq_lengths, key_value_seq_lengths, query_positions, key_positions,
        query_segment_ids, key_segment_ids, is_causal, window_sides(local_window_size),
    )  # fmt: skip
    check_call(query, key, value, bias, rules, dropout_rate, dropout_rng)
    if logits_soft_cap is not None and not 0.0 < logits_soft_cap < math.inf:
        raise ValueError(f'logits_soft_cap is {logits_soft_cap}; expected a positive finite number or None')
    name = next(iter(IMPLEMENTATIONS)) if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f'implementation is {implementation!r}; expected one of {sorted(IMPLEMENTATIONS)} or None')
    attended = IMPLEMENTATIONS[name](
        query, key, value, bias, rules,
        scale=1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale,
        logits_soft_cap=logits_soft_cap, dropout_rate=dropout_rate, dropout_rng=dropout_rng,
    )  # fmt: skip
    if unbatched:
        attended = dense.Attended(*(x[0] for x in attended))
    return give(attended, return_residual, return_weights)


def give(attended: dense.Attended, return_residual: bool, return_weights: bool) -> Array | tuple[Array, ...]:
    """The output alone, or a tuple of it and what else was asked for, in the order (output, residual, weights)."""
    more = (attended.residual,) * return_residual + (attended.weights,) * return_weights
    return (attended.output, *more) if more else attended.output


def window_sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """One number stands for both sides; refuses negative ones."""
    sides = (size, size) if isinstance(size, int) else size
    if sides is not None and (len(sides) != 2 or min(sides) < 0):
        raise ValueError(f'local_window_size is {size}; expected a number or (left, right), none of them negative')
    return sides


def check_call(
    query: Array, key: Array, value: Array, bias: Array | None, rules: Visibility, dropout_rate: float, dropout_rng: Any
) -> None:
    """Raises ValueError unless shapes, dtypes and the dropout rate fit together."""
    for name, x in (('query', query), ('key', key), ('value', value)):
        if x.ndim != 4:
            raise ValueError(f'{name} has shape {x.shape}; expected 4 axes [batch, length, heads, width]')
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f'{name} has dtype {x.dtype}; expected a float')
    B, T, N, H = query.shape
    S, K = key.shape[1], key.shape[2]
    if key.shape != (B, S, K, H):
        raise ValueError(f'key has shape {key.shape}; expected [B, S, K, H] with B = {B}, H = {H} as in query')
    if value.shape[:3] != (B, S, K):
        raise ValueError(f'value has shape {value.shape}; expected [B, S, K, any] = [{B}, {S}, {K}, any] as in key')
    if K == 0 or N % K:
        raise ValueError(f'{N} query heads do not divide into groups over {K} key and value heads')
    for name, x, dtypes in (('bias', bias, jnp.floating), ('mask', rules.mask, jnp.bool_)):
        if x is None:
            continue
        if not jnp.issubdtype(x.dtype, dtypes):
            raise ValueError(f'{name} has dtype {x.dtype}; expected {"a float" if name == "bias" else "boolean"}')
        if x.ndim != 4 or any(have not in (1, want) for have, want in zip(x.shape, (B, N, T, S), strict=True)):
            shape = (B, N, T, S)
            raise ValueError(f'{name} has shape {x.shape}; expected 4 axes broadcastable to [B, N, T, S] = {shape}')
    check_rows('query_seq_lengths', rules.query_seq_lengths, [(B,)])
    check_rows('key_value_seq_lengths', rules.key_value_seq_lengths, [(B,)])
    for name, x, size in (
        ('query_positions', rules.query_positions, T), ('key_positions', rules.key_positions, S),
        ('query_segment_ids', rules.query_segment_ids, T), ('key_segment_ids', rules.key_segment_ids, S),
    ):  # fmt: skip
        check_rows(name, x, [(B, size), (1, size)])
    if (rules.query_segment_ids is None) != (rules.key_segment_ids is None):
        raise ValueError('query_segment_ids and key_segment_ids go together; got only one of them')
    check_dropout(dropout_rate, dropout_rng)


def check_rows(name: str, x: Array | None, shapes: list[tuple[int, ...]]) -> None:
    """Raises ValueError unless x is absent or an array of signed integers (windows subtract) of one of the shapes."""
    if x is None:
        return
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        raise ValueError(f'{name} has dtype {x.dtype}; expected signed integers')
    if x.shape not in shapes:
        raise ValueError(f'{name} has shape {x.shape}; expected {" or ".join(map(str, shapes))}')


def check_dropout(rate: float, rng: Any) -> None:
    """Raises ValueError for a rate outside [0, 1), NaN included, and for a rate without a key to draw from."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f'dropout_rate is {rate}; expected 0 <= rate < 1')
    if rate > 0.0 and rng is None:
        raise ValueError(f"dropout_rate is {rate}, dropout_rng is None; pass a key (in Flax: rngs={{'dropout': key}})")
