"""The masking rules of `dot_product_attention`, kept around a kernel of another library.

Other kernels multiply masked values by a weight of zero, and zero times NaN is NaN.  `sanitize_call` gives such a
kernel finite numbers only, and computes separately which rows may attend to no key and which may attend to a non-finite
number; `restore_masked_rows` writes zero and NaN into these rows of the kernel's output.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.masks import Mask, mask_as_array

UNBOUNDED = 2**30
"""A window size that is larger than any distance, and still an int32 when added to a position."""


class SanitizedCall(NamedTuple):
    """A call with finite numbers only, and the rows of its output that must be replaced.

    call: non-finite numbers are zero, and so are rows of query, key and value that no unmasked pair contains; the
      gradient of a replaced number is zero, whatever the kernel returns for it.
    is_empty: [B, #N, T], the rows that may attend to no key.
    attends_to_nonfinite: [B, N, T], the rows that may attend to a non-finite number.
    """

    call: AttentionCall
    is_empty: Bool[Array, 'B #N T']
    attends_to_nonfinite: Bool[Array, 'B N T']


def run_sanitized(kernel: Callable[[AttentionCall], Array], call: AttentionCall) -> AttentionOutput:
    """Return the output [B, T, N, Hv] of another library's kernel, with the masking rules kept."""
    if not call.mask.restricts_any_pair():
        return AttentionOutput(kernel(call), None, None)
    sanitized = sanitize_call(call)
    return AttentionOutput(restore_masked_rows(kernel(sanitized.call), sanitized), None, None)


def sanitize_call(call: AttentionCall) -> SanitizedCall:
    """Return the call without non-finite numbers.

    Without a mask array, memory is O(T + S), and the mask must have neither positions nor a prefix.  With a mask array
    memory is that of all pairs [#B, #N, T, S].
    """
    (B, T, N, _), (S, K) = call.query.shape, call.key.shape[1:3]
    finite_query, finite_key, finite_value = (jnp.isfinite(x) for x in (call.query, call.key, call.value))
    bad_query = ~jnp.all(finite_query, axis=-1).swapaxes(1, 2)
    bad_key = ~(jnp.all(finite_key, axis=-1) & jnp.all(finite_value, axis=-1)).swapaxes(1, 2)
    if call.mask.mask is None:
        key_sets = jnp.concatenate([jnp.ones((B, 1, S), bool), bad_key], axis=1)
        visible = count_visible_keys(call.mask, key_sets, T)
        is_empty, attends_to_bad_key = visible[:, :1] == 0, jnp.repeat(visible[:, 1:] > 0, N // K, axis=1)
        all_queries = jnp.ones((B, 1, T), bool)
        key_unused = count_visible_keys(transpose_mask(call.mask), all_queries, S)[:, 0, :, None] == 0
    else:
        allowed = mask_as_array(call.mask, T, S)
        assert allowed is not None
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
        is_empty = jnp.broadcast_to(~jnp.any(allowed, axis=-1), (B, allowed.shape[1], T))
        attends_to_bad_key = _attends_to_any(allowed, jnp.repeat(bad_key, N // K, axis=1))
        key_unused = jnp.broadcast_to(~jnp.any(allowed, axis=(1, 2)), (B, S))[:, :, None]
    query_unused = jnp.all(is_empty, axis=1)[:, :, None]
    query, key, value = (
        jnp.where(is_finite & ~is_unused[..., None], x, jnp.zeros_like(x))
        for x, is_finite, is_unused in (
            (call.query, finite_query, query_unused), (call.key, finite_key, key_unused),
            (call.value, finite_value, key_unused),
        )
    )  # fmt: skip
    sanitized = call._replace(query=query, key=key, value=value)
    return SanitizedCall(sanitized, is_empty, attends_to_bad_key | (bad_query & ~is_empty))


def _attends_to_any(allowed: Bool[Array, '#B #N T S'], marks: Bool[Array, 'B N S']) -> Bool[Array, 'B N T']:
    """Return which rows may attend to a marked key.

    Computed as a matrix product, so that a mask that all batch rows or heads share is not repeated in memory.
    """
    axes = [axis for axis in (0, 1) if allowed.shape[axis] > 1]
    pairs = allowed.reshape(*(allowed.shape[axis] for axis in axes), *allowed.shape[2:])
    spec = ''.join('bn'[axis] for axis in axes) + 'ts,bns->bnt'
    half = jnp.bfloat16  # exact for zero and one
    return jnp.einsum(spec, pairs.astype(half), marks.astype(half), preferred_element_type=jnp.float32) > 0


def restore_masked_rows(output: Array, sanitized: SanitizedCall) -> Array:
    """Return the output [B, T, N, Hv] with NaN in rows that attend to a non-finite number and zero in empty rows.

    These rows have no gradient.
    """
    is_empty, attends_to_nonfinite = (x.swapaxes(1, 2)[..., None] for x in sanitized[1:])
    output = jnp.where(attends_to_nonfinite, jnp.full_like(output, jnp.nan), output)
    return jnp.where(is_empty, jnp.zeros_like(output), output)


def count_visible_keys(mask: Mask, key_sets: Bool[Array, 'B M S'], T: int) -> Int[Array, 'B M T']:
    """Return how many keys of each of M sets a query may attend to.

    The fields `mask`, positions and prefixes of the mask are ignored.  Memory is O(M (T + S)).  A query may attend to
    the keys of a range that are in its segment.  Their number is a difference of two running sums, over all keys or
    over the keys sorted by segment.
    """
    B, M, S = key_sets.shape
    first, after = (jnp.broadcast_to(x, (B, T)) for x in _key_range(mask, T, S))
    if mask.query_segment_ids is None or mask.key_segment_ids is None:
        sums = jnp.pad(jnp.cumsum(key_sets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        return _take(sums, after) - _take(sums, first)
    keys, queries = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (mask.key_segment_ids, mask.query_segment_ids))
    column = jnp.broadcast_to(jnp.arange(S), (B, S))
    is_key = jnp.concatenate([jnp.ones(S, bool), jnp.zeros(2 * T, bool)])  # a bound sorts before the key at its column
    order = jnp.lexsort((
        jnp.broadcast_to(is_key, (B, S + 2 * T)),
        jnp.concatenate([column, first, after], axis=1),
        jnp.concatenate([keys, queries, queries], axis=1),
    ))  # fmt: skip
    sorted_sets = _take(jnp.pad(key_sets, ((0, 0), (0, 0), (0, 2 * T))), order)
    sums = _take(jnp.cumsum(sorted_sets, axis=-1, dtype=jnp.int32), jnp.argsort(order, axis=-1))
    return sums[..., S + T :] - sums[..., S : S + T]


def _take(x: Array, indices: Int[Array, 'B L']) -> Array:
    return jnp.take_along_axis(x, indices[:, None], axis=-1)


def _key_range(mask: Mask, T: int, S: int) -> tuple[Array, Array]:
    """Return the first key of each query's range and the one after its last, [#B, T]."""
    left, right = effective_window(mask)
    row = jnp.arange(T)[None]
    end = jnp.array([[S]]) if (length := mask.key_value_seq_lengths) is None else clip_lengths(length, S)[:, None]
    first, after = jnp.clip(row - left, 0, end), jnp.clip(row + right + 1, 0, end)
    if (length := mask.query_seq_lengths) is not None:
        after = jnp.where(row < length[:, None], after, first)
    return first, after


def clip_lengths(lengths: Int[Array, ' B'], size: int) -> Int[Array, ' B']:
    """Clip lengths to 0 .. size, as int32 or wider."""
    return jnp.clip(lengths.astype(jnp.promote_types(lengths.dtype, jnp.int32)), 0, size)


def effective_window(mask: Mask) -> tuple[int, int]:
    """Return window and causality together as one window (left, right); a side without a bound is `UNBOUNDED`."""
    left, right = mask.window or (UNBOUNDED, UNBOUNDED)
    return left, 0 if mask.is_causal else right


def transpose_mask(mask: Mask) -> Mask:
    """Return the mask with queries and keys exchanged; it has only the fields that `count_visible_keys` uses."""
    left, right = effective_window(mask)
    return Mask(
        query_seq_lengths=mask.key_value_seq_lengths, key_value_seq_lengths=mask.query_seq_lengths,
        query_segment_ids=mask.key_segment_ids, key_segment_ids=mask.query_segment_ids,
        window=(right, left),
    )  # fmt: skip
