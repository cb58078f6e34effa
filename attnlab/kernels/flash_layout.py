"""The inputs of `attnlab.kernels.flash`: their layout, and functions that map, merge and split them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from attnlab.kernels import dropout
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.masks import Mask
from attnlab.kernels.tiles import BlockStarts, TileGrid


class FlashConfig(NamedTuple):
    """Constants of the compiled program."""

    grid: TileGrid
    sequence_length: int  # T of the whole sequence without padding; dropout derives row indices from it
    soft_cap: float | None
    dropout_rate: float
    vmap_rows: bool  # whether batch rows are computed by `jax.vmap`, or one after the other


class FloatInputs(NamedTuple):
    """The arrays that have a gradient.

    The leading axis is B; 1 for a bias that all rows share.  `sinks` and `alibi_slopes` have no batch axis.
    """

    query: Float[Array, 'B K G T H']  # scaled
    key: Float[Array, 'B K S H']
    value: Float[Array, 'B K S Hv']
    bias: Float[Array, '#B #K #G #T #S'] | None
    sinks: Float[Array, 'K G'] | None
    alibi_slopes: Float[Array, 'K G'] | None


class OtherInputs(NamedTuple):
    """The arrays that have no gradient."""

    mask: Mask
    batch_row: Int[Array, ' B']  # the index of each batch row, for dropout
    dropout_seed: UInt32[Array, '2'] | None
    block_starts: BlockStarts = BlockStarts()


FlashInputs = tuple[FloatInputs, OtherInputs]


def flash_inputs(call: AttentionCall) -> FlashInputs:
    """Return the arrays of a call in the layout of `attnlab.kernels.flash`.

    The query is scaled, in float32 or wider; heads come before positions, in groups.
    """
    (B, T, N, H), K = call.query.shape, call.key.shape[2]
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    query = (call.query.astype(wide) * call.scale).swapaxes(1, 2).reshape(B, K, N // K, T, H)
    bias = None if call.bias is None else group_heads(call.bias.astype(wide), K)
    sinks, alibi_slopes = (
        None if x is None else x.astype(wide).reshape(K, N // K) for x in (call.sinks, call.alibi_slopes)
    )
    seed = dropout.dropout_seed(call.dropout_rng) if call.dropout_rate and call.dropout_rng is not None else None
    floats = FloatInputs(query, call.key.swapaxes(1, 2), call.value.swapaxes(1, 2), bias, sinks, alibi_slopes)
    return floats, OtherInputs(call.mask, jnp.arange(B), seed)


def group_heads(x: Array, K: int) -> Array:
    """Reshape [#B, #N, #T, #S] to [#B, #K, #G, #T, #S]."""
    B, N, T, S = x.shape
    return x.reshape(B, *((K, N // K) if N > 1 else (1, 1)), T, S)


def map_inputs(function: Callable[[Array, str], Any], floats: FloatInputs, others: OtherInputs) -> FlashInputs:
    """Apply `function(array, axes)` to each array; `axes` is its shape, one letter for each axis."""
    optional: Any = lambda x, axes: None if x is None else function(x, axes)
    batch_row, seed = optional(others.batch_row, 'B'), optional(others.dropout_seed, 'W')
    return (
        FloatInputs(*map(optional, floats, ('BKGTH', 'BKSH', 'BKSH', 'BKGTS', 'KG', 'KG'))),
        OtherInputs(
            others.mask.map_arrays(function), batch_row, seed, BlockStarts(*map(optional, others.block_starts, 'IJ'))
        ),
    )


def merge_inputs(first: FlashInputs, second: FlashInputs) -> FlashInputs:
    """Return `first`, with the arrays of `second` where `first` has None."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)


def split_batch_rows(floats: FloatInputs, others: OtherInputs) -> tuple[FlashInputs, FlashInputs]:
    """Split the inputs into those with an entry for each batch row, [B, ...], and those that all rows share, without B.

    The mask of a row keeps a batch axis of size one.
    """
    B = floats.query.shape[0]
    others = others._replace(mask=jax.tree.map(lambda x: x[:, None], others.mask))
    is_own = lambda x, axes: axes[0] == 'B' and x.shape[0] == B
    rows = map_inputs(lambda x, axes: x if is_own(x, axes) else None, floats, others)
    without_batch = lambda x, axes: x[0] if axes[0] == 'B' else x
    return rows, map_inputs(lambda x, axes: None if is_own(x, axes) else without_batch(x, axes), floats, others)
