"""Sentence pairs of an experiment, as text and as token ids."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.configs import GrammarPairs, Multi30kData, PairFiles
from attnlab.data import grammar, parallel_text, vocabulary
from attnlab.data.alignments import Link
from attnlab.data.batches import check_token_ids
from attnlab.data.pairs import SentencePairs
from attnlab.data.vocabulary import EOS, Vocabulary, warn_of_unknown_words
from attnlab.errors import UserError
from attnlab.files import expand_home

PairsData = GrammarPairs | Multi30kData | PairFiles
"""Configs of sentence pairs."""

Vocabularies = tuple[Vocabulary, Vocabulary]
"""(source, target)."""

SIDES = ('source', 'target')
MAX_SENTENCE_LENGTH = 512


class EncodedPairs(NamedTuple):
    """A split as token ids; each sentence ends in EOS."""

    source: list[list[int]]
    target: list[list[int]]


def split_names(data: PairsData) -> tuple[str, ...]:
    """Return the names of a corpus's splits, the training split first."""
    match data:
        case GrammarPairs():
            return grammar.GRAMMAR_SPLITS
        case Multi30kData():
            return ('train', 'valid', 'test', 'test_2017')
        case PairFiles():
            return ('train', 'valid', 'test')


def language_pair(data: PairsData) -> tuple[str, str]:
    """Return the language codes (source, target)."""
    return data.languages if isinstance(data, PairFiles) else ('en', 'fr')


def read_pairs(data: PairsData, split: str, seed: int, linked: bool = True) -> SentencePairs:
    """Return the sentence pairs of a split; `linked`: with gold alignments, if the corpus has them.

    Raises UserError for an unknown split.
    """
    if split not in split_names(data):
        raise UserError(f'split is {split!r}; expected one of {", ".join(split_names(data))}')
    match data:
        case GrammarPairs():
            count = data.train_examples if split == 'train' else data.test_examples
            return grammar.grammar_pairs(split, count, seed, linked)
        case Multi30kData():
            folder = expand_home(data.folder, 'data.folder')
            return parallel_text.load_multi30k('test_2016' if split == 'test' else split, folder)
        case PairFiles():
            return parallel_text.read_sentence_pairs(expand_home(getattr(data, split), f'data.{split}'), data.languages)


def read_inversions(data: PairsData, split: str, seed: int) -> Sequence[Sequence[Link]] | None:
    """Return, for each sentence, the links of adjectives that change order with their noun; None if not annotated."""
    if not isinstance(data, GrammarPairs):
        return None
    return [example.inverted for example in grammar.grammar_examples(split, data.test_examples, seed)]


def build_vocabularies(data: PairsData, train: SentencePairs) -> Vocabularies:
    """Build the vocabularies of the training sentences; with `data.shared` both languages have the same tokens."""
    source, target = language_pair(data)
    if data.shared:
        both = [(train.source, source), (train.target, target)]
        shared = vocabulary.build_shared_vocabulary(data.vocabulary, both, data.vocabulary_size)
        return shared, dataclasses.replace(shared, language=target)
    return (
        vocabulary.build_vocabulary(data.vocabulary, train.source, data.vocabulary_size, source),
        vocabulary.build_vocabulary(data.vocabulary, train.target, data.vocabulary_size, target),
    )


def save_vocabularies(vocabularies: Vocabularies, workdir: Path) -> None:
    """Write the vocabularies into a run's directory."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    for side, side_vocabulary in zip(SIDES, vocabularies, strict=True):
        vocabulary.save_vocabulary(side_vocabulary, workdir / 'vocabulary' / side)


def load_vocabularies(workdir: Path) -> Vocabularies:
    """Read the vocabularies of a run."""
    source, target = (vocabulary.load_vocabulary(workdir / 'vocabulary' / side) for side in SIDES)
    return source, target


def max_sentence_length(data: PairsData) -> int:
    """Return the largest number of tokens of a sentence in evaluation and use; training cuts at the last width.

    The limit exists because attention weights and time grow with the square of the length.
    """
    return max(MAX_SENTENCE_LENGTH, *data.widths)


def encode_user_sentences(sentences: Sequence[str], vocabulary: Vocabulary, limit: int) -> list[list[int]]:
    """Return token ids, with EOS, of sentences that a user typed; log a warning that names unknown words.

    Raises UserError for a sentence of more than `limit` tokens, EOS included.
    """
    encoded = encode_sentences(sentences, vocabulary)
    for number, ids in enumerate(encoded, 1):
        if len(ids) > limit:
            raise UserError(
                f'sentence {number} has {len(ids)} tokens, the end of sentence included; expected at most {limit}'
            )
    warn_of_unknown_words(vocabulary, sentences)
    return encoded


def encode_sentences(lines: Sequence[str], vocabulary: Vocabulary, limit: int | None = None) -> list[list[int]]:
    """Return token ids, with EOS.

    limit: largest number of ids, EOS included. Longer sentences are cut and end in EOS; the log gives their number.
    """
    encoded = [[*ids, EOS] for ids in vocabulary.encode_batch(lines)]
    check_token_ids(encoded, vocabulary.size)
    if limit is None:
        return encoded
    cut = sum(len(ids) > limit for ids in encoded)
    if cut:
        logging.warning('%d of %d %s sentences are cut to %d tokens', cut, len(encoded), vocabulary.language, limit)
    return [ids if len(ids) <= limit else [*ids[: limit - 1], EOS] for ids in encoded]


def encode_pairs(pairs: SentencePairs, vocabularies: Vocabularies, limit: int | None = None) -> EncodedPairs:
    """Return `encode_sentences` of both sides of a split."""
    source_vocabulary, target_vocabulary = vocabularies
    return EncodedPairs(
        encode_sentences(pairs.source, source_vocabulary, limit),
        encode_sentences(pairs.target, target_vocabulary, limit),
    )
