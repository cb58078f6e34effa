"""The text of a language model, as tokens and as rows of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.configs import GrammarText, ShakespeareData, TextFile
from attnlab.data import corpus, rows, tokens
from attnlab.data.corpus import Text
from attnlab.data.rows import Rows
from attnlab.data.tokens import Tokens
from attnlab.errors import UserError
from attnlab.files import at_home
from attnlab.tasks.checks import check_paths

Data = ShakespeareData | TextFile | GrammarText

SPLITS = ('train', 'valid')


def read(data: Data, split: str, seed: int) -> list[Text]:
    """The texts of a split: one, or its documents where it has them."""
    if split not in SPLITS:
        raise UserError(f'split is {split!r}; expected one of {", ".join(SPLITS)}')
    match data:
        case GrammarText():
            return corpus.sentences(split, data.train_examples if split == 'train' else data.test_examples, seed)
        case ShakespeareData():
            whole = corpus.shakespeare(at_home(data.folder, 'data.folder'))
        case TextFile():
            whole = corpus.read(at_home(data.path, 'data.path'))
    half = corpus.halves(whole, data.share)[SPLITS.index(split)]
    return corpus.documents(half, data.documents) if data.documents else [half]


def build_vocabulary(data: Data, train: Sequence[Text]) -> Tokens:
    """The vocabulary of the training texts."""
    return tokens.build(data.vocabulary, train, data.vocabulary_size, documents=bool(data.documents))


def save_vocabulary(vocabulary: Tokens, workdir: Path) -> None:
    """Write a vocabulary into the directory of a run."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    tokens.save(vocabulary, workdir / 'vocabulary' / 'text')


def load_vocabulary(workdir: Path) -> Tokens:
    """Read the vocabulary of a run."""
    return tokens.load(workdir / 'vocabulary' / 'text')


def encode(data: Data, texts: Sequence[Text], vocabulary: Tokens) -> list[np.ndarray]:
    """The ids of each text, between the marks of a document where it is one."""
    return [tokens.document(vocabulary, text) if data.documents else vocabulary.encode(*text) for text in texts]


def every(data: Data, ids: list[np.ndarray], T: int) -> Rows:
    """Rows of T tokens in which each token but the first of its text is to be predicted once."""
    return rows.pack(ids, T) if data.documents else rows.consecutive(ids[0], T)


def vocabulary_size(data: Data, seed: int) -> int:
    """Number of tokens; of sub-words, whose number depends on the text, the largest."""
    match data.vocabulary:
        case 'subwords':
            return data.vocabulary_size
        case 'bytes':
            return tokens.Bytes(bool(data.documents)).size
        case 'characters':
            check_paths(data)
            return build_vocabulary(data, read(data, 'train', seed)).size
