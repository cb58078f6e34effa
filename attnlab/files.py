"""Files that a reader sees whole or not at all, whatever ends the one who writes them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: str | os.PathLike) -> Iterator[Path]:
    """A name beside `path` to write to: the new file takes the old one's place at the end, and is gone on an error."""
    part = beside(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a whole file; text as UTF-8, ends of line as they are."""
    with replaced(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def beside(path: str | os.PathLike) -> Path:
    """A name in the same folder that no other process takes."""
    path = Path(path)
    return path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.partial')
