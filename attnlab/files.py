"""Atomic file writing, reading of metrics files, file locks and checks of paths.

A file that is written here is either complete or absent for every reader, whenever the writing process is killed.
"""

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
    """Yield a temporary path in the same folder to write to; at the end that file replaces `path`.

    On an error the temporary file is deleted and `path` stays as it was.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.filename == str(temporary):  # report the name that the caller gave
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # an error here would hide the one above
            temporary.unlink(missing_ok=True)


def write_file(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a whole file atomically; text as UTF-8, with its line ends unchanged."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def log_write_errors(folder: str | os.PathLike) -> Iterator[None]:
    """Log an OSError instead of raising it, once for each folder.

    For files that accompany a result which is printed as well.  BrokenPipeError is raised.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if (name := os.fspath(folder)) not in _UNWRITABLE_FOLDERS:
            _UNWRITABLE_FOLDERS.add(name)
            reason = f'{error.filename}: {error.strerror}' if error.filename else error
            logging.warning('files in %s cannot be written (%s)', name, reason)


_UNWRITABLE_FOLDERS: set[str] = set()
"""Folders for which `log_write_errors` has logged an error."""


def check_writable(folder: str | os.PathLike) -> None:
    """Raise OSError if no file can be created in a folder."""
    temporary = temporary_path(Path(folder) / 'new')
    try:
        temporary.touch()
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(folder)) from None
    temporary.unlink()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl file, in order; an empty list if there is no file.

    Lines that are not valid records are left out, and their number is logged.  A last line without a line end, which a
    killed process leaves, is left out silently.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b'\n')
    records = [_parse_record(line) for line in lines]
    if invalid := [number for number, record in enumerate(records, 1) if record is None]:
        count = len(invalid)
        logging.warning('%s: left out %d lines that are not valid records, first line %d', path, count, invalid[0])
    return [record for record in records if record is not None]


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None if it is not a step, a split, and values that are finite numbers or null."""
    try:
        record = json.loads(line)
        step, split, numbers = record['step'], record['split'], [x for x in record.values() if x != record['split']]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    are_finite = all(x is None or type(x) in (int, float) and abs(x) < 1e300 for x in numbers)
    return record if type(step) is int and isinstance(split, str) and are_finite else None


def temporary_path(path: str | os.PathLike) -> Path:
    """Return a path in the same folder that no other process uses."""
    path = Path(path)
    return path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.partial')


def lock_file(path: str | os.PathLike) -> TextIO | None:
    """Lock a file and return it open; None if another process holds the lock.

    The lock is released when the file is closed or the process ends in any way.

    Raises OSError if the file system does not support locks.
    """
    import fcntl

    file = Path(path).open('a')  # network file systems lock only files that are open for writing
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
    """Return the path with ~ or ~USER at its start replaced by the home folder.

    A shell does not replace it in `--flag=~/folder`.

    name: name of the flag or config field, for the error message.

    Raises UserError if there is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith('~'):
        user = path.partition('/')[0]
        raise UserError(f'{name} is {path!r}, and there is no user {user[1:]!r}; write ./{path} for a folder {user}')
    return expanded


def is_utf8(text: str) -> bool:
    """Whether a command-line argument or path was valid UTF-8.

    Python represents other bytes as lone surrogates, which cannot be written to a file.
    """
    return text.isascii() or not any('\ud800' <= c <= '\udfff' for c in text)


def check_folder(path: str | os.PathLike, flag: str) -> None:
    """Raise UserError if a path is not a folder and cannot become one.

    It cannot if the path is invalid, or if the path or one of its parents is a file or a broken link.  flag: name of
    the command-line flag that held the path.
    """
    path = Path(path)
    try:
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                raise UserError(f'--{flag}={path}: {folder} is a broken link, expected a folder')
            if folder.exists() and not folder.is_dir():
                raise UserError(f'--{flag}={path}: {folder} is a file, expected a folder')
    except OSError as error:
        raise UserError(f'--{flag}={path}: {error.strerror}') from None
