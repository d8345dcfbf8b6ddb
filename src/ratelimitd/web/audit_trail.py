"""The audit trail as pages show it, read from the rule store; while that is away, it says so.

See ADR 0008.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.model import Rule
from ratelimitd.rules.store import AuditEntry
from ratelimitd.rules.validation import RuleRow, rule_from_row
from ratelimitd.web.rule_changes import Difference, fields_differences

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
        """The rule as its last change left it; ``None`` when there is none, or nobody can tell."""
        page = await self.page(rule_id, None)
        if not page.changes or page.changes[0].entry.after is None:
            return None
        after = page.changes[0].entry.after
        found = rule_from_row(RuleRow._make(after.get(name) for name in RuleRow._fields))
        return found if isinstance(found, Rule) else None


def _change(entry: AuditEntry) -> Change:
    fields = entry.after or entry.before or {}
    changed = [found for found in fields_differences(entry.before, entry.after) if found.changed]
    return Change(entry, str(fields.get("endpoint", "")), changed)
