"""The sentence pairs of an experiment, as text and as ids."""

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

Data = GrammarPairs | Multi30kData | PairFiles
Vocabularies = tuple[Vocabulary, Vocabulary]
"""(source, target)."""

SIDES = ('source', 'target')
MAX_SENTENCE_LENGTH = 512


class EncodedPairs(NamedTuple):
    """A split as ids: each sentence ends in EOS."""

    source: list[list[int]]
    target: list[list[int]]


def split_names(data: Data) -> tuple[str, ...]:
    """The names of a corpus' splits, the training split first."""
    match data:
        case GrammarPairs():
            return grammar.GRAMMAR_SPLITS
        case Multi30kData():
            return ('train', 'valid', 'test', 'test_2017')
        case PairFiles():
            return ('train', 'valid', 'test')


def language_pair(data: Data) -> tuple[str, str]:
    """(source, target)."""
    return data.languages if isinstance(data, PairFiles) else ('en', 'fr')


def read_pairs(data: Data, split: str, seed: int, linked: bool = True) -> SentencePairs:
    """The sentence pairs of a split; linked: with gold alignments, where there are any."""
    if split not in split_names(data):
        raise UserError(f'split is {split!r}; expected one of {", ".join(split_names(data))}')
    match data:
        case GrammarPairs():
            count = data.train_examples if split == 'train' else data.test_examples
            return grammar.grammar_pairs(split, count, seed, linked)
        case Multi30kData():
            return parallel_text.load_multi30k(
                'test_2016' if split == 'test' else split, expand_home(data.folder, 'data.folder')
            )
        case PairFiles():
            return parallel_text.read_sentence_pairs(expand_home(getattr(data, split), f'data.{split}'), data.languages)


def read_inversions(data: Data, split: str, seed: int) -> Sequence[Sequence[Link]] | None:
    """The adjectives of each sentence that change places with their noun, where the corpus knows them."""
    if not isinstance(data, GrammarPairs):
        return None
    return [example.inverted for example in grammar.grammar_examples(split, data.test_examples, seed)]


def build_vocabularies(data: Data, train: SentencePairs) -> Vocabularies:
    """Vocabularies of the training sentences."""
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
    """Write vocabularies into the directory of a run."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    for side, one in zip(SIDES, vocabularies, strict=True):
        vocabulary.save_vocabulary(one, workdir / 'vocabulary' / side)


def load_vocabularies(workdir: Path) -> Vocabularies:
    """Read the vocabularies of a run."""
    source, target = (vocabulary.load_vocabulary(workdir / 'vocabulary' / side) for side in SIDES)
    return source, target


def max_sentence_length(data: Data) -> int:
    """The most tokens that a sentence may have outside of training; weights and time grow with their square."""
    return max(MAX_SENTENCE_LENGTH, *data.widths)


def encode_user_sentences(sentences: Sequence[str], vocabulary: Vocabulary, limit: int) -> list[list[int]]:
    """Ids with EOS of sentences that a user typed; a warning names the words that the vocabulary lacks.

    Raises UserError for a sentence of more than `limit` tokens.
    """
    encoded = encode_sentences(sentences, vocabulary)
    for number, ids in enumerate(encoded, 1):
        if len(ids) > limit:
            raise UserError(f'sentence {number} has {len(ids)} tokens with its end; expected at most {limit}')
    warn_of_unknown_words(vocabulary, sentences)
    return encoded


def encode_sentences(lines: Sequence[str], vocabulary: Vocabulary, limit: int | None = None) -> list[list[int]]:
    """Ids with EOS.  Sentences longer than `limit` ids with their EOS are cut before it, and counted in the log."""
    encoded = [[*ids, EOS] for ids in vocabulary.encode_batch(lines)]
    check_token_ids(encoded, vocabulary.size)
    if limit is None:
        return encoded
    long = sum(len(ids) > limit for ids in encoded)
    if long:
        logging.warning('%d of %d %s sentences are cut to %d tokens', long, len(encoded), vocabulary.language, limit)
    return [ids if len(ids) <= limit else [*ids[: limit - 1], EOS] for ids in encoded]


def encode_pairs(pairs: SentencePairs, vocabularies: Vocabularies, limit: int | None = None) -> EncodedPairs:
    """Both sides of a split."""
    return EncodedPairs(
        encode_sentences(pairs.source, vocabularies[0], limit), encode_sentences(pairs.target, vocabularies[1], limit)
    )
