"""Text files as lines, text normalisation, and a reversible word tokeniser for English and French.

`normalise` gives differently typed forms of a line one form, in training and in use alike.  `tokenise` splits a
normalised text into words, and `detokenise` restores the text exactly.  The spacing between two words follows from the
words themselves.  A word with another spacing has a mark in front: `␣` for a space before it, `⁀` for none.
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
# Joiners, blank letters, variation selectors and non-characters: invisible, but not in Unicode's categories Cc and Cf.
_INVISIBLE_LETTERS = re.compile(
    '[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufdd0-\ufdef\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]'
)
_LOOKALIKES = str.maketrans({
    **dict.fromkeys('’‘ʼ′‛´＇', "'"),
    **dict.fromkeys('“”„‟″＂', '"'),
    **dict.fromkeys('‐‑‒–—―−', '-'),
    '…': '...',
})  # fmt: skip

# A run of ? ! ; : is punctuation unless a word or a smiley continues after it: not in 10:30, http://, :-).
_ENTITY = r'&(?:amp|lt|gt|quot|apos|[#]\d+);'  # [#]: a bare # would start a comment in a verbose pattern
_PUNCTUATION = r'[?!;:]+(?=$|[\s"«»\'])|[?!;:]*[?!](?=[)\].,])'
_PUNCTUATION_FR = re.compile(rf'({_ENTITY})|(?<=[^\s("\[\'?!;:]) ?({_PUNCTUATION})')
_PUNCTUATION_EN = re.compile(rf'(?<=\S) ({_PUNCTUATION})')

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
    """Return the lines of a UTF-8 file, plain or .gz, without line ends and byte-order mark, in any locale.

    A line ends at LF or CRLF only.  Lines longer than `limit` characters are cut; a warning gives their number.
    Raises UserError for a missing or damaged file and for a byte that is not UTF-8.
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
    too_long = sum(len(line) > limit for line in lines)
    if too_long:
        logging.getLogger(__name__).warning('%s: %d lines of more than %d characters were cut', path, too_long, limit)
    return [line[:limit] for line in lines]


def normalise(text: str, language: str) -> str:
    """Return the normal form of a text; normalising twice changes nothing.

    The result is in Unicode NFC and has one kind of apostrophe, double quote and dash.  Each run of white space becomes
    one space, and invisible characters are removed.  French ('fr') gets one space before ? ! ; : » and after «,
    English ('en') none.  Signs that are not punctuation (10:30, http://, smileys) and signs after a quote or an opening
    bracket keep their spacing.  Raises UserError for another language.
    """
    text = _INVISIBLE.sub('', text)
    text = ' '.join(unicodedata.normalize('NFC', text).translate(_LOOKALIKES).split())
    match language:
        case 'fr':
            text = _PUNCTUATION_FR.sub(lambda match: match[1] or f' {match[2]}', text)
            text = re.sub('« ?', '« ', re.sub('(?<=.)(?<! )»', ' »', text)) if '«' in text or '»' in text else text
        case 'en':
            text = _PUNCTUATION_EN.sub(r'\1', text)
            text = text.replace('« ', '«').replace(' »', '»')
        case _:
            raise UserError(f"language {language!r}: expected 'en' or 'fr'")
    return text.strip()


def is_blank(text: str) -> bool:
    """Whether a text has no visible character: it is empty, or only white space, controls and invisible characters.

    `normalise` makes most such texts empty, and a model would invent an output for an empty input.
    """
    return all(c.isspace() or unicodedata.category(c) in ('Cc', 'Cf') or _INVISIBLE_LETTERS.match(c) for c in text)


def tokenise(text: str) -> list[str]:
    """Split a normalised text of either language into words.

    Punctuation is separate.  A French elided word ends at its apostrophe (l' | homme, qu' | il); an English clitic
    starts at its apostrophe (teacher | 's, it | 's).  aujourd'hui, quelqu'un, don't and t-shirt are one word.
    A word with unexpected spacing before it starts with SPACE_MARK or JOIN_MARK.
    """
    tokens, previous, end, in_quotes = [], '', 0, False
    for match in _TOKEN.finditer(text):
        word = match[0]
        joined = match.start() == end
        if joined != _is_joined(previous, word, in_quotes) or word[0] in (JOIN_MARK, SPACE_MARK):
            tokens.append((JOIN_MARK if joined else SPACE_MARK) + word)
        else:
            tokens.append(word)
        previous, end, in_quotes = word, match.end(), in_quotes ^ (word == '"')
    return tokens


def detokenise(tokens: Iterable[str]) -> str:
    """Return the text of the words of `tokenise`; words from elsewhere get the expected spacing."""
    parts, previous, in_quotes = [], '', False
    for token in tokens:
        word = strip_spacing_mark(token)
        joined = token[0] == JOIN_MARK if word != token else _is_joined(previous, word, in_quotes)
        parts.append(word if joined else ' ' + word)
        previous, in_quotes = word, in_quotes ^ (word == '"')
    return ''.join(parts)


def strip_spacing_mark(token: str) -> str:
    """Return a word of `tokenise` without its spacing mark, if it has one."""
    return token[1:] if len(token) > 1 and token[0] in (JOIN_MARK, SPACE_MARK) else token


def _is_joined(left: str, right: str, in_quotes: bool) -> bool:
    """Whether two neighbouring words are expected to have no space between them.

    `in_quotes`: an odd number of double quotes comes before `right`.
    """
    if not left or right in _NO_SPACE_BEFORE or left in _NO_SPACE_AFTER:
        return True
    if left == '"' or right == '"':
        return in_quotes
    return right[0] == "'" or (left[-1] == "'" and len(left) > 1)


_NO_SPACE_BEFORE = frozenset(['.', ',', ';', ':', '?', '!', ')', ']', '}', '/', '...', '!!', '!!!', '??'])
_NO_SPACE_AFTER = frozenset(['(', '[', '{', '/', '#', '$'])


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == '.gz' else data
    except FileNotFoundError:
        raise UserError(f'{path}: no such file{file_suggestion(path)}') from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'{path}: cannot be read: {error}') from None


def check_regular_file(path: str | Path) -> None:
    """Raise UserError if a data file is a pipe or a device.

    A run reads its data more than once: for each split, and again to resume or to evaluate.  At the second reading, a
    pipe would be empty or block forever.  A missing file is accepted here; the function that reads it raises the error.
    """
    # os.path.exists, unlike Path.exists, returns False for an impossible name.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f'{path} is a pipe or a device, which can be read only once; expected a file')


def file_suggestion(path: Path) -> str:
    """End of an error about a missing file: ', did you mean ...?' with the most similar file name in its folder.

    It is '' if no name is similar, and ', nor a folder ...' if the folder is missing too.
    """
    if not path.parent.is_dir():
        return f', nor a folder {path.parent}'
    files = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    names = difflib.get_close_matches(path.name, files, n=1, cutoff=0.5)
    return f', did you mean {path.parent / names[0]}?' if names else ''
