"""Inspects a rule database for `doctor`: its content, and whether a node has all permissions that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from types import MappingProxyType
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.sql.dml import UpdateBase

from ratelimitd.rules.sql.assignments import count_assignments
from ratelimitd.rules.sql.database import (
    assignments,
    current_revision,
    fields_of,
    open_database,
    rule_audit,
    rule_audit_changes,
    rule_revision,
    rules,
    secrets,
)
from ratelimitd.rules.sql.migrations import require_current


class Contents(NamedTuple):
    """The number of rules, the revision of the last change, and the identifier types in use.

    ``plans`` are those that rules name; ``assigned`` is the number of assignments per identifier type and plan.
    """

    rules: int
    revision: int
    types: Sequence[str]
    plans: AbstractSet[str] = frozenset()
    assigned: Mapping[tuple[str, str], int] = MappingProxyType({})


async def inspect(database_url: str) -> Contents:
    """Try every read and write that a node needs, and roll back.

    Raises:
        StoreUnavailableError, StartupError: a node could not use the database; the message says why.
        SettingsError: the URL names no database.
    """
    await require_current(database_url)
    async with aclosing(open_database(database_url)) as database:
        async with database.reading() as connection:
            count = await connection.scalar(sa.select(sa.func.count()).select_from(rules))
            types = await connection.scalars(sa.select(rules.c.identifier_type).distinct())
            revision = await current_revision(connection)
            stored = await connection.scalars(sa.select(rules.c.plans).distinct())
            plans = frozenset(name for text in stored for name in fields_of(text) or ())
            contents = Contents(
                count or 0, revision, types.all(), plans, await count_assignments(connection)
            )
        async with database.writing() as connection:
            for statement in _writes_of_no_row():
                await connection.execute(statement)
            await connection.rollback()
    return contents


def _writes_of_no_row() -> Iterator[UpdateBase]:
    """Yield writes that change no row; the server still checks permissions."""
    # Lock first, so that concurrent inspections wait for each other.
    yield rule_revision.update().values(revision=rule_revision.c.revision)
    for table in (rule_revision, rules, rule_audit, rule_audit_changes, secrets, assignments):
        column = next(iter(table.c))
        no_rows = sa.select(*table.c).where(sa.false())
        yield table.update().where(sa.false()).values({column: column})
        yield table.insert().from_select(list(table.c.keys()), no_rows)
        yield table.delete().where(sa.false())
