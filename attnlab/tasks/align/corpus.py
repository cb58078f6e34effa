"""The sentence pairs of an experiment, as text and as ids."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.configs import GrammarPairs, Multi30kData, PairFiles
from attnlab.data import grammar, parallel, vocabulary
from attnlab.data.alignments import Link
from attnlab.data.batches import check_ids
from attnlab.data.pairs import Pairs
from attnlab.data.vocabulary import EOS, Vocabulary, warn_of_unknown
from attnlab.errors import UserError
from attnlab.files import at_home

Data = GrammarPairs | Multi30kData | PairFiles
Vocabularies = tuple[Vocabulary, Vocabulary]
"""(source, target)."""

SIDES = ('source', 'target')
MAX_LENGTH = 512


class Encoded(NamedTuple):
    """A split as ids: each sentence ends in EOS."""

    source: list[list[int]]
    target: list[list[int]]


def splits(data: Data) -> tuple[str, ...]:
    """The names of a corpus' splits, the training split first."""
    match data:
        case GrammarPairs():
            return grammar.SPLITS
        case Multi30kData():
            return ('train', 'valid', 'test', 'test_2017')
        case PairFiles():
            return ('train', 'valid', 'test')


def languages(data: Data) -> tuple[str, str]:
    """(source, target)."""
    return data.languages if isinstance(data, PairFiles) else ('en', 'fr')


def read(data: Data, split: str, seed: int, linked: bool = True) -> Pairs:
    """The sentence pairs of a split; linked: with gold alignments, where there are any."""
    if split not in splits(data):
        raise UserError(f'split is {split!r}; expected one of {", ".join(splits(data))}')
    match data:
        case GrammarPairs():
            count = data.train_examples if split == 'train' else data.test_examples
            return grammar.pairs(split, count, seed, linked)
        case Multi30kData():
            return parallel.multi30k('test_2016' if split == 'test' else split, at_home(data.folder, 'data.folder'))
        case PairFiles():
            return parallel.read_pair(at_home(getattr(data, split), f'data.{split}'), data.languages)


def inversions(data: Data, split: str, seed: int) -> Sequence[Sequence[Link]] | None:
    """The adjectives of each sentence that change places with their noun, where the corpus knows them."""
    if not isinstance(data, GrammarPairs):
        return None
    return [example.inverted for example in grammar.examples(split, data.test_examples, seed)]


def build_vocabularies(data: Data, train: Pairs) -> Vocabularies:
    """Vocabularies of the training sentences."""
    source, target = languages(data)
    if data.shared:
        both = [(train.source, source), (train.target, target)]
        shared = vocabulary.build_shared(data.vocabulary, both, data.vocabulary_size)
        return shared, dataclasses.replace(shared, language=target)
    return (
        vocabulary.build(data.vocabulary, train.source, data.vocabulary_size, source),
        vocabulary.build(data.vocabulary, train.target, data.vocabulary_size, target),
    )


def save_vocabularies(vocabularies: Vocabularies, workdir: Path) -> None:
    """Write vocabularies into the directory of a run."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    for side, one in zip(SIDES, vocabularies, strict=True):
        vocabulary.save(one, workdir / 'vocabulary' / side)


def load_vocabularies(workdir: Path) -> Vocabularies:
    """Read the vocabularies of a run."""
    source, target = (vocabulary.load(workdir / 'vocabulary' / side) for side in SIDES)
    return source, target


def max_length(data: Data) -> int:
    """The most tokens that a sentence may have outside of training; weights and time grow with their square."""
    return max(MAX_LENGTH, *data.widths)


def encode_typed(sentences: Sequence[str], vocabulary: Vocabulary, limit: int) -> list[list[int]]:
    """Ids with EOS of sentences that a user typed; a warning names the words that the vocabulary lacks.

    Raises UserError for a sentence of more than `limit` tokens.
    """
    encoded = encode(sentences, vocabulary)
    for number, ids in enumerate(encoded, 1):
        if len(ids) > limit:
            raise UserError(f'sentence {number} has {len(ids)} tokens with its end; expected at most {limit}')
    warn_of_unknown(vocabulary, sentences)
    return encoded


def encode(lines: Sequence[str], vocabulary: Vocabulary, limit: int | None = None) -> list[list[int]]:
    """Ids with EOS.  Sentences longer than `limit` ids with their EOS are cut before it, and counted in the log."""
    encoded = [[*ids, EOS] for ids in vocabulary.encode_all(lines)]
    check_ids(encoded, vocabulary.size)
    if limit is None:
        return encoded
    long = sum(len(ids) > limit for ids in encoded)
    if long:
        logging.warning('%d of %d %s sentences are cut to %d tokens', long, len(encoded), vocabulary.language, limit)
    return [ids if len(ids) <= limit else [*ids[: limit - 1], EOS] for ids in encoded]


def encode_pairs(pairs: Pairs, vocabularies: Vocabularies, limit: int | None = None) -> Encoded:
    """Both sides of a split."""
    return Encoded(encode(pairs.source, vocabularies[0], limit), encode(pairs.target, vocabularies[1], limit))
