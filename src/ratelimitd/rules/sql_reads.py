"""What the SQL rule store asks the database: rules in batches, the revision, the deletions since another, changes.

Never writes, and never begins a transaction: the caller's makes one snapshot of all it reads.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import RuleConflictError, RuleNotFoundError
from ratelimitd.model import Rule
from ratelimitd.rules.schema import rule_audit, rule_revision, rules
from ratelimitd.rules.store import AuditEntry, SkippedRow
from ratelimitd.rules.validation import RuleRow, etag_of, rule_from_row

ROWS_PER_TURN: Final = 128
"""Rows turned into rules in one turn of the event loop: about 1 ms at 8 µs a row."""

COLUMNS: Final = tuple(rules.c[name] for name in RuleRow._fields)
"""What a rule is made of, in the order of ``RuleRow``."""


class Batch(NamedTuple):
    """What some rows turned out to be."""

    rules: list[Rule]
    skipped: list[SkippedRow]


async def read(connection: AsyncConnection, statement: sa.Select[Any]) -> AsyncGenerator[Batch]:
    """The rules a statement selects, in batches with a turn of the event loop between two."""
    async with connection.stream(statement) as result:
        async for rows in result.partitions(ROWS_PER_TURN):
            batch = Batch([], [])
            for row in rows:
                rule = rule_from_row(RuleRow._make(row))
                if isinstance(rule, Rule):
                    batch.rules.append(rule)
                else:
                    batch.skipped.append(rule)
            yield batch


async def read_all(connection: AsyncConnection, statement: sa.Select[Any]) -> Batch:
    """All of :func:`read` in one."""
    whole = Batch([], [])
    async for batch in read(connection, statement):
        whole.rules.extend(batch.rules)
        whole.skipped.extend(batch.skipped)
    return whole


async def current_revision(connection: AsyncConnection) -> int:
    """The revision of the last change, 0 before the first."""
    return await connection.scalar(sa.select(rule_revision.c.revision)) or 0


async def removed_since(connection: AsyncConnection, revision: int) -> Sequence[str]:
    """The ids of the rules that were deleted after ``revision``; some may have been made again."""
    deletions = (rule_audit.c.revision > revision) & (rule_audit.c.action == "delete")
    found = await connection.scalars(sa.select(rule_audit.c.rule_id).where(deletions).distinct())
    return found.all()


async def audit_entries(
    connection: AsyncConnection, rule_id: str, before: int | None, size: int
) -> Sequence[AuditEntry]:
    """A page of the audit trail, the newest change first."""
    columns = [rule_audit.c[name] for name in AuditEntry._fields]
    statement = sa.select(*columns).order_by(rule_audit.c.revision.desc()).limit(size)
    if rule_id:
        statement = statement.where(rule_audit.c.rule_id == rule_id)
    if before is not None:
        statement = statement.where(rule_audit.c.revision < before)
    return [_audit_entry(AuditEntry._make(row)) for row in await connection.execute(statement)]


async def stored_row(connection: AsyncConnection, rule_id: str, etag: str) -> RuleRow:
    """The row of a rule, which need not be a valid one.

    Raises:
        RuleNotFoundError: no rule has this id.
        RuleConflictError: ``etag`` is given and is not the row's.
    """
    row = (await connection.execute(sa.select(*COLUMNS).where(rules.c.id == rule_id))).one_or_none()
    if row is None:
        raise RuleNotFoundError(rule_id)
    found = RuleRow._make(row)
    if etag and etag != etag_of(found):
        message = "the rule was changed meanwhile: read it again and send its new etag"
        raise RuleConflictError(message)
    return found


def _audit_entry(row: AuditEntry) -> AuditEntry:
    """The change that a row tells of. SQLite keeps no time zone: its times are in UTC, as they were written."""
    at = row.at if row.at.tzinfo else row.at.replace(tzinfo=UTC)
    return row._replace(at=at, before=_fields(row.before), after=_fields(row.after))


def _fields(text: Any) -> Mapping[str, Any] | None:
    """The fields of a rule as the audit trail holds them; of what is no such text none."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
