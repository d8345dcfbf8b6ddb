"""The rule store in SQL: every rule, the revision over them, the audit trail and the node's secrets.

Each write is one transaction that first locks the revision, so revisions become visible in order. Each read is one
snapshot. Builds no book and applies no rule. See ADR 0008, ADR 0013 and ADR 0024.
"""

from __future__ import annotations

import asyncio
import json
import secrets as random_source
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from datetime import datetime
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimitd.clock import Clock
from ratelimitd.errors import (
    RuleConflictError,
    RuleExistsError,
    RuleNotFoundError,
    RulesFullError,
    StoreUnavailableError,
)
from ratelimitd.model import IdentifierType, Rule
from ratelimitd.rules.applying import ACTIONS, BookDiff, Change
from ratelimitd.rules.assignments import MAX_ASSIGNMENTS
from ratelimitd.rules.sql.applying import (
    changes_back_to,
    changes_of,
    record,
    refuse_changes_after,
    trail_row,
    want_all,
    write,
)
from ratelimitd.rules.sql.assignments import (
    SqlAssignmentStore,
    read_assigned,
    read_assignments,
    read_unassigned,
)
from ratelimitd.rules.sql.database import (
    RuleDatabase,
    at_time,
    current_revision,
    is_standby,
    next_revision,
    rule_audit,
    rule_revision,
    rules,
    secrets,
    storable,
)
from ratelimitd.rules.sql.reading import (
    COLUMNS,
    ROWS_PER_STEP,
    read_page,
    read_removed_ids,
    read_rules,
    read_trail,
)
from ratelimitd.rules.store import (
    EVERY_CHANGE,
    MAX_RULES,
    SECRET_BYTES,
    Applied,
    AuditEntry,
    AuditFilter,
    BookChanges,
    RuleChanges,
    RuleDraft,
    limit_count,
    steps,
)
from ratelimitd.rules.validation import (
    RuleRow,
    canonical_id,
    etag_of,
    rule_from_row,
    types_beside,
    validated,
)

SEARCH_WAIT_S: Final = 5.0
"""Longest wait for other searches of the audit trail; as long as for a connection."""


