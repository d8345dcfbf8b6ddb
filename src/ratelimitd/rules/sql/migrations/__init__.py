"""Creates the schema of a new rule database, and upgrades an older one by migrations.

Refuses a database with tables of another program or with the schema of a newer release. Only an older database needs
Alembic, which takes 0.15 s to import.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from ratelimitd.errors import SchemaOlderError, StartupError, StoreUnavailableError
from ratelimitd.rules.sql.database import (
    REVISIONS,
    VERSION_TABLE,
    metadata,
    older_schema,
    open_database,
    rule_revision,
    schema_version,
)

UPGRADE_BUSY_TIMEOUT_S: Final = 10.0
"""Longest wait for another process that upgrades the same database."""

UPGRADE_COMMAND_TIMEOUT_S: Final = 60.0
"""Longest wait for one command of an upgrade, which may build an index."""


async def upgrade(
    database_url: str, *, create: bool = True, busy_timeout_s: float = UPGRADE_BUSY_TIMEOUT_S
) -> None:
    """Upgrade the schema to the newest revision; several processes may do so at once.

    Args:
        database_url: the database.
        create: create a missing SQLite file.
        busy_timeout_s: longest wait for another process that writes.

    Raises:
        StartupError: a retry cannot succeed: another program's database, a newer schema, not writable, disk full.
        StoreUnavailableError: it is locked, damaged or cannot be opened.
        SettingsError: the URL names no database.
    """
    database = open_database(
        database_url,
        create=create,
        busy_timeout_s=busy_timeout_s,
        command_timeout_s=UPGRADE_COMMAND_TIMEOUT_S,
    )
    async with aclosing(database), database.upgrading() as connection:
        await connection.run_sync(_upgrade, database.place)


async def require_current(database_url: str) -> None:
    """Verify that the schema is that of this release; change nothing.

    Raises:
        StoreUnavailableError: it is missing or older; or as :func:`upgrade`.
        StartupError: as :func:`upgrade`.
    """
    async with aclosing(open_database(database_url)) as database, database.reading() as connection:
        await connection.run_sync(_require_current, database.place)


def _upgrade(connection: sa.Connection, place: str) -> None:
    found = _revision(connection, place)
    if found is None:
        metadata.create_all(connection, checkfirst=False)
        connection.execute(rule_revision.insert().values(only=1, revision=0))
        schema_version.create(connection)
        connection.execute(schema_version.insert().values(version_num=REVISIONS[-1]))
    elif found != REVISIONS[-1]:
        migrate(connection, REVISIONS[-1])
    # A transaction begins on a read-only file, too; only a write shows that it fails.
    connection.execute(rule_revision.update().values(revision=rule_revision.c.revision))


def migrate(connection: sa.Connection, revision: str) -> None:
    """Apply the migrations up to ``revision``, in the transaction of ``connection``."""
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    # It logs each step at level info.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _require_current(connection: sa.Connection, place: str) -> None:
    found = _revision(connection, place)
    if found is None:
        message = f"the rule database has no tables yet: run `ratelimitd db upgrade`: {place}"
        raise StoreUnavailableError(message)
    if found != REVISIONS[-1]:
        message = f"{older_schema(found)}: {place}"
        raise SchemaOlderError(message)


def _revision(connection: sa.Connection, place: str) -> str | None:
    """Return the revision of the schema, ``None`` for an empty database; refuse an unknown one."""
    inspector = sa.inspect(connection)
    tables = inspector.get_table_names()
    if not tables and not inspector.get_view_names():
        return None
    found = connection.scalar(sa.select(schema_version)) if VERSION_TABLE in tables else None
    if found is None:
        message = f"the database holds tables that are not ratelimitd's: {place}"
        raise StartupError(message)
    if found not in REVISIONS:
        message = (
            f"the database was written by a newer ratelimitd (schema {found}, this one knows up to"
            f" {REVISIONS[-1]}): {place}"
        )
        raise StartupError(message)
    revision: str = found
    return revision
