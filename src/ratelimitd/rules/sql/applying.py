"""Applies a whole set of rules in SQL: compares it with the stored rules and writes it in one revision.

The set is wanted by a caller, or reconstructed as of an earlier revision from the audit trail of all changes since. The
trail gets one row, and ``rule_audit_changes`` one row per changed rule. See ADR 0058.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.errors import FieldViolation, RuleBookConflictError, RuleInvalidError
from ratelimitd.rules.applying import ACTIONS, MAX_APPLIED, BookDiff, Change
from ratelimitd.rules.sql.database import fields_of, rule_audit, rule_audit_changes, rules
from ratelimitd.rules.sql.reading import COLUMNS
from ratelimitd.rules.store import RuleDraft, SkippedRow, limit_count, steps
from ratelimitd.rules.validation import RuleRow, rule_from_row

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
    statement = sa.select(*COLUMNS).order_by(rules.c.endpoint, rules.c.identifier_type)
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


async def record(connection: AsyncConnection, changes: Iterable[Change], revision: int) -> None:
    """Insert the changes into ``rule_audit_changes``."""
    for step in steps(changes, PER_STEP, _limits_of):
        rows = [trail_row(revision, one) for one in step]
        await connection.execute(rule_audit_changes.insert(), rows)


def trail_row(revision: int, change: Change) -> dict[str, object]:
    """Return a change in the columns that both tables of the trail have."""
    before, after = map(_json, change)
    return {
        "revision": revision,
        "rule_id": change.rule_id,
        "action": change.action,
        "before": before,
        "after": after,
    }


def _json(row: RuleRow | None) -> str | None:
    if row is None:
        return None
    fields = row._asdict()
    for name in ("limits", "plans"):
        if fields[name] is None:
            del fields[name]
    # A row written outside the service may hold values that JSON cannot express, such as bytes.
    return json.dumps(fields, default=repr)


def _limits_of(change: Change) -> int:
    return sum(row.limit_count for row in change if row is not None)


def _by_action(changes: Iterable[Change]) -> dict[str, list[Any]]:
    of: dict[str, list[Any]] = {action: [] for action in ACTIONS}
    for one in changes:
        of[one.action].append(one)
    return of


def _pair(row: RuleRow) -> tuple[Any, Any]:
    return row.endpoint, row.identifier_type


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
    counts = [(fields_of(text) or {}).values() for text in await connection.scalars(of_sets)]
    noted = sa.select(sa.func.count()).where(rule_audit_changes.c.revision > to)
    try:
        expected = sum(map(sum, counts))
    except TypeError:  # written outside the service
        expected = None
    if entries != current - to or await connection.scalar(noted) != expected:
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
    rows = await connection.execute(sa.select(*COLUMNS).where(rules.c.id.in_(ids)))
    return {row.id: RuleRow._make(row) for row in rows}


def _limits_in(text: str | None) -> int:
    """Return about the number of limits in a rule of the trail."""
    return max(1, (text or "").count("{"))  # a rule, its further limits, its plans and theirs


def _row(text: str | None) -> RuleRow | None:
    """Return the row recorded in the trail, which must be a valid rule."""
    if text is None:
        return None
    row = RuleRow(*map((fields_of(text) or {}).get, RuleRow._fields))
    rule = rule_from_row(row)
    if isinstance(rule, SkippedRow):
        _refuse(f"the rule {rule.rule_id} was invalid then: {rule.reason}")
    return row


def _place(change: Change) -> tuple[bool, str, str]:
    row = change.after or change.before
    return change.after is None, str(row and row.endpoint), str(row and row.identifier_type)


def _refuse(text: str) -> NoReturn:
    raise RuleInvalidError(FieldViolation("as_of", text))
