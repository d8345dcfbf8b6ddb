"""The rule database: its tables, the adapter interface, and the selection of the adapter by URL.

The tables are portable between SQLite and PostgreSQL. Their constraints repeat :mod:`ratelimitd.rules.validation`,
because other writers may bypass the service. :mod:`ratelimitd.rules.sql.migrations` creates them. See ADR 0024.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import SchemaOlderError, SettingsError
from ratelimitd.rules.sql.sqlite import BUSY_TIMEOUT_S, POOL_TIMEOUT_S, SqliteDatabase
from ratelimitd.settings import urls

COMMAND_TIMEOUT_S: Final = 3.0
"""Longest wait for a server's answer to one command; commands take milliseconds."""


class RuleDatabase(Protocol):
    """A database and its connections; connects on first use.

    A driver error inside a transaction is raised as ``StoreUnavailableError``, without SQL or values in the message.
    Any exception rolls the transaction back, including cancellation.
    """

    place: str
    """Host and database, or the file, for messages; never user or password."""

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Begin a read-only transaction; all its statements see one snapshot."""

    def writing(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Begin a transaction and commit it at its end.

        Its first statement must lock the revision; SQLite locks the whole database at the begin.
        """

    def upgrading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Begin a transaction that changes the schema; concurrent upgrades by other processes wait.

        Raises ``StartupError`` where a retry cannot succeed.
        """

    async def aclose(self) -> None:
        """Close every connection; idempotent."""


def open_database(
    database_url: str,
    *,
    create: bool = False,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
    pool_timeout_s: float = POOL_TIMEOUT_S,
) -> RuleDatabase:
    """Return the database of a URL; the caller closes it.

    Args:
        database_url: the setting.
        create: create a missing SQLite file.
        busy_timeout_s: longest wait for another writer.
        command_timeout_s: longest wait for a server's answer to one command.
        pool_timeout_s: longest wait for a free connection.

    Raises:
        SettingsError: the URL names no database.
    """
    try:
        url = urls.parse_database_url(database_url)
    except ValueError as error:
        message = f"DATABASE_URL {error}"
        raise SettingsError(message) from None
    if isinstance(url, urls.SqliteFile):
        return SqliteDatabase(
            url.path, create=create, busy_timeout_s=busy_timeout_s, pool_timeout_s=pool_timeout_s
        )
    # The driver takes 100 ms to import; a node on SQLite does without it.
    from ratelimitd.rules.sql.postgresql import PostgresqlDatabase  # noqa: PLC0415

    return PostgresqlDatabase(
        url,
        busy_timeout_s=busy_timeout_s,
        command_timeout_s=command_timeout_s,
        pool_timeout_s=pool_timeout_s,
    )


REVISIONS: Final = tuple(f"{number:04}" for number in range(1, 9))
"""The files of :mod:`ratelimitd.rules.sql.migrations`, from the oldest; the tables below are those of the last."""

VERSION_TABLE: Final = "ratelimitd_schema"
"""Table of the schema revision; not alembic's default name, which another program may use in the same database."""

schema_version: Final = sa.Table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32)),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""As Alembic creates it."""

MAX_ACTOR_CHARS: Final = 255

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

metadata = sa.MetaData()

# Sorted by bytes, as SQLite does; PostgreSQL needs the collation.
_TEXT: Final = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")

rules = sa.Table(
    "rules",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("endpoint", _TEXT, nullable=False),
    sa.Column("identifier_type", _TEXT, nullable=False),
    sa.Column("limit", sa.Integer, nullable=False),
    sa.Column("window_seconds", sa.Integer, nullable=False),
    sa.Column("algorithm", sa.String(50), nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("limits", sa.Text),
    sa.Column("plans", sa.Text),
    sa.UniqueConstraint("endpoint", "identifier_type", name="rules_pair_unique"),
    sa.CheckConstraint("length(endpoint) BETWEEN 1 AND 255", name="rules_endpoint_length"),
    sa.CheckConstraint('"limit" BETWEEN 1 AND 2147483647', name="rules_limit"),
    sa.CheckConstraint("window_seconds BETWEEN 1 AND 2147483647", name="rules_window_seconds"),
    sa.CheckConstraint(
        "algorithm IN ('token_bucket', 'sliding_window', 'fixed_window', 'concurrency')",
        name="rules_algorithm",
    ),
    sa.Index("rules_revision", "revision"),
)
"""``revision`` is the store's revision at the rule's last change; times are UTC."""

rule_revision = sa.Table(
    "rule_revision",
    metadata,
    sa.Column("only", sa.Integer, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("assignments", sa.BigInteger, nullable=False, server_default="0"),
    sa.CheckConstraint('"only" = 1', name="rule_revision_one_row"),
)
"""One row: the revision of the last change, and the number of assignments, which is slow to count.

