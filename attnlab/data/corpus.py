"""Plain text for language models, whole or in documents: any file, tiny Shakespeare, sentences of the grammar."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from attnlab.data import download, grammar
from attnlab.data.text import check_regular_file, read_lines
from attnlab.errors import UserError

SHAKESPEARE_URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
_SEPARATORS = {'lines': r'\n', 'paragraphs': r'\n(?:[^\S\n]*\n)+'}


class SourceText(NamedTuple):
    """A text, where it came from, and the number that its first line has there."""

    text: str
    where: str
    line: int = 1


def read_text(path: str | Path) -> SourceText:
    """The text of a UTF-8 file, plain or .gz: no byte-order mark, every line ended by one LF, the last one too.

    A missing file, a damaged one, an empty one, a pipe and a byte that is not UTF-8 raise UserError.
    """
    check_regular_file(path)
    lines = read_lines(path, limit=sys.maxsize)
    if not any(lines):
        raise UserError(f'{path}: no text')
    return SourceText(''.join(f'{line}\n' for line in lines), str(path))


def load_shakespeare(folder: str | Path = '') -> SourceText:
    """Tiny Shakespeare (Karpathy 2015): 40,000 lines of the plays, 1,115,394 characters, 65 of them different.

    It is `input.txt` of `folder` if given, else of $ATTNLAB_DATA/tinyshakespeare if set, whatever stands there; else
    of the cache ($XDG_CACHE_HOME or ~/.cache, attnlab/tinyshakespeare), downloaded if missing, its checksum compared.
    """
    published = {'input.txt': (SHAKESPEARE_URL, SHAKESPEARE_SHA256)}
    return read_text(download.data_folder('tinyshakespeare', folder, published) / 'input.txt')


def split_text(whole: SourceText, share: float = 0.9) -> tuple[SourceText, SourceText]:
    """(train, valid): the first `share` of the characters and the rest, as nanoGPT divides a text."""
    at = int(len(whole.text) * share)
    if not 0 < at < len(whole.text):
        raise UserError(f'{whole.where}: {len(whole.text)} characters cannot be divided at {share} into two texts')
    head, tail = whole.text[:at], whole.text[at:]
    return whole._replace(text=head), SourceText(tail, whole.where, whole.line + head.count('\n'))


def split_documents(whole: SourceText, by: str = 'paragraphs') -> list[SourceText]:
    """The documents of a text, in order: its lines, its paragraphs (blank lines between them), or what a string parts.

    Newlines around a document are cut off, and one of white space alone is dropped; so is the string in between.
    UserError where `by` is a string that the text does not hold.
    """
    if by not in _SEPARATORS and (not by or by not in whole.text):
        known = ', '.join(_SEPARATORS)
        raise UserError(f'{whole.where}: documents by {by!r}; expected {known} or a string that stands between them')
    found, start, line = [], 0, whole.line
    for match in [*re.finditer(_SEPARATORS.get(by, re.escape(by)), whole.text), None]:
        stop, after = match.span() if match else (len(whole.text), len(whole.text))
        piece = whole.text[start:stop]
        if piece.strip():
            blank = len(piece) - len(piece.lstrip('\n'))
            found.append(SourceText(piece.strip('\n'), whole.where, line + blank))
        line += whole.text.count('\n', start, after)
        start = after
    if not found:
        raise UserError(f'{whole.where}: no documents')
    return found


def grammar_sentences(split: str, count: int, seed: int) -> list[SourceText]:
    """The English of the first `count` examples of a split of the grammar, one document each: nothing to download."""
    drawn = grammar.grammar_examples(split, count, seed)
    return [SourceText(example.source, f'grammar, {split}', number) for number, example in enumerate(drawn, 1)]
