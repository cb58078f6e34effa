"""The rules of one batch row, cut into tiles of queries by keys: which tiles to skip, which need no mask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attnlab.kernels.masks import Visibility, as_array

HIDDEN, PARTIAL, FULL = 0, 1, 2


class Grid(NamedTuple):
    """How a row is cut.  T and S count the padding to whole blocks."""

    T: int
    S: int
    queries: int
    keys: int


class Rules(NamedTuple):
    """`masks.Visibility` of one batch row: the same names, without the batch axis; None where there is no such rule.

    query_starts, key_starts: the row number of the first query or key in each block, where these are blocks of
    something longer; None where the blocks follow each other from 0 on.
    """

    mask: Bool[Array, '#K #G #T #S'] | None
    query_seq_lengths: Int[Array, ''] | None
    key_value_seq_lengths: Int[Array, ''] | None
    query_positions: Int[Array, ' T'] | None
    key_positions: Int[Array, ' S'] | None
    query_segment_ids: Int[Array, ' T'] | None
    key_segment_ids: Int[Array, ' S'] | None
    prefix_lengths: Int[Array, ''] | None
    query_starts: Int[Array, ' I'] | None = None
    key_starts: Int[Array, ' J'] | None = None


class Table(NamedTuple):
    """kinds: [T / queries, S / keys], HIDDEN, PARTIAL or FULL.  first, after: for each block of queries, the range of
    key blocks outside of which all are hidden."""

    kinds: Int[Array, 'I J']
    first: Int[Array, ' I']
    after: Int[Array, ' I']


def table(grid: Grid, rules: Rules, is_causal: bool, window: tuple[int, int] | None) -> Table:
    """What can be told of each tile from the extremes of its positions, segments and indices.

    A tile called HIDDEN shows nothing and one called FULL shows all of its pairs; what is called PARTIAL may be either.
    """
    across, along = grid.T // grid.queries, grid.S // grid.keys
    some, every = jnp.ones((across, along), bool), jnp.ones((across, along), bool)
    queries = start(rules.query_starts, jnp.arange(across), grid.queries)
    keys = start(rules.key_starts, jnp.arange(along), grid.keys)
    low, high = _extremes(rules.query_positions, queries, grid.queries)
    least, most = _extremes(rules.key_positions, keys, grid.keys)
    low, high, least, most = low[:, None], high[:, None], least[None], most[None]
    row, column = queries[:, None], keys[None]
    if rules.mask is not None:
        every &= False
    if (length := rules.query_seq_lengths) is not None:
        some, every = some & (row < length), every & (row + grid.queries <= length)
    if (length := rules.key_value_seq_lengths) is not None:
        some, every = some & (column < length), every & (column + grid.keys <= length)
    if rules.query_segment_ids is not None:
        lowest, highest = (x[:, None] for x in _extremes(rules.query_segment_ids, queries, grid.queries))
        smallest, largest = (x[None] for x in _extremes(rules.key_segment_ids, keys, grid.keys))
        some &= (smallest <= highest) & (largest >= lowest)
        every &= (smallest == largest) & (lowest == highest) & (smallest == lowest)
    if is_causal:
        past, whole = least <= high, most <= low
        if (length := rules.prefix_lengths) is not None:
            past, whole = past | (column < length), whole | (column + grid.keys <= length)
        some, every = some & past, every & whole
    if window is not None:
        left, right = window
        some &= (most >= low - left) & (least <= high + right)
        every &= (least >= high - left) & (most <= low + right)
    kinds = jnp.where(some, jnp.where(every, FULL, PARTIAL), HIDDEN)
    seen = jnp.any(some, axis=1)
    after = jnp.where(seen, along - jnp.argmax(some[:, ::-1], axis=1), 0)
    return Table(kinds, jnp.where(seen, jnp.argmax(some, axis=1), 0), after)


def start(starts: Int[Array, ' I'] | None, block: Int[Array, '*I'], size: int) -> Int[Array, '*I']:
    """The row number of the first query or key in a block."""
    return block * size if starts is None else starts[block]


def _extremes(numbers: Int[Array, ' L'] | None, starts: Int[Array, ' I'], block: int) -> tuple[Array, Array]:
    """The smallest and the largest number in each block; of the row numbers themselves if None."""
    if numbers is None:
        return starts, starts + block - 1
    blocks = numbers.reshape(-1, block)
    return blocks.min(axis=1), blocks.max(axis=1)


def allowed(
    grid: Grid, rules: Rules, is_causal: bool, window: tuple[int, int] | None, i: Int[Array, ''], j: Int[Array, '']
) -> Bool[Array, '#K #G #queries #keys']:
    """`masks.as_array` for the tile of query block i and key block j alone, as if there were no other."""
    query, key = positions(grid, rules, i, j)
    queries, keys = start(rules.query_starts, i, grid.queries), start(rules.key_starts, j, grid.keys)
    rest = lambda length, before: None if length is None else (length - before)[None]
    piece = lambda ids, block, size: None if ids is None else cut(ids, 0, block, size)[None]
    mask = None if rules.mask is None else cut_pairs(grid, rules.mask, i, j)
    array = as_array(
        Visibility(
            None if mask is None else mask.reshape(1, -1, *mask.shape[2:]),
            rest(rules.query_seq_lengths, queries), rest(rules.key_value_seq_lengths, keys), query.T, key,
            piece(rules.query_segment_ids, i, grid.queries), piece(rules.key_segment_ids, j, grid.keys),
            rest(rules.prefix_lengths, keys), is_causal, window,
        ), grid.queries, grid.keys,
    )  # fmt: skip
    assert array is not None  # without any rule nobody asks
    return array.reshape(*((1, 1) if mask is None else mask.shape[:2]), *array.shape[2:])


def positions(grid: Grid, rules: Rules, i: Int[Array, ''], j: Int[Array, '']) -> tuple[Array, Array]:
    """[queries, 1] and [1, keys], the positions that the tile's queries and keys stand at."""
    queries, keys = (
        start(starts, block, size) + jnp.arange(size) if given is None else cut(given, 0, block, size)
        for given, starts, block, size in (
            (rules.query_positions, rules.query_starts, i, grid.queries),
            (rules.key_positions, rules.key_starts, j, grid.keys),
        )
    )
    return queries[:, None], keys[None]


def cut(x: Array, axis: int, block: Int[Array, ''], size: int) -> Array:
    """The block of that number along an axis; all of an axis of size one, which stands for every block."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def cut_pairs(grid: Grid, x: Array, i: Int[Array, ''], j: Int[Array, '']) -> Array:
    """The tile (i, j) of [#K, #G, #T, #S]."""
    return cut(cut(x, 2, i, grid.queries), 3, j, grid.keys)
