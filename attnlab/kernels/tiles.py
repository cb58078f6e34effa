"""The mask of one batch row, cut into tiles of queries by keys: which tiles to skip, which need no mask."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attnlab.kernels.masks import Mask, mask_as_array

HIDDEN, PARTIAL, FULL = 0, 1, 2


class TileGrid(NamedTuple):
    """Block sizes. T and S include the padding to whole blocks."""

    T: int
    S: int
    queries: int
    keys: int


def even_block_size(length: int, limit: int, multiple: int) -> int:
    """Size of the blocks, a multiple of `multiple`, when a length is cut into the fewest of at most `limit`."""
    return math.ceil(length / math.ceil(length / limit) / multiple) * multiple


class BlockStarts(NamedTuple):
    """Row number of the first query or key of each block, for a part of a sequence; None: blocks follow from 0 on."""

    queries: Int[Array, ' I'] | None = None
    keys: Int[Array, ' J'] | None = None


class TileTable(NamedTuple):
    """kinds: [T / queries, S / keys], HIDDEN, PARTIAL or FULL.  first, after: for each block of queries, the range of
    key blocks outside of which all are hidden."""

    kinds: Int[Array, 'I J']
    first: Int[Array, ' I']
    after: Int[Array, ' I']


class MaskTiles(NamedTuple):
    """A mask with B = 1 over a grid; i and j are the numbers of a block of queries and of a block of keys."""

    grid: TileGrid
    mask: Mask
    begin: BlockStarts = BlockStarts()

    def starts(self, i: Int[Array, '*I'], j: Int[Array, '*J']) -> tuple[Int[Array, '*I'], Int[Array, '*J']]:
        """Row numbers of the first query of block i and of the first key of block j."""
        queries, keys = self.begin
        return (
            i * self.grid.queries if queries is None else queries[i], j * self.grid.keys if keys is None else keys[j]
        )  # fmt: skip

    def cut(self, x: Array, axes: str, i: Int[Array, ''], j: Int[Array, '']) -> Array:
        """The part of an array that belongs to the tile (i, j); `axes` has one letter for each axis.

        An axis of size one holds the entry of all blocks, and stays.
        """
        for axis, letter in enumerate(axes):
            if letter in 'TS' and x.shape[axis] > 1:
                block, size = (i, self.grid.queries) if letter == 'T' else (j, self.grid.keys)
                x = jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)
        return x

    def tile(self, i: Int[Array, ''], j: Int[Array, '']) -> Mask:
        """The mask of the tile (i, j), as if there were no other; it always has positions."""
        (row, column), grid = self.starts(i, j), self.grid
        mask = self.mask.map_arrays(lambda x, axes: self.cut(x, axes, i, j))
        at = lambda positions, start, size: (start + jnp.arange(size))[None] if positions is None else positions
        less = lambda lengths, start: None if lengths is None else lengths - start
        return mask.replace(
            query_positions=at(mask.query_positions, row, grid.queries),
            key_positions=at(mask.key_positions, column, grid.keys),
            query_seq_lengths=less(mask.query_seq_lengths, row),
            key_value_seq_lengths=less(mask.key_value_seq_lengths, column),
            prefix_lengths=less(mask.prefix_lengths, column),
        )

    def allowed(self, i: Int[Array, ''], j: Int[Array, '']) -> Bool[Array, '1 #N queries keys']:
        """The pairs of the tile (i, j) that the mask allows."""
        array = mask_as_array(self.tile(i, j), self.grid.queries, self.grid.keys)
        assert array is not None  # tiles are masked only where `mask.restrict()`
        return array

    def table(self) -> TileTable:
        """The kind of each tile, from the extremes of its positions, segments and row numbers.

        A HIDDEN tile allows no pair and a FULL tile all pairs; a PARTIAL one may allow any.
        """
        grid, mask = self.grid, self.mask
        across, along = grid.T // grid.queries, grid.S // grid.keys
        some, every = jnp.ones((across, along), bool), jnp.ones((across, along), bool)
        rows, columns = self.starts(jnp.arange(across), jnp.arange(along))
        low, high = (x[:, None] for x in _extremes(mask.query_positions, rows, grid.queries))
        least, most = (x[None] for x in _extremes(mask.key_positions, columns, grid.keys))
        if mask.mask is not None:
            every &= False
        if (length := mask.query_seq_lengths) is not None:
            some, every = some & (rows < length)[:, None], every & (rows + grid.queries <= length)[:, None]
        if (length := mask.key_value_seq_lengths) is not None:
            some, every = some & (columns < length)[None], every & (columns + grid.keys <= length)[None]
        if mask.query_segment_ids is not None:
            lowest, highest = (x[:, None] for x in _extremes(mask.query_segment_ids, rows, grid.queries))
            smallest, largest = (x[None] for x in _extremes(mask.key_segment_ids, columns, grid.keys))
            some &= (smallest <= highest) & (largest >= lowest)
            every &= (smallest == largest) & (lowest == highest) & (smallest == lowest)
        if mask.is_causal:
            past, whole = least <= high, most <= low
            if (length := mask.prefix_lengths) is not None:
                past, whole = past | (columns < length)[None], whole | (columns + grid.keys <= length)[None]
            some, every = some & past, every & whole
        if mask.window is not None:
            left, right = mask.window
            some &= (most >= low - left) & (least <= high + right)
            every &= (least >= high - left) & (most <= low + right)
        kinds = jnp.where(some, jnp.where(every, FULL, PARTIAL), HIDDEN)
        seen = jnp.any(some, axis=1)
        after = jnp.where(seen, along - jnp.argmax(some[:, ::-1], axis=1), 0)
        return TileTable(kinds, jnp.where(seen, jnp.argmax(some, axis=1), 0), after)


def _extremes(numbers: Int[Array, '1 L'] | None, starts: Int[Array, ' I'], block: int) -> tuple[Array, Array]:
    """The smallest and the largest number in each block; of the row numbers themselves if None."""
    if numbers is None:
        return starts, starts + block - 1
    blocks = numbers.reshape(-1, block)
    return blocks.min(axis=1), blocks.max(axis=1)
