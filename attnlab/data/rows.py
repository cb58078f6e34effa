"""Rows of T tokens for a language model: random or consecutive windows of one text, or packed documents.

    batch = random_windows(ids, T=64, B=12, seed=0)(step)                # training, as in nanoGPT
    batches = ordered_row_batches(consecutive_windows(ids, T=64), B=12)  # evaluation: each token is predicted once
    batch = shuffled_row_batches(pack_documents(documents, T=64), B=12, seed=0)(step)
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from attnlab.data import batches
from attnlab.errors import UserError

IGNORE_LABEL = -1
"""Label of a position that the loss leaves out."""


class TokenRows(NamedTuple):
    """Rows of tokens with their labels, [rows, T] int32 each.

    tokens: 0 in padding.
    labels: the token after each one in its document; IGNORE_LABEL where there is none, and in padding.
    segment_ids: 1, 2, ... along a row, one number for each document; 0 in padding.
    positions: 0, 1, ... in each segment.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


ALL_ROWS = slice(None)

BatchFunction = Callable[..., TokenRows]
"""Function (step, rows=ALL_ROWS) that returns the selected rows of the batch of a step."""


def random_windows(ids: np.ndarray, T: int, B: int, seed: int) -> BatchFunction:
    """Return a batch function that draws B windows of a text, each start with the same probability (nanoGPT).

    ids: [n] int.  Raises UserError if they are too few for one window of T tokens and their labels.
    """
    _check_shape(T, B)
    if len(ids) <= T:
        raise UserError(f'the text has {len(ids)} tokens; windows of {T} need at least {T + 1}')
    windows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))

    def draw(step: int, rows: slice = ALL_ROWS) -> TokenRows:
        # The step is the spawn key and not a part of the seed, so that no two pairs of (seed, step), however large,
        # give the same random numbers.
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step,))))
        drawn = windows[random.integers(len(windows), size=B)[rows]].astype(np.int32)
        return TokenRows(drawn[:, :-1], drawn[:, 1:], segments[rows], positions[rows])

    return draw


def consecutive_windows(ids: np.ndarray, T: int) -> TokenRows:
    """Divide a whole text into windows; each token except the first is a label exactly once.

    ids: [n] int.  Raises UserError for fewer than 2 tokens.
    """
    _check_shape(T)
    if len(ids) < 2:
        raise UserError(f'the text has {len(ids)} tokens; expected at least 2, one to predict from the other')
    count = len(ids) - 1
    shape = (-(-count // T), T)

    def to_rows(values: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(values.astype(np.int32), (0, shape[0] * T - count), constant_values=fill).reshape(shape)

    segments = to_rows(np.ones(count), 0)
    # Padding is a segment of its own, so its positions start at 0.
    positions = np.arange(T, dtype=np.int32) - (1 - segments) * (count % T)
    return TokenRows(to_rows(ids[:-1], 0), to_rows(ids[1:], IGNORE_LABEL), segments, positions)


def pack_documents(documents: Sequence[np.ndarray], T: int) -> TokenRows:
    """Pack whole documents into rows by best fit, each document in a segment of its own.

    The documents are placed in order, each into the row with the smallest free space that holds it (of several, the
    oldest), or into a new row.  A document longer than T is divided into pieces of T tokens, which are placed like
    documents; the last label of a piece is the first token of the next piece.  So each token except the first of its
    document is a label exactly once.

    documents: [n] int each, document marks included.  Raises UserError if they have no tokens.
    """
    _check_shape(T)
    lengths = np.array([len(document) for document in documents], np.int64)
    if not lengths.sum():
        raise UserError('no documents to pack')
    ids = np.concatenate(documents).astype(np.int32)
    labels = np.append(ids[1:], np.int32(IGNORE_LABEL))
    labels[np.cumsum(lengths)[lengths > 0] - 1] = IGNORE_LABEL
    pieces = np.array([size for length in lengths for size in _piece_lengths(int(length), T)], np.int64)
    rows, columns, segment_numbers = _best_fit(pieces, T)
    position_in_piece = np.arange(len(ids)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    slots = np.repeat(rows * T + columns, pieces) + position_in_piece
    free = np.full(rows.max() + 1, T)
    np.subtract.at(free, rows, pieces)

    def to_rows(values: np.ndarray, fill: int) -> np.ndarray:
        out = np.full((len(free), T), fill, np.int32)
        out.flat[slots] = values
        return out

    segments = to_rows(np.repeat(segment_numbers, pieces), 0)
    padding_positions = np.arange(T) - (T - free)[:, None]
    positions = np.where(segments == 0, padding_positions, to_rows(position_in_piece, 0)).astype(np.int32)
    return TokenRows(to_rows(ids, 0), to_rows(labels, IGNORE_LABEL), segments, positions)


def shuffled_row_batches(all_rows: TokenRows, B: int, seed: int) -> BatchFunction:
    """Return a batch function with a new order of the rows every epoch, each row once; one batch of it is padded."""
    _check_shape(B=B)
    count, T = all_rows.tokens.shape
    batch_indices = batches.shuffled_batches(np.full(count, T), [T], B, seed)

    def draw(step: int, rows: slice = ALL_ROWS) -> TokenRows:
        return _select(all_rows, batch_indices(step).examples[rows])

    return draw


def ordered_row_batches(rows: TokenRows, B: int) -> list[TokenRows]:
    """Divide rows into batches of B, in order; the last one is padded."""
    _check_shape(B=B)
    count = len(rows.tokens)
    indices = np.pad(np.arange(count), (0, -count % B), constant_values=-1)
    return [_select(rows, batch) for batch in indices.reshape(-1, B)]


def _check_shape(T: int = 1, B: int = 1) -> None:
    if T < 1 or B < 1:
        raise UserError(f'rows of {T} tokens, {B} in a batch; expected at least 1 of each')


def _select(rows: TokenRows, indices: np.ndarray) -> TokenRows:
    """Return the rows with these indices; -1 gives a row of padding."""
    full = (indices >= 0)[:, None]
    padding = (np.int32(0), np.int32(IGNORE_LABEL), np.int32(0), np.arange(rows.tokens.shape[1], dtype=np.int32))
    return TokenRows(*(np.where(full, values[indices], fill) for values, fill in zip(rows, padding, strict=True)))


def _piece_lengths(length: int, T: int) -> list[int]:
    return [T] * (length // T) + [length % T] * (length % T > 0)


def _best_fit(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place pieces into rows of T tokens by best fit.

    Returns (row, first column, number within the row from 1) of each piece, [pieces] int64 each.
    """
    rows_by_free: dict[int, list[int]] = {}  # free space -> heap of the rows that have it
    free_sizes: list[int] = []  # the keys of rows_by_free, ascending
    piece_counts: list[int] = []  # pieces in each row
    placements = np.empty((3, len(lengths)), np.int64)
    for index, length in enumerate(lengths.tolist()):
        at = bisect_left(free_sizes, length)
        if at == len(free_sizes):
            row, free = len(piece_counts), T
            piece_counts.append(0)
        else:
            free = free_sizes[at]
            row = heappop(rows_by_free[free])
            if not rows_by_free[free]:
                del rows_by_free[free], free_sizes[at]
        piece_counts[row] += 1
        placements[:, index] = row, T - free, piece_counts[row]
        if free > length:
            if free - length not in rows_by_free:
                rows_by_free[free - length] = []
                insort(free_sizes, free - length)
            heappush(rows_by_free[free - length], row)
    return placements[0], placements[1], placements[2]
