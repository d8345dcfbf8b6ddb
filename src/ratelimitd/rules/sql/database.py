"""What the SQL rule store needs of a database, and which of the two kinds a URL names.

Never holds a statement about rules, and knows no driver: those are :mod:`ratelimitd.rules.sql.sqlite` and
:mod:`ratelimitd.rules.sql.postgresql`. See ADR 0024.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import SettingsError
from ratelimitd.rules.sql.sqlite import BUSY_TIMEOUT_S, SqliteDatabase
from ratelimitd.settings import urls

COMMAND_TIMEOUT_S: Final = 3.0
"""Longest wait for a server's answer to one command: they take milliseconds."""

Changed = Callable[[], Awaitable[None]]
"""What is called when the rules may have changed."""


class RuleDatabase(Protocol):
    """A database and the connections to it; it connects when it is first used.

    What a driver raises inside a transaction leaves it as ``StoreUnavailableError``, without SQL or values in its
    message. A transaction is rolled back by any exception, also by a cancelled call.
    """

    place: str
    """Where it is, for a message: no user, no password."""

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction that only reads: all its statements see one state."""

    def writing(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction that writes, committed at the end.

        The lock on the revision is the first thing it must take: on SQLite it has the database's own already.
        """

    def upgrading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction that changes the schema: others, of any process, wait for each other.

        Raises ``StartupError`` at what waiting does not mend, where that can be told.
        """

    async def announce(self, connection: AsyncConnection) -> None:
        """Tell those who listen that the rules changed, once the transaction of ``connection`` is committed."""

    async def listen(self, changed: Changed) -> None:
        """Call ``changed`` at each announcement, until cancelled; return at once where nobody can announce.

        An announcement may be lost, and then nobody is told; ``changed`` is also called without one.
        """

    async def close(self) -> None:
        """Let go of every connection; idempotent."""


def open_database(
    database_url: str,
    *,
    create: bool = False,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
) -> RuleDatabase:
    """The database of a URL. Close it, or its connections live on.

    ``create`` makes a missing SQLite file. ``busy_timeout_s`` is the longest wait for another writer,
    ``command_timeout_s`` for a server's answer to one command.

    Raises:
        SettingsError: the URL names no database.
    """
    try:
        url = urls.parse(database_url)
    except ValueError as error:
        message = f"DATABASE_URL {error}"
        raise SettingsError(message) from None
    if isinstance(url, urls.SqliteFile):
        return SqliteDatabase(url.path, create=create, busy_timeout_s=busy_timeout_s)
    # Its driver takes 100 ms to import, which a node on SQLite need not wait for.
    from ratelimitd.rules.sql.postgresql import PostgresqlDatabase  # noqa: PLC0415

    return PostgresqlDatabase(
        url, busy_timeout_s=busy_timeout_s, command_timeout_s=command_timeout_s
    )
