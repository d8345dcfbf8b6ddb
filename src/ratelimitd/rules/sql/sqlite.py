"""The rule database in a SQLite file: how it is opened, and what its errors mean.

The one place that knows this driver. Never holds a statement about rules. See ADR 0013.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import quote
from weakref import WeakKeyDictionary

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
"""Longest wait for another process's write; writes here take milliseconds, so beyond it something hangs."""

POOL_SIZE: Final = 4
"""Connections, each with a thread of its own: one writes (SQLite allows one), the others read."""

POOL_TIMEOUT_S: Final = 5.0
"""Longest wait for a connection of the pool."""

CLOSE_TIMEOUT_S: Final = 2.0
"""Longest wait for the thread of a closed connection: as long as a statement may wait for a lock."""

_threads: Final[WeakKeyDictionary[sa.Engine, set[Thread]]] = WeakKeyDictionary()

_BEGIN: Final = "ratelimitd_begin"

# The driver logs every call with its arguments at debug level, and an argument may be a secret.
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


class SqliteDatabase:
    """A :class:`~ratelimitd.rules.sql.database.RuleDatabase` in the file at ``path``; see :func:`open_engine`."""

    def __init__(
        self, path: Path, *, create: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self.place = str(path)
        self._path = path
        self._engine = open_engine(path, create=create, busy_timeout_s=busy_timeout_s)
        self._writing = writing(self._engine)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that only reads: all its statements see one state."""
        with store_errors():
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that begins with the write lock."""
        with store_errors():
            async with self._writing.begin() as connection:
                yield connection

    @asynccontextmanager
    async def upgrading(self) -> AsyncIterator[AsyncConnection]:
        """As :meth:`writing`; the message of what it raises names the file."""
        try:
            async with self._writing.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            message = f"{meaning_of(error)}: {self._path}"
            if needs_mending(error, self._path):
                raise StartupError(message) from error
            raise StoreUnavailableError(message) from error

    async def announce(self, connection: AsyncConnection) -> None:
        """Nothing: SQLite has no way to tell another process."""

    async def listen(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Return at once: others are polled."""

    async def close(self) -> None:
        """Close every connection and end its thread; idempotent."""
        await close_engine(self._engine)


def open_engine(
    path: Path, *, create: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S
) -> AsyncEngine:
    """An engine on the file. It connects when it is first used; dispose of it, or its threads live on.

    Only with ``create`` is a missing file made: elsewhere that would turn a lost database into an empty one. It holds
    the secret that keys the buckets, so it is for its owner alone.
    """
    if create:
        _make_private(path)
    uri = f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}"
    threads: set[Thread] = set()

    async def connect() -> aiosqlite.Connection:
        connection = aiosqlite.connect(
            uri, uri=True, timeout=busy_timeout_s, check_same_thread=False
        )
        threads.difference_update([thread for thread in threads if not thread.is_alive()])
        threads.add(connection._thread)  # noqa: SLF001 - nothing else tells when it has ended
        return await connection

    engine = create_async_engine(
        "sqlite+aiosqlite://",
        async_creator=connect,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=POOL_SIZE,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        hide_parameters=True,
    )
    _threads[engine.sync_engine] = threads
    _prepare_connections(engine, path)
    return engine


async def close_engine(engine: AsyncEngine) -> None:
    """Close every connection and wait until its thread has ended; idempotent.

    A connection whose caller was cancelled is closed by its thread alone, in its own time. A thread that outlives the
    event loop ends with a traceback on stderr.
    """
    await engine.dispose()
    for thread in _threads.get(engine.sync_engine, ()):
        if thread.ident is not None:
            await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S)


def writing(engine: AsyncEngine) -> AsyncEngine:
    """The same engine for transactions that write: each takes the write lock when it begins.

    A transaction that reads first and locks later fails at once if another process wrote in between, however long
    the busy timeout is.
    """
    return engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what the driver raises inside into ``StoreUnavailableError``, without SQL or values in its message."""
    try:
        yield
    except PoolTimeoutError as error:
        message = "every connection to the rule database is busy"
        raise StoreUnavailableError(message) from error
    except SQLAlchemyError as error:
        raise StoreUnavailableError(meaning_of(error)) from error


def meaning_of(error: SQLAlchemyError) -> str:
    """What a database error means, in one line without SQL or values."""
    orig = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    # The low byte is the error, the rest its finer kind (sqlite.org/rescode.html).
    meaning = _MEANINGS.get(code & 0xFF)
    if meaning is None:
        meaning = f"failed ({getattr(orig, 'sqlite_errorname', type(orig).__name__)})"
    return f"the rule database {meaning}"


def needs_mending(error: SQLAlchemyError, path: Path) -> bool:
    """Whether to wait is in vain: ``path`` may not be written, is no place for a database, or the disk is full."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code != sqlite3.SQLITE_CANTOPEN:
        return code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL}
    if path.exists():
        return not path.is_file() or not os.access(path, os.R_OK | os.W_OK)
    return path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK)


def _make_private(path: Path) -> None:
    with suppress(
        OSError
    ):  # SQLite will meet the same obstacle, and its error is the one that is mapped
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _prepare_connections(engine: AsyncEngine, path: Path) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info["file"] = _identity(path)
        # The driver's own handling starts a transaction at the first write only; ours begins where it says.
        connection.isolation_level = None
        # One row of broken text would fail a whole load. As lone surrogates, its own validation finds it.
        connection.driver_connection.text_factory = _lenient_text
        cursor = connection.cursor()
        cursor.execute(
            "PRAGMA journal_mode=WAL"
        )  # readers and the writer do not wait for each other
        # FULL, where WAL is often used with NORMAL: an edit that was answered survives a power failure. Edits
        # are rare, so the sync it costs (milliseconds) is cheap.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @event.listens_for(engine.sync_engine, "checkout")
    def follow_file(_connection: DBAPIConnection, entry: ConnectionPoolEntry, _proxy: Any) -> None:
        # A database that was replaced (a restored backup) or deleted stays open as a ghost: writes to it are lost.
        if entry.info["file"] != _identity(path):
            raise DisconnectionError

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


def _lenient_text(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
