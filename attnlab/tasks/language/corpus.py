"""The text of a language model, as tokens and as rows of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import corpus, rows, tokens
from attnlab.data.corpus import Text
from attnlab.data.rows import Rows
from attnlab.data.tokens import Tokens
from attnlab.errors import UserError
from attnlab.files import at_home

SPLITS = ('train', 'valid')


def check(data: Any) -> None:
    """Raises UserError for a description of a text that cannot be one."""
    if data.name == 'file' and not data.path:
        raise UserError('data.path is empty; expected a text file: --config.data.path=FILE')
    if data.name == 'grammar' and data.documents != 'lines':
        raise UserError(f"data.documents is {data.documents!r}; a sentence of the grammar is one, expected 'lines'")
    check_tokens(data)
    for name in ('train_examples', 'test_examples') if data.name == 'grammar' else ():
        if data[name] < 1:
            raise UserError(f'data.{name} is {data[name]}; expected 1 or more')
    if data.name != 'grammar' and not 0.0 < data.share < 1.0:
        raise UserError(f'data.share is {data.share}; expected the part of the text to train on, between 0 and 1')


def check_tokens(data: Any) -> None:
    """Raises UserError for a vocabulary that is none."""
    if data.vocabulary not in tokens.KINDS:
        raise UserError(f'data.vocabulary is {data.vocabulary!r}; expected one of {", ".join(tokens.KINDS)}')
    if (data.vocabulary == 'subwords') != (data.vocabulary_size > 0):
        raise UserError(
            f'data.vocabulary_size is {data.vocabulary_size} for {data.vocabulary}; expected a size for subwords and 0 '
            'for others, which have their own'
        )


def read(data: Any, split: str, seed: int) -> list[Text]:
    """The texts of a split: one, or its documents where it has them."""
    if split not in SPLITS:
        raise UserError(f'split is {split!r}; expected one of {", ".join(SPLITS)}')
    if data.name == 'grammar':
        return corpus.sentences(split, data.train_examples if split == 'train' else data.test_examples, seed)
    if data.name == 'shakespeare':
        whole = corpus.shakespeare(at_home(data.folder, 'data.folder'))
    else:
        whole = corpus.read(at_home(data.path, 'data.path'))
    half = corpus.halves(whole, data.share)[SPLITS.index(split)]
    return corpus.documents(half, data.documents) if data.documents else [half]


def vocabulary(data: Any, workdir: Path, train: Sequence[Text] | None = None) -> Tokens:
    """The tokens that lie in a run's directory, or where there are none yet, built from `train`."""
    path = workdir / 'vocabulary' / 'text'
    if train is None or tokens.saved(path):
        return tokens.load(path)
    return tokens.build(data.vocabulary, train, data.vocabulary_size, documents=bool(data.documents))


def save(vocabulary: Tokens, workdir: Path) -> None:
    """Writes it where `vocabulary` looks for it."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    tokens.save(vocabulary, workdir / 'vocabulary' / 'text')


def encode(data: Any, texts: Sequence[Text], vocabulary: Tokens) -> list[np.ndarray]:
    """The ids of each text, between the marks of a document where it is one."""
    return [tokens.document(vocabulary, text) if data.documents else vocabulary.encode(*text) for text in texts]


def every(data: Any, ids: list[np.ndarray], T: int) -> Rows:
    """Rows of T tokens in which each token but the first of its text is to be predicted once."""
    return rows.pack(ids, T) if data.documents else rows.consecutive(ids[0], T)


def vocabulary_size(data: Any, seed: int) -> int:
    """How many tokens there are, or where sub-words are made to fit a text, how many there may be."""
    match data.vocabulary:
        case 'subwords':
            return data.vocabulary_size
        case 'bytes':
            return tokens.Bytes(bool(data.documents)).size
        case _:
            check(data)
            return tokens.build(data.vocabulary, read(data, 'train', seed), documents=bool(data.documents)).size
