"""The text of a language model: read, split, encoded as token ids, and cut into rows."""

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

TextData = ShakespeareData | TextFile | GrammarText
"""Configs of text."""

SPLITS = ('train', 'valid')


def read_texts(data: TextData, split: str, seed: int) -> list[SourceText]:
    """Return the texts of a split: its documents if `data.documents` is set, otherwise one text.

    Raises UserError for an unknown split.
    """
    if split not in SPLITS:
        raise UserError(f'split is {split!r}; expected one of {", ".join(SPLITS)}')
    match data:
        case GrammarText():
            count = data.train_examples if split == 'train' else data.test_examples
            return corpus.grammar_sentences(split, count, seed)
        case ShakespeareData():
            text = corpus.load_shakespeare(expand_home(data.folder, 'data.folder'))
        case TextFile():
            text = corpus.read_text(expand_home(data.path, 'data.path'))
    split_text = corpus.split_text(text, data.share)[SPLITS.index(split)]
    return corpus.split_documents(split_text, data.documents) if data.documents else [split_text]


def build_text_tokenizer(data: TextData, train: Sequence[SourceText]) -> Tokenizer:
    """Build the tokenizer of the training texts."""
    return tokenizers.build_tokenizer(data.vocabulary, train, data.vocabulary_size, documents=bool(data.documents))


def save_text_tokenizer(vocabulary: Tokenizer, workdir: Path) -> None:
    """Write a tokenizer into a run's directory."""
    (workdir / 'vocabulary').mkdir(exist_ok=True)
    tokenizers.save_tokenizer(vocabulary, workdir / 'vocabulary' / 'text')


def load_text_tokenizer(workdir: Path) -> Tokenizer:
    """Read the tokenizer of a run."""
    return tokenizers.load_tokenizer(workdir / 'vocabulary' / 'text')


def encode_texts(data: TextData, texts: Sequence[SourceText], vocabulary: Tokenizer) -> list[np.ndarray]:
    """Return the token ids [n] int32 of each text; a document has its marks for start and end around it."""
    return [
        tokenizers.encode_document(vocabulary, text) if data.documents else vocabulary.encode(*text) for text in texts
    ]


def build_rows(data: TextData, ids: list[np.ndarray], T: int) -> TokenRows:
    """Return rows of T tokens in which each token is a label exactly once, except the first token of each text.

    ids: token ids [n] of each document, which are packed, or of one text, which is cut into consecutive windows.
    """
    return rows.pack_documents(ids, T) if data.documents else rows.consecutive_windows(ids[0], T)


def vocabulary_size(data: TextData, seed: int) -> int:
    """Return the number of tokens; for sub-words, whose number depends on the text, the configured maximum.

    Reads the training text if the vocabulary is its characters.
    """
    match data.vocabulary:
        case 'subwords':
            return data.vocabulary_size
        case 'bytes':
            return tokenizers.ByteTokenizer(bool(data.documents)).size
        case 'characters':
            check_data_paths(data)
            return build_text_tokenizer(data, read_texts(data, 'train', seed)).size
