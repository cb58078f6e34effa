"""Config fields of language models."""

from dataclasses import dataclass
from typing import Literal

from attnlab.configs.block import TextConfig
from attnlab.configs.fields import REQUIRED, Section, field
from attnlab.configs.run import RunConfig
from attnlab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TextData(Section):
    """Fields of every text."""

    documents: str = field('', "document separator: lines, paragraphs, or any string; '': the text is one stream")
    vocabulary: Literal['characters', 'bytes', 'subwords'] = field('characters', 'unit of a token')
    vocabulary_size: int = field(0, 'number of sub-words; 0 for characters and bytes', ge=0)

    def check(self) -> None:
        """Require a vocabulary size for sub-words, and none for other units."""
        if (self.vocabulary == 'subwords') != (self.vocabulary_size > 0):
            raise UserError(
                f'vocabulary_size is {self.vocabulary_size} for {self.vocabulary}; expected a size for subwords and 0 '
                'for other units'
            )


@dataclass(frozen=True, kw_only=True)
class ShakespeareData(TextData):
    """Tiny Shakespeare."""

    name: Literal['shakespeare'] = field('shakespeare', 'corpus')
    folder: str = field('', 'folder with input.txt; empty: $ATTNLAB_DATA/tinyshakespeare if set, else a download')
    share: float = field(0.9, 'fraction of the text to train on; the rest is for validation', gt=0.0, lt=1.0)


@dataclass(frozen=True, kw_only=True)
class TextFile(TextData):
    """A text file."""

    name: Literal['file'] = field('file', 'corpus')
    path: str = field('', 'text file: --config.data.path=FILE')
    share: float = field(0.9, 'fraction of the text to train on; the rest is for validation', gt=0.0, lt=1.0)


@dataclass(frozen=True, kw_only=True)
class GrammarText(TextData):
    """English sentences of the embedded grammar."""

    name: Literal['grammar'] = field('grammar', 'corpus')
    documents: str = field('lines', 'always lines: each sentence is a document')
    train_examples: int = field(40_000, 'training sentences', ge=1)
    test_examples: int = field(500, 'sentences of every other split', ge=1)

    def check(self) -> None:
        """Also require that each sentence is a document."""
        super().check()
        if self.documents != 'lines':
            reason = 'because each sentence of the grammar is a document'
            raise UserError(f"documents is {self.documents!r}; expected 'lines', {reason}")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TextConfig):
    """Causal language model."""

    name: Literal['language'] = field('language', 'model')
    tied: bool = field(True, 'use the embedding as the output matrix (Press and Wolf 2017)')


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """Language modelling."""

    task: str = field('language', 'task')
    data: ShakespeareData | TextFile | GrammarText = field(REQUIRED, 'text')
    model: LanguageModelConfig = field(REQUIRED, 'language model')
