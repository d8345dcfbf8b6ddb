"""Reads of rules: pages, whole books and what has changed, in steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.model import Rule
from ratelimitd.rules.sql.database import rule_audit, rule_audit_changes, rules
from ratelimitd.rules.store import MAX_PAGE_LIMITS, SkippedRow, limit_count, steps
from ratelimitd.rules.validation import RuleRow, rule_from_row

ROWS_PER_STEP: Final = 128
"""Limits converted from rows to rules per event-loop iteration: about 1 ms at 8 µs a row of one limit."""

COLUMNS: Final = tuple(rules.c[name] for name in RuleRow._fields)
"""The columns of a rule, in the order of ``RuleRow``."""

_LIMITS_OF: Final = attrgetter("limit_count")


class Batch(NamedTuple):
    """The valid rules of some rows, and the invalid rows."""

    rules: list[Rule]
    skipped: list[SkippedRow]


async def _read(connection: AsyncConnection, statement: sa.Select[Any]) -> AsyncGenerator[Batch]:
    """Yield the rules that a statement selects, one batch per event-loop iteration."""
    async with connection.stream(statement) as result:
        async for rows in result.partitions(ROWS_PER_STEP):
            for step in steps(map(RuleRow._make, rows), ROWS_PER_STEP, _LIMITS_OF):
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
        found |= dict.fromkeys(await connection.scalars(statement))
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
