"""``/audit``: who changed which rule or assignment, and when; 503 while the rule database does not answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.model import Rule
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rules.store import AuditEntry
from ratelimitd.rules.validation import RuleRow, rule_from_row
from ratelimitd.web.pages.invoke import HTTP_STATUS
from ratelimitd.web.pages.page_base import Frame
from ratelimitd.web.pages.rule_changes import Difference, assignment_differences, fields_differences

PAGE_CHANGES: Final = 25

_log = logging.getLogger(__name__)


class AuditReader(Protocol):
    """What this module needs of a :class:`ratelimitd.rules.store.RuleStore`."""

    async def audit(self, rule_id: str, before: int | None, size: int) -> Sequence[AuditEntry]:
        """At most ``size`` changes, the newest first."""


class Change(NamedTuple):
    """One change, with the fields that it changed."""

    entry: AuditEntry
    endpoint: str
    differences: Sequence[Difference]
    identity: str = ""
    """Whose assignment it was; empty for a change of a rule."""
    counts: str = ""
    """How many rules a whole set created, updated and deleted; empty for any other change."""


class Changes(NamedTuple):
    """A page of changes. ``earlier`` is the revision that the next page starts below; 0 when there is none."""

    changes: Sequence[Change]
    earlier: int = 0
    away: bool = False
    """The store did not answer."""


class AuditTrail:
    """Reads pages of changes."""

    def __init__(self, reader: AuditReader) -> None:
        self._reader = reader

    async def page(self, rule_id: str, before: int | None) -> Changes:
        """Changes of a rule, of all rules when ``rule_id`` is empty, from below the revision ``before`` on."""
        try:
            entries = await self._reader.audit(rule_id, before, PAGE_CHANGES + 1)
        except StoreUnavailableError as error:
            _log.warning("the audit trail cannot be read: %s", error)
            return Changes([], away=True)
        shown = [_change(entry) for entry in entries[:PAGE_CHANGES]]
        more = len(entries) > PAGE_CHANGES
        return Changes(shown, entries[PAGE_CHANGES - 1].revision if more else 0)

    async def stored(self, rule_id: str) -> Rule | None:
        """The rule as its last change left it; ``None`` if there is none or it is unknown."""
        page = await self.page(rule_id, None)
        if not page.changes or page.changes[0].entry.after is None:
            return None
        after = page.changes[0].entry.after
        found = rule_from_row(RuleRow(*map(after.get, RuleRow._fields)))
        return found if isinstance(found, Rule) else None


def _change(entry: AuditEntry) -> Change:
    fields = entry.after or entry.before or {}
    if entry.action == "apply":
        counts = ", ".join(f"{count} {what}" for what, count in fields.items())
        return Change(entry, "", (), counts=counts)
    if not entry.rule_id:
        shown = assignment_differences(entry.before, entry.after)
        identity = f"{fields.get('identifier_type', '')} {fields.get('identifier', '')}"
        return Change(entry, "", [one for one in shown if one.changed], identity)
    changed = [found for found in fields_differences(entry.before, entry.after) if found.changed]
    return Change(entry, str(fields.get("endpoint", "")), changed)


_REVISION: Final = re.compile(r"[0-9]{1,18}")


def audit_routes(frame: Frame, trail: AuditTrail) -> list[BaseRoute]:
    """The page; ``before`` in its address is the revision it starts below, ``rule`` the one it is about."""

    async def show(request: Request) -> Response:
        given = request.query_params.get("before", "")
        before = int(given) if _REVISION.fullmatch(given) else None
        rule_id = request.query_params.get("rule", "")
        changes = await trail.page(rule_id, before)
        return frame.page(
            request,
            "audit.html",
            status_code=HTTP_STATUS[StatusCode.UNAVAILABLE] if changes.away else 200,
            rule_id=rule_id,
            first=before is None,
            trail=changes,
        )

    return [Route("/audit", frame.reading(show))]
