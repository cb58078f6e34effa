"""The database of a sweep: its URL, and how it is opened and waited for."""

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
"""Seconds that an SQLite file may be locked by another process before a worker gives up."""

_SQLITE = b'SQLite format 3\0'
_LOOK = 2.0
_TOLD = 60.0


class DatabaseFailed(RunError):
    """The database failed: the worker ends, and the point it runs is not at fault."""


def check_database(url: str) -> None:
    """Raises UserError for a database that cannot be reached; makes nothing in it."""
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
        raise UserError(f'--storage={shown}: {file} is no file')
    if not os.access(file if file.exists() else file.parent, os.R_OK | os.W_OK):
        raise UserError(f'--storage={shown}: {file} cannot be written')
    if file.exists():
        with file.open('rb') as opened:
            start = opened.read(len(_SQLITE))
        if start not in (b'', _SQLITE):
            raise UserError(f'--storage={shown}: {file} is no SQLite database')


def missing_driver_error(shown: str, url: sqlalchemy.URL) -> UserError:
    hint = "; pip install 'attnlab[postgresql]'" if url.get_backend_name() == 'postgresql' else ''
    return UserError(f'--storage={shown} needs a driver that is not installed{hint}')


def error_summary(error: BaseException) -> str:
    return ' '.join(str(error.__cause__ or error).split())


def parse_database_url(text: str) -> tuple[str, sqlalchemy.URL]:
    """A URL without its password, to be shown, and as SQLAlchemy has it; UserError for a text that is none."""
    try:
        file = text.removeprefix('sqlite:///')
        # Of a file's name no character means anything else.
        url = sqlalchemy.make_url(text) if file == text else sqlalchemy.URL.create('sqlite', database=file)
        url.get_backend_name()
    except (sqlalchemy.exc.ArgumentError, ValueError):  # ValueError: of a port that is no number
        raise UserError(f'--storage expects a URL as in postgresql://user@host/database, got {text!r}') from None
    shown = url.render_as_string(hide_password=True) if file == text else text
    return shown, url.set(drivername='postgresql+psycopg') if url.drivername == 'postgresql' else url


def open_storage(url: sqlalchemy.URL, check: Callable[[], None]) -> RDBStorage:
    """Optuna's storage in a database, with its tables.

    check: called while an SQLite file is locked by another process; raises to stop waiting.
    """
    local = url.get_backend_name() == 'sqlite'
    # SQLite has no locks of rows, and by default Python begins no transaction before it writes: two would read WAITING.
    arguments = {'timeout': _LOOK, 'isolation_level': None, 'factory': _waiting(str(url.database), check)}
    # Without a pool no connection stays open where this fails, which Python 3.13 warns of.
    options = {'connect_args': arguments, 'poolclass': sqlalchemy.NullPool} if local else {'pool_pre_ping': True}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', ExperimentalWarning)
        text = url.render_as_string(hide_password=False)
        storage = RDBStorage(text, options, heartbeat_interval=int(HEARTBEAT_SECONDS), grace_period=int(GRACE_SECONDS))
    if local:
        begin = lambda connection: connection.exec_driver_sql('BEGIN IMMEDIATE')
        sqlalchemy.event.listen(storage.engine, 'begin', begin)
    return storage


def _waiting(file: str, check: Callable[[], None]) -> type[sqlite3.Connection]:
    """Connections to an SQLite file that wait while another process locks it, and log that they do.

    SQLite waits too, but silently, and no signal is handled meanwhile: so it waits for `_LOOK` seconds at a time.
    """

    def patiently(act: Callable[..., Any], *args: Any) -> Any:
        begun, told = time.monotonic(), 0.0
        while True:
            try:
                return act(*args)
            except sqlite3.OperationalError as error:
                if (error.sqlite_errorcode & 0xFF) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
            check()
            waited = time.monotonic() - begun
            if waited > MAX_LOCK_WAIT:
                raise DatabaseFailed(
                    f'{file} has been locked by another process for {waited:.0f} s; the same command goes on'
                )
            if waited > told:
                logging.warning('%s is locked by another process; waits for it', file)
                told = waited + _TOLD

    class Cursor(sqlite3.Cursor):
        def execute(self, *args: Any) -> Any:
            return patiently(super().execute, *args)

        def executemany(self, *args: Any) -> Any:
            return patiently(super().executemany, *args)

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def commit(self) -> None:
            patiently(super().commit)

    return Connection
