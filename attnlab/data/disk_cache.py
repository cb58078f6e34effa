"""Disk cache of arrays that take seconds to compute and are the same at every start.

It holds generated sentences and digits, vocabularies, and the ids of encoded text, in the user's cache folder.
"""

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

MIN_EXAMPLES = 400
"""Results for fewer examples are not cached: computing them takes no longer than finding the file."""

MAX_BYTES = 2**26
"""Larger results are not cached: a second copy of so much data would fill the user's disk."""


def cached_arrays(name: str, count: int, key: tuple, compute: Callable[[], Arrays]) -> Arrays:
    """Return `compute()`, or the result of an earlier call with the same name, count and key.

    count: number of examples.  `compute` must be a function of the count and the key alone; the code of
    `attnlab.data`, the version of NumPy and Python's Unicode tables are part of the key of the cache.
    A cache file that cannot be read is computed again, and one that cannot be written is skipped, both without
    a message.
    """
    if count < MIN_EXAMPLES:
        return compute()
    file_hash = hashlib.sha256(repr((name, count, key)).encode() + _code_digest()).hexdigest()
    path = download.cache_folder('made') / f'{name}-{file_hash[:24]}.npz'
    try:
        with path.open('rb') as file, np.load(file) as stored:
            return dict(stored)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        arrays = compute()
    if sum(x.nbytes for x in arrays.values()) > MAX_BYTES:
        return arrays
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_atomically(path) as part, part.open('wb') as file:
            np.savez(file, allow_pickle=False, **arrays)
    return arrays


def digest_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text as hexadecimal digits, to be part of a key."""
    return hashlib.sha256('\n'.join(lines).encode('utf-8', 'surrogatepass')).hexdigest()


def text_to_bytes(text: str) -> np.ndarray:
    """Return the UTF-8 bytes of a text, [n] uint8, to be stored as an array."""
    return np.frombuffer(text.encode('utf-8', 'surrogatepass'), np.uint8)


def bytes_to_text(array: np.ndarray) -> str:
    """Return the text of an array [n] uint8 that `text_to_bytes` returned."""
    return array.tobytes().decode('utf-8', 'surrogatepass')


@cache
def _code_digest() -> bytes:
    """SHA-256 of all code that may change a cached result: this package, NumPy's random draws, Unicode tables."""
    digest = hashlib.sha256(f'{np.__version__} {unicodedata.unidata_version}'.encode())
    for file in sorted(Path(__file__).parent.rglob('*.py')):
        digest.update(file.read_bytes())
    return digest.digest()
