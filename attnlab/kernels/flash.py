"""Attention over tiles of queries by keys, forward and backward (FlashAttention, Dao et al. 2022, algorithms 1 and 4).

The softmax of a row is built up over blocks of keys, and a row keeps only its output and the log of its sum, from
which the gradient forms every tile again.  Tiles that no rule lets anyone see are never computed.
`kernels.blockwise` brings a call into the layout that is used here, and `kernels.ring` the parts of one.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from attnlab.kernels import axes, derivatives, dropout, tiles
from attnlab.kernels.tiles import Grid, Rules


class Plan(NamedTuple):
    """What is fixed when the program is made."""

    grid: Grid
    length: int  # T without padding, and of the whole where this is a part: dropout counts rows by it
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    dropout_rate: float
    masked: bool  # whether any rule may hide anything
    together: bool  # all batch rows at once, or one after the other


class Floats(NamedTuple):
    """What has a gradient.  Leading axis B, or 1 for a bias of all rows; none on sinks and slopes."""

    query: Float[Array, 'B K G T H']  # scaled
    key: Float[Array, 'B K S H']
    value: Float[Array, 'B K S Hv']
    bias: Float[Array, '#B #K #G #T #S'] | None
    sinks: Float[Array, 'K G'] | None
    slopes: Float[Array, 'K G'] | None


class Others(NamedTuple):
    rules: Rules  # here with a leading axis B or 1
    number: Int[Array, ' B']  # of the batch row
    words: UInt32[Array, '2'] | None  # dropout's


def attend(plan: Plan, floats: Floats, others: Others) -> tuple[Array, Array]:
    """Output [B, K, G, T, Hv] and the log of each row's sum [B, K, G, T], which has no gradient; both wide.

    Raises NotImplementedError in forward-mode derivatives.
    """
    floats, others = axes.vary((derivatives.reverse_only(floats, 'blockwise'), others))
    return _attend(plan, floats, others)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, floats: Floats, others: Others) -> tuple[Array, Array]:
    return _forward(plan, floats, others)[0]


def _forward(plan: Plan, floats: Floats, others: Others) -> tuple[tuple[Array, Array], tuple]:
    output, total, empty = forward(plan, floats, others)
    return (output, total), (floats, others, output, largest_if(empty, total))


def forward(plan: Plan, floats: Floats, others: Others) -> tuple[Array, Array, Array]:
    """Output and log as of `attend`, and which rows [B, K, G, T] see no key; without a gradient."""
    rows, shared = _split(floats, others)
    each = lambda row: _forward_row(plan, _joined(row, shared))
    return jax.vmap(each)(rows) if plan.together else jax.lax.map(each, rows)


def largest_if(empty: Array, total: Array) -> Array:
    """For the gradient an empty row has the largest sum there is: every weight of it is zero."""
    return jnp.where(empty, jnp.finfo(total.dtype).max, total)


def _backward(plan: Plan, saved: tuple, cotangents: tuple[Array, Array]) -> tuple[Floats, None]:
    floats, *_ = saved
    made = _gradients(plan, *saved, cotangents[0])
    return jax.tree.map(lambda slope, x: slope.astype(x.dtype), made, floats), None  # None: the rest has no gradient


def gradients(plan: Plan, floats: Floats, others: Others, output: Array, total: Array, cotangent: Array) -> Floats:
    """What a slope `cotangent` of the output makes of everything, wide.  total: as `largest_if` leaves it.

    The keys may be a part of all that the rows see: given the output and the sum over all, what each part makes of
    query and slopes adds up.
    """
    rows, shared = _split(floats, others)
    slope, delta = _slope(output, total, cotangent)
    each = lambda row: _backward_row(plan, _joined(row[0], shared), *row[1:])
    rows = rows, slope, delta, total
    if plan.together:
        own, common = jax.vmap(each)(rows)
        common = jax.tree.map(lambda x: jnp.sum(x, axis=0), common)
    else:
        start = axes.vary(_zeros(jax.eval_shape(each, jax.tree.map(lambda x: x[0], rows))[1]), rows)
        common, own = jax.lax.scan(lambda total, row: _add(total, each(row)), start, rows)
    return Floats(
        own['query'], own['key'], own['value'],
        own['bias'] if 'bias' in own else common['bias'][None] if 'bias' in common else None,
        None if floats.sinks is None else to_sinks(floats.sinks, output, total, cotangent), common.get('slopes'),
    )  # fmt: skip


def to_sinks(sinks: Array, output: Array, total: Array, cotangent: Array) -> Array:
    """The part of the gradient that is the sinks', [K, G]."""
    _, delta = _slope(output, total, cotangent)
    return -jnp.sum(jnp.exp(sinks[None, :, :, None] - total) * delta, axis=(0, 3))


def _slope(output: Array, total: Array, cotangent: Array) -> tuple[Array, Array]:
    """What reaches the output of rows that are not empty, and for each row its product with the output."""
    slope = jnp.where(total[..., None] < jnp.finfo(total.dtype).max, cotangent, 0.0)
    return slope, jnp.sum(slope * output, axis=-1)


