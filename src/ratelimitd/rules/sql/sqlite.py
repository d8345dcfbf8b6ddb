"""The rule database in a SQLite file: connections, transactions, and the meaning of SQLite's errors.

The only module that imports the driver. Contains no statement about rules. See ADR 0013.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import quote

import aiosqlite
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry

from ratelimitd.errors import StartupError, StoreUnavailableError

BUSY_TIMEOUT_S: Final = 2.0
"""Longest wait for another process's write, which takes milliseconds."""

POOL_SIZE: Final = 3
"""Connections that read, each with its own thread. One more writes: SQLite allows one writer, and its lock has no
queue, so that of several some would wait in vain."""

POOL_TIMEOUT_S: Final = 5.0
"""Longest wait for a free connection: more than one writer's wait for the lock and its answer."""

WAL_ATTEMPTS: Final = 5
"""Attempts to switch a new file to write-ahead logging while other processes open it."""

CLOSE_TIMEOUT_S: Final = 2.0
"""Longest wait for the thread of a closed connection: as long as a statement may wait for a lock."""

_BEGIN: Final = "ratelimitd_begin"

# The driver logs every call with its arguments at debug level; an argument may be a secret.
logging.getLogger("aiosqlite").setLevel(logging.WARNING)

_MEANINGS: Final = {
    sqlite3.SQLITE_BUSY: "is locked by another process",
    sqlite3.SQLITE_LOCKED: "is locked by another process",
    sqlite3.SQLITE_READONLY: "is read-only",
    sqlite3.SQLITE_PERM: "is read-only",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full",
    sqlite3.SQLITE_IOERR: "cannot be read or written: disk error",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_NOTADB: "is not a SQLite database",
}


_NO_TABLE: Final = ("no such table", "no such column")
"""SQLite has no code for these errors, only a text."""


class SqliteDatabase:
    """A :class:`~ratelimitd.rules.sql.database.RuleDatabase` in the file at ``path``.

    ``create`` allows creating a missing file, readable by its owner only: it holds the key of the buckets. Otherwise a
    missing file is an error, because creating it would turn a lost database into an empty one.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        pool_timeout_s: float = POOL_TIMEOUT_S,
    ) -> None:
        self.place = str(path)
        self._path = path
        self._uri = f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}"
        self._busy_timeout_s = busy_timeout_s
        self._threads: set[Thread] = set()
        if create:
            with suppress(OSError):  # SQLite hits the same error and reports it
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._engine = self._open_engine(pool_timeout_s, POOL_SIZE)
        # A transaction that reads first and locks later fails at once, regardless of the busy timeout, if another
        # process wrote in between.
        writer = self._open_engine(pool_timeout_s, 1)
        self._writing = writer.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Begin a read-only transaction; all its statements see one snapshot."""
        with _store_errors(self._path):
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction that holds the write lock from the start."""
        with _store_errors(self._path):
            async with self._writing.begin() as connection:
                yield connection

    @asynccontextmanager
    async def upgrading(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction as :meth:`writing` does; error messages name the setting and the file."""
        try:
            async with self._writing.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            message = f"DATABASE_URL: {meaning_of(error, self._path)}: {self._path}"
            if is_permanent(error, self._path):
                raise StartupError(message) from error
            raise StoreUnavailableError(message) from error

    async def aclose(self) -> None:
        """Close every connection and wait for its thread; idempotent.

        A connection whose caller was cancelled is closed later, by its thread. A thread that outlives the event loop
        ends with a traceback on stderr.
        """
        await self._engine.dispose()
        await self._writing.dispose()
        for thread in tuple(self._threads):
            if thread.ident is not None:
                await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S)

    async def _connect(self) -> aiosqlite.Connection:
        connection = aiosqlite.connect(
            self._uri,
            uri=True,
            timeout=self._busy_timeout_s,
            check_same_thread=False,
            factory=_Connection,
        )
        # A thread without an ident is about to start.
        self._threads = {one for one in self._threads if one.ident is None or one.is_alive()}
        self._threads.add(connection._thread)  # noqa: SLF001 - the driver has no public way to join it
        opening = asyncio.ensure_future(connection)
        try:
            # Not shielded: that logs a failure after the cancellation since Python 3.14.
            await asyncio.wait([opening])
            return opening.result()
        except asyncio.CancelledError:
            # If the await itself were cancelled, the driver would never close the connection that its thread opens.
            opening.add_done_callback(_stop)
            raise

    def _open_engine(self, pool_timeout_s: float, connections: int) -> AsyncEngine:
        engine = create_async_engine(
            "sqlite+aiosqlite://",
            async_creator=self._connect,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=pool_timeout_s,
            hide_parameters=True,
        )
        event.listen(engine.sync_engine, "connect", self._set_up)
        event.listen(engine.sync_engine, "checkout", self._require_same_file)
        event.listen(engine.sync_engine, "begin", _begin)
        return engine

    def _set_up(self, connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info["file"] = identity_of(self._path)
        # The driver would begin a transaction only at the first write; `_begin` does so explicitly.
        connection.isolation_level = None
        # Invalid UTF-8 in one row would fail a whole load; validation rejects the lone surrogates instead.
        connection.driver_connection.text_factory = partial(
            str, encoding="utf-8", errors="surrogateescape"
        )
        cursor = connection.cursor()
        _use_wal(cursor)
        # WAL is often combined with NORMAL; FULL makes an answered edit survive a power failure. Edits are rare, so a
        # sync of milliseconds is cheap.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    def _require_same_file(
        self, _connection: DBAPIConnection, entry: ConnectionPoolEntry, _proxy: Any
    ) -> None:
        # Writes to a file that was replaced (a restored backup) or deleted would be lost.
        if entry.info["file"] != identity_of(self._path):
            raise DisconnectionError


