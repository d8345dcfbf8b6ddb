"""``/audit``: the changes of rules and assignments, with actor and time, and a revert to an earlier revision.

Answers 503 while the rule database is unavailable. A revert applies a whole set of rules, see ADR 0058: it has a
preview, and is refused if a rule was changed after that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import MAXYEAR, UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.model import Rule
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rules.store import (
    EVERY_CHANGE,
    AuditEntry,
    AuditFilter,
    LimitDraft,
    RuleStore,
)
from ratelimitd.rules.validation import RuleRow, rule_from_row
from ratelimitd.web.pages.page_base import CONFIG, HTTP_STATUS, Fields, Frame, Rejected
from ratelimitd.web.pages.rule_changes import (
    Difference,
    assignment_differences,
    fields_differences,
    limit_summary,
)
from ratelimiter.v1 import ratelimiter_pb2

PAGE_CHANGES: Final = 25

ACTIONS: Final = {"create": "created", "update": "changed", "delete": "deleted", "apply": "applied"}
"""The page's words for the actions of the trail."""

_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """One change, with the changed fields."""

    entry: AuditEntry
    rule: str
    """Endpoint and identifier type of the rule; empty for any other change."""
    differences: Sequence[Difference]
    identity: str = ""
    """The assigned identity; empty for a change of a rule."""
    counts: str = ""
    """Numbers of rules that a whole set created, updated and deleted; empty for any other change."""

    @property
    def what(self) -> str:
        """Return the action in words."""
        return ACTIONS.get(self.entry.action, self.entry.action)


class Changes(NamedTuple):
    """A page of changes. ``earlier`` is the revision below which the next page starts; 0 if there is none."""

    changes: Sequence[Change]
    earlier: int = 0
    away: bool = False
    """The store did not answer."""

    @property
    def newest_of_rules(self) -> int:
        """The revision of the newest change of rules; 0 if there is none."""
        return next((one.entry.revision for one in self.changes if not one.identity), 0)


class AuditTrail:
    """Reads pages of changes."""

    def __init__(self, store: RuleStore) -> None:
        self._store = store

    async def page(
        self, rule_id: str, before: int | None, wanted: AuditFilter = EVERY_CHANGE
    ) -> Changes:
        """Return changes of a rule, or of all rules if ``rule_id`` is empty, below the revision ``before``."""
        try:
            entries = await self._store.audit(rule_id, before, PAGE_CHANGES + 1, wanted)
        except StoreUnavailableError as error:
            _log.warning("the audit trail cannot be read: %s", error)
            return Changes([], away=True)
        shown = [_change(entry) for entry in entries[:PAGE_CHANGES]]
        more = len(entries) > PAGE_CHANGES
        return Changes(shown, entries[PAGE_CHANGES - 1].revision if more else 0)

    async def stored(self, rule_id: str) -> Rule | None:
        """Return the rule as its last change left it; ``None`` if deleted or unknown."""
        page = await self.page(rule_id, None)
        if not page.changes or page.changes[0].entry.after is None:
            return None
        after = page.changes[0].entry.after
        found = rule_from_row(RuleRow(*map(after.get, RuleRow._fields)))
        return found if isinstance(found, Rule) else None


def _change(entry: AuditEntry) -> Change:
    fields = entry.after or entry.before or {}
    if entry.action == "apply":
        counts = ", ".join(f"{count} {what}" for what, count in fields.items() if count)
        return Change(entry, "", (), counts=counts)
    if not entry.rule_id:
        shown = assignment_differences(entry.before, entry.after)
        identity = f"{fields.get('identifier_type', '')} {fields.get('identifier', '')}"
        return Change(entry, "", [one for one in shown if one.changed], identity)
    changed = [found for found in fields_differences(entry.before, entry.after) if found.changed]
    place = f"{fields.get('endpoint', '')} {fields.get('identifier_type', '')}"
    return Change(entry, place.strip(), changed)


_REVISION: Final = re.compile(r"[0-9]{1,18}")

MAX_FILTER: Final = 255
"""Longest filter: as long as the name of a caller or an endpoint may be."""

MAX_SHOWN: Final = 100
"""Changes that the preview of a revert lists."""

STALE: Final = (
    "A rule was changed meanwhile, so nothing was reverted. This is what would change now."
)


class AuditQuery(NamedTuple):
    """The filters in an address, as typed; invalid ones select all."""

    rule: str = ""
    who: str = ""
    action: str = ""
    text: str = ""
    since: str = ""
    until: str = ""
    before: str = ""

    @classmethod
    def of_parameters(cls, given: Mapping[str, str]) -> Self:
        """Return the query in the parameters of an address."""
        # PostgreSQL's text cannot contain a zero byte, so no change contains one.
        texts = (given.get(name, "").replace("\0", "").strip() for name in cls._fields)
        return cls(*(text[:MAX_FILTER] for text in texts))

    @property
    def is_filtered(self) -> bool:
        """Return whether the query selects fewer than all changes of all rules."""
        return any(self[:-1])

    @property
    def first_below(self) -> int | None:
        """Return the revision below which the page begins; ``None`` for the newest."""
        return int(self.before) if _REVISION.fullmatch(self.before) else None

    @property
    def filter(self) -> AuditFilter:
        """Return the filter for the store."""
        action = self.action if self.action in ACTIONS else ""
        until = _day(self.until)
        return AuditFilter(
            self.who,
            action,
            self.text,
            _day(self.since),
            until + timedelta(days=1) if until else None,
        )

    def address(self, before: int | str = "") -> str:
        """Return the address of another page of the same changes."""
        given = {**self._asdict(), "before": before}
        parameters = {name: value for name, value in given.items() if value}
        return "/audit" + (f"?{urlencode(parameters)}" if parameters else "")


