"""Attention by JAX's own kernel for TPUs, `jax.experimental.pallas.ops.tpu.splash_attention`.

The contract of `attnlab.dot_product_attention` holds for every supported call, with these exceptions:

- `query` is scaled before the product and rounded to its own dtype again; this is exact if the scale is a power of two.
- Products of float32 have the TPU's default precision.
- A row that may attend to a non-finite number is NaN and has no gradient; `dense` has a gradient of NaN there.
- The kernel classifies tiles on the host, pair by pair, once for each combination of lengths and window.
- `jax.jit` cannot divide the kernel over devices: on several devices, call it inside `jax.shard_map` or `jax.pmap`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attnlab.kernels import dense, sanitize
from attnlab.kernels.call import AttentionCall, AttentionOutput, raise_unsupported
from attnlab.kernels.tiles import even_block_size

LANES = 128
"""Blocks of queries and keys are a multiple of this, and JAX tests the kernel with heads of this width."""


def dot_product(call: AttentionCall, interpret: bool = False) -> AttentionOutput:
    """Return the same as `dense.dot_product`, with memory O(T + S).

    `interpret` runs the kernel step by step, on any device.  Raises NotImplementedError on other machines, and for what
    the kernel does not support (see `_check_supported`).
    """
    if not interpret:
        check_tpu()
    _check_supported(call)
    if 0 in call.query.shape or 0 in call.value.shape:
        return dense.dot_product(call._replace(block_sizes=None))
    return sanitize.run_sanitized(lambda call: _call_splash(call, interpret), call)


def check_tpu() -> None:
    """Raise NotImplementedError unless this process runs on TPUs."""
    if jax.default_backend() != 'tpu':
        raise NotImplementedError(f'platform: splash needs a TPU; this process runs on {jax.default_backend()}')


def is_preferred(call: AttentionCall, platform: str) -> bool:
    """Return whether the program that is traced runs on one device, because the compiler cannot divide the kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and mesh.are_all_axes_manual)


def _check_supported(call: AttentionCall) -> None:
    """Raise NotImplementedError, with argument and reason, if the kernel cannot compute the call."""
    mask, width = call.mask, max(call.query.shape[-1], call.value.shape[-1])
    has_float64 = any(x.dtype == jnp.float64 for x in (call.query, call.key, call.value))
    segment_ids = (mask.query_segment_ids, mask.key_segment_ids)
    has_wide_ids = any(x is not None and x.dtype.itemsize > 4 for x in segment_ids)
    compares_positions = mask.is_causal or mask.window is not None
    raise_unsupported([
        ('query', width > 2 * LANES, f'JAX tests splash with heads of width up to {2 * LANES}, not {width}'),
        ('query', has_float64, 'a TPU has no float64'),
        ('bias', call.bias is not None, 'splash takes no bias'),
        ('mask', mask.mask is not None, 'splash takes no mask array'),
        ('alibi_slopes', call.alibi_slopes is not None, 'splash takes no bias'),
        ('dropout_rate', call.dropout_rate > 0.0, 'splash has no dropout'),
        ('return_weights', call.return_weights, 'splash never forms them'),
        ('return_residual', call.return_residual, 'splash returns it only if nothing has a gradient'),
        ('prefix_lengths', mask.prefix_lengths is not None, 'the mask of splash is fixed before the lengths are known'),
        ('query_positions', compares_positions and mask.query_positions is not None, 'splash uses row numbers'),
        ('key_positions', compares_positions and mask.key_positions is not None, 'splash uses column numbers'),
        ('query_segment_ids', has_wide_ids, 'splash compares int32'),
        ('block_sizes', any(size % LANES for size in call.block_sizes or ()),
         f'splash needs multiples of {LANES}, not {call.block_sizes}'),
    ])  # fmt: skip