_gradients = derivatives.once(gradients, 'blockwise')
_attend.defvjp(_forward, _backward)


def _add(total: Any, parts: tuple[Any, Any]) -> tuple[Any, Any]:
    own, common = parts
    return jax.tree.map(jnp.add, total, common), own


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


class Row(NamedTuple):
    """One batch row; the same letters without B."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None
    slopes: Array | None
    rules: Rules
    number: Array
    words: Array | None
    own_bias: bool  # and not one for all rows


def _split(floats: Floats, others: Others) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each batch row has of its own, with the leading axis B, and what all share, without."""
    B = floats.query.shape[0]
    arrays = floats._asdict() | {f'rules.{name}': x for name, x in others.rules._asdict().items()}
    arrays |= {'number': others.number}
    shared = {'sinks': arrays.pop('sinks'), 'slopes': arrays.pop('slopes'), 'words': others.words}
    rows = {name: x for name, x in arrays.items() if x is not None and x.shape[0] == B}
    shared |= {name: x if x is None else x[0] for name, x in arrays.items() if name not in rows}
    return rows, shared | {'own_bias': 'bias' in rows}


def _joined(row: dict[str, Any], shared: dict[str, Any]) -> Row:
    both = row | shared
    rules = Rules(**{name: both.pop(f'rules.{name}') for name in Rules._fields})
    return Row(rules=rules, **both)


def _forward_row(plan: Plan, row: Row) -> tuple[Array, Array, Array]:
    """Output [K, G, T, Hv], the log of each row's sum, a sink's included, and whether the row sees no key."""
    grid = plan.grid
    K, G, _, H = row.query.shape
    wide = row.query.dtype
    lowest = jnp.finfo(wide).min
    marked, value = (_marked(row.key, row.value), _finite(row.value)) if plan.masked else (row.key, row.value)
    table = tiles.table(grid, row.rules, plan.is_causal, plan.window) if plan.masked else None

    def block(i: Array) -> tuple[Array, Array, Array]:
        query = tiles.cut(row.query, 2, i, grid.queries)

        def tile(j: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            largest, total, output = state
            logits, _ = _logits(plan, row, query, marked, i, j, masked)
            larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - larger[..., None])
            shrink = jnp.exp(largest - larger)
            total = total * shrink + jnp.sum(weights, axis=-1)
            values = tiles.cut(value, 1, j, grid.keys)
            if row.words is not None:
                weights = weights * _dropped(plan, row, i, j)
            more = jnp.einsum('kgts,ksh->kgth', weights, values, preferred_element_type=wide)
            return larger, total, output * shrink[..., None] + more

        shape = (K, G, grid.queries)
        start = jnp.full(shape, lowest), jnp.zeros(shape, wide), jnp.zeros((*shape, row.value.shape[-1]), wide)
        start = axes.vary(start, row.query)
        step = lambda j, state: _choose(table, i, j, lambda state: state, partial(tile, j), state)
        largest, total, output = jax.lax.fori_loop(*_range(grid, table, i), step, start)
        empty = total == 0.0
        divisor = jnp.where(empty, 1.0, total)
        log = jnp.where(empty, lowest, jnp.log(divisor) + largest)
        if row.sinks is None:
            return jnp.where(empty[..., None], 0.0, output / divisor[..., None]), log, empty
        summed = jnp.logaddexp(log, row.sinks[..., None])
        return jnp.where(empty[..., None], 0.0, output * jnp.exp(largest - summed)[..., None]), summed, empty

    output, total, empty = jax.lax.map(block, _numbers(grid, row))
    return _joined_blocks(output), _joined_blocks(total), _joined_blocks(empty)


