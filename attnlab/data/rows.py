"""Rows of T tokens for a language model: windows of one text, at random or in order, and documents packed together.

    batch = windows(ids, T=64, B=12, seed=0)(step)      # training, as in nanoGPT
    batches = in_order(consecutive(ids, T=64), B=12)    # evaluation, every prediction once
    batch = shuffled(pack(documents, T=64), B=12, seed=0)(step)
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from attnlab.data import batches
from attnlab.errors import UserError

IGNORE_LABEL = -1  # a label that no loss counts


class TokenRows(NamedTuple):
    """[rows, T] int32 each.

    tokens: 0 in padding.  labels: what follows each token in its document, IGNORE where nothing does and in padding.
    segment_ids: equal within a document, 1, 2, ... along a row; 0 in padding.  positions: 0, 1, ... in each segment.
    """

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


ALL_ROWS = slice(None)

BatchFunction = Callable[..., TokenRows]
"""(step, rows=ALL) -> those rows of the step's batch."""


def random_windows(ids: np.ndarray, T: int, B: int, seed: int) -> BatchFunction:
    """Batch of step i: B windows whose starts are drawn from all that there are, each as likely (nanoGPT).

    ids: [n] int.  UserError if they hold no window of T tokens and their labels.
    """
    _check(T, B)
    if len(ids) <= T:
        raise UserError(f'the text has {len(ids)} tokens; windows of {T} need at least {T + 1}')
    every = np.lib.stride_tricks.sliding_window_view(ids, T + 1)
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))

    def draw(step: int, rows: slice = ALL_ROWS) -> TokenRows:
        # The key of a step apart from the seed: no two of them give one sequence, however large.
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step,))))
        drawn = every[random.integers(len(every), size=B)[rows]].astype(np.int32)
        return TokenRows(drawn[:, :-1], drawn[:, 1:], segments[rows], positions[rows])

    return draw


def consecutive_windows(ids: np.ndarray, T: int) -> TokenRows:
    """The whole text in windows: each token but the first, before which there is nothing, is a label exactly once."""
    _check(T)
    if len(ids) < 2:
        raise UserError(f'the text has {len(ids)} tokens; expected at least 2, one to predict from the other')
    count = len(ids) - 1
    shape = (-(-count // T), T)

    def cut(values: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(values.astype(np.int32), (0, shape[0] * T - count), constant_values=fill).reshape(shape)

    segments = cut(np.ones(count), 0)
    # Padding is a segment of its own, with positions of its own.
    positions = np.arange(T, dtype=np.int32) - (1 - segments) * (count % T)
    return TokenRows(cut(ids[:-1], 0), cut(ids[1:], IGNORE_LABEL), segments, positions)


def pack_documents(documents: Sequence[np.ndarray], T: int) -> TokenRows:
    """Documents in as few rows as best fit finds, whole, each a segment of its own.

    documents: [n] int each, marks included.  They are placed in order, each in the row with the least room that holds
    it (the oldest of several), a new one if there is none.  Of a document longer than T, pieces of T tokens are
    documents of their own, but for their last label, which is the first token of the next.  So each token but the first
    of its document is a label exactly once.
    """
    _check(T)
    lengths = np.array([len(document) for document in documents], np.int64)
    if not lengths.sum():
        raise UserError('no documents to pack')
    ids = np.concatenate(documents).astype(np.int32)
    labels = np.append(ids[1:], np.int32(IGNORE_LABEL))
    labels[np.cumsum(lengths)[lengths > 0] - 1] = IGNORE_LABEL
    pieces = np.array([size for length in lengths for size in _pieces(int(length), T)], np.int64)
    rows, columns, numbers = _places(pieces, T)
    within = np.arange(len(ids)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    slots = np.repeat(rows * T + columns, pieces) + within
    room = np.full(rows.max() + 1, T)
    np.subtract.at(room, rows, pieces)

    def laid(values: np.ndarray, fill: int) -> np.ndarray:
        out = np.full((len(room), T), fill, np.int32)
        out.flat[slots] = values
        return out

    segments = laid(np.repeat(numbers, pieces), 0)
    positions = np.where(segments == 0, np.arange(T) - (T - room)[:, None], laid(within, 0)).astype(np.int32)
    return TokenRows(laid(ids, 0), laid(labels, IGNORE_LABEL), segments, positions)


def shuffled_row_batches(every: TokenRows, B: int, seed: int) -> BatchFunction:
    """Batch of step i: a new order of the rows every epoch, in which each comes once; the last batch is padded."""
    _check(B=B)
    count, T = every.tokens.shape
    order = batches.shuffled_batches(np.full(count, T), [T], B, seed)
    return lambda step, rows=ALL_ROWS: _take(every, order(step).examples[rows])


def ordered_row_batches(rows: TokenRows, B: int) -> list[TokenRows]:
    """All rows in batches of B; the last one is padded."""
    _check(B=B)
    count = len(rows.tokens)
    numbers = np.pad(np.arange(count), (0, -count % B), constant_values=-1)
    return [_take(rows, chosen) for chosen in numbers.reshape(-1, B)]


def _check(T: int = 1, B: int = 1) -> None:
    if T < 1 or B < 1:
        raise UserError(f'rows of {T} tokens, {B} in a batch; expected at least 1 of each')


def _take(rows: TokenRows, chosen: np.ndarray) -> TokenRows:
    """Those rows; -1 is a row of padding."""
    full = (chosen >= 0)[:, None]
    empty = (np.int32(0), np.int32(IGNORE_LABEL), np.int32(0), np.arange(rows.tokens.shape[1], dtype=np.int32))
    return TokenRows(*(np.where(full, values[chosen], fill) for values, fill in zip(rows, empty, strict=True)))


def _pieces(length: int, T: int) -> list[int]:
    return [T] * (length // T) + [length % T] * (length % T > 0)


def _places(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first column, number in the row from 1) of each piece, by best fit."""
    waiting: dict[int, list[int]] = {}  # room: the rows that have it, a heap
    rooms: list[int] = []  # ascending, those of some row
    held: list[int] = []  # documents of each row
    places = np.empty((3, len(lengths)), np.int64)
    for index, length in enumerate(lengths.tolist()):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(held), T
            held.append(0)
        else:
            room = rooms[at]
            row = heappop(waiting[room])
            if not waiting[room]:
                del waiting[room], rooms[at]
        held[row] += 1
        places[:, index] = row, T - room, held[row]
        if room > length:
            if room - length not in waiting:
                waiting[room - length] = []
                insort(rooms, room - length)
            heappush(waiting[room - length], row)
    return places[0], places[1], places[2]
