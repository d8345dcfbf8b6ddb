"""What keeps the rules, as the rest of the node sees it: the store's protocol and the values that go in and out.

Never imports a driver. Adapters: :mod:`ratelimitd.rules.sql.store`. See ADR 0008 (editing a live rule) and ADR 0013.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from ratelimitd.model import Rule

MAX_RULES: Final = 100_000
"""Rules a store takes. A book of so many loads in about 3 s and needs some 80 MB."""

SECRET_BYTES: Final = 32
"""Length of a secret that the store makes."""


@dataclass(frozen=True, slots=True)
class RuleDraft:
    """A whole rule as somebody asks for it, not yet validated; ``id`` empty = the store makes one.

    Fields and units are those of the contract's ``RateLimit``.
    """

    endpoint: str
    identifier_type: str
    limit: int
    window_seconds: int
    algorithm: str
    enabled: bool = True
    id: str = ""


@dataclass(frozen=True, slots=True)
class RuleChanges:
    """The fields of a rule that an update sets, not yet validated; ``None`` = leave as it is."""

    endpoint: str | None = None
    identifier_type: str | None = None
    limit: int | None = None
    window_seconds: int | None = None
    algorithm: str | None = None
    enabled: bool | None = None

    def apply(self, draft: RuleDraft) -> RuleDraft:
        """``draft`` with the named fields replaced."""
        named = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return dataclasses.replace(draft, **named)


EDITABLE: Final = tuple(field.name for field in dataclasses.fields(RuleChanges))
"""The fields of a rule that an update may set, in the order of the contract; the others say which rule, and when."""


class SkippedRow(NamedTuple):
    """A stored row that is no valid rule: it is not served, and its neighbours are not affected."""

    rule_id: str
    reason: str


class AuditEntry(NamedTuple):
    """One change of a rule: who made it, when (UTC), and the rule's fields before and after, ``None`` where none was.

    ``action`` is ``create``, ``update`` or ``delete``. Fields are as they were stored: untyped, and none is certain.
    """

    revision: int
    at: datetime
    actor: str
    action: str
    rule_id: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


class BookChanges(NamedTuple):
    """What differs between a book at some revision and the store at ``revision``.

    ``full``: ``changed`` is every rule there is. Otherwise remove ``removed_ids`` first, then put ``changed``.
    """

    revision: int
    changed: Sequence[Rule]
    removed_ids: Sequence[str] = ()
    skipped: Sequence[SkippedRow] = ()
    full: bool = False


class RuleStore(Protocol):
    """Keeps the rules, one revision counter over all of them, an audit trail, and the node's secrets.

    A write is one transaction: the rule, the next revision and the audit row, or nothing. ``actor`` says who asked
    (a certificate's SAN, or role@peer). Every method raises ``StoreUnavailableError`` when the database cannot be
    reached or cannot write; messages never hold SQL or values.
    """

    async def create(self, draft: RuleDraft, actor: str) -> Rule:
        """Add a rule.

        Raises:
            RuleInvalidError: names every violated field.
            RuleExistsError: the id, or the endpoint and identifier type, are taken; the message says which.
            RulesFullError: there are ``MAX_RULES`` already.
        """

    async def create_all(self, drafts: Sequence[RuleDraft], actor: str) -> int:
        """Fill a store that never held a rule, in one transaction; any other is left as it is.

        Returns:
            How many rules were written: all, or 0 when there was a change before or there is a rule.

        Raises:
            RuleInvalidError: as :meth:`create`; nothing was written.
            RuleExistsError: two drafts have the same id, or the same endpoint and identifier type.
            RulesFullError: there are more than ``MAX_RULES``.
        """

    async def update(self, rule_id: str, changes: RuleChanges, etag: str, actor: str) -> Rule:
        """Change a rule; the merged result is validated.

        An update that changes nothing succeeds and moves neither revision nor etag: nobody has anything to reload.

        Raises:
            RuleInvalidError: names every violated field.
            RuleNotFoundError: no rule has this id.
            RuleConflictError: ``etag`` is given and is not the rule's.
            RuleExistsError: another rule has this endpoint and identifier type.
        """

    async def delete(self, rule_id: str, etag: str, actor: str) -> None:
        """Take a rule out. Raises as :meth:`update` does."""

    async def page(
        self, endpoint: str, identifier_type: str, after: tuple[str, str] | None, size: int
    ) -> Sequence[Rule]:
        """At most ``size`` rules by the bytes of endpoint, then identifier type; fewer only at the end.

        ``endpoint`` and ``identifier_type`` select exactly, empty = all; ``after`` is the (endpoint, identifier type)
        the page starts behind.
        """

    async def audit(self, rule_id: str, before: int | None, size: int) -> Sequence[AuditEntry]:
        """At most ``size`` changes, the newest first; fewer only at the end.

        ``rule_id`` selects the changes of one rule, empty = of all; ``before`` is the revision the page starts below.
        """

    async def changes_since(self, revision: int | None) -> BookChanges:
        """What changed since ``revision``, as one consistent snapshot; ``None`` = everything."""

    async def revision(self) -> int:
        """The revision of the last change, 0 before the first."""

    async def secret(self, name: str, proposed: bytes | None = None) -> bytes:
        """The secret of this name, made once and kept: ``proposed`` if given, else ``SECRET_BYTES`` random bytes."""

    async def close(self) -> None:
        """Let go of every connection; idempotent."""