def _backward_row(plan: Plan, row: Row, slope: Array, delta: Array, total: Array) -> tuple[dict, dict]:
    """The gradients of what is the row's own, and its part of those of what all rows share."""
    grid = plan.grid
    marked, key, value, clean = row.key, row.key, row.value, row.query
    if plan.masked:
        marked = _marked(key, value)
        key, value, clean = _finite(key), _finite(value), _finite(clean)
    table = tiles.table(grid, row.rules, plan.is_causal, plan.window) if plan.masked else None
    wide = row.query.dtype
    K, G, _, H = row.query.shape
    # Keys last: then no product has to turn a tile.
    sums = {'key': jnp.zeros((K, H, grid.S), wide), 'value': jnp.zeros((K, value.shape[-1], grid.S), wide)}
    if row.bias is not None:
        sums['bias'] = jnp.zeros(row.bias.shape, wide)
    if row.slopes is not None:
        sums['slopes'] = jnp.zeros(row.slopes.shape, wide)

    def block(sums: dict[str, Array], i: Array) -> tuple[dict[str, Array], Array]:
        here = lambda x: tiles.cut(x, 2, i, grid.queries)
        query, out, off, log = here(row.query), here(slope), here(delta), here(total)
        turned = tuple(jax.lax.optimization_barrier(x.transpose(0, 3, 1, 2)) for x in (here(clean), out))

        def tile(j: Array, masked: bool) -> dict[str, Array]:
            keys, values = tiles.cut(key, 1, j, grid.keys), tiles.cut(value, 1, j, grid.keys)
            logits, through_cap = _logits(plan, row, query, marked, i, j, masked)
            weights = jnp.exp(logits - log[..., None])
            change = jnp.einsum('kgth,ksh->kgts', out, values, preferred_element_type=wide)
            kept = weights
            if row.words is not None:
                factor = _dropped(plan, row, i, j)
                change, kept = change * factor, weights * factor
            change = weights * (change - off[..., None])
            if masked:  # a row that sees something not finite still leaves alone what it does not see
                seen = tiles.allowed(grid, row.rules, plan.is_causal, plan.window, i, j)
                kept, change = jnp.where(seen, kept, 0.0), jnp.where(seen, change, 0.0)
            parts = {'value': jnp.einsum('khgt,kgts->khs', turned[1], kept)}
            if row.bias is not None:
                parts['bias'] = _summed_to(change, row.bias.shape)
            if row.slopes is not None:
                parts['slopes'] = -jnp.sum(change * _distance(plan, row, i, j), axis=(2, 3))
            if through_cap is not None:
                change = change * through_cap
                change = jnp.where(seen, change, 0.0) if masked else change  # zero times the slope of NaN
            parts['key'] = jnp.einsum('khgt,kgts->khs', turned[0], change)
            parts['query'] = jnp.einsum('kgts,ksh->kgth', change, keys, preferred_element_type=wide)
            return parts

        def step(j: Array, state: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            # The branches give the parts of one tile: sums that passed through them would be copied every time.
            nothing = lambda: axes.vary(_zeros(jax.eval_shape(partial(tile, masked=False), j)), row.query)
            parts = _choose(table, i, j, nothing, partial(tile, j))
            sums, query_slope = state
            return _added(sums, parts, i, j), query_slope + parts['query']

        start = sums, axes.vary(jnp.zeros(query.shape, wide), query)
        return jax.lax.fori_loop(*_range(grid, table, i), step, start)

    sums, query_slope = jax.lax.scan(block, axes.vary(sums, row.query), _numbers(grid, row))
    common = {name: sums.pop(name) for name in ('slopes', *(() if row.own_bias else ('bias',))) if name in sums}
    own = sums | {name: sums[name].swapaxes(1, 2) for name in ('key', 'value')}
    return own | {'query': _joined_blocks(query_slope)}, common


def _numbers(grid: Grid, row: Row) -> Array:
    """The blocks of queries, varying over mesh axes as the row does: `jax.vmap` of a switch takes that for granted."""
    return axes.vary(jnp.arange(grid.T // grid.queries), row.query)


def _range(grid: Grid, table: tiles.Table | None, i: Array) -> tuple[Any, Any]:
    """From and to which block of keys the query block i may see any."""
    return (0, grid.S // grid.keys) if table is None else (table.first[i], table.after[i])


def _choose(table: tiles.Table | None, i: Array, j: Array, hidden: Any, tile: Any, *state: Any) -> Any:
    """`hidden(*state)` or `tile(*state, masked)`, as the kind of the tile asks for."""
    full = partial(tile, masked=False)
    if table is None:
        return full(*state)
    return jax.lax.switch(table.kinds[i, j], (hidden, partial(tile, masked=True), full), *state)


# One tile


def _logits(
    plan: Plan, row: Row, query: Array, keys: Array, i: Array, j: Array, masked: bool
) -> tuple[Float[Array, 'K G queries keys'], Array | None]:
    """The logits of the tile (i, j), -inf where hidden, and the slope of the soft cap, if there is one."""
    key = tiles.cut(keys, 1, j, plan.grid.keys)
    logits = jnp.einsum('kgth,ksh->kgts', query, key, preferred_element_type=query.dtype)
    through_cap = None
    if plan.soft_cap is not None:
        bounded = jnp.tanh(logits / plan.soft_cap)
        logits, through_cap = plan.soft_cap * bounded, 1.0 - bounded**2
    if row.slopes is not None:
        logits -= row.slopes[:, :, None, None] * _distance(plan, row, i, j)
    if row.bias is not None:
        logits += tiles.cut_pairs(plan.grid, row.bias, i, j)
    if masked:
        logits = jnp.where(tiles.allowed(plan.grid, row.rules, plan.is_causal, plan.window, i, j), logits, -jnp.inf)
    return logits, through_cap


def _distance(plan: Plan, row: Row, i: Array, j: Array) -> Array:
    query, key = tiles.positions(plan.grid, row.rules, i, j)
    return jnp.abs(query - key)[None, None].astype(row.query.dtype)


def _dropped(plan: Plan, row: Row, i: Array, j: Array) -> Float[Array, 'K G queries keys']:
    K, G = row.query.shape[:2]
    assert row.words is not None
    query = tiles.start(row.rules.query_starts, i, plan.grid.queries)
    key = tiles.start(row.rules.key_starts, j, plan.grid.keys)
    numbers = dropout.row_numbers(row.number, K * G, plan.length, query, plan.grid.queries)
    return dropout.factors(row.words, plan.dropout_rate, numbers.reshape(K, G, -1), key, plan.grid.keys)


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