class SqlRuleStore:
    """A :class:`~ratelimitd.rules.store.RuleStore` in a database whose schema is current (``migrations.upgrade``).

    :meth:`close` closes ``database``. Several processes may share one. ``types`` are the identifier types that new
    rules may have or combine. ``before_first_edit`` raises to refuse a single rule or assignment that would become the
    whole book. Tests set ``max_rules``, ``new_id``, ``random_bytes`` and ``max_assignments``.
    """

    def __init__(
        self,
        database: RuleDatabase,
        *,
        clock: Clock,
        max_rules: int = MAX_RULES,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
        random_bytes: Callable[[int], bytes] = random_source.token_bytes,
        types: Collection[str] = tuple(IdentifierType),
        before_first_edit: Callable[[], None] = lambda: None,
        max_assignments: int = MAX_ASSIGNMENTS,
    ) -> None:
        self._database = database
        self._clock = clock
        self._max_rules = max_rules
        self._new_id = new_id
        self._random_bytes = random_bytes
        self._types = types
        self._before_first_edit = before_first_edit
        self._searches = asyncio.Lock()
        self.assignments = SqlAssignmentStore(
            database,
            clock=clock,
            before_first_edit=before_first_edit,
            max_assignments=max_assignments,
        )
        """The assignments in the same database."""

    async def create(self, draft: RuleDraft, actor: str) -> Rule:
        """Add a rule."""
        rule_id = draft.id.lower() or str(self._new_id())
        # Fail before waiting for the lock. equivalent: the rule is not kept, so any revision does
        validated(draft, rule_id=rule_id, revision=0, types=self._types)
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            if revision == 1:
                self._before_first_edit()
            await _refuse_taken_id(connection, rule_id)
            await _refuse_taken_pair(connection, draft.endpoint, draft.identifier_type)
            await self._refuse_beyond_maximum(connection)
            rule = validated(draft, rule_id=rule_id, revision=revision)
            after = RuleRow.of(rule)
            with _exists_if_taken():
                await connection.execute(rules.insert().values(self._new_row(after)))
            await self._record(connection, revision, actor, Change(None, after))
        return rule

    async def create_all(self, drafts: Sequence[RuleDraft], actor: str) -> int:
        """Fill a new store."""
        if len(drafts) > self._max_rules:
            message = f"{len(drafts)} rules exceed the {self._max_rules} that a store holds"
            raise RulesFullError(message)
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            # Rows inserted outside the service did not change the revision.
            # equivalent: with several rows the first is taken
            some_id = await connection.scalar(sa.select(rules.c.id).limit(1))
            if revision > 1 or some_id is not None:
                return 0
            first = 1
            for batch in steps(drafts, ROWS_PER_STEP, limit_count):
                await self._insert_batch(connection, batch, first, actor)
                first += len(batch)
            await connection.execute(rule_revision.update().values(revision=len(drafts)))
        return len(drafts)

    async def apply(
        self, drafts: Sequence[RuleDraft], actor: str, *, prune: bool, dry_run: bool, since: int
    ) -> Applied:
        """Replace the rules with a whole set."""
        # In a dry run a new rule has no id.
        new_id = str if dry_run else lambda: str(self._new_id())
        diff = BookDiff(self._types, prune=prune, new_id=new_id)
        await want_all(diff, drafts)
        compare = partial(changes_of, diff)
        return await self._apply(compare, actor, dry_run=dry_run, since=since)

    async def revert(self, to: int, actor: str, *, dry_run: bool, since: int) -> Applied:
        """Restore the rules of an earlier revision."""
        compare = partial(changes_back_to, to)
        return await self._apply(compare, actor, dry_run=dry_run, since=since)

    async def update(self, rule_id: str, changes: RuleChanges, etag: str, actor: str) -> Rule:
        """Change a rule."""
        rule_id = canonical_id(rule_id, "rate_limit.id")
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            before = await _stored_row(connection, rule_id, etag)
            draft = changes.apply(before.draft())
            types = types_beside(self._types, before)
            unchanged = validated(draft, rule_id=rule_id, revision=before.revision, types=types)
            if RuleRow.of(unchanged) == before:
                return unchanged
            if (draft.endpoint, draft.identifier_type) != (before.endpoint, before.identifier_type):
                await _refuse_taken_pair(connection, draft.endpoint, draft.identifier_type)
            rule = validated(draft, rule_id=rule_id, revision=revision)
            after = RuleRow.of(rule)
            values = {**after._asdict(), "updated_at": self._now()}
            with _exists_if_taken():
                await connection.execute(rules.update().where(rules.c.id == rule_id).values(values))
            await self._record(connection, revision, actor, Change(before, after))
        return rule

    async def delete(self, rule_id: str, etag: str, actor: str) -> None:
        """Delete a rule."""
        rule_id = canonical_id(rule_id, "id")
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            before = await _stored_row(connection, rule_id, etag)
            await connection.execute(rules.delete().where(rules.c.id == rule_id))
            await self._record(connection, revision, actor, Change(before, None))

    async def rule(self, rule_id: str) -> Rule:
        """Return a rule."""
        rule_id = canonical_id(rule_id, "id")
        async with self._database.reading() as connection:
            rule = rule_from_row(await _stored_row(connection, rule_id, ""))
        if not isinstance(rule, Rule):
            raise RuleNotFoundError(rule_id)
        return rule

    async def page(
        self, endpoint: str, identifier_type: str, after: tuple[str, str] | None, size: int
    ) -> Sequence[Rule]:
        """Return rules in order."""
        async with self._database.reading() as connection:
            return await read_page(connection, endpoint, identifier_type, after, size)

    async def audit(
        self, rule_id: str, before: int | None, size: int, wanted: AuditFilter = EVERY_CHANGE
    ) -> Sequence[AuditEntry]:
        """Return a page of the audit trail."""
        searching = nullcontext() if wanted == EVERY_CHANGE else self._searching()
        async with searching, self._database.reading() as connection:
            return await read_trail(connection, rule_id, before, size, wanted)

    async def changes_since(self, revision: int | None) -> BookChanges:
        """Return the changes since a revision."""
        statement = sa.select(*COLUMNS)
        async with self._database.reading() as connection:
            current = await current_revision(connection)
            if revision is None or revision > current:
                if revision is not None and await is_standby(connection):
                    message = (
                        "the rule database is a standby that lacks edits in force on this node"
                    )
                    raise StoreUnavailableError(message)
                every = await read_rules(connection, statement)
                assigned, skipped = await read_assignments(connection, self._clock.now_us())
                return BookChanges(
                    current, every.rules, (), every.skipped, full=True, assignments=assigned,
                    skipped_assignments=skipped,
                )  # fmt: skip
            changed = await read_rules(connection, statement.where(rules.c.revision > revision))
            removed_ids = await read_removed_ids(connection, revision)
            found, skipped = await read_assigned(connection, revision)
            return BookChanges(
                current, changed.rules, removed_ids, changed.skipped, assigned=found,
                unassigned=await read_unassigned(connection, revision), skipped_assignments=skipped,
            )  # fmt: skip

    async def revision(self) -> int:
        """Return the revision of the last change, 0 before the first."""
        async with self._database.reading() as connection:
            return await current_revision(connection)

    async def secret(self, name: str, proposed: bytes | None = None) -> bytes:
        """Return the secret of this name."""
        # First without the lock: a node must also start on a locked or read-only database.
        async with self._database.reading() as connection:
            value = await _secret(connection, name)
        if value is not None:
            return value
        async with self._database.writing() as connection:
            # Takes the lock, so that only one node creates the secret.
            await next_revision(connection)
            value = await _secret(connection, name)
            if value is None:
                value = proposed or self._random_bytes(SECRET_BYTES)
                row = {"name": name, "value": value, "created_at": self._now()}
                await connection.execute(secrets.insert().values(row))
        return value

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._database.aclose()

    @asynccontextmanager
    async def _searching(self) -> AsyncIterator[None]:
        """Search the audit trail alone: searches read all of it, and several would take every connection."""
        try:
            async with asyncio.timeout(SEARCH_WAIT_S):
                await self._searches.acquire()
        except TimeoutError:
            message = "other searches of the audit trail take too long"
            raise StoreUnavailableError(message) from None
        try:
            yield
        finally:
            self._searches.release()

    async def _record(
        self, connection: AsyncConnection, revision: int, actor: str, change: Change
    ) -> None:
        """Advance the revision and insert the audit row, in the transaction of the change."""
        await connection.execute(rule_revision.update().values(revision=revision))
        row = self._audit_row(revision, actor, change)
        await connection.execute(rule_audit.insert().values(row))

    async def _apply(
        self,
        compare: Callable[[AsyncConnection, int], Awaitable[Sequence[Change]]],
        actor: str,
        *,
        dry_run: bool,
        since: int,
    ) -> Applied:
        """Compare with the stored rules and write the differences, in one transaction."""
        begin = self._database.reading if dry_run else self._database.writing
        async with begin() as connection:
            current = await (current_revision if dry_run else next_revision)(connection)
            revision = current if dry_run else current - 1
            if since:
                await refuse_changes_after(connection, since, revision)
            compared = await compare(connection, revision)
            counts = Counter(one.action for one in compared)
            await self._refuse_beyond_maximum(connection, counts["create"] - counts["delete"])
            changes = [one for one in compared if one.action]
            if changes and not dry_run:
                revision += 1
                with _exists_if_taken():
                    await write(connection, changes, self._now())
                await connection.execute(rule_revision.update().values(revision=revision))
                row = self._audit_row(revision, actor, Change(None, None))
                numbers = json.dumps({f"{action}d": counts[action] for action in ACTIONS})
                values = {**row, "action": "apply", "after": numbers}
                await connection.execute(rule_audit.insert().values(values))
                await record(connection, changes, revision)
        return Applied(revision, changes, counts)

    async def _insert_batch(
        self, connection: AsyncConnection, drafts: Sequence[RuleDraft], revision: int, actor: str
    ) -> None:
        """Insert new rules and their audit rows; the first gets ``revision``, each further one the next."""
        rows, audit_rows = [], []
        for number, draft in enumerate(drafts, revision):
            rule_id = draft.id.lower() or str(self._new_id())
            after = RuleRow.of(
                validated(draft, rule_id=rule_id, revision=number, types=self._types)
            )
            rows.append(self._new_row(after))
            audit_rows.append(self._audit_row(number, actor, Change(None, after)))
        message = "two of the rules have the same id, or the same endpoint and identifier type"
        with _exists_if_taken(message):
            await connection.execute(rules.insert(), rows)
        await connection.execute(rule_audit.insert(), audit_rows)

    def _new_row(self, row: RuleRow) -> dict[str, object]:
        now = self._now()
        return {**row._asdict(), "created_at": now, "updated_at": now}

    def _audit_row(self, revision: int, actor: str, change: Change) -> dict[str, object]:
        return {**trail_row(revision, change), "actor": storable(actor), "at": self._now()}

    async def _refuse_beyond_maximum(self, connection: AsyncConnection, added: int = 1) -> None:
        count = await connection.scalar(sa.select(sa.func.count()).select_from(rules)) or 0
        if added > 0 and count + added > self._max_rules:
            message = f"there are {count} rules, and the maximum of a store is {self._max_rules}"
            raise RulesFullError(message)

    def _now(self) -> datetime:
        return at_time(self._clock.now_us())


