"""Sequences of unequal length in few shapes: batches by width, each a pure function of (seed, step)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class BatchIndices(NamedTuple):
    """One batch before its tokens are laid out: the width it is padded to, and [B] examples, -1 for an empty row."""

    width: int
    examples: np.ndarray


def padded_width(length: int, widths: Sequence[int]) -> int:
    """The narrowest of the ascending `widths` that holds `length`; beyond the last, a multiple of it."""
    for width in widths:
        if length <= width:
            return width
    return -(-length // widths[-1]) * widths[-1]


def plan_batches(lengths: np.ndarray, order: np.ndarray, widths: Sequence[int], batch_size: int) -> list[BatchIndices]:
    """Every example once: full batches of each width, whose remainder moves up to the next; the last one is padded.

    lengths: [examples] int.  order: the examples in the order in which they are taken.
    """
    needed = np.array([padded_width(length, widths) for length in lengths])[order]
    batches, left = [], order[:0]
    for width in np.unique(needed):
        members = np.concatenate([left, order[needed == width]])
        full = len(members) // batch_size * batch_size
        batches += [BatchIndices(int(width), rows) for rows in members[:full].reshape(-1, batch_size)]
        left = members[full:]
    if len(left):
        batches.append(BatchIndices(int(needed.max()), np.pad(left, (0, batch_size - len(left)), constant_values=-1)))
    return batches


def shuffled_batches(
    lengths: np.ndarray, widths: Sequence[int], batch_size: int, seed: int
) -> Callable[[int], BatchIndices]:
    """Batch of step i, i from 0: a new order of the examples and of the batches every epoch."""

    @lru_cache(maxsize=2)
    def epoch(number: int) -> list[BatchIndices]:
        random = np.random.default_rng((seed, number))
        batches = plan_batches(lengths, random.permutation(len(lengths)), widths, batch_size)
        return [batches[i] for i in random.permutation(len(batches))]

    count = -(-len(lengths) // batch_size)
    return lambda step: epoch(step // count)[step % count]


def pad_sequences(sequences: Sequence[Sequence[int]], rows: np.ndarray, width: int) -> np.ndarray:
    """[B, width] int32: the sequences of the rows, zeros behind them; an empty row is all zeros."""
    out = np.zeros((len(rows), width), np.int32)
    for slot, row in enumerate(rows):
        if row >= 0:
            out[slot, : len(sequences[row])] = sequences[row]
    return out


def check_token_ids(sequences: Sequence[Sequence[int]], size: int) -> None:
    """Raises ValueError for an id outside a table of `size`, which JAX would clamp or turn into NaN in silence."""
    for sequence in sequences:
        if sequence and not 0 <= min(sequence) <= max(sequence) < size:
            bad = next(i for i in sequence if not 0 <= i < size)
            raise ValueError(f'token id {bad} is outside the vocabulary; expected 0 <= id < {size}')
