"""Who may attend to whom, kept as a description until an implementation asks for the array."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Visibility(NamedTuple):
    """The rules of one attention call; a query attends to a key where every given rule allows it.

    mask: boolean, True attends, broadcastable to [B, N, T, S].
    query_seq_lengths, key_value_seq_lengths: [B]; positions at and after a length take no part.
    query_positions, key_positions: [B, T], [B, S]; what causality and windows compare; row and column numbers if None.
    query_segment_ids, key_segment_ids: [B, T], [B, S]; attend only where equal.
    is_causal: no key after the query.  window: (left, right), the keys at most so far before and after the query.
    """

    mask: Bool[Array, '#B #N #T #S'] | None = None
    query_seq_lengths: Int[Array, ' B'] | None = None
    key_value_seq_lengths: Int[Array, ' B'] | None = None
    query_positions: Int[Array, '#B T'] | None = None
    key_positions: Int[Array, '#B S'] | None = None
    query_segment_ids: Int[Array, '#B T'] | None = None
    key_segment_ids: Int[Array, '#B S'] | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None


def as_array(rules: Visibility, T: int, S: int) -> Bool[Array, '#B #N #T #S'] | None:
    """The rules as one boolean array, or None where there is no rule and all attend to all."""
    queries = rules.query_positions if rules.query_positions is not None else jnp.arange(T)[None]
    keys = rules.key_positions if rules.key_positions is not None else jnp.arange(S)[None]
    query, key = queries[:, None, :, None], keys[:, None, None, :]
    allowed = []
    if rules.mask is not None:
        allowed.append(rules.mask)
    if rules.query_seq_lengths is not None:
        allowed.append((jnp.arange(T)[None, :] < rules.query_seq_lengths[:, None])[:, None, :, None])
    if rules.key_value_seq_lengths is not None:
        allowed.append((jnp.arange(S)[None, :] < rules.key_value_seq_lengths[:, None])[:, None, None, :])
    if rules.query_segment_ids is not None and rules.key_segment_ids is not None:
        allowed.append(rules.query_segment_ids[:, None, :, None] == rules.key_segment_ids[:, None, None, :])
    if rules.is_causal:
        allowed.append(key <= query)
    if rules.window is not None:
        left, right = rules.window
        allowed.append((key >= query - left) & (key <= query + right))
    if not allowed:
        return None
    both = allowed[0]
    for one in allowed[1:]:
        both = both & one
    return both


def length_mask(lengths: Int[Array, ' B'], size: int) -> Bool[Array, 'B size']:
    """True on the first `lengths[b]` of `size` positions."""
    return jax.lax.broadcasted_iota(jnp.int32, (lengths.shape[0], size), 1) < lengths[:, None]
