"""Word alignments read off attention weights."""

from collections.abc import Sequence

import numpy as np

from attnlab.data.alignments import Link
from attnlab.data.vocabulary import Vocabulary

Span = tuple[str, int, int]
"""(label, start, stop) of a word over ids."""


def join_subwords(weights: np.ndarray, rows: Sequence[Span], columns: Sequence[Span]) -> np.ndarray:
    """Weights of words from weights of tokens [T, S]: the sum over a source word, the mean over a produced one."""
    by_column = np.stack([weights[:, start:stop].sum(axis=1) for _, start, stop in columns], axis=1)
    return np.stack([by_column[start:stop].mean(axis=0) for _, start, stop in rows])


def extract_links(weights: np.ndarray, rows: Sequence[Span], columns: Sequence[Span], shift: int) -> frozenset[Link]:
    """One (source word, produced word) for each produced word: where it looks most, EOS apart on both sides.

    weights: [T, S] over tokens, the last row and column those of EOS.
    shift: 0 reads a word at the steps that emit it, 1 one later, at the steps that it feeds (Chen et al. 2020).
    """
    if len(rows) < 2 or len(columns) < 2:
        return frozenset()
    words = join_subwords(weights[shift : len(weights) - 1 + shift], rows[:-1], columns[:-1])
    return frozenset((int(source), target) for target, source in enumerate(words.argmax(axis=1)))


def extract_split_links(
    weights: Sequence[np.ndarray],
    source: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
    vocabularies: tuple[Vocabulary, Vocabulary],
    shift: int,
) -> list[frozenset[Link]]:
    """`extract_links` of every sentence, over the words of its ids."""
    return [
        extract_links(one, vocabularies[1].words(produced), vocabularies[0].words(read), shift)
        for one, read, produced in zip(weights, source, target, strict=True)
    ]


def count_reversals(found: frozenset[Link]) -> int:
    """Neighbouring produced words that come from neighbouring source words in the opposite order."""
    source_of = {target: source for source, target in found}
    return sum(source_of.get(target + 1) == source - 1 for target, source in source_of.items())
