"""Batches of sequences of unequal length, padded to a few fixed widths; each batch is a function of (seed, step)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class BatchIndices(NamedTuple):
    """The examples of one batch.

    width: the length that its sequences are padded to.  examples: their indices, [B] int, -1 for an empty row.
    """

    width: int
    examples: np.ndarray


def padded_width(length: int, widths: Sequence[int]) -> int:
    """Return the smallest of the ascending `widths` that is at least `length`, or else a multiple of the last one."""
    for width in widths:
        if length <= width:
            return width
    return -(-length // widths[-1]) * widths[-1]


def plan_batches(
    lengths: np.ndarray, order: np.ndarray, widths: Sequence[int], batch_size: int
) -> list[BatchIndices]:
    """Divide examples into batches by width, each example once.

    Each width has full batches only; the examples left over go to the next larger width.  The last batch of all is
    filled up with empty rows.

    lengths: [examples] int.  order: [examples] int, the indices of the examples in the order in which they are taken.
    """
    needed = np.array([padded_width(length, widths) for length in lengths])[order]
    batches, leftover = [], order[:0]
    for width in np.unique(needed):
        members = np.concatenate([leftover, order[needed == width]])
        full = len(members) // batch_size * batch_size
        batches += [BatchIndices(int(width), rows) for rows in members[:full].reshape(-1, batch_size)]
        leftover = members[full:]
    if len(leftover):
        last = np.pad(leftover, (0, batch_size - len(leftover)), constant_values=-1)
        batches.append(BatchIndices(int(needed.max()), last))
    return batches


def shuffled_batches(
    lengths: np.ndarray, widths: Sequence[int], batch_size: int, seed: int
) -> Callable[[int], BatchIndices]:
    """Return a function from a step, from 0, to its batch.

    Examples and batches are in a new order every epoch.  lengths: [examples] int.
    """

    @lru_cache(maxsize=2)
    def epoch_batches(epoch: int) -> list[BatchIndices]:
        random = np.random.default_rng((seed, epoch))
        batches = plan_batches(lengths, random.permutation(len(lengths)), widths, batch_size)
        return [batches[i] for i in random.permutation(len(batches))]

    steps_per_epoch = -(-len(lengths) // batch_size)
    return lambda step: epoch_batches(step // steps_per_epoch)[step % steps_per_epoch]


def pad_sequences(sequences: Sequence[Sequence[int]], rows: np.ndarray, width: int) -> np.ndarray:
    """Return the sequences with the indices `rows` as [B, width] int32, with zeros after each.

    rows: [B] int; -1 gives a row of zeros.  Raises ValueError for a sequence longer than `width`.
    """
    out = np.zeros((len(rows), width), np.int32)
    for slot, row in enumerate(rows):
        if row >= 0:
            out[slot, : len(sequences[row])] = sequences[row]
    return out


def check_token_ids(sequences: Sequence[Sequence[int]], size: int) -> None:
    """Raise ValueError for an id outside [0, size); JAX would clamp it or return NaN without an error."""
    for sequence in sequences:
        if sequence and not 0 <= min(sequence) <= max(sequence) < size:
            bad = next(i for i in sequence if not 0 <= i < size)
            raise ValueError(f'token id {bad} is outside the vocabulary; expected 0 <= id < {size}')
