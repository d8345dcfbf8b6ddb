"""Reads of rules in steps: pages, whole books and what has changed; and pages of the audit trail.

The trail of one rule includes its changes that were made as part of a whole set.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.model import Rule
from ratelimitd.rules.sql.database import fields_of, rule_audit, rule_audit_changes, rules
from ratelimitd.rules.store import (
    MAX_PAGE_LIMITS,
    AuditEntry,
    AuditFilter,
    SkippedRow,
    limit_count,
    steps,
)
from ratelimitd.rules.validation import RuleRow, rule_from_row

ROWS_PER_STEP: Final = 128
"""Limits converted from rows to rules per event-loop iteration: about 1 ms at 8 µs a row of one limit."""

COLUMNS: Final = tuple(rules.c[name] for name in RuleRow._fields)
"""The columns of a rule, in the order of ``RuleRow``."""

_AT: Final = rule_audit.c.at
_OLDEST, _NEWEST = (
    sa.literal(datetime(*day, tzinfo=UTC), _AT.type) for day in ((1, 1, 2), (9999, 12, 31))
)
_SHOWN_AT: Final = sa.case((_AT < _OLDEST, _OLDEST), (_AT > _NEWEST, _NEWEST), else_=_AT)
"""The time of a change; one written outside the service may be in a year that Python does not have."""


class Batch(NamedTuple):
    """The valid rules of some rows, and the invalid rows."""

    rules: list[Rule]
    skipped: list[SkippedRow]


async def _read(connection: AsyncConnection, statement: sa.Select[Any]) -> AsyncGenerator[Batch]:
    """Yield the rules that a statement selects, one batch per event-loop iteration."""
    async with connection.stream(statement) as result:
        async for rows in result.partitions(ROWS_PER_STEP):
            for step in steps(map(RuleRow._make, rows), ROWS_PER_STEP, attrgetter("limit_count")):
                batch = Batch([], [])
                for row in step:
                    rule = rule_from_row(row)
                    if isinstance(rule, Rule):
                        batch.rules.append(rule)
                    else:
                        batch.skipped.append(rule)
                yield batch
                await asyncio.sleep(0)


async def read_rules(connection: AsyncConnection, statement: sa.Select[Any]) -> Batch:
    """Return all batches of :func:`_read` as one."""
    whole = Batch([], [])
    async for batch in _read(connection, statement):
        whole.rules.extend(batch.rules)
        whole.skipped.extend(batch.skipped)
    return whole


async def read_removed_ids(connection: AsyncConnection, revision: int) -> Sequence[str]:
    """Return the ids of the rules that were deleted after ``revision``; some may exist again."""
    found: dict[str, None] = {}
    for trail in (rule_audit.c, rule_audit_changes.c):
        deletions = (trail.revision > revision) & (trail.action == "delete")
        # No DISTINCT: SQLite would walk the index of the rules through the whole trail.
        statement = sa.select(trail.rule_id).where(deletions & (trail.rule_id != ""))
        async with connection.stream(statement) as result:
            async for rows in result.partitions(ROWS_PER_STEP):
                found |= dict.fromkeys(rule_id for (rule_id,) in rows)
                await asyncio.sleep(0)
    return list(found)


async def read_page(  # noqa: PLR0917 -- as RuleStore.page
    connection: AsyncConnection,
    endpoint: str,
    identifier_type: str,
    after: tuple[str, str] | None,
    size: int,
) -> Sequence[Rule]:
    """Return a page, as :meth:`ratelimitd.rules.store.RuleStore.page` does."""
    statement = sa.select(*COLUMNS).order_by(rules.c.endpoint, rules.c.identifier_type)
    if endpoint:
        statement = statement.where(rules.c.endpoint == endpoint)
    if identifier_type:
        statement = statement.where(rules.c.identifier_type == identifier_type)
    if after is not None:
        place = sa.tuple_(rules.c.endpoint, rules.c.identifier_type)
        statement = statement.where(place > sa.tuple_(*after))
    found: list[Rule] = []
    limits = 0
    # No LIMIT: invalid rows do not count, and rows after the page are never fetched.
    async with aclosing(_read(connection, statement)) as batches:
        while (
            len(found) < size
            and limits < MAX_PAGE_LIMITS
            and (batch := await anext(batches, None)) is not None
        ):
            found += batch.rules
            limits += sum(map(limit_count, batch.rules))
    return found[:size]


async def read_trail(  # noqa: PLR0917 -- as RuleStore.audit
    connection: AsyncConnection, rule_id: str, before: int | None, size: int, wanted: AuditFilter
) -> Sequence[AuditEntry]:
    """Return a page of the trail, as :meth:`ratelimitd.rules.store.RuleStore.audit` does."""
    found: list[AuditEntry] = []
    for trail in (rule_audit, rule_audit_changes) if rule_id else (rule_audit,):
        statement = _selected(_trail(trail, rule_id, before, size), trail, wanted)
        rows = await connection.execute(statement)
        found += [_audit_entry(AuditEntry._make(row)) for row in rows]
    return sorted(found, key=lambda entry: -entry.revision)[:size]


def _trail(changes: sa.Table, rule_id: str, before: int | None, size: int) -> sa.Select[Any]:
    """Select a page of one table of the audit trail, with the actor and the time of each change."""
    columns = (
        _SHOWN_AT.label(name) if name == "at" else changes.c.get(name, rule_audit.c[name])
        for name in AuditEntry._fields
    )
    statement = sa.select(*columns).order_by(changes.c.revision.desc()).limit(size)
    if changes is not rule_audit:
        statement = statement.join(rule_audit, rule_audit.c.revision == changes.c.revision)
    if rule_id:
        statement = statement.where(changes.c.rule_id == rule_id)
    return statement if before is None else statement.where(changes.c.revision < before)


def _selected(statement: sa.Select[Any], changes: sa.Table, wanted: AuditFilter) -> sa.Select[Any]:
    """Add the conditions of a filter to a statement of :func:`_trail`."""
    if wanted.actor:
        statement = statement.where(rule_audit.c.actor.icontains(wanted.actor, autoescape=True))
    if wanted.action:
        statement = statement.where(changes.c.action == wanted.action)
    if wanted.since is not None:
        statement = statement.where(rule_audit.c.at >= wanted.since)
    if wanted.until is not None:
        statement = statement.where(rule_audit.c.at < wanted.until)
    if wanted.text:
        of_set = rule_audit_changes.alias()
        in_set = sa.exists().where(
            (of_set.c.revision == changes.c.revision) & _mentions(of_set, wanted.text)
        )
        of_rule = (changes.c.rule_id != "") & _mentions(changes, wanted.text)
        statement = statement.where(of_rule | ((changes.c.action == "apply") & in_set))
    return statement


def _mentions(changes: sa.FromClause, text: str) -> sa.ColumnElement[bool]:
    """Return a condition: the fields of a change, stored as JSON, contain ``text``."""
    written = json.dumps(text)[1:-1]
    return sa.or_(
        *(changes.c[name].icontains(written, autoescape=True) for name in ("before", "after"))
    )


def _audit_entry(row: AuditEntry) -> AuditEntry:
    """Return the change of a row; SQLite drops the time zone, which is always UTC."""
    at = row.at if row.at.tzinfo else row.at.replace(tzinfo=UTC)
    return row._replace(at=at, before=fields_of(row.before), after=fields_of(row.after))
