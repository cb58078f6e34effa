"""The mask of one batch row, cut into tiles of queries by keys: which tiles to skip, and which need no mask."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from attnlab.kernels.masks import Mask, mask_as_array

HIDDEN, PARTIAL, FULL = 0, 1, 2
"""The kinds of a tile: the mask allows no pair, or may allow some, or allows all."""


class TileGrid(NamedTuple):
    """Lengths and block sizes; T and S include the padding to whole blocks."""

    T: int
    S: int
    queries: int
    keys: int


def even_block_size(length: int, limit: int, multiple: int) -> int:
    """Return the block size that cuts a length evenly into the fewest blocks of at most `limit`.

    It is rounded up to a multiple of `multiple`.
    """
    return math.ceil(length / math.ceil(length / limit) / multiple) * multiple


class BlockStarts(NamedTuple):
    """The row number of the first query or key of each block, for a part of a sequence.

    None: the blocks follow each other from 0 on.
    """

    queries: Int[Array, ' I'] | None = None
    keys: Int[Array, ' J'] | None = None


class TileTable(NamedTuple):
    """The kinds of all tiles of a mask.

    kinds: [I, J] for I = T / queries and J = S / keys; HIDDEN, PARTIAL or FULL.
    first, after: [I], the range of key blocks for each block of queries; all tiles outside of it are hidden.
    """

    kinds: Int[Array, 'I J']
    first: Int[Array, ' I']
    after: Int[Array, ' I']


class MaskTiles(NamedTuple):
    """A mask with B = 1 over a grid; i and j are the indices of a block of queries and of a block of keys."""

    grid: TileGrid
    mask: Mask
    block_starts: BlockStarts = BlockStarts()

    def starts(self, i: Int[Array, '*I'], j: Int[Array, '*J']) -> tuple[Int[Array, '*I'], Int[Array, '*J']]:
        """Return the row numbers of the first query of block i and of the first key of block j."""
        queries, keys = self.block_starts
        return (
            i * self.grid.queries if queries is None else queries[i], j * self.grid.keys if keys is None else keys[j]
        )  # fmt: skip

    def cut(self, x: Array, axes: str, i: Int[Array, ''], j: Int[Array, '']) -> Array:
        """Return the part of an array that belongs to the tile (i, j); `axes`: its shape, one letter for each axis.

        A broadcast axis of size one is not cut.
        """
        for axis, letter in enumerate(axes):
            if letter in 'TS' and x.shape[axis] > 1:
                block, size = (i, self.grid.queries) if letter == 'T' else (j, self.grid.keys)
                x = jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)
        return x

    def tile(self, i: Int[Array, ''], j: Int[Array, '']) -> Mask:
        """Return the mask of the tile (i, j) for its queries and keys alone; it always has positions."""
        (row, column), grid = self.starts(i, j), self.grid
        mask = self.mask.map_arrays(lambda x, axes: self.cut(x, axes, i, j))
        return mask.replace(
            query_positions=_positions_or_range(mask.query_positions, row, grid.queries),
            key_positions=_positions_or_range(mask.key_positions, column, grid.keys),
            query_seq_lengths=_subtract_start(mask.query_seq_lengths, row),
            key_value_seq_lengths=_subtract_start(mask.key_value_seq_lengths, column),
            prefix_lengths=_subtract_start(mask.prefix_lengths, column),
        )

    def allowed(self, i: Int[Array, ''], j: Int[Array, '']) -> Bool[Array, '1 #N queries keys']:
        """Return which pairs of the tile (i, j) the mask allows."""
        array = mask_as_array(self.tile(i, j), self.grid.queries, self.grid.keys)
        assert array is not None  # tiles are masked only if `mask.restricts_any_pair()`
        return array

    def table(self) -> TileTable:
        """Return the kind of each tile, from the smallest and largest positions, segment ids and row numbers in it.

        A HIDDEN tile allows no pair and a FULL tile all pairs; a PARTIAL tile may allow any.
        """
        grid, mask = self.grid, self.mask
        query_blocks, key_blocks = grid.T // grid.queries, grid.S // grid.keys
        allows_some, allows_all = (jnp.ones((query_blocks, key_blocks), bool),) * 2
        rows, columns = self.starts(jnp.arange(query_blocks), jnp.arange(key_blocks))
        query_min, query_max = (x[:, None] for x in _block_extremes(mask.query_positions, rows, grid.queries))
        key_min, key_max = (x[None] for x in _block_extremes(mask.key_positions, columns, grid.keys))
        if mask.mask is not None:
            allows_all &= False
        if (length := mask.query_seq_lengths) is not None:
            allows_some &= (rows < length)[:, None]
            allows_all &= (rows + grid.queries <= length)[:, None]
        if (length := mask.key_value_seq_lengths) is not None:
            allows_some &= (columns < length)[None]
            allows_all &= (columns + grid.keys <= length)[None]
        if mask.query_segment_ids is not None:
            id_min, id_max = (x[:, None] for x in _block_extremes(mask.query_segment_ids, rows, grid.queries))
            key_id_min, key_id_max = (x[None] for x in _block_extremes(mask.key_segment_ids, columns, grid.keys))
            allows_some &= (key_id_min <= id_max) & (key_id_max >= id_min)
            allows_all &= (key_id_min == key_id_max) & (id_min == id_max) & (key_id_min == id_min)
        if mask.is_causal:
            some_causal, all_causal = key_min <= query_max, key_max <= query_min
            if (length := mask.prefix_lengths) is not None:
                some_causal = some_causal | (columns < length)[None]
                all_causal = all_causal | (columns + grid.keys <= length)[None]
            allows_some &= some_causal
            allows_all &= all_causal
        if mask.window is not None:
            left, right = mask.window
            allows_some &= (key_max >= query_min - left) & (key_min <= query_max + right)
            allows_all &= (key_min >= query_max - left) & (key_max <= query_min + right)
        kinds = jnp.where(allows_some, jnp.where(allows_all, FULL, PARTIAL), HIDDEN)
        has_keys = jnp.any(allows_some, axis=1)
        after = jnp.where(has_keys, key_blocks - jnp.argmax(allows_some[:, ::-1], axis=1), 0)
        return TileTable(kinds, jnp.where(has_keys, jnp.argmax(allows_some, axis=1), 0), after)


def _positions_or_range(positions: Array | None, start: Array, size: int) -> Array:
    """Return the positions, or [1, size] row numbers from `start` on if None."""
    return (start + jnp.arange(size))[None] if positions is None else positions


def _subtract_start(lengths: Array | None, start: Array) -> Array | None:
    """Return lengths counted from the start of a block."""
    return None if lengths is None else lengths - start


def _block_extremes(numbers: Int[Array, '1 L'] | None, starts: Int[Array, ' I'], block: int) -> tuple[Array, Array]:
    """Return the smallest and the largest number in each block; of the row numbers themselves if None."""
    if numbers is None:
        return starts, starts + block - 1
    blocks = numbers.reshape(-1, block)
    return blocks.min(axis=1), blocks.max(axis=1)
