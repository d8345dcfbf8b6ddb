"""Pages of the audit trail: all changes, or those of one rule, including changes made as part of a whole set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.rules.sql.database import fields_of, rule_audit, rule_audit_changes
from ratelimitd.rules.store import AuditEntry, AuditFilter


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
    columns = (changes.c.get(name, rule_audit.c[name]) for name in AuditEntry._fields)
    statement = sa.select(*columns).order_by(changes.c.revision.desc()).limit(size)
    if changes is not rule_audit:
        statement = statement.join(rule_audit, rule_audit.c.revision == changes.c.revision)
    if rule_id:
        statement = statement.where(changes.c.rule_id == rule_id)
    return statement if before is None else statement.where(changes.c.revision < before)


def _selected(statement: sa.Select[Any], changes: sa.Table, wanted: AuditFilter) -> sa.Select[Any]:
    """Add the conditions of a filter to a statement of :func:`_trail`."""
    if wanted.actor:
        actor = sa.func.lower(rule_audit.c.actor)
        statement = statement.where(actor.contains(wanted.actor.lower(), autoescape=True))
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
    written = json.dumps(text)[1:-1].lower()
    return sa.or_(
        *(
            sa.func.lower(changes.c[name]).contains(written, autoescape=True)
            for name in ("before", "after")
        )
    )


def _audit_entry(row: AuditEntry) -> AuditEntry:
    """Return the change of a row; SQLite drops the time zone, which is always UTC."""
    at = row.at if row.at.tzinfo else row.at.replace(tzinfo=UTC)
    return row._replace(at=at, before=fields_of(row.before), after=fields_of(row.after))
