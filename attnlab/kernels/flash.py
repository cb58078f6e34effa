"""Attention over tiles of queries by keys, forward and backward (FlashAttention, Dao et al. 2022, algorithms 1 and 4).

The softmax of a row is built up over blocks of keys, and a row keeps only its output and its log-sum-exp, from
which the gradient forms every tile again.  Tiles in which the mask hides all pairs are never computed.
`flash_inputs` brings a call into the layout that is used here; `kernels.blockwise` pads it, `kernels.ring` divides it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from attnlab.kernels import derivatives, dropout, mesh_axes
from attnlab.kernels.call import AttentionCall
from attnlab.kernels.masks import Mask, position_distances
from attnlab.kernels.tiles import BlockStarts, MaskTiles, TileGrid, TileTable


class FlashConfig(NamedTuple):
    """Constants of a compiled program."""

    grid: TileGrid
    length: int  # T of the whole sequence without padding: dropout counts rows by it
    soft_cap: float | None
    dropout_rate: float
    together: bool  # all batch rows at once, or one after the other


class FloatInputs(NamedTuple):
    """Arrays that have a gradient.  Leading axis B, or 1 for a bias of all rows; none on sinks and slopes."""

    query: Float[Array, 'B K G T H']  # scaled
    key: Float[Array, 'B K S H']
    value: Float[Array, 'B K S Hv']
    bias: Float[Array, '#B #K #G #T #S'] | None
    sinks: Float[Array, 'K G'] | None
    slopes: Float[Array, 'K G'] | None


class OtherInputs(NamedTuple):
    mask: Mask
    number: Int[Array, ' B']  # of the batch row
    words: UInt32[Array, '2'] | None  # dropout's
    begin: BlockStarts = BlockStarts()


FlashInputs = tuple[FloatInputs, OtherInputs]


def flash_inputs(call: AttentionCall) -> FlashInputs:
    """The arrays of a call: the query scaled, in float32 or wider; heads before positions, in groups."""
    (B, T, N, H), K = call.query.shape, call.key.shape[2]
    wide = jnp.promote_types(call.query.dtype, jnp.float32)
    query = (call.query.astype(wide) * call.scale).swapaxes(1, 2).reshape(B, K, N // K, T, H)
    bias = None if call.bias is None else group_heads(call.bias.astype(wide), K)
    sinks, slopes = (None if x is None else x.astype(wide).reshape(K, N // K) for x in (call.sinks, call.alibi_slopes))
    words = dropout.dropout_seed(call.dropout_rng) if call.dropout_rate and call.dropout_rng is not None else None
    floats = FloatInputs(query, call.key.swapaxes(1, 2), call.value.swapaxes(1, 2), bias, sinks, slopes)
    return floats, OtherInputs(call.mask, jnp.arange(B), words)


def group_heads(pairs: Array, K: int) -> Array:
    """[#B, #N, #T, #S] as [#B, #K, #G, #T, #S]."""
    B, N, T, S = pairs.shape
    return pairs.reshape(B, *((K, N // K) if N > 1 else (1, 1)), T, S)


def map_inputs(function: Callable[[Array, str], Any], floats: FloatInputs, others: OtherInputs) -> FlashInputs:
    """`function(array, axes)` for each array, axes as in the annotations, one letter each."""
    each: Any = lambda x, axes: None if x is None else function(x, axes)
    number, words = each(others.number, 'B'), each(others.words, 'W')
    return (
        FloatInputs(*map(each, floats, ('BKGTH', 'BKSH', 'BKSH', 'BKGTS', 'KG', 'KG'))),
        OtherInputs(others.mask.map_arrays(function), number, words, BlockStarts(*map(each, others.begin, 'IJ'))),
    )  # fmt: skip


def merge_inputs(some: FlashInputs, others: FlashInputs) -> FlashInputs:
    """One tree of two: where the first holds None, what the second holds."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)


def flash_attention(plan: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    """Output [B, K, G, T, Hv] and log-sum-exp of each row [B, K, G, T], which has no gradient; both wide.

    Raises NotImplementedError in forward-mode derivatives.
    """
    floats, others = mesh_axes.match_varying_axes((derivatives.reverse_mode_only(floats, 'blockwise'), others))
    return _attend(plan, floats, others)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array]:
    return _forward(plan, floats, others)[0]


def _forward(plan: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[tuple[Array, Array], tuple]:
    output, lse, empty = flash_forward(plan, floats, others)
    return (output, lse), (floats, others, output, lse_for_gradient(empty, lse))


def flash_forward(plan: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array, Array]:
    """Output and log-sum-exp as of `flash_attention`, and which rows [B, K, G, T] see no key; without a gradient."""
    rows, shared = _split(floats, others)
    of_row = lambda row: _forward_row(plan, *merge_inputs(row, shared))
    return jax.vmap(of_row)(rows) if plan.together else jax.lax.map(of_row, rows)


def lse_for_gradient(empty: Array, lse: Array) -> Array:
    """For the gradient an empty row has the largest sum there is: every weight of it is zero."""
    return jnp.where(empty, jnp.finfo(lse.dtype).max, lse)


def _backward(plan: FlashConfig, saved: tuple, d_outs: tuple[Array, Array]) -> tuple[FloatInputs, None]:
    floats, *_ = saved
    wide = _gradients(plan, *saved, d_outs[0])
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), wide, floats), None  # None: integers have none


def flash_gradients(
    plan: FlashConfig, floats: FloatInputs, others: OtherInputs, output: Array, lse: Array, d_out: Array
) -> FloatInputs:
    """Gradients of all floating-point arrays, in float32 or wider.  lse: as `lse_for_gradient` leaves it.

    The keys may be a part of all that the rows see: given output and log-sum-exp over all, the gradients of query and
    slopes of the parts add up.
    """
    rows, shared = _split(floats, others)
    of_row = lambda row: _backward_row(plan, *merge_inputs(row[0], shared), *row[1:], own_bias=rows[0].bias is not None)
    inputs = rows, *_live(output, lse, d_out), lse
    if plan.together:
        own, common = jax.vmap(of_row)(inputs)
        common = jax.tree.map(lambda x: jnp.sum(x, axis=0), common)
    else:
        start = mesh_axes.match_varying_axes(
            _zeros(jax.eval_shape(of_row, jax.tree.map(lambda x: x[0], inputs))[1]), inputs
        )
        common, own = jax.lax.scan(lambda total, row: _add(total, of_row(row)), start, inputs)
    return FloatInputs(
        own['query'], own['key'], own['value'],
        own['bias'] if 'bias' in own else common['bias'][None] if 'bias' in common else None,
        None if floats.sinks is None else sink_gradient(floats.sinks, output, lse, d_out), common.get('slopes'),
    )  # fmt: skip


def sink_gradient(sinks: Array, output: Array, lse: Array, d_out: Array) -> Array:
    """The gradient of the sinks, [K, G]."""
    _, delta = _live(output, lse, d_out)
    return -jnp.sum(jnp.exp(sinks[None, :, :, None] - lse) * delta, axis=(0, 3))


def _live(output: Array, lse: Array, d_out: Array) -> tuple[Array, Array]:
    """The cotangent with zeros for empty rows, and for each row its product with the output."""
    d_out = jnp.where(lse[..., None] < jnp.finfo(lse.dtype).max, d_out, 0.0)
    return d_out, jnp.sum(d_out * output, axis=-1)


_gradients = derivatives.first_order_only(flash_gradients, 'blockwise')
_attend.defvjp(_forward, _backward)


def _add(total: Any, parts: tuple[Any, Any]) -> tuple[Any, Any]:
    own, common = parts
    return jax.tree.map(jnp.add, total, common), own


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _split(floats: FloatInputs, others: OtherInputs) -> tuple[FlashInputs, FlashInputs]:
    """Arrays that each batch row has of its own, with the leading axis B, and those that all rows share, without.

    The mask of a row keeps an axis B of size one.
    """
    B = floats.query.shape[0]
    others = others._replace(mask=jax.tree.map(lambda x: x[:, None], others.mask))
    is_own = lambda x, axes: axes[0] == 'B' and x.shape[0] == B
    rows = map_inputs(lambda x, axes: x if is_own(x, axes) else None, floats, others)
    alone = lambda x, axes: x[0] if axes[0] == 'B' else x
    return rows, map_inputs(lambda x, axes: None if is_own(x, axes) else alone(x, axes), floats, others)


class BatchRow(NamedTuple):
    """One batch row; the same axes without B."""

    plan: FlashConfig
    floats: FloatInputs
    others: OtherInputs

    @property
    def tiles(self) -> MaskTiles:
        return MaskTiles(self.plan.grid, self.others.mask, self.others.begin)

    def seen(self, i: Array, j: Array) -> Bool[Array, '#K #G queries keys']:
        """The pairs of the tile (i, j) that the mask allows."""
        return group_heads(self.tiles.allowed(i, j), self.floats.query.shape[0])[0]

    def distances(self, i: Array, j: Array) -> Float[Array, '1 1 queries keys']:
        grid = self.plan.grid
        return position_distances(self.tiles.tile(i, j), grid.queries, grid.keys).astype(self.floats.query.dtype)

    def dropped(self, i: Array, j: Array) -> Float[Array, 'K G queries keys']:
        """Factors of the weights of the tile (i, j) under dropout."""
        (K, G, *_), (first, key), plan = self.floats.query.shape, self.tiles.starts(i, j), self.plan
        assert self.others.words is not None
        numbers = dropout.global_row_indices(self.others.number, K * G, plan.length, first, plan.grid.queries)
        return dropout.dropout_factors(
            self.others.words, plan.dropout_rate, numbers.reshape(K, G, -1), key, plan.grid.keys
        )

    def logits(
        self, query: Array, keys: Array, i: Array, j: Array, seen: Array | None
    ) -> tuple[Float[Array, 'K G queries keys'], Array | None]:
        """The logits of the tile (i, j), -inf where hidden, and the derivative of the soft cap, if there is one."""
        key, cap, derivative = self.tiles.cut(keys, 'KSH', i, j), self.plan.soft_cap, None
        logits = jnp.einsum('kgth,ksh->kgts', query, key, preferred_element_type=query.dtype)
        if cap is not None:
            bounded = jnp.tanh(logits / cap)
            logits, derivative = cap * bounded, 1.0 - bounded**2
        if self.floats.slopes is not None:
            logits -= self.floats.slopes[:, :, None, None] * self.distances(i, j)
        if self.floats.bias is not None:
            logits += self.tiles.cut(self.floats.bias, 'KGTS', i, j)
        return logits if seen is None else jnp.where(seen, logits, -jnp.inf), derivative


def _forward_row(plan: FlashConfig, floats: FloatInputs, others: OtherInputs) -> tuple[Array, Array, Array]:
    """Output [K, G, T, Hv], log-sum-exp of each row, a sink's included, and whether the row sees no key."""
    grid, row = plan.grid, BatchRow(plan, floats, others)
    K, G, *_ = floats.query.shape
    wide = floats.query.dtype
    lowest = jnp.finfo(wide).min
    tiles, marked, value, table = row.tiles, floats.key, floats.value, None
    if others.mask.restrict():
        marked, value, table = _marked(marked, value), _finite(value), tiles.table()

    def block(i: Array) -> tuple[Array, Array, Array]:
        query = tiles.cut(floats.query, 'KGTH', i, i)

        def tile(j: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            largest, total, output = state
            seen = row.seen(i, j) if masked else None
            logits, _ = row.logits(query, marked, i, j, seen)
            larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - larger[..., None])
            shrink = jnp.exp(largest - larger)
            total = total * shrink + jnp.sum(weights, axis=-1)
            values = tiles.cut(value, 'KSH', i, j)
            if others.words is not None:
                weights = weights * row.dropped(i, j)
            more = jnp.einsum('kgts,ksh->kgth', weights, values, preferred_element_type=wide)
            return larger, total, output * shrink[..., None] + more

        shape = (K, G, grid.queries)
        start = jnp.full(shape, lowest), jnp.zeros(shape, wide), jnp.zeros((*shape, value.shape[-1]), wide)
        start = mesh_axes.match_varying_axes(start, floats.query)
        step = lambda j, state: _choose(table, i, j, lambda state: state, partial(tile, j), state)
        largest, total, output = jax.lax.fori_loop(*_range(grid, table, i), step, start)
        empty = total == 0.0
        divisor = jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, lowest, jnp.log(divisor) + largest)
        if floats.sinks is None:
            return jnp.where(empty[..., None], 0.0, output / divisor[..., None]), lse, empty
        summed = jnp.logaddexp(lse, floats.sinks[..., None])
        return jnp.where(empty[..., None], 0.0, output * jnp.exp(largest - summed)[..., None]), summed, empty

    output, lse, empty = jax.lax.map(block, _numbers(grid, floats))
    return _joined_blocks(output), _joined_blocks(lse), _joined_blocks(empty)


def _backward_row(
    plan: FlashConfig, floats: FloatInputs, others: OtherInputs, d_out: Array, delta: Array, lse: Array, own_bias: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Gradients of the arrays that the row has of its own, and its part of those of arrays that all rows share."""
    grid, row = plan.grid, BatchRow(plan, floats, others)
    marked, key, value, clean = floats.key, floats.key, floats.value, floats.query
    tiles, table = row.tiles, None
    if others.mask.restrict():
        marked, table = _marked(key, value), tiles.table()
        key, value, clean = _finite(key), _finite(value), _finite(clean)
    wide = floats.query.dtype
    K, G, _, H = floats.query.shape
    # Keys last: then no product has to turn a tile.
    sums = {'key': jnp.zeros((K, H, grid.S), wide), 'value': jnp.zeros((K, value.shape[-1], grid.S), wide)}
    sums |= {
        name: jnp.zeros(x.shape, wide) for name, x in (('bias', floats.bias), ('slopes', floats.slopes))
        if x is not None
    }  # fmt: skip

    def block(sums: dict[str, Array], i: Array) -> tuple[dict[str, Array], Array]:
        here = lambda x: tiles.cut(x, 'KGTH'[: x.ndim], i, i)
        query, out, off, log = here(floats.query), here(d_out), here(delta), here(lse)
        turned = tuple(jax.lax.optimization_barrier(x.transpose(0, 3, 1, 2)) for x in (here(clean), out))

        def tile(j: Array, masked: bool) -> dict[str, Array]:
            keys, values = (tiles.cut(x, 'KSH', i, j) for x in (key, value))
            seen = row.seen(i, j) if masked else None
            logits, through_cap = row.logits(query, marked, i, j, seen)
            weights = jnp.exp(logits - log[..., None])
            change = jnp.einsum('kgth,ksh->kgts', out, values, preferred_element_type=wide)
            kept = weights
            if others.words is not None:
                factor = row.dropped(i, j)
                change, kept = change * factor, weights * factor
            change = weights * (change - off[..., None])
            if seen is not None:  # a row that sees something not finite still leaves alone what it does not see
                kept, change = jnp.where(seen, kept, 0.0), jnp.where(seen, change, 0.0)
            parts = {'value': jnp.einsum('khgt,kgts->khs', turned[1], kept)}
            if floats.bias is not None:
                parts['bias'] = _summed_to(change, floats.bias.shape)
            if floats.slopes is not None:
                parts['slopes'] = -jnp.sum(change * row.distances(i, j), axis=(2, 3))
            if through_cap is not None:
                change = change * through_cap
                change = change if seen is None else jnp.where(seen, change, 0.0)  # zero times the slope of NaN
            parts['key'] = jnp.einsum('khgt,kgts->khs', turned[0], change)
            parts['query'] = jnp.einsum('kgts,ksh->kgth', change, keys, preferred_element_type=wide)
            return parts

        def step(j: Array, state: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            # The branches give the parts of one tile: sums that passed through them would be copied every time.
            nothing = lambda: mesh_axes.match_varying_axes(
                _zeros(jax.eval_shape(partial(tile, masked=False), j)), floats.query
            )
            parts = _choose(table, i, j, nothing, partial(tile, j))
            sums, d_query = state
            return _added(sums, parts, i, j), d_query + parts['query']

        start = sums, mesh_axes.match_varying_axes(jnp.zeros(query.shape, wide), query)
        return jax.lax.fori_loop(*_range(grid, table, i), step, start)

    sums, d_query = jax.lax.scan(block, mesh_axes.match_varying_axes(sums, floats.query), _numbers(grid, floats))
    common = {name: sums.pop(name) for name in ('slopes', *(() if own_bias else ('bias',))) if name in sums}
    own = sums | {name: sums[name].swapaxes(1, 2) for name in ('key', 'value')}
    return own | {'query': _joined_blocks(d_query)}, common


def _numbers(grid: TileGrid, floats: FloatInputs) -> Array:
    """The blocks of queries, varying over mesh axes as the row does: `jax.vmap` of a switch takes that for granted."""
    return mesh_axes.match_varying_axes(jnp.arange(grid.T // grid.queries), floats.query)


def _range(grid: TileGrid, table: TileTable | None, i: Array) -> tuple[Any, Any]:
    """The range of key blocks of which the query block i may see any."""
    return (0, grid.S // grid.keys) if table is None else (table.first[i], table.after[i])


def _choose(table: TileTable | None, i: Array, j: Array, hidden: Any, tile: Any, *state: Any) -> Any:
    """`hidden(*state)` or `tile(*state, masked)`, as the kind of the tile asks for."""
    full = partial(tile, masked=False)
    if table is None:
        return full(*state)
    return jax.lax.switch(table.kinds[i, j], (hidden, partial(tile, masked=True), full), *state)


def _added(sums: dict[str, Array], parts: dict[str, Array], i: Array, j: Array) -> dict[str, Array]:
    """Each part of the tile (i, j) added where it belongs in its sum."""
    at = {'key': (None, None, j), 'value': (None, None, j), 'bias': (None, None, i, j), 'slopes': (None, None)}
    added = {}
    for name, whole in sums.items():
        size = parts[name].shape
        starts = [0 if block is None or size[axis] == whole.shape[axis] else block * size[axis]
                  for axis, block in enumerate(at[name])]  # fmt: skip
        old = jax.lax.dynamic_slice(whole, starts, size)
        added[name] = jax.lax.dynamic_update_slice(whole, old + parts[name], starts)
    return added


def _summed_to(tile: Array, shape: tuple[int, ...]) -> Array:
    """[K, G, queries, keys] summed over the axes that have size one in [#K, #G, #T, #S]."""
    return jnp.sum(tile, axis=[axis for axis in range(4) if shape[axis] == 1], keepdims=True)


def _joined_blocks(x: Array) -> Array:
    """[I, K, G, queries, ...] as [K, G, I queries, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _marked(key: Array, value: Array) -> Array:
    """The keys, NaN where their value is not finite: whoever may see such a key gets NaN, a masked one never matters.

    The values themselves are made finite, for a weight of zero does not undo them: zero times NaN is NaN.
    """
    return jnp.where(jnp.all(jnp.isfinite(value), axis=-1, keepdims=True), key, jnp.nan)
