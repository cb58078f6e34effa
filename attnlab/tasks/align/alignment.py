"""Word alignments from attention weights."""

from collections.abc import Sequence

import numpy as np

from attnlab.data.alignments import Link
from attnlab.data.vocabulary import Vocabulary

Span = tuple[str, int, int]
"""(label, start, stop): a word, and the range of its token ids in the sentence."""


def join_subwords(weights: np.ndarray, rows: Sequence[Span], columns: Sequence[Span]) -> np.ndarray:
    """Return weights of words, [len(rows), len(columns)], from weights of tokens, [T, S].

    Weights are summed over the tokens of a source word and averaged over the tokens of a produced word.
    """
    by_column = np.stack([weights[:, start:stop].sum(axis=1) for _, start, stop in columns], axis=1)
    return np.stack([by_column[start:stop].mean(axis=0) for _, start, stop in rows])


def extract_links(weights: np.ndarray, rows: Sequence[Span], columns: Sequence[Span], shift: int) -> frozenset[Link]:
    """Link each produced word to the source word with the largest weight; return pairs (source word, produced word).

    The end of sentence (EOS) gets no link on either side.
    weights: [T, S] over tokens; the last row and the last column belong to EOS.
    rows, columns: the produced words and the source words, EOS last.
    shift: 0 takes the weights of the steps that emit a word. 1 takes the weights of the steps whose decoder input is
      the word, one step later (Chen et al. 2020).
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
    """Return `extract_links` of every sentence of a split.

    weights: [T, S] for each sentence.  source, target: token ids of each sentence, with EOS.
    vocabularies: (source, target); they group the ids into words.
    """
    source_vocabulary, target_vocabulary = vocabularies
    return [
        extract_links(matrix, target_vocabulary.words(target_ids), source_vocabulary.words(source_ids), shift)
        for matrix, source_ids, target_ids in zip(weights, source, target, strict=True)
    ]


def count_reversals(links: frozenset[Link]) -> int:
    """Return the number of pairs of neighbouring produced words whose source words are neighbours in reverse order."""
    source_of = {target: source for source, target in links}
    return sum(source_of.get(target + 1) == source - 1 for target, source in source_of.items())
