"""What a rule database is like, for whoever looks for what is wrong with it. Never leaves a change behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.sql.dml import UpdateBase

from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.migrations import require_current
from ratelimitd.rules.sql.schema import rule_audit, rule_revision, rules, secrets
from ratelimitd.rules.sql.store import current_revision

WRITTEN_TABLES: Final = (rule_revision, rules, rule_audit, secrets)
"""What nodes write to."""


class Contents(NamedTuple):
    """How many rules there are, and the revision of their last change."""

    rules: int
    revision: int


async def inspect(database_url: str) -> Contents:
    """Do once what nodes do: read, and all kinds of writing, which is taken back.

    Raises:
        StoreUnavailableError, StartupError: a node could not use it; the message says why.
        SettingsError: the URL names no database.
    """
    await require_current(database_url)
    database = open_database(database_url)
    try:
        async with database.reading() as connection:
            count = await connection.scalar(sa.select(sa.func.count()).select_from(rules))
            contents = Contents(count or 0, await current_revision(connection))
        async with database.writing() as connection:
            for statement in _writes():
                await connection.execute(statement)
            await connection.rollback()
    finally:
        await database.close()
    return contents


def _writes() -> Iterator[UpdateBase]:
    """Statements that change no row; a server asks for the permission all the same."""
    # First what locks: two that try at once then wait for each other, as nodes do.
    yield rule_revision.update().values(revision=rule_revision.c.revision)
    for table in WRITTEN_TABLES:
        column = next(iter(table.c))
        nothing = sa.select(*table.c).where(sa.false())
        yield table.update().where(sa.false()).values({column: column})
        yield table.insert().from_select(list(table.c.keys()), nothing)
        yield table.delete().where(sa.false())
