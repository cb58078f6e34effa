"""Plain text for language models, whole or divided into documents: a file, tiny Shakespeare, grammar sentences."""

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
    """A text and its origin, for errors.

    where: the file or data set that it comes from.  line: the number that its first line has there.
    """

    text: str
    where: str
    line: int = 1


def read_text(path: str | Path) -> SourceText:
    """Read a UTF-8 file, plain or .gz, without its byte-order mark; each line, the last included, ends in one LF.

    Raises UserError for a missing, damaged or empty file, for a pipe, and for a byte that is not UTF-8.
    """
    check_regular_file(path)
    lines = read_lines(path, limit=sys.maxsize)
    if not any(lines):
        raise UserError(f'{path}: no text')
    return SourceText(''.join(f'{line}\n' for line in lines), str(path))


def load_shakespeare(folder: str | Path = '') -> SourceText:
    """Load tiny Shakespeare (Karpathy 2015): 40,000 lines of the plays, 1,115,394 characters, 65 different ones.

    `input.txt` is read from `folder` if given, else from $ATTNLAB_DATA/tinyshakespeare if ATTNLAB_DATA is set, both
    without a check of its content.  Else it is read from the cache ($XDG_CACHE_HOME or ~/.cache,
    attnlab/tinyshakespeare), where it is downloaded if it is missing or has the wrong checksum.
    """
    published = {'input.txt': (SHAKESPEARE_URL, SHAKESPEARE_SHA256)}
    return read_text(download.data_folder('tinyshakespeare', folder, published) / 'input.txt')


def split_text(whole: SourceText, share: float = 0.9) -> tuple[SourceText, SourceText]:
    """Divide a text into (train, valid): the first `share` of its characters and the rest, as in nanoGPT.

    Raises UserError if a part would be empty.
    """
    split_at = int(len(whole.text) * share)
    if not 0 < split_at < len(whole.text):
        raise UserError(f'{whole.where}: {len(whole.text)} characters cannot be divided at {share} into two texts')
    head, tail = whole.text[:split_at], whole.text[split_at:]
    return whole._replace(text=head), SourceText(tail, whole.where, whole.line + head.count('\n'))


def split_documents(whole: SourceText, by: str = 'paragraphs') -> list[SourceText]:
    """Divide a text into documents, in order.

    by: 'lines'; 'paragraphs', which blank lines separate; or any other string, which is the separator itself.

    Separators and the newlines around a document are removed, and documents of white space alone are dropped.
    Raises UserError for a separator that is not in the text, and if no document is left.
    """
    if by not in _SEPARATORS and (not by or by not in whole.text):
        known = ', '.join(_SEPARATORS)
        raise UserError(f'{whole.where}: documents by {by!r}; expected {known} or a string that separates them')
    documents, start, line = [], 0, whole.line
    for match in [*re.finditer(_SEPARATORS.get(by, re.escape(by)), whole.text), None]:
        stop, next_start = match.span() if match else (len(whole.text), len(whole.text))
        piece = whole.text[start:stop]
        if piece.strip():
            leading_newlines = len(piece) - len(piece.lstrip('\n'))
            documents.append(SourceText(piece.strip('\n'), whole.where, line + leading_newlines))
        line += whole.text.count('\n', start, next_start)
        start = next_start
    if not documents:
        raise UserError(f'{whole.where}: no documents')
    return documents


def grammar_sentences(split: str, count: int, seed: int) -> list[SourceText]:
    """Return the English of the first `count` examples of a split of the embedded grammar, one document each."""
    examples = grammar.grammar_examples(split, count, seed)
    return [SourceText(example.source, f'grammar, {split}', number) for number, example in enumerate(examples, 1)]