def _day(text: str) -> datetime | None:
    """Return the start of a day in UTC; ``None`` if invalid or the last day that Python represents."""
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return None
    return day if day.year < MAXYEAR else None


class AuditPages:
    """The endpoints of the audit pages."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._trail = AuditTrail(frame.parts.audit)

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        return [
            Route("/audit", self._frame.reading(self.show)),
            Route("/audit/revert", self._frame.reading(self.preview)),
            Route("/audit/revert", self._frame.posting(self.revert), methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show a page of the selected changes."""
        query = AuditQuery.of_parameters(request.query_params)
        changes = await self._trail.page(query.rule, query.first_below, query.filter)
        is_newest = not (query.before or query.is_filtered)
        newest = changes if is_newest or changes.away else await self._trail.page("", None)
        return self._frame.page(
            request,
            "audit.html",
            status_code=HTTP_STATUS[StatusCode.UNAVAILABLE] if changes.away else 200,
            query=query,
            actions=ACTIONS,
            trail=changes,
            in_force=newest.newest_of_rules,
            done=request.query_params.get("done", "") == "reverted",
        )

    async def preview(self, request: Request) -> Response:
        """Show what a revert to the revision ``to`` of the address would change."""
        return await self._preview(request, request.query_params.get("to", ""))

    async def revert(self, request: Request, fields: Fields) -> Response:
        """Revert, if no rule was changed after the preview."""
        to, since = fields.get("to", ""), fields.get("revision", "")
        if not _is_revision(to) or not _is_revision(since):
            return self._no_revision(request)
        try:
            await self._apply(request, as_of=int(to), revision=int(since))
        except Rejected as error:
            problem = STALE if error.code is StatusCode.ABORTED else error.message
            return await self._preview(request, to, problem, error.status)
        return RedirectResponse("/audit?done=reverted", 303)

    async def _preview(
        self, request: Request, to: str, problem: str = "", status_code: int = 200
    ) -> Response:
        if not _is_revision(to):
            return self._no_revision(request)
        try:
            answer = await self._apply(request, as_of=int(to), dry_run=True)
        except Rejected as error:
            text = "; ".join(error.fields.values()) or error.message
            title = f"The rules cannot be reverted to revision {to}"
            return self._frame.message(request, title, text, error.status)
        counts = {"created": answer.created, "changed": answer.updated, "deleted": answer.deleted}
        return self._frame.page(
            request,
            "revert.html",
            status_code=status_code,
            to=int(to),
            revision=answer.revision,
            counts=counts,
            total=sum(counts.values()),
            changes=[*map(self._reverted, answer.changes[:MAX_SHOWN])],
            problem=problem,
        )

    async def _apply(
        self, request: Request, **fields: Any
    ) -> ratelimiter_pb2.ApplyRateLimitsResponse:
        message = ratelimiter_pb2.ApplyRateLimitsRequest(**fields)
        answer = ratelimiter_pb2.ApplyRateLimitsResponse
        return await self._frame.ask(request, f"{CONFIG}/ApplyRateLimits", message, answer)

    def _reverted(self, change: ratelimiter_pb2.RateLimitChange) -> Reverted:
        before, after = (
            getattr(change, name) if change.HasField(name) else None for name in ("before", "after")
        )
        places = [(one.endpoint, one.identifier_type) for one in (before, after) if one]
        is_moved = len({*places}) > 1
        words = [self._in_words(one, with_place=is_moved) if one else "" for one in (before, after)]
        return Reverted(*places[-1], Difference("", *words))

    def _in_words(self, rule: ratelimiter_pb2.RateLimit, *, with_place: bool) -> str:
        """Summarise a rule; ``with_place``: including endpoint and identifier type, because it moves."""
        draft = self._frame.parts.draft_of(rule)
        own = LimitDraft("", draft.limit, draft.window_seconds, draft.algorithm)
        parts = [f"{draft.endpoint} {draft.identifier_type}"] if with_place else []
        parts += [_limits(draft.limits or [own])]
        parts += [f"plan {plan.name}: {_limits(plan.limits)}" for plan in draft.plans]
        parts += [] if rule.enabled else ["disabled"]
        return "; ".join(parts)

    def _no_revision(self, request: Request) -> Response:
        text = "A revision is a number from 1 on, such as the list of changes shows."
        return self._frame.message(request, "There is no such revision", text, 404)


def _is_revision(text: str) -> bool:
    return bool(_REVISION.fullmatch(text)) and int(text) > 0


class Reverted(NamedTuple):
    """One rule changed by a revert."""

    endpoint: str
    identifier_type: str
    difference: Difference


def _limits(limits: Iterable[LimitDraft]) -> str:
    return "; ".join(f"{limit.name} {limit_summary(limit)}".strip() for limit in limits)
