"""Lines of a file, one form of a text, its words and back.

`normalise` brings a line of any typist to one form, in training and in use alike; `tokenise` cuts it into words, one
string each, and `detokenise` undoes that exactly.  Words are separated by the space that their neighbours let one
expect; a word whose spacing is not the expected one carries a mark in front: `␣` a space, `⁀` none.
"""

import difflib
import gzip
import logging
import os
import re
import unicodedata
import zlib
from collections.abc import Iterable
from pathlib import Path

from attnlab.errors import UserError

JOIN_MARK, SPACE_MARK = '⁀', '␣'

_INVISIBLE = re.compile(
    '[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufdd0-\ufdef\ufeff]'
)
# Joiners, blank letters, variation selectors and non-characters: invisible, though Unicode does not file them as such.
_FILLERS = re.compile(
    '[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufdd0-\ufdef\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]'
)
_LOOKALIKES = str.maketrans({
    **dict.fromkeys('’‘ʼ′‛´＇', "'"),
    **dict.fromkeys('“”„‟″＂', '"'),
    **dict.fromkeys('‐‑‒–—―−', '-'),
    '…': '...',
})  # fmt: skip

# A run of signs is punctuation where no word and no smiley goes on behind it: not 10:30, http://, :-).
_ENTITY = r'&(?:amp|lt|gt|quot|apos|[#]\d+);'  # [#]: no comment in a verbose pattern
_SIGNS = r'[?!;:]+(?=$|[\s"«»\'])|[?!;:]*[?!](?=[)\].,])'
_SIGNS_FR = re.compile(rf'({_ENTITY})|(?<=[^\s("\[\'?!;:]) ?({_SIGNS})')
_SIGNS_EN = re.compile(rf'(?<=\S) ({_SIGNS})')

_CLITIC = r"'(?:s|re|ve|ll|d|m)(?![\w'])"
_ELIDED = r"(?:[cdjlmnst]|(?:jus|lors|puis|quoi)?qu)'"
_WORD = r'[\w\u0300-\u036f]+'
_TOKEN = re.compile(
    rf"""
      (?!\w{_CLITIC}) {_ELIDED} (?=[\w"])         # l' | homme
    | {_CLITIC}                                   # teacher | 's
    | \d+ (?: [.,:/] \d+ )+ (?!\w)                # 10:30, 250,000
    | (?: [^\W\d_] \. ){{2,}} | {_ENTITY}           # U.S., &amp;
    | {_WORD} (?: (?!{_CLITIC}) ['&-] {_WORD} )*  # aujourd'hui, don't, t-shirt, A&M
    | (\S) \1*                                    # ..., !!
    """,
    re.VERBOSE | re.IGNORECASE,
)


def read_lines(path: str | Path, limit: int = 100_000) -> list[str]:
    """The lines of a UTF-8 file, plain or .gz, in any locale, without their ends and without a byte-order mark.

    A line ends at LF or CRLF and nowhere else.  Lines of more than `limit` characters are cut, and counted in the log.
    A missing file, a damaged one and a byte that is not UTF-8 raise UserError.
    """
    data = _read_bytes(Path(path)).removeprefix(b'\xef\xbb\xbf')
    try:
        text = data.decode('utf-8')
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise UserError(f'{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8') from None
    lines = text.replace('\r\n', '\n').split('\n')
    if not lines[-1]:
        lines.pop()
    long = sum(len(line) > limit for line in lines)
    if long:
        logging.getLogger(__name__).warning('%s: %d lines of more than %d characters were cut', path, long, limit)
    return [line[:limit] for line in lines]


