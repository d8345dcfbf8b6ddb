"""The schema's migrations, and the upgrade of a database to the newest one.

Refuses a database with tables of another program or with the schema of a newer release.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.rules.sql.database import open_database, rule_revision

VERSION_TABLE: Final = "ratelimitd_schema"
"""Table of the schema revision; not alembic's default name, which another program may use in the same database."""

UPGRADE_BUSY_TIMEOUT_S: Final = 10.0
"""Longest wait for another process that upgrades the same database."""

UPGRADE_COMMAND_TIMEOUT_S: Final = 60.0
"""Longest wait for one command of an upgrade, which may build an index."""

# Alembic logs each step at level info.
logging.getLogger("alembic").setLevel(logging.WARNING)


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
    try:
        async with database.upgrading() as connection:
            await connection.run_sync(_upgrade, database.place)
    finally:
        await database.close()


async def require_current(database_url: str) -> None:
    """Verify that the schema is that of this release; change nothing.

    Raises:
        StoreUnavailableError: it is missing or older; or as :func:`upgrade`.
        StartupError: as :func:`upgrade`.
    """
    database = open_database(database_url)
    try:
        async with database.reading() as connection:
            await connection.run_sync(_require_current, database.place)
    finally:
        await database.close()


def _upgrade(connection: sa.Connection, place: str) -> None:
    config = _config()
    config.attributes["connection"] = connection
    _known_revision(connection, ScriptDirectory.from_config(config), place)
    command.upgrade(config, "head")
    # A transaction begins on a read-only file, too; only a write shows that it fails.
    connection.execute(rule_revision.update().values(revision=rule_revision.c.revision))


def _require_current(connection: sa.Connection, place: str) -> None:
    script = ScriptDirectory.from_config(_config())
    found, newest = _known_revision(connection, script, place), script.get_current_head()
    if found != newest:
        state = f"is of an older release (schema {found})" if found else "has no tables yet"
        message = f"the rule database {state}: run `ratelimitd db upgrade`: {place}"
        raise StoreUnavailableError(message)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _known_revision(connection: sa.Connection, script: ScriptDirectory, place: str) -> str | None:
    """Return the revision of the schema, ``None`` before the first; refuse an unknown one."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found = context.get_current_revision()
    if found is None:
        if sa.inspect(connection).get_table_names():
            message = f"the database holds tables that are not ratelimitd's: {place}"
            raise StartupError(message)
        return None
    known = {revision.revision for revision in script.walk_revisions()}
    if found not in known:
        newest = script.get_current_head()
        message = (
            f"the database was written by a newer ratelimitd (schema {found}, this one knows up to"
            f" {newest}): {place}"
        )
        raise StartupError(message)
    return found
