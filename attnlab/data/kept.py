"""What our own programs draw, kept in the user's cache: the same every time, and seconds to draw at every start."""

import hashlib
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from attnlab.data import download

Arrays = dict[str, np.ndarray]

ENOUGH = 400
"""Fewer examples are drawn anew, which takes no longer than to look for them."""


def kept(name: str, count: int, key: tuple, make: Callable[[], Arrays]) -> Arrays:
    """`make()`, a function of the key, this package's code and NumPy's alone, or what it gave before for the same.

    A file that cannot be read or written is made anew, or not kept, without a word.
    """
    if count < ENOUGH:
        return make()
    digest = hashlib.sha256(repr((name, count, key)).encode() + _code()).hexdigest()
    path = download.cache('drawn') / f'{name}-{digest[:24]}.npz'
    try:
        with path.open('rb') as file, np.load(file) as found:
            return dict(found)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        made = make()
    part = path.with_name(f'{path.stem}.{os.getpid()}.part.npz')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part, allow_pickle=False, **made)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return made


@cache
def _code() -> bytes:
    """A digest of all that may have a say in what is drawn."""
    total = hashlib.sha256(np.__version__.encode())  # whose random draws may change
    for file in sorted(Path(__file__).parent.rglob('*.py')):
        total.update(file.read_bytes())
    return total.digest()
