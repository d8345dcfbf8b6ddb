"""The assignments in SQL: stored beside the rules, and read by nodes together with them.

A write is one transaction under the revision lock; each change in it has its own revision and audit row. See ADR 0050.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.clock import Clock
from ratelimitd.errors import AssignmentConflictError, AssignmentNotFoundError, AssignmentsFullError
from ratelimitd.model import US_PER_S, Identity
from ratelimitd.rules.assignments import Assigned, Assignment, Assignments, assigned_of
from ratelimitd.rules.sql.database import (
    RuleDatabase,
    assignments,
    at_time,
    next_revision,
    rule_audit,
    rule_revision,
    storable,
)
from ratelimitd.rules.store import AssignmentQuery

ROWS_PER_STEP: Final = 256
"""Rows processed per event-loop iteration: about 1 ms."""

KEPT_S: Final = 86_400
"""Retention of an expired assignment: far above the usual clock differences between nodes."""

PURGED_PER_WRITE: Final = 100
"""Expired assignments that each write deletes, plus two per assignment written."""

_COLUMNS: Final = tuple(assignments.c[name] for name in (*Assignment._fields[:-1], "revision"))
"""The columns of an assignment; the etag is computed from the revision."""

_SERVED: Final = tuple(assignments.c[name] for name in Assigned._fields)


class SqlAssignmentStore:
    """An :class:`~ratelimitd.rules.store.AssignmentStore` in a database whose schema is current.

    The rule store creates it and closes ``database``.
    """

    def __init__(
        self,
        database: RuleDatabase,
        *,
        clock: Clock,
        before_first_edit: Callable[[], None],
        max_assignments: int,
    ) -> None:
        self._database = database
        self._clock = clock
        self._before_first_edit = before_first_edit
        self._max_assignments = max_assignments

    async def assign_all(
        self, assignments: Sequence[Assignment], actor: str
    ) -> Sequence[Assignment]:
        """Assign every identity, or none."""
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            if revision == 1:
                self._before_first_edit()
            purged = await self._purge(connection, PURGED_PER_WRITE + 2 * len(assignments))
            stored = await _stored(connection, [one.identity for one in assignments])
            answers: list[Assignment] = []
            changes: list[tuple[Assignment | None, Assignment]] = []
            for wanted in assignments:
                before = self._current(stored.get(wanted.identity))
                _refuse_conflict(before, wanted.etag)
                # All but the etag.
                if before is not None and wanted[:-1] == before[:-1]:
                    answers.append(before)
                    continue
                after = wanted.with_etag(revision + len(changes))
                answers.append(after)
                changes.append((before, after))
            replaced = [after.identity for _, after in changes if after.identity in stored]
            await self._count(connection, len(changes) - len(replaced) - purged)
            await _delete(connection, replaced)
            await self._write(connection, changes, revision, actor)
        return answers

    async def unassign(self, identity: Identity, etag: str, actor: str) -> None:
        """Remove the assignment of an identity."""
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            before = self._current((await _stored(connection, [identity])).get(identity))
            if before is None:
                raise AssignmentNotFoundError
            _refuse_conflict(before, etag)
            await _delete(connection, [identity])
            await self._count(connection, -1)
            await self._write(connection, [(before, None)], revision, actor)

    async def assignment(self, identity: Identity) -> Assignment:
        """Return the assignment of an identity."""
        async with self._database.reading() as connection:
            found = self._current((await _stored(connection, [identity])).get(identity))
        if found is None:
            raise AssignmentNotFoundError
        return found

    async def assignments(
        self, query: AssignmentQuery, after: Identity | None, size: int
    ) -> Sequence[Assignment]:
        """Return a page of assignments."""
        columns = assignments.c
        statement = sa.select(*_COLUMNS).where(_is_current(self._now_s()))
        if query.plan:
            statement = statement.where(columns.plan == query.plan)
        if query.identifier_type:
            statement = statement.where(columns.identifier_type == query.identifier_type)
        if query.prefix:
            statement = statement.where(columns.identifier >= query.prefix)
            if end := _after_prefix(query.prefix):
                statement = statement.where(columns.identifier < end)
        ordered = statement.order_by(columns.identifier_type, columns.identifier).limit(size)
        found: list[Assignment] = []
        async with self._database.reading() as connection:
            while len(found) < size:
                rows = (await connection.execute(_behind(ordered, after))).all()
                # Invalid rows do not count.
                found += [_assignment(row) for row in rows if assigned_of(row[:4])]
                if len(rows) < size:
                    break
                after = rows[-1].identifier_type, rows[-1].identifier
        return found[:size]

    async def _write(
        self,
        connection: AsyncConnection,
        changes: Sequence[tuple[Assignment | None, Assignment | None]],
        revision: int,
        actor: str,
    ) -> None:
        """Insert changed assignments and the audit rows; the first gets ``revision``, each further one the next."""
        if not changes:
            return
        rows, audit_rows = [], []
        for number, (before, after) in enumerate(changes, revision):
            if after is not None:
                rows.append({**_content(after), "identifier": after.identifier, "revision": number})
            audit_rows.append(self._audit_row(number, actor, before, after))
        if rows:
            await connection.execute(assignments.insert(), rows)
        await connection.execute(rule_audit.insert(), audit_rows)
        last = revision + len(changes) - 1
        await connection.execute(rule_revision.update().values(revision=last))

    def _audit_row(
        self, revision: int, actor: str, before: Assignment | None, after: Assignment | None
    ) -> dict[str, object]:
        identifier_type, identifier = (after or before or _NONE).identity
        return {
            "revision": revision,
            "at": at_time(self._clock.now_us()),
            "actor": storable(actor),
            "action": "create" if before is None else "update" if after else "delete",
            "rule_id": "",
            "before": before and json.dumps(_content(before)),
            "after": after and json.dumps(_content(after)),
            "identifier_type": identifier_type,
            "identifier": identifier,
        }

    async def _count(self, connection: AsyncConnection, change: int) -> None:
        """Update the number of assignments by ``change``.

        Raises:
            AssignmentsFullError: they would exceed the maximum.
        """
        known = await connection.scalar(sa.select(rule_revision.c.assignments)) or 0
        if change > 0 and known + change > self._max_assignments:
            # Rows may have been deleted outside the service.
            known = (
                await connection.scalar(sa.select(sa.func.count()).select_from(assignments)) or 0
            )
            if known + change > self._max_assignments:
                message = (
                    f"there are {known} assignments, and a store holds {self._max_assignments}"
                )
                raise AssignmentsFullError(message)
        counted = max(0, known + change)
        await connection.execute(rule_revision.update().values(assignments=counted))

    async def _purge(self, connection: AsyncConnection, most: int) -> int:
        """Delete at most ``most`` assignments that expired long ago; return their number.

        Nodes need no notification: an expired assignment has no effect. Both this node's clock and the database's must
        say so: one node with a wrong clock would delete assignments that are in force on the others.
        """
        expire_time = assignments.c.expire_time
        ended = expire_time.between(1, self._now_s() - KEPT_S) & (
            expire_time <= sa.extract("epoch", sa.func.now()) - KEPT_S
        )
        columns = (assignments.c.identifier_type, assignments.c.identifier)
        rows = await connection.execute(sa.select(*columns).where(ended).limit(most))
        identities = [(row.identifier_type, row.identifier) for row in rows]
        await _delete(connection, identities)
        return len(identities)

    def _current(self, found: Assignment | None) -> Assignment | None:
        if found is None or 0 < found.expire_time <= self._now_s():
            return None
        return found

    def _now_s(self) -> int:
        return self._clock.now_us() // US_PER_S


_NONE: Final = Assignment("", b"", "")


async def read_assignments(connection: AsyncConnection, now_us: int) -> tuple[Assignments, int]:
    """Return all unexpired assignments, read in steps, and the number of invalid rows."""
    loaded = Assignments()
    skipped = 0
    statement = sa.select(*_SERVED).where(_is_current(now_us // US_PER_S))
    async for rows in _steps(connection, statement):
        for row in rows:
            assigned = assigned_of(row)
            if assigned is None:
                skipped += 1
            else:
                loaded.put(*assigned)
    return loaded, skipped


async def read_assigned(
    connection: AsyncConnection, revision: int
) -> tuple[Sequence[Assigned], int]:
    """Return the assignments changed after ``revision``, and the number of invalid rows among them."""
    found: list[Assigned] = []
    skipped = 0
    statement = sa.select(*_SERVED).where(assignments.c.revision > revision)
    async for rows in _steps(connection, statement):
        valid = [one for one in map(assigned_of, rows) if one is not None]
        found += valid
        skipped += len(rows) - len(valid)
    return found, skipped


async def read_unassigned(connection: AsyncConnection, revision: int) -> Sequence[Identity]:
    """Return the identities whose assignment was removed after ``revision``; some may be assigned again."""
    columns = (rule_audit.c.identifier_type, rule_audit.c.identifier)
    deletions = (rule_audit.c.revision > revision) & (rule_audit.c.action == "delete")
    statement = sa.select(*columns).where(deletions & rule_audit.c.identifier.is_not(None))
    found: list[Identity] = []
    async for rows in _steps(connection, statement):
        found += [(row.identifier_type, row.identifier) for row in rows]
    return found


async def count_assignments(connection: AsyncConnection) -> Mapping[tuple[str, str], int]:
    """Return the number of assignments of each identifier type and plan, expired ones included."""
    of = (assignments.c.identifier_type, assignments.c.plan)
    rows = await connection.execute(sa.select(*of, sa.func.count().label("number")).group_by(*of))
    return {(row.identifier_type, row.plan): row.number for row in rows}


async def _steps(
    connection: AsyncConnection, statement: sa.Select[Any]
) -> AsyncIterator[Sequence[sa.Row[Any]]]:
    async with connection.stream(statement) as result:
        async for rows in result.partitions(ROWS_PER_STEP):
            yield rows


async def _stored(
    connection: AsyncConnection, identities: Iterable[Identity]
) -> dict[Identity, Assignment]:
    """Return the rows of some identities, expired ones included."""
    found = {}
    for condition in _conditions(identities):
        for row in await connection.execute(sa.select(*_COLUMNS).where(condition)):
            assignment = _assignment(row)
            found[assignment.identity] = assignment
    return found


async def _delete(connection: AsyncConnection, identities: Iterable[Identity]) -> None:
    for condition in _conditions(identities):
        await connection.execute(assignments.delete().where(condition))


def _conditions(identities: Iterable[Identity]) -> list[sa.ColumnElement[bool]]:
    """Return conditions, one per type, that together select the identities."""
    of_type: dict[str, list[bytes]] = {}
    for identifier_type, identifier in identities:
        of_type.setdefault(identifier_type, []).append(identifier)
    return [
        (assignments.c.identifier_type == identifier_type)
        & assignments.c.identifier.in_(identifiers)
        for identifier_type, identifiers in of_type.items()
    ]


def _behind(statement: sa.Select[Any], after: Identity | None) -> sa.Select[Any]:
    if after is None:
        return statement
    place = sa.tuple_(assignments.c.identifier_type, assignments.c.identifier)
    return statement.where(place > sa.tuple_(*after))


def _is_current(now_s: int) -> sa.ColumnElement[bool]:
    return (assignments.c.expire_time == 0) | (assignments.c.expire_time > now_s)


def _after_prefix(prefix: bytes) -> bytes:
    """Return the smallest bytes greater than all that begin with ``prefix``; empty if there are none."""
    rest = prefix.rstrip(b"\xff")
    return rest[:-1] + bytes((rest[-1] + 1,)) if rest else b""


def _assignment(row: sa.Row[Any]) -> Assignment:
    return Assignment._make((*row[:-1], "")).with_etag(row.revision)


def _refuse_conflict(before: Assignment | None, etag: str) -> None:
    if etag and (before is None or before.etag != etag):
        message = "the assignment has changed: read it again and send its new etag"
        raise AssignmentConflictError(message)


def _content(assignment: Assignment) -> dict[str, object]:
    """Return the fields of an assignment for the audit trail."""
    return {
        "identifier_type": assignment.identifier_type,
        "identifier": assignment.identifier.decode(errors="replace"),
        "plan": assignment.plan,
        "expire_time": assignment.expire_time,
        "note": assignment.note,
    }