def _call_splash(call: AttentionCall, interpret: bool) -> Array:
    """Return splash's output [B, T, N, Hv]; rows that may attend to no key hold arbitrary numbers."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds  # a slow import that only TPUs need

    T, N = call.query.shape[1:3]
    S, Hv = call.key.shape[1], call.value.shape[-1]
    queries, keys = call.block_sizes or (_block_size(T, call), _block_size(S, call))
    padded_T, padded_S = math.ceil(T / queries) * queries, math.ceil(S / keys) * keys
    all_bfloat16 = all(x.dtype == jnp.bfloat16 for x in (call.query, call.key, call.value))
    # A TPU has no float16.  And the sinks' gradient is computed in the dtype of the query.
    dtype = jnp.bfloat16 if all_bfloat16 and call.sinks is None else jnp.float32
    query = call.query.astype(jnp.float32) * call.scale
    query, key, value = (
        _pad(x.astype(dtype).swapaxes(1, 2), length)
        for x, length in ((query, padded_T), (call.key, padded_S), (call.value, padded_S))
    )
    window = sanitize.effective_window(call.mask)
    segment_ids = _segment_ids(call, padded_T, padded_S)
    kernel = _make_kernel(N, (padded_T, padded_S), (T, S), window, (queries, keys), call.logits_soft_cap, interpret)
    sinks = None if call.sinks is None else call.sinks.astype(jnp.float32)
    attend_row = lambda query, key, value, ids: kernel(query, key, value, ids and SegmentIds(*ids), sinks)
    output = jax.vmap(attend_row)(query, key, value, segment_ids)
    return output[:, :, :T, :Hv].swapaxes(1, 2).astype(call.query.dtype)


def _block_size(length: int, call: AttentionCall) -> int:
    """Return the block size for a length; wider heads have smaller blocks."""
    limit = 512 if max(call.query.shape[-1], call.value.shape[-1]) <= LANES else 256
    return even_block_size(length, limit, LANES)


def _pad(x: Array, length: int) -> Array:
    """Pad [B, heads, T, H] to the length, and the width to a multiple of `LANES`."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, -x.shape[3] % LANES)))


def _segment_ids(
    call: AttentionCall, padded_T: int, padded_S: int
) -> tuple[Int[Array, 'B T'], Int[Array, 'B S']] | None:
    """Return segment ids of padded queries and keys, or None if none are needed.

    Keys after the end get an id that no query has.  Queries after the end are cut off later.
    """
    mask, (B, T), S = call.mask, call.query.shape[:2], call.key.shape[1]
    queries, keys, length = mask.query_segment_ids, mask.key_segment_ids, mask.key_value_seq_lengths
    reaches_padding = padded_S > S and T + sanitize.effective_window(mask)[1] > S
    if queries is None and length is None and not reaches_padding:
        return None
    queries, keys = (
        jnp.zeros((B, size), jnp.int32) if x is None else jnp.broadcast_to(x, (B, size)).astype(jnp.int32)
        for x, size in ((queries, T), (keys, S))
    )
    end = jnp.full(B, S) if length is None else sanitize.clip_lengths(length, S)
    unused_id = jnp.max(queries, axis=1, keepdims=True) + 1
    keys = jnp.pad(keys, ((0, 0), (0, padded_S - S)))
    keys = jnp.where(jnp.arange(padded_S)[None] < end[:, None], keys, unused_id)
    return jnp.pad(queries, ((0, 0), (0, padded_T - T)), 'edge'), keys


def _make_kernel(
    N: int, padded: tuple[int, int], sizes: tuple[int, int], window: tuple[int, int], blocks: tuple[int, int],
    soft_cap: float | None, interpret: bool,
) -> Any:  # fmt: skip
    """Return a function of (query [N, T, H], key [K, S, H], value [K, S, Hv], segment ids, sinks) to [N, T, Hv].

    `padded` and `sizes` are (T, S) with and without padding; `blocks` is (queries, keys).
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (left, right), (T, S) = window, sizes
    left, right = None if left >= T - 1 else left, None if right >= S - 1 else right
    if left is None and right is None:
        mask = splash.FullMask(padded)
    elif left is None and right == 0:
        mask = splash.CausalMask(padded)
    else:
        mask = splash.LocalMask(padded, (left, right), 0)
    queries, keys = blocks
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * N), head_shards=1, q_seq_shards=1, attn_logits_soft_cap=soft_cap,
        interpret=interpret, block_sizes=splash.BlockSizes(
            block_q=queries, block_kv=keys, block_q_dkv=queries, block_kv_dkv=keys, block_q_dq=queries, block_kv_dq=keys
        ),
    )  # fmt: skip
