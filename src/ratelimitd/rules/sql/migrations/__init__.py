"""The schema's history, and the step that brings a database to its newest revision.

Never changes a database it does not recognise: a file of somebody else, or of a newer release, is left alone.
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
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.schema import rule_revision

VERSION_TABLE: Final = "ratelimitd_schema"
"""Where the database notes its revision; not alembic's own name, so that another program's history is not mistaken."""

UPGRADE_BUSY_TIMEOUT_S: Final = 10.0
"""Longest wait while another process brings the same database up to date."""

UPGRADE_COMMAND_TIMEOUT_S: Final = 60.0
"""Longest wait for one command of an upgrade, where a server answers it: it may build an index."""

# It tells of each step at level info; what matters of that is in our own errors.
logging.getLogger("alembic").setLevel(logging.WARNING)


async def upgrade(
    database_url: str, *, create: bool = True, busy_timeout_s: float = UPGRADE_BUSY_TIMEOUT_S
) -> None:
    """Bring the schema to the newest revision. Nothing happens to a current one. Several processes may do it at once.

    Args:
        database_url: the database.
        create: make a SQLite file if there is none.
        busy_timeout_s: longest wait for another process that writes.

    Raises:
        StartupError: the database is not ours, of a newer release, not writable, or the disk is full: waiting is in
            vain.
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
    """See that the schema is of this release, and change nothing.

    Raises:
        StoreUnavailableError: it is missing or older, until somebody upgrades it; or as :func:`upgrade`.
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
    # On a file that may only be read a transaction begins all the same; it is the first write that fails.
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
    """The revision of the schema, ``None`` before the first. One that is not of our history is refused."""
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
