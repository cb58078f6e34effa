r"""Tokenizers of language models: text to token ids and back, by characters, bytes or sub-words.

    tokenizer = build_tokenizer('characters', [train])
    ids = tokenizer.encode('First Citizen:\n', 'prompt')

Characters and bytes restore any text exactly; sub-words restore each line in the normal form of `normalise`.
A text read as one stream needs no other ids.  Separate documents are enclosed by two document marks: for sub-words the
ids of `<s>` and `</s>`; for characters and bytes one id serves as both, the last one, as in GPT-2 (with `marked`).
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from attnlab import files
from attnlab.data import vocabulary
from attnlab.data.corpus import SourceText
from attnlab.data.text import SPACE_MARK, file_suggestion
from attnlab.data.vocabulary import Vocabulary, checked_ids
from attnlab.errors import UserError

TOKENIZER_KINDS = ('characters', 'bytes', 'subwords')
END_LABEL = vocabulary.SPECIAL_TOKENS[vocabulary.EOS]
Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
    """Interface of all tokenizers.  Ids outside [0, size) raise ValueError."""

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def marks(self) -> tuple[int, int] | None:
        """(id before a document, id after it), or None for a text read as one stream."""
        ...

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        """Return the ids of a text as [n] int32, without document marks; `encode(*text)` takes a SourceText.

        Raises UserError for a character that has no id.  The error names `where`, the origin of the text, and the
        line, counted from `line`, the number of the first line.
        """
        ...

    def decode(self, ids: Ids) -> str:
        """Return the text of the ids up to the end mark of the first document."""
        ...

    def pieces(self, ids: Ids) -> list[str]:
        """Return one printable label for each id."""
        ...


@dataclass(frozen=True)
class CharacterTokenizer:
    """One id for each of the `characters`, sorted by code point; if `marked`, the last id is the document mark."""

    characters: str
    marked: bool = False

    def __post_init__(self):
        if not self.characters or self.characters != ''.join(sorted(set(self.characters))):
            raise ValueError(f'characters are {self.characters[:60]!r}; expected at least one, in order, each once')

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.characters) + self.marked

    @property
    def marks(self) -> tuple[int, int] | None:
        """(id before a document, id after it), or None."""
        return (self.size - 1, self.size - 1) if self.marked else None

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        """Return the ids of a text, [n] int32; see `Tokenizer.encode`."""
        code_points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._code_points, code_points), len(self._code_points) - 1)
        unknown = self._code_points[ids] != code_points
        if unknown.any():
            character = _describe_character(text, int(unknown.argmax()), where, line)
            count = len(self.characters)
            raise UserError(
                f'{character} is not one of the {count} of the training text; bytes and subwords encode any character'
            )
        return ids.astype(np.int32)

    def decode(self, ids: Ids) -> str:
        """Return the text of the first document."""
        return ''.join(self.characters[i] for i in _first_document(self, ids))

    def pieces(self, ids: Ids) -> list[str]:
        """Return one printable label for each id."""
        labels = [*map(_label, self.characters), END_LABEL]
        return [labels[i] for i in checked_ids(ids, self.size)]

    @cached_property
    def _code_points(self) -> np.ndarray:
        return _code_points(self.characters)


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8 as ids; if `marked`, id 256 is the document mark.

    Bytes that are not UTF-8 decode to U+FFFD.
    """

    marked: bool = False

    @property
    def size(self) -> int:
        """Number of ids."""
        return 256 + self.marked

    @property
    def marks(self) -> tuple[int, int] | None:
        """(id before a document, id after it), or None."""
        return (256, 256) if self.marked else None

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        """Return the ids of a text, [n] int32; see `Tokenizer.encode`."""
        _check_surrogates(text, where, line)
        return np.frombuffer(text.encode('utf-8'), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        """Return the text of the first document."""
        return bytes(_first_document(self, ids)).decode('utf-8', 'replace')

    def pieces(self, ids: Ids) -> list[str]:
        """Return one printable label for each id."""
        labels = [*map(_label, map(chr, range(128))), *(f'\\x{i:02x}' for i in range(128, 256)), END_LABEL]
        return [labels[i] for i in checked_ids(ids, self.size)]


@dataclass(frozen=True)
class SubwordTokenizer:
    """Each line encoded by a Vocabulary, with the id of the byte <0x0A> between two lines."""

    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.vocabulary.size

    @property
    def marks(self) -> tuple[int, int] | None:
        """(id before a document, id after it), or None."""
        return vocabulary.BOS, vocabulary.EOS

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        """Return the ids of a text, [n] int32; see `Tokenizer.encode`."""
        _check_surrogates(text, where, line)
        ids = []
        for line_ids in self.vocabulary.encode_batch(text.split('\n')):
            ids += [*line_ids, self._newline_id]
        return np.array(ids[:-1], np.int32)

    def decode(self, ids: Ids) -> str:
        """Return the text of the first document."""
        lines = [[]]
        for i in _first_document(self, ids):
            if i == self._newline_id:
                lines.append([])
            else:
                lines[-1].append(i)
        return '\n'.join(map(self.vocabulary.decode, lines))

    def pieces(self, ids: Ids) -> list[str]:
        """Return one printable label for each id."""
        return ['\\n' if i == self._newline_id else self.vocabulary.pieces([i])[0] for i in checked_ids(ids, self.size)]

    @cached_property
    def _newline_id(self) -> int:
        return self.vocabulary.tokens.index('<0x0A>')


def build_tokenizer(
    kind: str, texts: Iterable[SourceText], size: int = 0, language: str = 'en', documents: bool = False
) -> Tokenizer:
    """Build the tokenizer of a training text.

    kind: 'characters' (those of the texts), 'bytes', or 'subwords': at most `size` of them, in the `language`.
    documents: with document marks; sub-words always have them.

    Raises UserError for an unknown kind, for a size with characters or bytes, and for texts without any character.
    """
    if kind not in TOKENIZER_KINDS:
        raise UserError(f'vocabulary {kind!r}: expected one of {", ".join(TOKENIZER_KINDS)}')
    if kind == 'subwords':
        lines = [line for text in texts for line in text.text.split('\n')]
        return SubwordTokenizer(vocabulary.build_vocabulary('subwords', lines, size, language))
    if size:
        raise UserError(f'vocabulary size {size}: the size of {kind} is fixed; expected 0')
    if kind == 'bytes':
        return ByteTokenizer(documents)
    characters = set().union(*(text.text for text in texts))
    if not characters:
        raise UserError('no text to build a vocabulary from')
    return CharacterTokenizer(''.join(sorted(characters)), documents)


def encode_document(tokenizer: Tokenizer, text: SourceText) -> np.ndarray:
    """Return a document between its marks, [n + 2] int32, so that its first token and its end are predicted too.

    Raises ValueError if the tokenizer has no document marks.
    """
    if tokenizer.marks is None:
        raise ValueError(
            'the tokenizer has no start and end tokens of documents; build it with build_tokenizer(..., documents=True)'
        )
    start_mark, end_mark = tokenizer.marks
    return np.concatenate([[start_mark], tokenizer.encode(*text), [end_mark]], dtype=np.int32)


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> Path:
    """Write `path`.json (characters and bytes) or `path`.model (sub-words) and return the path of the file."""
    match tokenizer:
        case SubwordTokenizer(subwords):
            return vocabulary.save_vocabulary(subwords, path)
        case CharacterTokenizer(characters, marked):
            fields = {'kind': 'characters', 'documents': marked, 'characters': characters}
        case ByteTokenizer(marked):
            fields = {'kind': 'bytes', 'documents': marked}
        case _:
            expected = 'a CharacterTokenizer, ByteTokenizer or SubwordTokenizer'
            raise TypeError(f'tokenizer is {tokenizer!r}; expected {expected}')
    path = Path(f'{path}.json')
    files.write_file(path, json.dumps(fields) + '\n')
    return path


def tokenizer_exists(path: str | Path) -> bool:
    """Whether `path`.json or `path`.model exists, as `save_tokenizer` writes them."""
    return Path(f'{path}.json').is_file() or Path(f'{path}.model').is_file()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer that `save_tokenizer` wrote to `path`.json or `path`.model.

    Raises UserError if neither file exists, or if the file is not a tokenizer.
    """
    json_file, subword_file = Path(f'{path}.json'), Path(f'{path}.model')
    if json_file.is_file():
        return _load_json(json_file)
    if not subword_file.is_file():
        raise UserError(f'{path}: no vocabulary, neither a .json nor a .model file{file_suggestion(json_file)}')
    return SubwordTokenizer(vocabulary.load_vocabulary(path))


def _load_json(path: Path) -> Tokenizer:
    try:
        match json.loads(path.read_bytes()):
            case {'kind': 'bytes', 'documents': bool(marked)}:
                return ByteTokenizer(marked)
            case {'kind': 'characters', 'documents': bool(marked), 'characters': str(characters)}:
                return CharacterTokenizer(characters, marked)
    except ValueError:  # not JSON, or characters out of order
        pass
    raise UserError(f'{path}: not a vocabulary of attnlab')


def _code_points(text: str) -> np.ndarray:
    """[n] uint32."""
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)


def _first_document(tokenizer: Tokenizer, ids: Ids) -> list[int]:
    """Return the ids of the first document, without its marks."""
    id_list = checked_ids(ids, tokenizer.size)
    if tokenizer.marks is None:
        return id_list
    start_mark, end_mark = tokenizer.marks
    id_list = id_list[id_list[:1] == [start_mark] :]
    return id_list[: id_list.index(end_mark)] if end_mark in id_list else id_list


def _label(character: str) -> str:
    if character == ' ':
        return SPACE_MARK
    return character if character.isprintable() else repr(character)[1:-1]


def _check_surrogates(text: str, where: str, line: int) -> None:
    """Raise UserError for a lone surrogate: Python decodes a command-line argument that is not UTF-8 to these."""
    match = re.search('[\ud800-\udfff]', text)
    if match:
        raise UserError(f'{_describe_character(text, match.start(), where, line)} is not UTF-8')


def _describe_character(text: str, index: int, where: str, line: int) -> str:
    """Origin, line and code point of a character of a text, for an error."""
    character = text[index]
    return f'{where}, line {line + text.count(chr(10), 0, index)}: character {character!r} (U+{ord(character):04X})'
