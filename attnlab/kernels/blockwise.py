"""Attention over tiles of queries by keys, in memory that grows with T + S.

This file pads a call to whole blocks and restores the shapes of the results; `attnlab.kernels.flash` does the work.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.kernels import dense, flash
from attnlab.kernels.call import AttentionCall, AttentionOutput
from attnlab.kernels.flash_layout import FlashConfig, FlashInputs, flash_inputs, map_inputs
from attnlab.kernels.tiles import TileGrid, even_block_size


def dot_product(call: AttentionCall) -> AttentionOutput:
    """Return the same as `dense.dot_product`, with memory O(T + S) besides inputs and outputs, forward and backward.

    Raises NotImplementedError if the call requests weights.
    """
    if call.return_weights:
        raise NotImplementedError('return_weights: blockwise never forms them')
    B, T, N, H = call.query.shape
    S, _, Hv = call.value.shape[1:]
    if 0 in (B, T, N, H, S, Hv):  # an axis of size zero has no tiles
        return dense.dot_product(call._replace(block_sizes=None))
    config, inputs = _padded_inputs(call, jax.default_backend())
    output, residual = flash.flash_attention(config, *inputs)
    output = output.reshape(B, N, -1, Hv)[:, :, :T].swapaxes(1, 2).astype(call.query.dtype)
    residual = jax.lax.stop_gradient(residual.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2))
    return AttentionOutput(output, residual if call.return_residual else None, None)


def is_preferred(call: AttentionCall, platform: str) -> bool:
    """Return whether tiles are likely faster than the whole matrix."""
    T, S = call.query.shape[1], call.key.shape[1]
    return T * S >= (256 * 256 if platform == 'cpu' else 2048 * 2048)


def default_block_sizes(T: int, S: int, N: int, platform: str) -> tuple[int, int]:
    """Return (queries, keys) of a block; all blocks have about the same length.

    A tile holds all N heads, so on a CPU a block has fewer queries if there are more heads.
    """
    keys = even_block_size(S, 512, 8)
    queries = max(64, min(512, 2**21 // (N * keys))) if platform == 'cpu' else 512
    return even_block_size(T, queries, 8), keys


def _padded_inputs(call: AttentionCall, platform: str) -> tuple[FlashConfig, FlashInputs]:
    """Return the inputs of `flash`, padded to whole blocks; the mask hides the padding."""
    B, T, N, _ = call.query.shape
    S = call.key.shape[1]
    queries, keys = call.block_sizes or default_block_sizes(T, S, N, platform)
    keys += keys % 2  # dropout draws random numbers for pairs of keys
    grid = TileGrid(math.ceil(T / queries) * queries, math.ceil(S / keys) * keys, queries, keys)
    mask = call.mask
    is_restricted = mask.restricts_any_pair()
    if grid.S > S:
        mask = mask.replace(key_value_seq_lengths=_clip_or_fill(mask.key_value_seq_lengths, S, B))
    if grid.T > T and is_restricted:  # padding queries must not attend to keys that all queries mask
        mask = mask.replace(query_seq_lengths=_clip_or_fill(mask.query_seq_lengths, T, B))
    config = FlashConfig(grid, T, call.logits_soft_cap, call.dropout_rate, platform != 'cpu')
    padding = {'T': (T, grid.T - T), 'S': (S, grid.S - S)}

    def pad(x: Array, axes: str) -> Array:
        """Pad the axes T and S.  A broadcast axis of size one stays; positions and segment ids repeat their last."""
        widths = [(0, padding[a][1]) if a in padding and padding[a][0] == size else (0, 0)
                  for a, size in zip(axes, x.shape, strict=True)]  # fmt: skip
        mode = 'edge' if jnp.issubdtype(x.dtype, jnp.integer) else 'constant'
        return jnp.pad(x, widths, mode) if any(after for _, after in widths) else x

    return config, map_inputs(pad, *flash_inputs(call._replace(mask=mask)))


def _clip_or_fill(lengths: Array | None, limit: int, B: int) -> Array:
    """Return lengths [B] of at most `limit`; all are `limit` if None."""
    return jnp.full(B, limit) if lengths is None else jnp.minimum(lengths, limit)
