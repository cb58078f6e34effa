"""The text of a language model, as tokens and as rows of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.configs import GrammarText, ShakespeareData, TextFile
from attnlab.data import corpus, rows, tokenizers
from attnlab.data.corpus import SourceText
from attnlab.data.rows import TokenRows
from attnlab.data.tokenizers import Tokenizer
from attnlab.errors import UserError
from attnlab.files import expand_home
from attnlab.tasks.checks import check_data_paths

Data = ShakespeareData | TextFile | GrammarText

SPLITS = ('train', 'valid')


def read_texts(data: Data, split: str, seed: int) -> list[SourceText]:
    """The texts of a split: one, or its documents where it has them."""
    if split not in SPLITS:
        raise UserError(f'split is {split!r}; expected one of {", ".join(SPLITS)}')
    match data:
        case GrammarText():
            return corpus.grammar_sentences(
                split, data.train_examples if split == 'train' else data.test_examples, seed
            )
        case ShakespeareData():
            whole = corpus.load_shakespeare(expand_home(data.folder, 'data.folder'))
        case TextFile():
            whole = corpus.read_text(expand_home(data.path, 'data.path'))
    half = corpus.split_text(whole, data.share)[SPLITS.index(split)]
    return corpus.split_documents(half, data.documents) if data.documents else [half]


def build_vocabulary(data: Data, train: Sequence[SourceText]) -> Tokenizer:
    """The vocabulary of the training texts."""
    return tokenizers.build_tokenizer(data.vocabulary, train, data.vocabulary_size, documents=bool(data.documents))


def save_vocabulary(vocabulary: Tokenizer, workdir: Path) -> None:
    """Write a vocabulary into the directory of a run."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    tokenizers.save_tokenizer(vocabulary, workdir / 'vocabulary' / 'text')


def load_vocabulary(workdir: Path) -> Tokenizer:
    """Read the vocabulary of a run."""
    return tokenizers.load_tokenizer(workdir / 'vocabulary' / 'text')


def encode_texts(data: Data, texts: Sequence[SourceText], vocabulary: Tokenizer) -> list[np.ndarray]:
    """The ids of each text, between the marks of a document where it is one."""
    return [
        tokenizers.encode_document(vocabulary, text) if data.documents else vocabulary.encode(*text) for text in texts
    ]


def build_rows(data: Data, ids: list[np.ndarray], T: int) -> TokenRows:
    """Rows of T tokens in which each token but the first of its text is to be predicted once."""
    return rows.pack_documents(ids, T) if data.documents else rows.consecutive_windows(ids[0], T)


def vocabulary_size(data: Data, seed: int) -> int:
    """Number of tokens; of sub-words, whose number depends on the text, the largest."""
    match data.vocabulary:
        case 'subwords':
            return data.vocabulary_size
        case 'bytes':
            return tokenizers.ByteTokenizer(bool(data.documents)).size
        case 'characters':
            check_data_paths(data)
            return build_vocabulary(data, read_texts(data, 'train', seed)).size
