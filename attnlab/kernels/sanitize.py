"""What keeps the contract around a kernel of another library: no junk goes in, rows that see nothing give zero.

Other kernels multiply what stands in a masked slot by a weight of zero, and zero times NaN is NaN.  Here they are given
finite numbers only; which rows see something that was not finite is counted beside, and so is which see nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.masks import Mask, mask_as_array

UNBOUNDED = 2**30
"""Farther than any key is, and still an int32 when added to one."""


class SanitizedCall(NamedTuple):
    """call: zeros for what is not finite and for what nobody sees, whose gradient is zero then, whatever comes back.

    empty, spoilt: [B, #N, T], which rows see no key, and which see something that is not finite.
    """

    call: AttentionCall
    empty: Bool[Array, 'B #N T']
    spoilt: Bool[Array, 'B N T']


def run_sanitized(kernel: Callable[[AttentionCall], Array], call: AttentionCall) -> AttentionOutput:
    """The output [B, T, N, Hv] of another library's kernel, with the contract kept."""
    if not call.mask.restrict():
        return AttentionOutput(kernel(call), None, None)
    cleaned = sanitize_call(call)
    return AttentionOutput(restore_masked_rows(kernel(cleaned.call), cleaned), None, None)


def sanitize_call(call: AttentionCall) -> SanitizedCall:
    """Memory O(T + S) where the mask holds no array of pairs, else that of all pairs [#B, #N, T, S].

    Positions count from zero, and there is no prefix.
    """
    (B, T, N, _), (S, K) = call.query.shape, call.key.shape[1:3]
    good_query, good_key, good_value = (jnp.isfinite(x) for x in (call.query, call.key, call.value))
    bad_query = ~jnp.all(good_query, axis=-1).swapaxes(1, 2)
    bad_key = ~(jnp.all(good_key, axis=-1) & jnp.all(good_value, axis=-1)).swapaxes(1, 2)
    if call.mask.mask is None:
        marks = jnp.concatenate([jnp.ones((B, 1, S), bool), bad_key], axis=1)
        seen = count_visible_keys(call.mask, marks, T)
        empty, some_bad = seen[:, :1] == 0, jnp.repeat(seen[:, 1:] > 0, N // K, axis=1)
        lost = count_visible_keys(transpose_mask(call.mask), jnp.ones((B, 1, T), bool), S)[:, 0, :, None] == 0
    else:
        allowed = mask_as_array(call.mask, T, S)
        assert allowed is not None
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
        empty = jnp.broadcast_to(~jnp.any(allowed, axis=-1), (B, allowed.shape[1], T))
        some_bad = _any_seen(allowed, jnp.repeat(bad_key, N // K, axis=1))
        lost = jnp.broadcast_to(~jnp.any(allowed, axis=(1, 2)), (B, S))[:, :, None]
    idle = jnp.all(empty, axis=1)[:, :, None]
    query, key, value = (
        jnp.where(good & ~nobody[..., None], x, jnp.zeros_like(x))
        for x, good, nobody in (
            (call.query, good_query, idle), (call.key, good_key, lost), (call.value, good_value, lost)
        )
    )  # fmt: skip
    return SanitizedCall(call._replace(query=query, key=key, value=value), empty, some_bad | (bad_query & ~empty))


def _any_seen(allowed: Bool[Array, '#B #N T S'], marks: Bool[Array, 'B N S']) -> Bool[Array, 'B N T']:
    """Which rows see a marked key.  As a product, in which a mask for all batch rows or heads is not repeated."""
    axes = [axis for axis in (0, 1) if allowed.shape[axis] > 1]
    pairs = allowed.reshape(*(allowed.shape[axis] for axis in axes), *allowed.shape[2:])
    spec = ''.join('bn'[axis] for axis in axes) + 'ts,bns->bnt'
    half = jnp.bfloat16  # holds zero and one
    return jnp.einsum(spec, pairs.astype(half), marks.astype(half), preferred_element_type=jnp.float32) > 0


def restore_masked_rows(output: Array, cleaned: SanitizedCall) -> Array:
    """[B, T, N, Hv] with NaN in the spoilt rows and zero in the empty ones.  Neither sends any gradient back."""
    empty, spoilt = (x.swapaxes(1, 2)[..., None] for x in cleaned[1:])
    output = jnp.where(spoilt, jnp.full_like(output, jnp.nan), output)
    return jnp.where(empty, jnp.zeros_like(output), output)


def count_visible_keys(mask: Mask, marks: Bool[Array, 'B M S'], T: int) -> Int[Array, 'B M T']:
    """How many of the keys in each of M sets a query sees, by all fields but `mask`, positions and prefixes.

    Memory O(M (T + S)).  A query sees the keys of a range, and of those the ones in its segment: a difference of two
    running sums, over all keys or over the keys sorted by segment.
    """
    B, M, S = marks.shape
    first, after = (jnp.broadcast_to(x, (B, T)) for x in _range(mask, T, S))
    if mask.query_segment_ids is None or mask.key_segment_ids is None:
        sums = jnp.pad(jnp.cumsum(marks, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        return _at(sums, after) - _at(sums, first)
    keys, queries = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (mask.key_segment_ids, mask.query_segment_ids))
    column = jnp.broadcast_to(jnp.arange(S), (B, S))
    is_key = jnp.concatenate([jnp.ones(S, bool), jnp.zeros(2 * T, bool)])  # a bound comes before the key it names
    order = jnp.lexsort((
        jnp.broadcast_to(is_key, (B, S + 2 * T)),
        jnp.concatenate([column, first, after], axis=1),
        jnp.concatenate([keys, queries, queries], axis=1),
    ))  # fmt: skip
    ranked = _at(jnp.pad(marks, ((0, 0), (0, 0), (0, 2 * T))), order)
    sums = _at(jnp.cumsum(ranked, axis=-1, dtype=jnp.int32), jnp.argsort(order, axis=-1))
    return sums[..., S + T :] - sums[..., S : S + T]


def _at(x: Array, indices: Int[Array, 'B L']) -> Array:
    return jnp.take_along_axis(x, indices[:, None], axis=-1)


def _range(mask: Mask, T: int, S: int) -> tuple[Array, Array]:
    """The first key of each query's range and the one after its last, [#B, T]."""
    left, right = effective_window(mask)
    row = jnp.arange(T)[None]
    end = jnp.array([[S]]) if (length := mask.key_value_seq_lengths) is None else clip_lengths(length, S)[:, None]
    first, after = jnp.clip(row - left, 0, end), jnp.clip(row + right + 1, 0, end)
    if (length := mask.query_seq_lengths) is not None:
        after = jnp.where(row < length[:, None], after, first)
    return first, after


def clip_lengths(lengths: Int[Array, ' B'], size: int) -> Int[Array, ' B']:
    """Between 0 and size, as int32 or wider."""
    return jnp.clip(lengths.astype(jnp.promote_types(lengths.dtype, jnp.int32)), 0, size)


def effective_window(mask: Mask) -> tuple[int, int]:
    """Window and causality as one window, FAR to the sides that neither bounds."""
    left, right = mask.window or (UNBOUNDED, UNBOUNDED)
    return left, 0 if mask.is_causal else right


def transpose_mask(mask: Mask) -> Mask:
    """Keys for queries and queries for keys; by the same fields as in `count_visible_keys`."""
    left, right = effective_window(mask)
    return Mask(
        query_seq_lengths=mask.key_value_seq_lengths, key_value_seq_lengths=mask.query_seq_lengths,
        query_segment_ids=mask.key_segment_ids, key_segment_ids=mask.query_segment_ids,
        window=(right, left),
    )  # fmt: skip
