"""Reconstructs the rules of an earlier revision from the audit trail of all changes since."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.rules.applying import MAX_APPLIED, Change
from ratelimitd.rules.sql.applying import PER_STEP
from ratelimitd.rules.sql.database import rule_audit, rule_audit_changes, rules
from ratelimitd.rules.store import SkippedRow, steps
from ratelimitd.rules.validation import RuleRow, rule_from_row


class _Earliest(NamedTuple):
    """The first change of a rule after a revision; holds the rule before that change, as JSON."""

    revision: int
    before: str | None


async def changes_back_to(to: int, connection: AsyncConnection, current: int) -> Sequence[Change]:
    """Return the changes that restore the rules of the revision ``to``, including rules that stay unchanged.

    Raises:
        RuleInvalidError: there was no such revision, the trail does not have all changes since, too many rules changed,
            or one was invalid then.
    """
    if to > current:
        _refuse(f"there is no such revision: the newest is {current}")
    await _refuse_gaps(connection, to, current)
    earliest: dict[str, _Earliest] = {}
    for trail in (rule_audit.c, rule_audit_changes.c):
        await _find_earliest(connection, trail, to, earliest)
    changes = []
    for ids in steps(
        sorted(earliest), PER_STEP, lambda rule_id: _limits_in(earliest[rule_id].before)
    ):
        now = await _rows(connection, ids)
        for rule_id in ids:
            before, then = now.get(rule_id), _row(earliest[rule_id].before)
            if then is not None:
                same = before is not None and before == then._replace(revision=before.revision)
                then = before if same else then._replace(revision=current + 1)
            if before is not None or then is not None:
                changes.append(Change(before, then))
        await asyncio.sleep(0)
    return sorted(changes, key=_place)


async def _refuse_gaps(connection: AsyncConnection, to: int, current: int) -> None:
    """Refuse if rows of the trail were deleted, or rules were changed outside the service."""
    since = rule_audit.c.revision > to
    entries = await connection.scalar(sa.select(sa.func.count()).where(since))
    of_sets = sa.select(rule_audit.c.after).where(since & (rule_audit.c.action == "apply"))
    expected = [sum(json.loads(text).values()) for text in await connection.scalars(of_sets)]
    noted = sa.select(sa.func.count()).where(rule_audit_changes.c.revision > to)
    if entries != current - to or await connection.scalar(noted) != sum(expected):
        _refuse("the audit trail does not have all changes since")


async def _find_earliest(
    connection: AsyncConnection, trail: Any, to: int, earliest: dict[str, _Earliest]
) -> None:
    """Record the first change of each rule in one table of the trail."""
    columns = (trail.rule_id, trail.revision, trail.before)
    of_rules = (trail.revision > to) & (trail.rule_id != "")
    statement = sa.select(*columns).where(of_rules).order_by(trail.revision)
    async with connection.stream(statement) as result:
        async for rows in result.partitions(PER_STEP):
            for rule_id, *change in rows:
                found = _Earliest(*change)
                if earliest.setdefault(rule_id, found).revision > found.revision:
                    earliest[rule_id] = found
            if len(earliest) > MAX_APPLIED:
                _refuse(f"more than {MAX_APPLIED} rules were changed since")


async def _rows(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, RuleRow]:
    columns = [rules.c[name] for name in RuleRow._fields]
    rows = await connection.execute(sa.select(*columns).where(rules.c.id.in_(ids)))
    return {row.id: RuleRow._make(row) for row in rows}


def _limits_in(text: str | None) -> int:
    """Return about the number of limits in a rule of the trail."""
    return max(1, (text or "").count("{"))  # a rule, its further limits, its plans and theirs


def _row(text: str | None) -> RuleRow | None:
    """Return the row recorded in the trail, which must be a valid rule."""
    if text is None:
        return None
    row = RuleRow(*map(json.loads(text).get, RuleRow._fields))
    rule = rule_from_row(row)
    if isinstance(rule, SkippedRow):
        _refuse(f"the rule {rule.rule_id} was invalid then: {rule.reason}")
    return row


def _place(change: Change) -> tuple[bool, str, str]:
    row = change.after or change.before
    return change.after is None, str(row and row.endpoint), str(row and row.identifier_type)


def _refuse(text: str) -> NoReturn:
    raise RuleInvalidError(FieldViolation("as_of", text))
