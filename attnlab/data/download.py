"""Published files, downloaded once into the user's cache and compared with their checksum."""

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from attnlab import files
from attnlab.errors import UserError

TIMEOUT_SECONDS = 30.0  # seconds without an answer


def cache_folder(name: str) -> Path:
    """The folder of a data set below $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / name


def data_folder(name: str, chosen: str | Path, published: Mapping[str, tuple[str, str]]) -> Path:
    """The folder of a data set: `chosen` if given, else $ATTNLAB_DATA/NAME if set, whatever it holds; else the cache.

    published: file -> (URL, SHA-256); a file that the cache lacks is downloaded into it.
    """
    if chosen:
        return Path(chosen)
    if root := os.environ.get('ATTNLAB_DATA'):
        return Path(root) / name
    remedy = f'a folder that holds it is taken by --config.data.folder=DIR, or as DIR/{name} by ATTNLAB_DATA=DIR'
    for file, (url, sha256) in published.items():
        download_file(url, cache_folder(name) / file, sha256, remedy)
    return cache_folder(name)


def download_file(url: str, path: Path, sha256: str, remedy: str) -> None:
    """Brings a file that is missing or damaged; what stands under its name is complete and checked at any time.

    UserError where it cannot be had, is not the file of that checksum or cannot be written; it ends with the `remedy`.
    """
    if path.is_file() and _digest(path.read_bytes()) == sha256:
        return
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            data = answer.read()
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
