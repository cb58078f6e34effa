"""Attention over tiles of queries by keys, in memory that grows with T + S: the way in and out of `kernels.flash`."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.kernels import dense, flash
from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.tiles import TileGrid, even_block_size


def dot_product(call: AttentionCall) -> AttentionOutput:
    """As `dense.dot_product`; memory O(T + S) beside what comes in and goes out, forward and backward."""
    if call.return_weights:
        raise NotImplementedError('return_weights: blockwise never forms them')
    B, T, N, H = call.query.shape
    S, _, Hv = call.value.shape[1:]
    if 0 in (B, T, N, H, S, Hv):  # nothing to cut
        return dense.dot_product(call._replace(block_sizes=None))
    plan, arrays = _padded(call, jax.default_backend())
    output, residual = flash.flash_attention(plan, *arrays)
    output = output.reshape(B, N, -1, Hv)[:, :, :T].swapaxes(1, 2).astype(call.query.dtype)
    residual = jax.lax.stop_gradient(residual.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2))
    return AttentionOutput(output, residual if call.return_residual else None, None)


def pays(call: AttentionCall, platform: str) -> bool:
    """Whether tiles are likely faster than the whole matrix."""
    T, S = call.query.shape[1], call.key.shape[1]
    return T * S >= (256 * 256 if platform == 'cpu' else 2048 * 2048)


def default_block_sizes(T: int, S: int, N: int, platform: str) -> tuple[int, int]:
    """Blocks of about equal length; on a CPU the fewer queries the more heads, for a tile holds all of them."""
    keys = even_block_size(S, 512, 8)
    queries = max(64, min(512, 2**21 // (N * keys))) if platform == 'cpu' else 512
    return even_block_size(T, queries, 8), keys


def _padded(call: AttentionCall, platform: str) -> tuple[flash.FlashConfig, flash.FlashInputs]:
    """The arrays of a call, filled up to whole blocks, which the mask hides."""
    B, T, N, _ = call.query.shape
    S = call.key.shape[1]
    queries, keys = call.block_sizes or default_block_sizes(T, S, N, platform)
    keys += keys % 2  # dropout draws for pairs of keys
    grid = TileGrid(math.ceil(T / queries) * queries, math.ceil(S / keys) * keys, queries, keys)
    mask = call.mask
    restricts = mask.restrict()
    if grid.S > S:
        mask = mask.replace(key_value_seq_lengths=_at_most(S, mask.key_value_seq_lengths, B))
    if grid.T > T and restricts:  # queries of the padding must not see keys that no query sees
        mask = mask.replace(query_seq_lengths=_at_most(T, mask.query_seq_lengths, B))
    plan = flash.FlashConfig(grid, T, call.logits_soft_cap, call.dropout_rate, platform != 'cpu')
    more = {'T': (T, grid.T - T), 'S': (S, grid.S - S)}

    def filled(x: Array, axes: str) -> Array:
        """An axis of size one that stands for all stays; positions and segments repeat their last."""
        widths = [(0, more[a][1]) if a in more and more[a][0] == size else (0, 0)
                  for a, size in zip(axes, x.shape, strict=True)]  # fmt: skip
        mode = 'edge' if jnp.issubdtype(x.dtype, jnp.integer) else 'constant'
        return jnp.pad(x, widths, mode) if any(after for _, after in widths) else x

    return plan, flash.map_inputs(filled, *flash.flash_inputs(call._replace(mask=mask)))


def _at_most(limit: int, lengths: Array | None, B: int) -> Array:
    return jnp.full(B, limit) if lengths is None else jnp.minimum(lengths, limit)
