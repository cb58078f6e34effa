"""The database of a sweep: parsing and checking its URL, opening it, and waiting while an SQLite file is locked."""

import logging
import os
import sqlite3
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy
import sqlalchemy.event
import sqlalchemy.exc
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage

from attnlab.errors import RunError, UserError
from attnlab.sweeps.sweep_files import GRACE_SECONDS, HEARTBEAT_SECONDS

MAX_LOCK_WAIT = 600.0
"""Seconds for which another process may lock an SQLite file before a worker fails."""

_SQLITE_HEADER = b'SQLite format 3\0'
_SQLITE_TIMEOUT = 2.0
"""Seconds for which one SQLite call waits for a lock."""

_LOG_INTERVAL = 60.0
"""Seconds between two log lines about the same lock."""


class DatabaseFailed(RunError):
    """Raised when the database fails: the worker ends, and the point that it runs does not count as failed."""


def check_database(url: str) -> None:
    """Raise UserError if the database cannot be reached; nothing is created in it."""
    shown, full = parse_database_url(url)
    try:
        if full.get_backend_name() == 'sqlite':
            _check_file(shown, full.database)
        else:
            sqlalchemy.create_engine(full, poolclass=sqlalchemy.NullPool).connect().close()
    except ImportError as error:
        raise missing_driver_error(shown, full) from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise UserError(f'--storage={shown} cannot be reached: {error_summary(error)}') from error


def _check_file(shown: str, name: str | None) -> None:
    if not name or name == ':memory:':
        raise UserError(f'--storage={shown} is a database in memory; expected a file, as in sqlite:///FILE')
    file = Path(name)
    if not file.parent.is_dir():
        raise UserError(f'--storage={shown}: there is no folder {file.parent}')
    if file.exists() and not file.is_file():
        raise UserError(f'--storage={shown}: {file} is not a regular file')
    if not os.access(file if file.exists() else file.parent, os.R_OK | os.W_OK):
        raise UserError(f'--storage={shown}: {file} cannot be written')
    if file.exists():
        with file.open('rb') as opened:
            header = opened.read(len(_SQLITE_HEADER))
        if header not in (b'', _SQLITE_HEADER):
            raise UserError(f'--storage={shown}: {file} is not an SQLite database')


def missing_driver_error(shown: str, url: sqlalchemy.URL) -> UserError:
    """Return the error for a URL whose database driver is not installed; `shown` is the URL without its password."""
    hint = "; pip install 'attnlab[postgresql]'" if url.get_backend_name() == 'postgresql' else ''
    return UserError(f'--storage={shown} needs a driver that is not installed{hint}')


def error_summary(error: BaseException) -> str:
    """Return the message of an error, or of its cause if it has one, in one line."""
    return ' '.join(str(error.__cause__ or error).split())


def parse_database_url(text: str) -> tuple[str, sqlalchemy.URL]:
    """Return the URL as a text without its password, for messages, and as an SQLAlchemy URL.

    Raises UserError if the text is not a URL.
    """
    try:
        file = text.removeprefix('sqlite:///')
        # After sqlite:/// no character of the file name has a special meaning.
        url = sqlalchemy.make_url(text) if file == text else sqlalchemy.URL.create('sqlite', database=file)
        url.get_backend_name()
    except (sqlalchemy.exc.ArgumentError, ValueError):  # ValueError: the port is not a number
        raise UserError(f'--storage expects a URL as in postgresql://user@host/database, got {text!r}') from None
    shown = url.render_as_string(hide_password=True) if file == text else text
    return shown, url.set(drivername='postgresql+psycopg') if url.drivername == 'postgresql' else url


def open_storage(url: sqlalchemy.URL, check: Callable[[], None]) -> RDBStorage:
    """Open Optuna's storage in a database and create its tables if they are missing.

    check: called while an SQLite file is locked by another process; may raise to stop waiting.
    """
    is_sqlite = url.get_backend_name() == 'sqlite'
    # SQLite has no row locks, and by default Python begins a transaction only at the first write. Two processes could
    # then both read a trial as WAITING. So every transaction begins with BEGIN IMMEDIATE, below.
    factory = _waiting_connection_class(str(url.database), check)
    connect_args = {'timeout': _SQLITE_TIMEOUT, 'isolation_level': None, 'factory': factory}
    # A pool would leave a connection open if opening fails; Python 3.13 warns about that.
    options = {'connect_args': connect_args, 'poolclass': sqlalchemy.NullPool} if is_sqlite else {'pool_pre_ping': True}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', ExperimentalWarning)
        text = url.render_as_string(hide_password=False)
        storage = RDBStorage(text, options, heartbeat_interval=int(HEARTBEAT_SECONDS), grace_period=int(GRACE_SECONDS))
    if is_sqlite:
        begin = lambda connection: connection.exec_driver_sql('BEGIN IMMEDIATE')
        sqlalchemy.event.listen(storage.engine, 'begin', begin)
    return storage


def _waiting_connection_class(file: str, check: Callable[[], None]) -> type[sqlite3.Connection]:
    """Return a class of connections to an SQLite file that wait, and log, while another process locks the file.

    SQLite can wait by itself, but without a log line, and Python handles no signal meanwhile. So SQLite waits for
    `_SQLITE_TIMEOUT` seconds at a time, with a call of `check` in between.
    """

    def retry_while_locked(call: Callable[..., Any], *args: Any) -> Any:
        start, next_log = time.monotonic(), 0.0
        while True:
            try:
                return call(*args)
            except sqlite3.OperationalError as error:
                if (error.sqlite_errorcode & 0xFF) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
            check()
            waited = time.monotonic() - start
            if waited > MAX_LOCK_WAIT:
                message = f'{file} has been locked by another process for {waited:.0f} s'
                raise DatabaseFailed(f'{message}; run the same command again to continue')
            if waited > next_log:
                logging.warning('%s is locked by another process; waiting for it', file)
                next_log = waited + _LOG_INTERVAL

    class Cursor(sqlite3.Cursor):
        def execute(self, *args: Any) -> Any:
            return retry_while_locked(super().execute, *args)

        def executemany(self, *args: Any) -> Any:
            return retry_while_locked(super().executemany, *args)

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def commit(self) -> None:
            retry_while_locked(super().commit)

    return Connection
