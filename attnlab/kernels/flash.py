"""Attention over tiles of queries by keys, forward and backward (FlashAttention, Dao et al. 2022, algorithms 1 and 4).

The softmax of a row is accumulated over blocks of keys.  Only the output and the log-sum-exp of each row are saved;
from these the backward pass computes every tile again.  Tiles in which the mask hides all pairs are never computed.
The layout of the arrays is in `attnlab.kernels.flash_layout`.  `attnlab.kernels.blockwise` pads them to whole blocks,
`attnlab.kernels.ring` divides them over devices.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.kernels import derivatives, dropout, mesh_axes
from attnlab.kernels.flash_layout import (
    FlashConfig,
    FloatInputs,
    OtherInputs,
    group_heads,
    merge_inputs,
    split_batch_rows,
)
from attnlab.kernels.masks import position_distances
from attnlab.kernels.tiles import MaskTiles, TileGrid, TileTable


def flash_attention(config: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Return the output [B, K, G, T, Hv] and the log-sum-exp of each row [B, K, G, T], in float32 or wider.

    The log-sum-exp has no gradient.  Forward-mode derivatives raise NotImplementedError.
    """
    floats, others = mesh_axes.match_varying_axes((derivatives.reverse_mode_only(floats, 'blockwise'), others))
    return _attention(config, floats, others)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    return _vjp_forward(config, floats, others)[0]


def _vjp_forward(config: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[tuple[Array, Array], tuple]:
    output, lse, is_empty = flash_forward(config, floats, others)
    return (output, lse), (floats, others, output, lse_for_gradient(is_empty, lse))


def flash_forward(config: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array, Array]:
    """Return output and log-sum-exp as `flash_attention` does, without a gradient, and which rows are empty.

    The third array is boolean, [B, K, G, T]; a row is empty if it may attend to no key.
    """
    rows, shared = split_batch_rows(floats, others)
    forward_row = lambda row: _forward_row(config, *merge_inputs(row, shared))
    return jax.vmap(forward_row)(rows) if config.vmap_rows else jax.lax.map(forward_row, rows)


def lse_for_gradient(is_empty: Array, lse: Array) -> Array:
    """Return `lse` [B, K, G, T] with the largest finite number for empty rows, whose weights are then zero in the
    backward pass."""
    return jnp.where(is_empty, jnp.finfo(lse.dtype).max, lse)


def _vjp_backward(config: FlashConfig, saved: tuple, d_outs: tuple[Array, Array]) -> tuple[FloatInputs, None]:
    floats, *_ = saved
    wide = _gradients(config, *saved, d_outs[0])
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), wide, floats), None  # None: integers have none


def flash_gradients(
    config: FlashConfig, floats: FloatInputs, others: OtherInputs, output: Array, lse: Array, d_out: Array
) -> FloatInputs:
    """Return the gradients of all floating-point inputs, in float32 or wider, given the cotangent of the output.

    output, d_out: [B, K, G, T, Hv].  lse: [B, K, G, T], from `lse_for_gradient`.

    The keys may be a part of all keys of the rows: if output and
    log-sum-exp are over all keys, the gradients of query and ALiBi slopes for the parts add up.
    """
    rows, shared = split_batch_rows(floats, others)
    has_own_bias = rows[0].bias is not None
    backward_row = lambda row: _backward_row(config, *merge_inputs(row[0], shared), *row[1:], has_own_bias=has_own_bias)
    inputs = rows, *_live_cotangent(output, lse, d_out), lse
    if config.vmap_rows:
        own, common = jax.vmap(backward_row)(inputs)
        common = jax.tree.map(lambda x: jnp.sum(x, axis=0), common)
    else:
        first_row = jax.tree.map(lambda x: x[0], inputs)
        zeros = mesh_axes.match_varying_axes(_zeros_like_shapes(jax.eval_shape(backward_row, first_row)[1]), inputs)
        common, own = jax.lax.scan(lambda sums, row: _add_common(sums, backward_row(row)), zeros, inputs)
    return FloatInputs(
        own['query'], own['key'], own['value'],
        own['bias'] if 'bias' in own else common['bias'][None] if 'bias' in common else None,
        None if floats.sinks is None else sink_gradient(floats.sinks, output, lse, d_out), common.get('alibi_slopes'),
    )  # fmt: skip


def sink_gradient(sinks: Array, output: Array, lse: Array, d_out: Array) -> Array:
    """Return the gradient of the sinks, [K, G]."""
    _, delta = _live_cotangent(output, lse, d_out)
    return -jnp.sum(jnp.exp(sinks[None, :, :, None] - lse) * delta, axis=(0, 3))


