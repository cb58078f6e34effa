"""Published files, downloaded once into the user's cache and compared with their checksum."""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

from attnlab import files
from attnlab.errors import UserError

TIMEOUT = 30.0  # seconds without an answer


def cache(name: str) -> Path:
    """The folder of a data set below $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'attnlab' / name


def fetch(url: str, path: Path, sha256: str, remedy: str) -> None:
    """Brings a file that is missing or damaged; what stands under its name is complete and checked at any time.

    UserError where it cannot be had, is not the file of that checksum or cannot be written; it ends with the `remedy`.
    """
    if path.is_file() and _digest(path.read_bytes()) == sha256:
        return
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f'{url}: cannot be downloaded ({error}); {remedy}') from None
    if _digest(data) != sha256:
        raise UserError(f'{url}: sha256 is {_digest(data)}, expected {sha256}; {remedy}')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, data)
    except OSError as error:
        raise UserError(f'{path}: cannot be written ({error}); {remedy}') from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
