"""Published data files, downloaded once into the user's cache folder and checked against their SHA-256."""

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from attnlab import files
from attnlab.errors import UserError

TIMEOUT_SECONDS = 30.0
"""Time without an answer of the server after which a download fails."""


def cache_folder(name: str) -> Path:
    """Return the folder of a data set below $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / name


def data_folder(name: str, chosen: str | Path, published: Mapping[str, tuple[str, str]]) -> Path:
    """Return the folder of a data set.

    It is `chosen` if given, else $ATTNLAB_DATA/NAME if ATTNLAB_DATA is set, both without a check of their files, else
    the cache folder.  Files that the cache folder lacks are downloaded into it.

    published: (URL, SHA-256) by file name.
    """
    if chosen:
        return Path(chosen)
    if root := os.environ.get('ATTNLAB_DATA'):
        return Path(root) / name
    remedy = (
        f'if you have the files, name their folder by --config.data.folder=DIR, or put them in DIR/{name} and set '
        'ATTNLAB_DATA=DIR'
    )
    for file, (url, sha256) in published.items():
        download_file(url, cache_folder(name) / file, sha256, remedy)
    return cache_folder(name)


def download_file(url: str, path: Path, sha256: str, remedy: str) -> None:
    """Download a file unless it exists with the right checksum.

    The file is written under another name and then moved, so `path` never holds an incomplete or unchecked file.
    Raises UserError, with `remedy` as the end of its message, if the download fails, if the checksum is wrong, or if
    the file cannot be written.
    """
    if path.is_file() and _digest(path.read_bytes()) == sha256:
        return
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f'{url}: cannot be downloaded ({error}); {remedy}') from None
    if _digest(data) != sha256:
        raise UserError(f'{url}: sha256 is {_digest(data)}, expected {sha256}; {remedy}')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_file(path, data)
    except OSError as error:
        raise UserError(f'{path}: cannot be written ({error}); {remedy}') from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
