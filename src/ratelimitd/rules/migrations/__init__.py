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
from sqlalchemy.exc import SQLAlchemyError

from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.rules import database
from ratelimitd.rules.schema import rule_revision

VERSION_TABLE: Final = "ratelimitd_schema"
"""Where the database notes its revision; not alembic's own name, so that another program's history is not mistaken."""

UPGRADE_BUSY_TIMEOUT_S: Final = 10.0
"""Longest wait while another process of this host brings the same file up to date."""

# It tells of each step at level info; what matters of that is in our own errors.
logging.getLogger("alembic").setLevel(logging.WARNING)


async def upgrade(
    database_url: str, *, create: bool = True, busy_timeout_s: float = UPGRADE_BUSY_TIMEOUT_S
) -> None:
    """Bring the schema to the newest revision. Nothing happens to a current one. Several processes may do it at once.

    Args:
        database_url: the database.
        create: make the file if there is none.
        busy_timeout_s: longest wait for another process that writes.

    Raises:
        StartupError: the file is not ours, of a newer release, not writable, or the disk is full: waiting is in vain.
        StoreUnavailableError: it is locked, damaged or cannot be opened.
        SettingsError: the URL is not one of SQLite.
    """
    path = database.sqlite_path(database_url)
    engine = database.open_engine(path, create=create, busy_timeout_s=busy_timeout_s)
    try:
        async with database.writing(engine).begin() as connection:
            await connection.run_sync(_upgrade, path)
    except SQLAlchemyError as error:
        message = f"{database.meaning_of(error)}: {path}"
        if database.needs_mending(error, path):
            raise StartupError(message) from error
        raise StoreUnavailableError(message) from error
    finally:
        await database.close_engine(engine)


def _upgrade(connection: sa.Connection, path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    _refuse_unknown(connection, ScriptDirectory.from_config(config), path)
    command.upgrade(config, "head")
    # On a file that may only be read a transaction begins all the same; it is the first write that fails.
    connection.execute(rule_revision.update().values(revision=rule_revision.c.revision))


def _refuse_unknown(connection: sa.Connection, script: ScriptDirectory, path: Path) -> None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found = context.get_current_revision()
    if found is None:
        if sa.inspect(connection).get_table_names():
            message = f"the database holds tables that are not ratelimitd's: {path}"
            raise StartupError(message)
        return
    known = {revision.revision for revision in script.walk_revisions()}
    if found not in known:
        newest = script.get_current_head()
        message = (
            f"the database was written by a newer ratelimitd (schema {found}, this one knows up to"
            f" {newest}): {path}"
        )
        raise StartupError(message)
