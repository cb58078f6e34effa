"""Attention by JAX's own kernel for TPUs, `jax.experimental.pallas.ops.tpu.splash_attention`.

Outside of what is refused by name the contract holds, but that
- `query` is scaled before the product and rounded to its own dtype again, exact where the scale is a power of two;
- products of float32 are as precise as the TPU's default;
- a row that sees something not finite is NaN, and sends no gradient where `dense` sends NaN;
- the kernel sorts out tiles on the host, pair by pair, once for a combination of lengths and window;
- `jax.jit` cannot split it over devices: there it belongs into `jax.shard_map` or `jax.pmap`.
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
"""What blocks of queries and keys are a multiple of, and the heads that JAX tests the kernel with."""


def dot_product(call: AttentionCall, interpret: bool = False) -> AttentionOutput:
    """As `dense.dot_product`, in memory O(T + S); `interpret` runs the kernel step by step, on any device.

    Raises NotImplementedError on other machines, and for what the kernel lacks; the reasons are in `_refuse`.
    """
    if not interpret:
        check_tpu()
    _refuse(call)
    if 0 in call.query.shape or 0 in call.value.shape:
        return dense.dot_product(call._replace(block_sizes=None))
    return sanitize.run_sanitized(lambda call: _call(call, interpret), call)


def check_tpu() -> None:
    """Raises NotImplementedError unless this process runs on TPUs."""
    if jax.default_backend() != 'tpu':
        raise NotImplementedError(f'platform: splash needs a TPU; this process runs on {jax.default_backend()}')


def pays(call: AttentionCall, platform: str) -> bool:
    """Whether the program traced here runs on one device, because the compiler cannot divide the kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and mesh.are_all_axes_manual)


def _refuse(call: AttentionCall) -> None:
    mask, width = call.mask, max(call.query.shape[-1], call.value.shape[-1])
    wide = [x.dtype for x in (call.query, call.key, call.value) if x.dtype == jnp.float64]
    ids = [x for x in (mask.query_segment_ids, mask.key_segment_ids) if x is not None and x.dtype.itemsize > 4]
    counts = mask.is_causal or mask.window is not None
    raise_unsupported([
        ('query', width > 2 * LANES, f'JAX tests splash with heads of at most {2 * LANES} numbers, not of {width}'),
        ('query', bool(wide), 'a TPU has no float64'),
        ('bias', call.bias is not None, 'splash adds none'),
        ('mask', mask.mask is not None, 'splash takes no array'),
        ('alibi_slopes', call.alibi_slopes is not None, 'splash adds no bias'),
        ('dropout_rate', call.dropout_rate > 0.0, 'splash drops nothing'),
        ('return_weights', call.return_weights, 'splash never forms them'),
        ('return_residual', call.return_residual, 'splash returns it only where nothing has a gradient'),
        ('prefix_lengths', mask.prefix_lengths is not None, 'splash fixes its mask before it sees them'),
        ('query_positions', counts and mask.query_positions is not None, 'splash counts rows'),
        ('key_positions', counts and mask.key_positions is not None, 'splash counts columns'),
        ('query_segment_ids', bool(ids), 'splash compares int32'),
        ('block_sizes', any(size % LANES for size in call.block_sizes or ()),
         f'splash wants multiples of {LANES}, not {call.block_sizes}'),
    ])  # fmt: skip


def _call(call: AttentionCall, interpret: bool) -> Array:
    """Splash's own output [B, T, N, Hv]; rows that see nothing hold anything."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds  # takes long, and is for TPUs alone

    T, N = call.query.shape[1:3]
    S, Hv = call.key.shape[1], call.value.shape[-1]
    queries, keys = call.block_sizes or (_block(T, call), _block(S, call))
    padded_T, padded_S = math.ceil(T / queries) * queries, math.ceil(S / keys) * keys
    halves = all(x.dtype == jnp.bfloat16 for x in (call.query, call.key, call.value))
    # A TPU has no float16.  And the sinks' gradient is formed in the dtype of the query.
    dtype = jnp.bfloat16 if halves and call.sinks is None else jnp.float32
    query = call.query.astype(jnp.float32) * call.scale
    query, key, value = (
        _padded(x.astype(dtype).swapaxes(1, 2), length)
        for x, length in ((query, padded_T), (call.key, padded_S), (call.value, padded_S))
    )
    band = sanitize.effective_window(call.mask)
    ids = _ids(call, padded_T, padded_S)
    kernel = _kernel(N, (padded_T, padded_S), (T, S), band, (queries, keys), call.logits_soft_cap, interpret)
    sinks = None if call.sinks is None else call.sinks.astype(jnp.float32)
    each = lambda query, key, value, ids: kernel(query, key, value, ids and SegmentIds(*ids), sinks)
    output = jax.vmap(each)(query, key, value, ids)
    return output[:, :, :T, :Hv].swapaxes(1, 2).astype(call.query.dtype)


def _block(length: int, call: AttentionCall) -> int:
    """Block size for a length; wider heads have smaller blocks."""
    limit = 512 if max(call.query.shape[-1], call.value.shape[-1]) <= LANES else 256
    return even_block_size(length, limit, LANES)


def _padded(x: Array, length: int) -> Array:
    """[B, heads, length, whole lanes]."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, -x.shape[3] % LANES)))


def _ids(call: AttentionCall, padded_T: int, padded_S: int) -> tuple[Int[Array, 'B T'], Int[Array, 'B S']] | None:
    """Segments, with one of its own for keys after the end; queries after theirs are cut off later."""
    mask, (B, T), S = call.mask, call.query.shape[:2], call.key.shape[1]
    queries, keys, length = mask.query_segment_ids, mask.key_segment_ids, mask.key_value_seq_lengths
    reaches_end = padded_S > S and T + sanitize.effective_window(mask)[1] > S
    if queries is None and length is None and not reaches_end:
        return None
    queries, keys = (
        jnp.zeros((B, size), jnp.int32) if x is None else jnp.broadcast_to(x, (B, size)).astype(jnp.int32)
        for x, size in ((queries, T), (keys, S))
    )
    end = jnp.full(B, S) if length is None else sanitize.clip_lengths(length, S)
    nobody = jnp.max(queries, axis=1, keepdims=True) + 1
    keys = jnp.pad(keys, ((0, 0), (0, padded_S - S)))
    keys = jnp.where(jnp.arange(padded_S)[None] < end[:, None], keys, nobody)
    return jnp.pad(queries, ((0, 0), (0, padded_T - T)), 'edge'), keys


def _kernel(
    N: int, padded: tuple[int, int], sizes: tuple[int, int], band: tuple[int, int], blocks: tuple[int, int],
    soft_cap: float | None, interpret: bool,
) -> Any:  # fmt: skip
    """(query [N, T, H], key [K, S, H], value [K, S, Hv], segments, sinks) to [N, T, Hv]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (left, right), (T, S) = band, sizes
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
