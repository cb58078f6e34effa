"""From the text of a language model to ids and back: characters, bytes or sub-words.

    tokens = build('characters', [train])
    ids = tokens.encode('First Citizen:\n', 'prompt')

Characters and bytes give any text back as it was; sub-words give its lines back, each in the one form of `normalise`.
A stream of text needs no other ids.  Documents that stand alone have a mark in front and one behind: with sub-words
the ids `<s>` and `</s>`, with characters and bytes one id for both behind all others, as in GPT-2, where asked for.
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
MARK = vocabulary.SPECIAL_TOKENS[vocabulary.EOS]
Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
    """What the kinds have in common.  An id outside of 0 to size - 1 raises ValueError."""

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def marks(self) -> tuple[int, int] | None:
        """(in front of a document, behind it), or None for a stream."""
        ...

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        """[n] int32, without marks; `encode(*text)` of a Text.

        UserError for a character that has no id, with its line in `where`, whose first line has the number `line`.
        """
        ...

    def decode(self, ids: Ids) -> str:
        """The text up to the mark behind the first document."""
        ...

    def pieces(self, ids: Ids) -> list[str]:
        """One readable label an id."""
        ...


@dataclass(frozen=True)
class CharacterTokenizer:
    """Id i is the i-th of the `characters`, sorted by code point; the mark, if there is one, comes last."""

    characters: str
    marked: bool = False

    def __post_init__(self):
        if not self.characters or self.characters != ''.join(sorted(set(self.characters))):
            raise ValueError(f'characters are {self.characters[:60]!r}; expected at least one, in order, each once')

    @property
    def size(self) -> int:
        return len(self.characters) + self.marked

    @property
    def marks(self) -> tuple[int, int] | None:
        return (self.size - 1, self.size - 1) if self.marked else None

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        points = _points(text)
        ids = np.minimum(np.searchsorted(self._known, points), len(self._known) - 1)
        strange = self._known[ids] != points
        if strange.any():
            place = _place(text, int(strange.argmax()), where, line)
            count = len(self.characters)
            raise UserError(f'{place} is none of the {count} of the training text; bytes and subwords take any')
        return ids.astype(np.int32)

    def decode(self, ids: Ids) -> str:
        return ''.join(self.characters[i] for i in _document(self, ids))

    def pieces(self, ids: Ids) -> list[str]:
        labels = [*map(_label, self.characters), MARK]
        return [labels[i] for i in checked_ids(ids, self.size)]

    @cached_property
    def _known(self) -> np.ndarray:
        return _points(self.characters)


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8, and 256 for the mark if there is one.  Bytes that are no UTF-8 decode to U+FFFD."""

    marked: bool = False

    @property
    def size(self) -> int:
        return 256 + self.marked

    @property
    def marks(self) -> tuple[int, int] | None:
        return (256, 256) if self.marked else None

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        _refuse_surrogates(text, where, line)
        return np.frombuffer(text.encode('utf-8'), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        return bytes(_document(self, ids)).decode('utf-8', 'replace')

    def pieces(self, ids: Ids) -> list[str]:
        labels = [*map(_label, map(chr, range(128))), *(f'\\x{i:02x}' for i in range(128, 256)), MARK]
        return [labels[i] for i in checked_ids(ids, self.size)]


@dataclass(frozen=True)
class SubwordTokenizer:
    """Every line as its Vocabulary encodes it, and between two lines the id of the byte <0x0A>."""

    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        return self.vocabulary.size

    @property
    def marks(self) -> tuple[int, int] | None:
        return vocabulary.BOS, vocabulary.EOS

    def encode(self, text: str, where: str = 'text', line: int = 1) -> np.ndarray:
        _refuse_surrogates(text, where, line)
        ids = []
        for encoded in self.vocabulary.encode_batch(text.split('\n')):
            ids += [*encoded, self._newline]
        return np.array(ids[:-1], np.int32)

    def decode(self, ids: Ids) -> str:
        lines = [[]]
        for i in _document(self, ids):
            if i == self._newline:
                lines.append([])
            else:
                lines[-1].append(i)
        return '\n'.join(map(self.vocabulary.decode, lines))

    def pieces(self, ids: Ids) -> list[str]:
        return ['\\n' if i == self._newline else self.vocabulary.pieces([i])[0] for i in checked_ids(ids, self.size)]

    @cached_property
    def _newline(self) -> int:
        return self.vocabulary.tokens.index('<0x0A>')


def build_tokenizer(
    kind: str, texts: Iterable[SourceText], size: int = 0, language: str = 'en', documents: bool = False
) -> Tokenizer:
    """The tokens of a training text: its characters, the 256 bytes, or at most `size` sub-words of the `language`.

    documents: with marks; sub-words always have them.  A size for characters or bytes raises UserError.
    """
    if kind not in TOKENIZER_KINDS:
        raise UserError(f'vocabulary {kind!r}: expected one of {", ".join(TOKENIZER_KINDS)}')
    if kind == 'subwords':
        lines = [line for text in texts for line in text.text.split('\n')]
        return SubwordTokenizer(vocabulary.build_vocabulary('subwords', lines, size, language))
    if size:
        raise UserError(f'vocabulary size {size}: {kind} have a size of their own; expected 0')
    if kind == 'bytes':
        return ByteTokenizer(documents)
    found = set().union(*(text.text for text in texts))
    if not found:
        raise UserError('no text to build a vocabulary from')
    return CharacterTokenizer(''.join(sorted(found)), documents)


def encode_document(tokens: Tokenizer, text: SourceText) -> np.ndarray:
    """[n + 2] int32: a document between its marks, so that its first token and its end are predicted too."""
    if tokens.marks is None:
        raise ValueError('these tokens have no marks for documents; expected those of build(..., documents=True)')
    front, behind = tokens.marks
    return np.concatenate([[front], tokens.encode(*text), [behind]], dtype=np.int32)


def save_tokenizer(tokens: Tokenizer, path: str | Path) -> Path:
    """Writes `path`.json for characters and bytes, `path`.model for sub-words, and returns which."""
    match tokens:
        case SubwordTokenizer(words):
            return vocabulary.save_vocabulary(words, path)
        case CharacterTokenizer(characters, marked):
            fields = {'kind': 'characters', 'documents': marked, 'characters': characters}
        case ByteTokenizer(marked):
            fields = {'kind': 'bytes', 'documents': marked}
        case _:
            raise TypeError(f'tokens are {tokens!r}; expected Characters, Bytes or Subwords')
    path = Path(f'{path}.json')
    files.write_file(path, json.dumps(fields) + '\n')
    return path


def tokenizer_exists(path: str | Path) -> bool:
    """Whether there is what `save_tokenizer` writes to `path` + .json or .model."""
    return Path(f'{path}.json').is_file() or Path(f'{path}.model').is_file()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """What `save_tokenizer` wrote to `path` + .json or .model; a missing or foreign file raises UserError."""
    plain, subwords = Path(f'{path}.json'), Path(f'{path}.model')
    if plain.is_file():
        return _loaded(plain)
    if not subwords.is_file():
        raise UserError(f'{path}: no such vocabulary, .json or .model{file_suggestion(plain)}')
    return SubwordTokenizer(vocabulary.load_vocabulary(path))


def _loaded(path: Path) -> Tokenizer:
    try:
        match json.loads(path.read_bytes()):
            case {'kind': 'bytes', 'documents': bool(marked)}:
                return ByteTokenizer(marked)
            case {'kind': 'characters', 'documents': bool(marked), 'characters': str(characters)}:
                return CharacterTokenizer(characters, marked)
    except ValueError:  # no JSON, or characters out of order
        pass
    raise UserError(f'{path}: not a vocabulary of attnlab')


def _points(text: str) -> np.ndarray:
    """The code points of a text."""
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)


def _document(tokens: Tokenizer, ids: Ids) -> list[int]:
    """The ids of the first document, without its marks."""
    listed = checked_ids(ids, tokens.size)
    if tokens.marks is None:
        return listed
    front, behind = tokens.marks
    listed = listed[listed[:1] == [front] :]
    return listed[: listed.index(behind)] if behind in listed else listed


def _label(character: str) -> str:
    if character == ' ':
        return SPACE_MARK
    return character if character.isprintable() else repr(character)[1:-1]


def _refuse_surrogates(text: str, where: str, line: int) -> None:
    """Half a code point, which is what Python makes of an argument that is no UTF-8."""
    match = re.search('[\ud800-\udfff]', text)
    if match:
        raise UserError(f'{_place(text, match.start(), where, line)} is not UTF-8')


def _place(text: str, at: int, where: str, line: int) -> str:
    return f'{where}, line {line + text.count(chr(10), 0, at)}: character {text[at]!r} (U+{ord(text[at]):04X})'