def _live_cotangent(output: Array, lse: Array, d_out: Array) -> tuple[Array, Array]:
    """Return the cotangent with zeros for empty rows, and its dot product with the output for each row."""
    d_out = jnp.where(lse[..., None] < jnp.finfo(lse.dtype).max, d_out, 0.0)
    return d_out, jnp.sum(d_out * output, axis=-1)


_gradients = derivatives.first_order_only(flash_gradients, 'blockwise')
_attention.defvjp(_vjp_forward, _vjp_backward)


def _add_common(sums: Any, row_gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    own, common = row_gradients
    return jax.tree.map(jnp.add, sums, common), own


def _zeros_like_shapes(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


class BatchRow(NamedTuple):
    """The inputs of one batch row: the axes of `FloatInputs` and `OtherInputs` without B.

    The methods return one tile, (i, j), for a block of queries and a block of keys.
    """

    config: FlashConfig
    floats: FloatInputs
    others: OtherInputs

    @property
    def tiles(self) -> MaskTiles:
        """The tiles of the mask."""
        return MaskTiles(self.config.grid, self.others.mask, self.others.block_starts)

    def allowed_pairs(self, i: Array, j: Array) -> Bool[Array, '#K #G queries keys']:
        """Return which pairs of the tile (i, j), indices of shape [], the mask allows."""
        return group_heads(self.tiles.allowed(i, j), self.floats.query.shape[0])[0]

    def distances(self, i: Array, j: Array) -> Float[Array, '1 1 queries keys']:
        """Return |query position - key position| in the tile (i, j), in the dtype of the query.

        i, j: indices of shape [].
        """
        grid = self.config.grid
        return position_distances(self.tiles.tile(i, j), grid.queries, grid.keys).astype(self.floats.query.dtype)

    def dropout_factors(self, i: Array, j: Array) -> Float[Array, 'K G queries keys']:
        """Return the factors of the weights of the tile (i, j) under dropout; i, j: indices of shape []."""
        (K, G, *_), config = self.floats.query.shape, self.config
        first_query, first_key = self.tiles.starts(i, j)
        seed, batch_row = self.others.dropout_seed, self.others.batch_row
        assert seed is not None
        rows = dropout.global_row_indices(batch_row, K * G, config.sequence_length, first_query, config.grid.queries)
        return dropout.dropout_factors(seed, config.dropout_rate, rows.reshape(K, G, -1), first_key, config.grid.keys)

    def logits(
        self, query: Array, keys: Array, i: Array, j: Array, allowed: Array | None
    ) -> tuple[Float[Array, 'K G queries keys'], Array | None]:
        """Return the logits, -inf where hidden, and the derivative of the soft cap (None without a cap).

        query: [K, G, queries, H], block i of the queries.  keys: [K, S, H], those of the whole row.
        allowed: [#K, #G, queries, keys] bool; all are allowed if None.
        """
        key, cap, cap_derivative = self.tiles.cut(keys, 'KSH', i, j), self.config.soft_cap, None
        logits = jnp.einsum('kgth,ksh->kgts', query, key, preferred_element_type=query.dtype)
        if cap is not None:
            tanh = jnp.tanh(logits / cap)
            logits, cap_derivative = cap * tanh, 1.0 - tanh**2
        if self.floats.alibi_slopes is not None:
            logits -= self.floats.alibi_slopes[:, :, None, None] * self.distances(i, j)
        if self.floats.bias is not None:
            logits += self.tiles.cut(self.floats.bias, 'KGTS', i, j)
        return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf), cap_derivative


def _forward_row(config: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array, Array]:
    """Return output [K, G, T, Hv], log-sum-exp of each row including a sink, and whether the row is empty."""
    grid, row = config.grid, BatchRow(config, floats, others)
    K, G, *_ = floats.query.shape
    wide = floats.query.dtype
    lowest = jnp.finfo(wide).min
    tiles, key, value, table = row.tiles, floats.key, floats.value, None
    if others.mask.restricts_any_pair():
        key, value, table = _mark_nonfinite_values(key, value), _zero_nonfinite(value), tiles.table()

    def query_block(i: Array) -> tuple[Array, Array, Array]:
        query = tiles.cut(floats.query, 'KGTH', i, i)

        def tile(j: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            largest, softmax_sum, output = state
            allowed = row.allowed_pairs(i, j) if masked else None
            logits, _ = row.logits(query, key, i, j, allowed)
            new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - new_largest[..., None])
            rescale = jnp.exp(largest - new_largest)
            softmax_sum = softmax_sum * rescale + jnp.sum(weights, axis=-1)
            values = tiles.cut(value, 'KSH', i, j)
            if others.dropout_seed is not None:
                weights = weights * row.dropout_factors(i, j)
            tile_output = jnp.einsum('kgts,ksh->kgth', weights, values, preferred_element_type=wide)
            return new_largest, softmax_sum, output * rescale[..., None] + tile_output

        shape = (K, G, grid.queries)
        initial = jnp.full(shape, lowest), jnp.zeros(shape, wide), jnp.zeros((*shape, value.shape[-1]), wide)
        initial = mesh_axes.match_varying_axes(initial, floats.query)
        step = lambda j, state: _compute_tile(table, i, j, lambda state: state, partial(tile, j), state)
        largest, softmax_sum, output = jax.lax.fori_loop(*_key_block_range(grid, table, i), step, initial)
        is_empty = softmax_sum == 0.0
        divisor = jnp.where(is_empty, 1.0, softmax_sum)
        lse = jnp.where(is_empty, lowest, jnp.log(divisor) + largest)
        if floats.sinks is None:
            return jnp.where(is_empty[..., None], 0.0, output / divisor[..., None]), lse, is_empty
        lse_with_sink = jnp.logaddexp(lse, floats.sinks[..., None])
        output = jnp.where(is_empty[..., None], 0.0, output * jnp.exp(largest - lse_with_sink)[..., None])
        return output, lse_with_sink, is_empty

    output, lse, is_empty = jax.lax.map(query_block, _query_block_indices(grid, floats))
    return _join_blocks(output), _join_blocks(lse), _join_blocks(is_empty)


def _backward_row(
    config: FlashConfig, floats: FloatInputs, others: OtherInputs, d_out: Array, delta: Array, lse: Array,
    has_own_bias: bool,
) -> tuple[dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Return two dicts of gradients: of the row's own arrays, and the row's part of those of shared arrays."""
    grid, row = config.grid, BatchRow(config, floats, others)
    marked_key, key, value, finite_query = floats.key, floats.key, floats.value, floats.query
    tiles, table = row.tiles, None
    if others.mask.restricts_any_pair():
        marked_key, table = _mark_nonfinite_values(key, value), tiles.table()
        key, value, finite_query = _zero_nonfinite(key), _zero_nonfinite(value), _zero_nonfinite(finite_query)
    wide = floats.query.dtype
    K, G, _, H = floats.query.shape
    # The key axis comes last: then no matrix product has to transpose a tile.
    sums = {'key': jnp.zeros((K, H, grid.S), wide), 'value': jnp.zeros((K, value.shape[-1], grid.S), wide)}
    sums |= {
        name: jnp.zeros(x.shape, wide) for name, x in (('bias', floats.bias), ('alibi_slopes', floats.alibi_slopes))
        if x is not None
    }  # fmt: skip

    def query_block(sums: dict[str, Array], i: Array) -> tuple[dict[str, Array], Array]:
        cut = lambda x: tiles.cut(x, 'KGTH'[: x.ndim], i, i)
        query, block_d_out, block_delta, block_lse = cut(floats.query), cut(d_out), cut(delta), cut(lse)
        query_t, d_out_t = (
            jax.lax.optimization_barrier(x.transpose(0, 3, 1, 2)) for x in (cut(finite_query), block_d_out)
        )

        def tile(j: Array, masked: bool) -> dict[str, Array]:
            keys, values = (tiles.cut(x, 'KSH', i, j) for x in (key, value))
            allowed = row.allowed_pairs(i, j) if masked else None
            logits, cap_derivative = row.logits(query, marked_key, i, j, allowed)
            weights = jnp.exp(logits - block_lse[..., None])
            d_weights = jnp.einsum('kgth,ksh->kgts', block_d_out, values, preferred_element_type=wide)
            dropped_weights = weights
            if others.dropout_seed is not None:
                factors = row.dropout_factors(i, j)
                d_weights, dropped_weights = d_weights * factors, weights * factors
            d_logits = weights * (d_weights - block_delta[..., None])
            if allowed is not None:  # a row that attends to NaN must not change keys that it does not attend to
                dropped_weights = jnp.where(allowed, dropped_weights, 0.0)
                d_logits = jnp.where(allowed, d_logits, 0.0)
            parts = {'value': jnp.einsum('khgt,kgts->khs', d_out_t, dropped_weights)}
            if floats.bias is not None:
                parts['bias'] = _sum_broadcast_axes(d_logits, floats.bias.shape)
            if floats.alibi_slopes is not None:
                parts['alibi_slopes'] = -jnp.sum(d_logits * row.distances(i, j), axis=(2, 3))
            if cap_derivative is not None:
                d_logits = d_logits * cap_derivative
                # Again: the derivative of the cap may be NaN at a hidden pair, and zero times NaN is NaN.
                d_logits = d_logits if allowed is None else jnp.where(allowed, d_logits, 0.0)
            parts['key'] = jnp.einsum('khgt,kgts->khs', query_t, d_logits)
            parts['query'] = jnp.einsum('kgts,ksh->kgth', d_logits, keys, preferred_element_type=wide)
            return parts

        def step(j: Array, state: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            # The branches return the parts of one tile: sums that passed through them would be copied every time.
            zeros = lambda: mesh_axes.match_varying_axes(
                _zeros_like_shapes(jax.eval_shape(partial(tile, masked=False), j)), floats.query
            )
            parts = _compute_tile(table, i, j, zeros, partial(tile, j))
            sums, d_query = state
            return _add_tile(sums, parts, i, j), d_query + parts['query']

        initial = sums, mesh_axes.match_varying_axes(jnp.zeros(query.shape, wide), query)
        return jax.lax.fori_loop(*_key_block_range(grid, table, i), step, initial)

    sums = mesh_axes.match_varying_axes(sums, floats.query)
    sums, d_query = jax.lax.scan(query_block, sums, _query_block_indices(grid, floats))
    common_names = ('alibi_slopes', *(() if has_own_bias else ('bias',)))
    common = {name: sums.pop(name) for name in common_names if name in sums}
    own = sums | {name: sums[name].swapaxes(1, 2) for name in ('key', 'value')}
    return own | {'query': _join_blocks(d_query)}, common


def _query_block_indices(grid: TileGrid, floats: FloatInputs) -> Array:
    """Return the indices of the blocks of queries, varying over mesh axes as the row does.

    The batching rule of a switch under `jax.vmap` assumes this.
    """
    return mesh_axes.match_varying_axes(jnp.arange(grid.T // grid.queries), floats.query)


def _key_block_range(grid: TileGrid, table: TileTable | None, i: Array) -> tuple[Any, Any]:
    """Return (first, after) of the key blocks that are not hidden from the query block i."""
    return (0, grid.S // grid.keys) if table is None else (table.first[i], table.after[i])


def _compute_tile(table: TileTable | None, i: Array, j: Array, hidden: Any, tile: Any, *state: Any) -> Any:
    """Return `hidden(*state)` for a hidden tile, else `tile(*state, masked)`; only partial tiles are masked."""
    full = partial(tile, masked=False)
    if table is None:
        return full(*state)
    return jax.lax.switch(table.kinds[i, j], (hidden, partial(tile, masked=True), full), *state)


def _add_tile(sums: dict[str, Array], parts: dict[str, Array], i: Array, j: Array) -> dict[str, Array]:
    """Add each part of the tile (i, j) at its position in the sum of the same name."""
    blocks = {'key': (None, None, j), 'value': (None, None, j), 'bias': (None, None, i, j)}
    blocks['alibi_slopes'] = None, None
    new_sums = {}
    for name, whole in sums.items():
        size = parts[name].shape
        starts = [0 if block is None or size[axis] == whole.shape[axis] else block * size[axis]
                  for axis, block in enumerate(blocks[name])]  # fmt: skip
        old = jax.lax.dynamic_slice(whole, starts, size)
        new_sums[name] = jax.lax.dynamic_update_slice(whole, old + parts[name], starts)
    return new_sums


def _sum_broadcast_axes(tile: Array, shape: tuple[int, ...]) -> Array:
    """Sum [K, G, queries, keys] over the axes that have size one in `shape`, [#K, #G, #T, #S]."""
    return jnp.sum(tile, axis=[axis for axis in range(4) if shape[axis] == 1], keepdims=True)


def _join_blocks(x: Array) -> Array:
    """Reshape [I, K, G, queries, ...] to [K, G, I queries, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _zero_nonfinite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _mark_nonfinite_values(key: Array, value: Array) -> Array:
    """Return the keys, with NaN where the value is not finite: a row that may attend to such a key becomes NaN.

    The values themselves must be made finite, because a hidden pair has a weight of zero, and zero times NaN is NaN.
    """
    return jnp.where(jnp.all(jnp.isfinite(value), axis=-1, keepdims=True), key, jnp.nan)