def normalise(text: str, language: str) -> str:
    """One form of a text, whoever typed it; normalising twice changes nothing.

    NFC; one apostrophe, one double quote, one dash; every run of white space one plain space; invisible characters
    removed.  Before ? ! ; : and » French ('fr') has one space and English ('en') none, and so behind «; signs that are
    no punctuation (10:30, http://, smileys) and those behind a quote or an opening bracket stay.
    """
    text = _INVISIBLE.sub('', text)
    text = ' '.join(unicodedata.normalize('NFC', text).translate(_LOOKALIKES).split())
    match language:
        case 'fr':
            text = _SIGNS_FR.sub(lambda match: match[1] or f' {match[2]}', text)
            text = re.sub('« ?', '« ', re.sub('(?<=.)(?<! )»', ' »', text)) if '«' in text or '»' in text else text
        case 'en':
            text = _SIGNS_EN.sub(r'\1', text)
            text = text.replace('« ', '«').replace(' »', '»')
        case _:
            raise UserError(f"language {language!r}: expected 'en' or 'fr'")
    return text.strip()


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: it is empty, or all white space, controls and invisible characters.

    `normalise` leaves nothing of most such texts; a model would make up something from no input at all.
    """
    return all(c.isspace() or unicodedata.category(c) in ('Cc', 'Cf') or _FILLERS.match(c) for c in text)


def tokenise(text: str) -> list[str]:
    """The words of a normalised text, in either language.

    Punctuation stands alone; an elided word ends at its apostrophe (l' | homme, qu' | il), an English clitic starts at
    it (teacher | 's, it | 's); aujourd'hui, quelqu'un, don't and t-shirt are one word.  Marks show unexpected spacing.
    """
    tokens, left, end, quoted = [], '', 0, False
    for match in _TOKEN.finditer(text):
        word = match[0]
        joined = match.start() == end
        if joined != _joins(left, word, quoted) or word[0] in (JOIN_MARK, SPACE_MARK):
            tokens.append((JOIN_MARK if joined else SPACE_MARK) + word)
        else:
            tokens.append(word)
        left, end, quoted = word, match.end(), quoted ^ (word == '"')
    return tokens


def detokenise(tokens: Iterable[str]) -> str:
    """The text of `tokenise`'s words; of any other words, the text with the spacing one expects."""
    parts, left, quoted = [], '', False
    for token in tokens:
        word = strip_spacing_mark(token)
        joined = token[0] == JOIN_MARK if word != token else _joins(left, word, quoted)
        parts.append(word if joined else ' ' + word)
        left, quoted = word, quoted ^ (word == '"')
    return ''.join(parts)


def strip_spacing_mark(token: str) -> str:
    """The word of a token, without its mark."""
    return token[1:] if len(token) > 1 and token[0] in (JOIN_MARK, SPACE_MARK) else token


def _joins(left: str, right: str, quoted: bool) -> bool:
    """Whether two words are expected to stand without a space between them, inside or outside of double quotes."""
    if not left or right in _CLOSING or left in _OPENING:
        return True
    if left == '"' or right == '"':
        return quoted
    return right[0] == "'" or (left[-1] == "'" and len(left) > 1)


_CLOSING = frozenset(['.', ',', ';', ':', '?', '!', ')', ']', '}', '/', '...', '!!', '!!!', '??'])
_OPENING = frozenset(['(', '[', '{', '/', '#', '$'])


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == '.gz' else data
    except FileNotFoundError:
        raise UserError(f'{path}: no such file{file_suggestion(path)}') from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'{path}: cannot be read: {error}') from None


def check_regular_file(path: str | Path) -> None:
    """Raises UserError for a pipe or a device in place of a data file.

    A run reads its data more than once: for each split, and again to resume or to evaluate.  A pipe would be empty or
    block for ever then.  A missing file is left to the reader.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # False for any impossible name
        raise UserError(f'{path} is a pipe or a device, which can be read only once; expected a file')


def file_suggestion(path: Path) -> str:
    """`, did you mean ...?` with the most similar file in the folder of a missing one, or nothing."""
    if not path.parent.is_dir():
        return f', nor a folder {path.parent}'
    files = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    names = difflib.get_close_matches(path.name, files, n=1, cutoff=0.5)
    return f', did you mean {path.parent / names[0]}?' if names else ''