def meaning_of(error: SQLAlchemyError, path: Path) -> str:
    """Return the meaning of a database error, in one line without SQL, values and the path."""
    orig = error.orig if isinstance(error, DBAPIError) else error
    meaning = _MEANINGS.get(_code_of(orig))
    if _code_of(orig) == sqlite3.SQLITE_CANTOPEN and (reason := _obstacle(path)[0]):
        meaning = f"cannot be opened: {reason}"
    elif meaning is None and str(orig).startswith(_NO_TABLE):
        meaning = "lacks the tables of this release: run `ratelimitd db upgrade`"
    elif meaning is None:
        meaning = f"failed ({getattr(orig, 'sqlite_errorname', type(orig).__name__)})"
    return f"the rule database {meaning}"


def is_permanent(error: SQLAlchemyError, path: Path) -> bool:
    """Return whether a retry cannot succeed: ``path`` is not writable, not a file, or the disk is full."""
    code = _code_of(getattr(error, "orig", None))
    if code == sqlite3.SQLITE_CANTOPEN:
        return _obstacle(path)[1]
    return code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL}


def _obstacle(path: Path) -> tuple[str, bool]:
    """Return what keeps SQLite from opening a file, or an empty text; and whether a retry cannot succeed."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return "its directory is not accessible", True
    except OSError:
        return _why_missing(path.absolute().parent)
    if stat.S_ISDIR(mode):
        return "it is a directory", True
    if not stat.S_ISREG(mode) or not os.access(path, os.R_OK | os.W_OK):
        return "it is not a file that this user may read and write", True
    return "", False


def _why_missing(directory: Path) -> tuple[str, bool]:
    if not directory.is_dir():
        return "its directory is missing", False
    if not os.access(directory, os.W_OK | os.X_OK):
        return "its directory is not writable", True
    return "it is missing: restore it, or run `ratelimitd db upgrade`", False


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except PoolTimeoutError as error:
        message = "every connection to the rule database is busy"
        raise StoreUnavailableError(message) from error
    except SQLAlchemyError as error:
        raise StoreUnavailableError(meaning_of(error, path)) from error


def _code_of(error: object) -> int:
    # The low byte is the primary code (sqlite.org/rescode.html).
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


class _Connection(sqlite3.Connection):
    def close(self) -> None:
        # SQLite keeps a closed connection and its locks while a statement has unread rows, such as after a caller was
        # cancelled between execution and fetch.
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _stop(opening: asyncio.Future[aiosqlite.Connection]) -> None:
    """Close a connection whose caller is gone, in its thread."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().stop()


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def _use_wal(cursor: Any) -> None:
    """Set the journal mode in which readers and the writer do not wait for each other."""
    # The switch ignores the busy timeout while another connection switches or writes; beginning a write honours it.
    for _ in range(WAL_ATTEMPTS - 1):
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if _code_of(error) != sqlite3.SQLITE_BUSY:
                raise
            cursor.execute("BEGIN IMMEDIATE")
            cursor.execute("COMMIT")
        else:
            return
    cursor.execute("PRAGMA journal_mode=WAL")


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that replaced it; ``None`` for a missing one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
