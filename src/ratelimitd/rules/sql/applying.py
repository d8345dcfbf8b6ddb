"""Applies a whole set of rules in SQL: compares it with the stored rules and writes it in one revision.

The audit trail gets one row, and ``rule_audit_changes`` one row per changed rule. See ADR 0058.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import RuleBookConflictError
from ratelimitd.rules.applying import ACTIONS, BookDiff, Change
from ratelimitd.rules.sql.database import rule_audit, rule_audit_changes, rules
from ratelimitd.rules.store import RuleDraft, limit_count, steps
from ratelimitd.rules.validation import RuleRow

PER_STEP: Final = 64
"""Limits validated, compared or written per event-loop iteration: about 1 ms. A rule has up to 264, in plans."""

_CONTROL: Final = sa.literal("\x01")
"""A control character, which is in no valid endpoint."""


async def want_all(diff: BookDiff, drafts: Iterable[RuleDraft]) -> None:
    """Validate wanted rules, in steps.

    Raises:
        RuleInvalidError: names the violated fields.
    """
    for step in steps(drafts, PER_STEP, limit_count):
        for draft in step:
            diff.want(draft)
        await asyncio.sleep(0)
    diff.refuse()


async def changes_of(diff: BookDiff, connection: AsyncConnection, current: int) -> Sequence[Change]:
    """Return the changes of all wanted rules and the deletions, relative to the revision ``current``.

    Raises as ``diff`` does.
    """
    columns = [rules.c[name] for name in RuleRow._fields]
    statement = sa.select(*columns).order_by(rules.c.endpoint, rules.c.identifier_type)
    async with connection.stream(statement) as result:
        async for rows in result.partitions(PER_STEP):
            for row in rows:
                diff.see(RuleRow._make(row))
    changes: list[Change] = []
    for step in steps(diff.changes(current + 1), PER_STEP, _limits_of):
        changes += step
        await asyncio.sleep(0)
    diff.refuse()
    return changes


async def refuse_changes_after(connection: AsyncConnection, since: int, current: int) -> None:
    """Refuse a set that was prepared for an earlier state of the rules.

    Raises:
        RuleBookConflictError: a rule was changed after ``since``, or there was no such revision.
    """
    of_rules = (rule_audit.c.rule_id != "") | (rule_audit.c.action == "apply")
    for statement in (
        sa.select(rules.c.revision).where(rules.c.revision > since),
        sa.select(rule_audit.c.revision).where((rule_audit.c.revision > since) & of_rules),
    ):
        # equivalent: of several rows the first would be taken
        if since > current or await connection.scalar(statement.limit(1)) is not None:
            message = f"revision: rules were changed after {since}: the revision is {current} now"
            raise RuleBookConflictError(message)


async def write(connection: AsyncConnection, changes: Iterable[Change], now: datetime) -> None:
    """Write changed rules; rules may swap endpoints."""
    of = _by_action(changes)
    by_id = rules.c.id == sa.bindparam("of_id")
    for step in steps((row.id for row, _ in of["delete"]), PER_STEP):
        await connection.execute(rules.delete().where(rules.c.id.in_(step)))
    # Endpoints must stay unique at every step: first, rules that move get a temporary one that no rule can have.
    moved = (before.id for before, after in of["update"] if _pair(before) != _pair(after))
    for step in steps(moved, PER_STEP):
        parked = rules.update().where(rules.c.id.in_(step))
        await connection.execute(parked.values(endpoint=_CONTROL + rules.c.id))
    for updated in steps(of["update"], PER_STEP):
        values = [{**after._asdict(), "updated_at": now, "of_id": after.id} for _, after in updated]
        await connection.execute(rules.update().where(by_id), values)
    for created in steps(of["create"], PER_STEP):
        values = [{**after._asdict(), "created_at": now, "updated_at": now} for _, after in created]
        await connection.execute(rules.insert(), values)


async def record(
    connection: AsyncConnection,
    changes: Iterable[Change],
    revision: int,
    text_of: Callable[[RuleRow | None], str | None],
) -> None:
    """Insert the changes into ``rule_audit_changes``."""
    for step in steps(changes, PER_STEP, _limits_of):
        rows = [
            {
                "revision": revision,
                "rule_id": one.rule_id,
                "action": one.action,
                "before": text_of(one.before),
                "after": text_of(one.after),
            }
            for one in step
        ]
        await connection.execute(rule_audit_changes.insert(), rows)


def _limits_of(change: Change) -> int:
    return sum(row.limit_count for row in change if row is not None)


def _by_action(changes: Iterable[Change]) -> dict[str, list[Any]]:
    of: dict[str, list[Any]] = {action: [] for action in ACTIONS}
    for one in changes:
        of[one.action].append(one)
    return of


def _pair(row: RuleRow) -> tuple[Any, Any]:
    return row.endpoint, row.identifier_type
