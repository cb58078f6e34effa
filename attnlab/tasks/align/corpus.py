"""The sentence pairs of an experiment, as text and as ids."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnlab.data import grammar, parallel, vocabulary
from attnlab.data.batches import check_ids
from attnlab.data.pairs import Pairs
from attnlab.data.vocabulary import EOS, Vocabulary, warn_of_unknown
from attnlab.errors import UserError
from attnlab.files import at_home

LANGUAGES = ('en', 'fr')
SIDES = ('source', 'target')
LONGEST = 512


class Encoded(NamedTuple):
    """A split as ids: each sentence ends in EOS."""

    source: list[list[int]]
    target: list[list[int]]


def splits(data: Any) -> tuple[str, ...]:
    """The names of a corpus' splits, the training split first."""
    match data.name:
        case 'grammar':
            return grammar.SPLITS
        case 'multi30k':
            return ('train', 'valid', 'test', 'test_2017')
        case _:
            return ('train', 'valid', 'test')


def languages(data: Any) -> tuple[str, str]:
    """(source, target)."""
    return tuple(data.languages) if data.name == 'files' else LANGUAGES


def read(data: Any, split: str, seed: int, linked: bool = True) -> Pairs:
    """The sentence pairs of a split; linked: with gold alignments, where there are any."""
    if split not in splits(data):
        raise UserError(f'split is {split!r}; expected one of {", ".join(splits(data))}')
    match data.name:
        case 'grammar':
            count = data.train_examples if split == 'train' else data.test_examples
            return grammar.pairs(split, count, seed, linked)
        case 'multi30k':
            return parallel.multi30k('test_2016' if split == 'test' else split, at_home(data.folder, 'data.folder'))
        case _:
            return parallel.read_pair(at_home(data[split], f'data.{split}'), languages(data))


def vocabularies(data: Any, workdir: Path, train: Pairs | None = None) -> tuple[Vocabulary, Vocabulary]:
    """(source, target): those that lie in a run's directory, or where they do not yet, built from `train`."""
    names = languages(data)
    paths = [workdir / 'vocabulary' / side for side in SIDES]
    if train is None or all(map(vocabulary.saved, paths)):  # one alone was left by a kill between the two
        source, target = map(vocabulary.load, paths)
    elif data.shared:
        both = [(train.source, names[0]), (train.target, names[1])]
        source = vocabulary.build_shared(data.vocabulary, both, data.vocabulary_size)
        target = dataclasses.replace(source, language=names[1])
    else:
        source, target = (
            vocabulary.build(data.vocabulary, lines, data.vocabulary_size, language)
            for lines, language in zip((train.source, train.target), names, strict=True)
        )
    return source, target


def save(vocabularies: tuple[Vocabulary, Vocabulary], workdir: Path) -> None:
    """Writes them where `vocabularies` looks for them."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    for side, one in zip(SIDES, vocabularies, strict=True):
        vocabulary.save(one, workdir / 'vocabulary' / side)


def check(data: Any) -> None:
    """Raises UserError for a description of a corpus that cannot be one."""
    check_sizes(data)
    for field in ('train_examples', 'test_examples') if data.name == 'grammar' else ():
        if data[field] < 1:
            raise UserError(f'data.{field} is {data[field]}; expected 1 or more')
    if data.name == 'files' and len(data.languages) != 2:
        raise UserError(f'data.languages is {tuple(data.languages)}; expected two, source and target')


def check_sizes(data: Any) -> None:
    """Raises UserError for widths and vocabularies that no model can have."""
    widths = tuple(data.widths)
    if not widths or list(widths) != sorted(set(widths)) or widths[0] < 2:
        raise UserError(f'data.widths is {widths}; expected ascending numbers of tokens, 2 or more')
    if data.vocabulary not in vocabulary.KINDS:
        raise UserError(f'data.vocabulary is {data.vocabulary!r}; expected one of {", ".join(vocabulary.KINDS)}')
    if data.vocabulary_size <= len(vocabulary.SPECIAL):
        raise UserError(f'data.vocabulary_size is {data.vocabulary_size}; expected more than {len(vocabulary.SPECIAL)}')


def longest(data: Any) -> int:
    """The most tokens that a sentence may have outside of training; weights and time grow with their square."""
    return max(LONGEST, *data.widths)


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


def encode_pairs(pairs: Pairs, vocabularies: tuple[Vocabulary, Vocabulary], limit: int | None = None) -> Encoded:
    """Both sides of a split."""
    return Encoded(encode(pairs.source, vocabularies[0], limit), encode(pairs.target, vocabularies[1], limit))