Writers lock it first, so revisions are in commit order.
"""

_NAME: Final = sa.String(32).with_variant(sa.String(32, collation="C"), "postgresql")

assignments = sa.Table(
    "assignments",
    metadata,
    sa.Column("identifier_type", _NAME, primary_key=True),
    sa.Column("identifier", sa.LargeBinary, primary_key=True),
    sa.Column("plan", _NAME, nullable=False),
    sa.Column("expire_time", sa.BigInteger, nullable=False),
    sa.Column("note", sa.String(255), nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.CheckConstraint(
        "length(identifier) BETWEEN 1 AND 256", name="assignments_identifier_length"
    ),
    sa.CheckConstraint("length(plan) BETWEEN 1 AND 32", name="assignments_plan_length"),
    sa.CheckConstraint("expire_time BETWEEN 0 AND 8589934591", name="assignments_expire_time"),
    sa.Index("assignments_revision", "revision"),
    sa.Index("assignments_plan", "plan", "identifier_type", "identifier"),
    sa.Index("assignments_expire_time", "expire_time"),
)
"""The plan of each identity. Identifiers are bytes: PostgreSQL's text rejects NUL, and both databases sort bytes alike.

``expire_time`` is in Unix seconds, 0 = never; ``revision`` is the store's at the last change.
"""

rule_audit = sa.Table(
    "rule_audit",
    metadata,
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("action", sa.String(10), nullable=False),
    sa.Column("rule_id", sa.String(36), nullable=False),
    sa.Column("before", sa.Text, nullable=True),
    sa.Column("after", sa.Text, nullable=True),
    sa.Column("identifier_type", sa.String(32)),
    sa.Column("identifier", sa.LargeBinary),
    sa.CheckConstraint(
        "action IN ('create', 'update', 'delete', 'apply')", name="rule_audit_action"
    ),
    sa.Index("rule_audit_rule", "rule_id", "revision"),
    sa.Index("rule_audit_identity", "identifier_type", "identifier", "revision"),
)
"""One row per revision: who changed what and when; ``before`` and ``after`` are JSON, NULL where there was none.

A change of an assignment has an empty ``rule_id`` and names the identity. An ``apply`` has an empty ``rule_id``, too,
and its changes in ``rule_audit_changes``.
"""

rule_audit_changes = sa.Table(
    "rule_audit_changes",
    metadata,
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("rule_id", sa.String(36), primary_key=True),
    sa.Column("action", sa.String(10), nullable=False),
    sa.Column("before", sa.Text, nullable=True),
    sa.Column("after", sa.Text, nullable=True),
    sa.CheckConstraint(
        "action IN ('create', 'update', 'delete')", name="rule_audit_changes_action"
    ),
    sa.Index("rule_audit_changes_rule", "rule_id", "revision"),
)
"""The changes of each ``apply`` in the audit trail: one row per rule."""

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.String(50), primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
)
"""Random values shared by all nodes, such as the key that hashes bucket keys."""


async def current_revision(connection: AsyncConnection) -> int:
    """Return the revision of the last change, 0 before the first."""
    return await connection.scalar(sa.select(rule_revision.c.revision)) or 0


async def is_standby(connection: AsyncConnection) -> bool:
    """Return whether the server is a standby, which may lack edits of its primary."""
    if connection.dialect.name != "postgresql":
        return False
    return bool(await connection.scalar(sa.select(sa.func.pg_is_in_recovery())))


async def next_revision(connection: AsyncConnection) -> int:
    """Return the next revision, and lock out other writers until the transaction ends.

    Raises:
        SchemaOlderError: nodes of this release do not read the database until it is upgraded, so no edit is in force.
    """
    # SQLite ignores FOR UPDATE: its transaction began with the write lock. On PostgreSQL the next writer waits for
    # the commit, so a reader of a revision sees every change up to it.
    schema = sa.select(schema_version.c.version_num).scalar_subquery()
    locked = sa.select(rule_revision.c.revision, schema).with_for_update()
    revision, found = (await connection.execute(locked)).one()
    # That of a newer release is compatible.
    if found in REVISIONS[:-1]:
        raise SchemaOlderError(older_schema(found))
    return int(revision) + 1


def older_schema(found: str) -> str:
    """Return the error about a database with an older revision of the schema."""
    return f"the rule database is of an older release (schema {found}): run `ratelimitd db upgrade`"


def at_time(now_us: int) -> datetime:
    """Return a time in µs since the Unix epoch as a value of the audit trail."""
    return _EPOCH + timedelta(microseconds=now_us)


def storable(actor: str) -> str:
    """Return ``actor`` in characters that every database can store; a certificate may contain others."""
    return actor.encode(errors="replace").decode().replace("\0", "?")[:MAX_ACTOR_CHARS]


def fields_of(text: Any) -> Mapping[str, Any] | None:
    """Return the fields of a rule from their JSON; ``None`` when it is not an object."""
    try:
        found = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
