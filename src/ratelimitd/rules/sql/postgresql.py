"""The rule database in PostgreSQL: connections, transactions, timeouts, and the meaning of its errors.

The only module that imports the driver. Contains no statement about rules. See ADR 0024.

Every command has a timeout. A connection whose command timed out or was cancelled is terminated, because the driver
would wait for the server to confirm the cancellation. An idle connection is probed before use and replaced when dead.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final
from weakref import WeakSet

import asyncpg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from ratelimitd.errors import StartupError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.settings.urls import PostgresqlServer

CONNECT_TIMEOUT_S: Final = 3.0
"""Longest wait for a connection to any of the hosts, including name look-up, TLS and authentication."""

IDLE_IN_TRANSACTION_S: Final = 10.0
"""The server ends a transaction whose node is silent for this long: it may hold the lock that every writer needs."""

POOL_SIZE: Final = 4
"""Connections of one node; a server has 100 for all by default."""

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait for an orderly close of a connection."""

UPGRADE_LOCK: Final = 0x72_61_74_65_6C_69_6D_64
"""Key of the advisory lock of upgrades: "ratelimd" in ASCII, unlikely to collide with another program's."""

_LOST: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # includes TimeoutError
)
"""Driver errors when a connection fails or is lost."""

_TRY_NEXT_HOST: Final = (
    OSError,  # includes TimeoutError
    asyncpg.CannotConnectNowError,
    asyncpg.PostgresConnectionError,
    asyncpg.TargetServerAttributeNotMatched,
)
"""Driver errors after which the next host is tried, as by libpq: not after a refused password, for example."""

_DRIVER_ERRORS: Final = (SQLAlchemyError, *_LOST)
"""Raised inside a transaction."""

_READ_ONLY: Final = "25006"
"""SQLSTATE of a write that a standby, or a session with ``default_transaction_read_only``, refuses."""

_MISCONFIGURED: Final = {
    "28": "refuses the user or the password of DATABASE_URL",
    "3D": "does not exist",
    "3F": "has none of the schemas in its search_path: create one",
    "42501": "forbids its user to read or write the rules",
}

_UNAVAILABLE: Final = {
    "08": "cannot be reached",
    _READ_ONLY: "is read-only",
    "25": "ended a transaction that took too long",
    "40": "was changed by another transaction",
    "42703": "lacks the tables of this release: run `ratelimitd db upgrade`",
    "42P01": "lacks the tables of this release: run `ratelimitd db upgrade`",
    "53100": "cannot grow: the disk is full",
    "53300": "has no connection left",
    "53": "is short of memory or another resource",
    "55P03": "is locked by another writer",
    "57014": "did not answer in time",
    "57P01": "is shutting down",
    "57P02": "is shutting down",
    "57P03": "is starting up or shutting down",
    "58": "cannot be read or written: disk error",
    "XX": "is damaged",
}
"""Meaning of an SQLSTATE or of its class, the first two characters (PostgreSQL documentation, appendix A)."""


