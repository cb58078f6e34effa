"""What takes seconds to make at every start and is the same every time, kept in the user's cache: sentences and digits
that our own programs draw, vocabularies, and text as their ids."""

import hashlib
import unicodedata
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from attnlab import files
from attnlab.data import download

Arrays = dict[str, np.ndarray]

ENOUGH = 400
"""Fewer examples are made anew, which takes no longer than to look for them."""

MOST = 2**26
"""What has more bytes is not kept: who has so much text does not want it twice."""


def kept(name: str, count: int, key: tuple, make: Callable[[], Arrays]) -> Arrays:
    """`make()`, a function of key and count, this package's code and NumPy's alone, or what it gave for them before.

    A file that cannot be read or written is made anew, or not kept, without a word.
    """
    if count < ENOUGH:
        return make()
    number = hashlib.sha256(repr((name, count, key)).encode() + _code()).hexdigest()
    path = download.cache_folder('made') / f'{name}-{number[:24]}.npz'
    try:
        with path.open('rb') as file, np.load(file) as found:
            return dict(found)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        made = make()
    if sum(x.nbytes for x in made.values()) > MOST:
        return made
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_atomically(path) as part, part.open('wb') as file:
            np.savez(file, allow_pickle=False, **made)
    return made


def digest(lines: Iterable[str]) -> str:
    """Of lines of text, for a key."""
    return hashlib.sha256('\n'.join(lines).encode('utf-8', 'surrogatepass')).hexdigest()


def from_text(text: str) -> np.ndarray:
    """A text as bytes, to be kept."""
    return np.frombuffer(text.encode('utf-8', 'surrogatepass'), np.uint8)


def to_text(kept: np.ndarray) -> str:
    """The way back."""
    return kept.tobytes().decode('utf-8', 'surrogatepass')


@cache
def _code() -> bytes:
    """A digest of all that may have a say in what is made."""
    # NumPy's random draws may change, and Python's tables of characters.
    total = hashlib.sha256(f'{np.__version__} {unicodedata.unidata_version}'.encode())
    for file in sorted(Path(__file__).parent.rglob('*.py')):
        total.update(file.read_bytes())
    return total.digest()
