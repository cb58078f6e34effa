"""Files that a reader sees whole or not at all, whatever ends the one who writes them; locks; folders to write to."""

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from attnlab.errors import UserError


@contextmanager
def replace_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """A name beside `path` to write to: the new file takes the old one's place at the end, and is gone on an error."""
    part = temporary_path(path)
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        if error.filename == str(part):  # whoever reads of it knows no such name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # it would hide the error above
            part.unlink(missing_ok=True)


def write_file(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a whole file; text as UTF-8, ends of line as they are."""
    with replace_atomically(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def log_write_errors(folder: str | os.PathLike) -> Iterator[None]:
    """Logs OSError instead of raising it, once for a folder: for files beside a result that is printed."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if (name := os.fspath(folder)) not in _UNWRITABLE:
            _UNWRITABLE.add(name)
            reason = f'{error.filename}: {error.strerror}' if error.filename else error
            logging.warning('files in %s cannot be written (%s)', name, reason)


_UNWRITABLE: set[str] = set()
"""Folders that `log_write_errors` has logged."""


def check_writable(folder: str | os.PathLike) -> None:
    """Raises OSError where no file can be made in a folder."""
    part = temporary_path(Path(folder) / 'new')
    try:
        part.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(folder)) from None
    part.unlink()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, in order; lines that are no records are left out, and counted in the log.

    No file has no records.  A last line that a kill cut short does not count.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b'\n')
    records = [_record(line) for line in lines]
    if wrong := [number for number, record in enumerate(records, 1) if record is None]:
        logging.warning('%s: left out %d lines that are no records, the first is line %d', path, len(wrong), wrong[0])
    return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line: a step, a split and finite or missing numbers; None for anything else."""
    try:
        record = json.loads(line)
        step, split, numbers = record['step'], record['split'], [x for x in record.values() if x != record['split']]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    fine = all(x is None or type(x) in (int, float) and abs(x) < 1e300 for x in numbers)
    return record if type(step) is int and isinstance(split, str) and fine else None


def temporary_path(path: str | os.PathLike) -> Path:
    """A name in the same folder that no other process takes."""
    path = Path(path)
    return path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.partial')


def lock_file(path: str | os.PathLike) -> TextIO | None:
    """Holds a lock until the file is closed or the process ends, however it does; None where another holds it.

    Raises OSError where the file system has none.
    """
    import fcntl

    file = Path(path).open('a')  # a network's file system locks only what may be written
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


def expand_home(path: str, name: str) -> str:
    """The path with ~ or ~USER at its start replaced by the home folder: behind the = of a flag a shell leaves it.

    name: of the flag or config field, for the UserError where there is no such user.
    """
    found = os.path.expanduser(path)
    if found.startswith('~'):
        user = path.partition('/')[0]
        raise UserError(f'{name} is {path!r}, and there is no user {user[1:]!r}; write ./{path} for a folder {user}')
    return found


def is_utf8(text: str) -> bool:
    """Whether an argument or a path is UTF-8: Python keeps other bytes as lone surrogates, which no file can hold."""
    return text.isascii() or not any('\ud800' <= c <= '\udfff' for c in text)


def check_folder(path: str | os.PathLike, flag: str) -> None:
    """Raises UserError for what can be no folder, new or old: a name that is none, a file in its way, a broken link."""
    path = Path(path)
    try:
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                raise UserError(f'--{flag}={path}: {folder} is a link to what is not there')
            if folder.exists() and not folder.is_dir():
                raise UserError(f'--{flag}={path}: {folder} is a file, expected a folder')
    except OSError as error:
        raise UserError(f'--{flag}={path}: {error.strerror}') from None