class PostgresqlDatabase:
    """A :class:`~ratelimitd.rules.sql.database.RuleDatabase` on a PostgreSQL server."""

    def __init__(
        self,
        url: PostgresqlServer,
        *,
        busy_timeout_s: float,
        command_timeout_s: float,
        pool_timeout_s: float,
    ) -> None:
        self.place = url.place
        self._url = url
        self._busy_timeout_s = busy_timeout_s
        self._command_timeout_s = command_timeout_s
        self._drivers: WeakSet[asyncpg.Connection] = WeakSet()
        self._engine = self._open_engine(pool_timeout_s)
        # One snapshot for all statements; nothing is locked.
        self._reading = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        # Each statement sees all commits before it, those of the lock's previous holder included.
        self._writing = self._engine.execution_options(isolation_level="READ COMMITTED")

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Begin a read-only transaction; all its statements see one snapshot."""
        with _store_errors():
            async with self._reading.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction; if COMMIT gets no answer, the error says that the outcome is unknown."""
        with _store_errors():
            async with self._writing.connect() as connection:
                yield connection
                try:
                    await connection.commit()
                except _DRIVER_ERRORS as error:
                    message = f"{error_of(error)}; the change may have been made nevertheless"
                    raise StoreUnavailableError(message) from error

    @asynccontextmanager
    async def upgrading(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction under the advisory lock of upgrades."""
        try:
            async with self._writing.begin() as connection:
                await _lock_schema(connection)
                yield connection
        except _DRIVER_ERRORS as error:
            found = error_of(error)
            message = f"{found}: {self.place}"
            raise type(found)(message) from error

    async def aclose(self) -> None:
        """Close every connection; idempotent."""
        # Concurrently and in bounded time: a hanging server must not delay the shutdown.
        closings = [driver.close(timeout=CLOSE_TIMEOUT_S) for driver in self._drivers]
        await asyncio.gather(*closings, return_exceptions=True)
        await self._engine.dispose()

    async def _connect(self) -> asyncpg.Connection:
        limits = {
            "lock_timeout": self._busy_timeout_s,
            # The server times out before the client: its error is more precise, and it stops the work.
            "statement_timeout": self._command_timeout_s * 0.9,
            "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION_S,
        }
        driver = await self._connect_to_first(
            command_timeout=self._command_timeout_s,
            server_settings={
                "application_name": "ratelimitd",
                **{name: f"{limit_s * 1000:.0f}" for name, limit_s in limits.items()},
            },
        )
        self._drivers.add(driver)
        return driver

    async def _connect_to_first(self, **options: Any) -> asyncpg.Connection:
        """Connect to the first host that answers and is of the wanted kind.

        Left to the driver, all hosts share one timeout, and a silent one uses it up.
        """
        wanted = self._url.target_session_attrs
        kinds = ("standby", "any") if wanted == "prefer-standby" else (wanted,)
        attempts = [(dsn, kind) for kind in kinds for dsn in self._url.dsns]
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(CONNECT_TIMEOUT_S, self._command_timeout_s)
        while True:
            dsn, kind = attempts.pop(0)
            share_s = (deadline_s - loop.time()) / (len(attempts) + 1)
            try:
                return await asyncpg.connect(
                    dsn, target_session_attrs=kind, timeout=share_s, **options
                )
            except _TRY_NEXT_HOST:
                if not attempts:
                    raise

    def _open_engine(self, pool_timeout_s: float) -> AsyncEngine:
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self._connect,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=pool_timeout_s,
            pool_use_lifo=True,  # surplus connections stay idle
            hide_parameters=True,
        )
        event.listen(engine.sync_engine, "checkout", _probe)
        event.listen(engine.sync_engine, "handle_error", _cut_if_lost)
        return engine


def error_of(error: Exception) -> StoreUnavailableError:
    """Return the store error for an error of the driver or the pool, in one line without SQL or values."""
    if isinstance(error, PoolTimeoutError):
        return StoreUnavailableError("every connection to the rule database is busy")
    origin = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(origin, "sqlstate", None) or ""
    for codes, kind in (
        (_MISCONFIGURED, StoreMisconfiguredError),
        (_UNAVAILABLE, StoreUnavailableError),
    ):
        meaning = codes.get(state) or codes.get(state[:2])
        if meaning is not None:
            return kind(f"the rule database {meaning}")
    if state or not isinstance(origin, OSError):
        return _error_without_state(origin, state)
    return _error_of_network(origin)


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except _DRIVER_ERRORS as error:
        raise error_of(error) from error


def _error_without_state(origin: BaseException | None, state: str) -> StoreUnavailableError:
    cause = getattr(origin, "driver_exception", None) or origin
    if isinstance(cause, asyncpg.exceptions.ClientConfigurationError):
        # The text may quote the URL.
        return StoreMisconfiguredError(
            "the rule database cannot be reached with the options of DATABASE_URL"
        )
    if isinstance(cause, asyncpg.TargetServerAttributeNotMatched):
        return StoreUnavailableError(
            "the rule database cannot be reached:"
            " no host matches target_session_attrs (with several hosts by default primary)"
        )
    if isinstance(cause, asyncpg.InterfaceError | asyncpg.InternalClientError):
        return StoreUnavailableError("the rule database cannot be reached")
    return StoreUnavailableError(f"the rule database failed ({state or type(cause).__name__})")


def _error_of_network(origin: OSError) -> StoreUnavailableError:
    if isinstance(origin, TimeoutError):
        return StoreUnavailableError("the rule database did not answer in time")
    if isinstance(origin, ssl.SSLCertVerificationError):
        return StoreMisconfiguredError(
            "the certificate of the rule database cannot be verified with sslrootcert"
        )
    if type(origin) is ConnectionError:
        # The driver raises exactly this class, no subclass, when the server offers no TLS.
        return StoreMisconfiguredError("the rule database refuses TLS, which sslmode requires")
    reason = f": {origin.strerror}" if origin.strerror else ""
    return StoreUnavailableError(f"the rule database cannot be reached{reason}")


async def _lock_schema(connection: AsyncConnection) -> None:
    """Wait for other upgrades; refuse a database whose encoding cannot hold every endpoint."""
    await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
    encoding = await connection.scalar(sa.text("SHOW server_encoding"))
    if encoding != "UTF8":
        message = f"the rule database is encoded in {encoding}; it must be UTF8"
        raise StartupError(message)


def _probe(connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:
    """Probe an idle connection; a dead one invalidates the whole pool."""
    if not entry.info.setdefault("used", False):
        entry.info["used"] = True
        return
    try:
        connection.run_async(lambda driver: driver.execute("SELECT 1"))
    except _LOST as error:
        connection.driver_connection.terminate()
        raise InvalidatePoolError from error


def _cut_if_lost(context: ExceptionContext) -> None:
    """Terminate a connection that SQLAlchemy discards, such as after a command timeout.

    A read-only session may stay so after a switchover: it is discarded with the others in the pool.
    """
    connection = context.connection
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True
    if context.is_disconnect and connection is not None and not connection.invalidated:
        driver: Any = connection.connection.driver_connection
        driver.terminate()