async def _stored_row(connection: AsyncConnection, rule_id: str, etag: str) -> RuleRow:
    """Return the row of a rule, valid or not.

    Raises:
        RuleNotFoundError: no rule has this id.
        RuleConflictError: ``etag`` is given and is not the row's.
    """
    row = (await connection.execute(sa.select(*COLUMNS).where(rules.c.id == rule_id))).one_or_none()
    if row is None:
        raise RuleNotFoundError(rule_id)
    found = RuleRow._make(row)
    if etag and etag != etag_of(found):
        message = "the rule has changed: read it again and send its new etag"
        raise RuleConflictError(message)
    return found


async def _secret(connection: AsyncConnection, name: str) -> bytes | None:
    value = await connection.scalar(sa.select(secrets.c.value).where(secrets.c.name == name))
    return None if value is None else bytes(value)


@contextmanager
def _exists_if_taken(
    message: str = "a rule with this id, or this endpoint and identifier type, was created concurrently",
) -> Iterator[None]:
    """Convert a constraint violation to ``RuleExistsError``: a writer outside the service does not take the lock."""
    try:
        yield
    except IntegrityError as error:
        raise RuleExistsError(message) from error


async def _refuse_taken_id(connection: AsyncConnection, rule_id: str) -> None:
    if await connection.scalar(sa.select(rules.c.id).where(rules.c.id == rule_id)) is not None:
        message = f"a rule with the id {rule_id} exists"
        raise RuleExistsError(message)


async def _refuse_taken_pair(
    connection: AsyncConnection, endpoint: str, identifier_type: str
) -> None:
    same = (rules.c.endpoint == endpoint) & (rules.c.identifier_type == identifier_type)
    holder = await connection.scalar(sa.select(rules.c.id).where(same))
    if holder is not None:
        message = f"a rule with this endpoint and identifier type exists; its id is {holder}"
        raise RuleExistsError(message)
