"""Compares the rules of a store with a wanted set: which rules are created, changed and deleted.

Pure. Handles one rule at a time, so that callers can pause between rules. See ADR 0058.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

from ratelimitd.errors import FieldViolation, RuleBookConflictError, RuleInvalidError
from ratelimitd.rules.store import RuleDraft
from ratelimitd.rules.validation import (
    RuleRow,
    etag_of,
    is_rule_id,
    type_problem,
    types_beside,
    validated,
)

MAX_APPLIED: Final = 20_000
"""Maximum rules per call: it holds the revision lock, for which other writers wait up to 2 s, for about 1 s."""

MAX_NAMED: Final = 15
"""Violations reported individually: as many as fit in a status beside the number of the others."""

FIELD: Final = "rate_limits"

_Pair = tuple[str, str]


ACTIONS: Final = ("create", "update", "delete")


class Change(NamedTuple):
    """A rule before and after a change; ``None`` where it does not exist. Both are equal if nothing changes."""

    before: RuleRow | None
    after: RuleRow | None

    @property
    def rule_id(self) -> str:
        """The id of the rule."""
        row = self.after or self.before
        return "" if row is None else str(row.id)

    @property
    def action(self) -> str:
        """``create``, ``update``, ``delete``, or empty."""
        if self.before is None:
            return "create"
        if self.after is None:
            return "delete"
        return "" if self.before == self.after else "update"


_NO_ROW: Final = RuleRow(*[None] * 8)
"""Placeholder for an invalid wanted rule."""


class _Wanted(NamedTuple):
    row: RuleRow
    etag: str


class BookDiff:
    """Compares wanted with stored rules: :meth:`want` each, :meth:`see` each stored one, then call :meth:`changes`.

    A wanted rule with an id matches the stored rule with that id. One without an id matches the stored rule of its
    endpoint and identifier type, unless that rule's id is wanted, too. ``types`` are the identifier types that rules
    may have or combine; a stored rule may keep another one. ``prune`` deletes stored rules that are not wanted.
    ``new_id`` generates missing ids of new rules.
    """

    def __init__(
        self, types: Collection[str], *, prune: bool, new_id: Callable[[], str] = str
    ) -> None:
        self._types = types
        self._prune = prune
        self._new_id = new_id
        self._wanted: list[_Wanted] = []
        self._by_id: dict[str, int] = {}
        self._by_pair: dict[_Pair, int] = {}
        self._stored: dict[int, RuleRow] = {}
        self._unwanted: list[RuleRow] = []
        self._undeclared: dict[int, str] = {}
        """Problems of the types of wanted rules that are not compared yet: the stored rule may keep its type."""
        self._named: list[FieldViolation] = []
        self._more = 0
        """Violations that are only counted: a message of 4 MiB may contain millions."""

    def want(self, draft: RuleDraft) -> None:
        """Add a wanted rule and record its violations."""
        index = len(self._wanted)
        rule_id = draft.id.lower()
        try:
            row = RuleRow.of(validated(draft, rule_id=rule_id, revision=0))
        except RuleInvalidError as error:
            for path, text in error.violations:
                self._complain(index, path.removeprefix("rate_limit."), text)
            row = _NO_ROW
        else:
            first = self._by_pair.setdefault((row.endpoint, row.identifier_type), index)
            if first != index:
                text = f"the endpoint and identifier_type are those of {FIELD}[{first}]"
                self._complain(index, "endpoint", text)
        if rule_id and (first := self._by_id.setdefault(rule_id, index)) != index:
            self._complain(index, "id", f"the id is that of {FIELD}[{first}]")
        kind = draft.identifier_type
        if (problem := type_problem(kind, self._types)) and not type_problem(kind):
            self._undeclared[index] = problem
        self._wanted.append(_Wanted(row, draft.etag))

    def see(self, row: RuleRow) -> None:
        """Compare a stored rule, valid or not. Ignores a row whose id is not a rule id."""
        if not is_rule_id(row.id):
            return
        index = self._by_id.get(row.id)
        if index is None:
            index = self._by_pair.get((row.endpoint, row.identifier_type))
            if index is not None and self._wanted[index].row.id:
                index = None
        if index is None:
            self._unwanted.append(row)
        else:
            self._stored[index] = row

    def changes(self, revision: int) -> Iterator[Change]:
        """Yield the change of each wanted rule in their order, then the deletions; changed rules get ``revision``.

        Call :meth:`refuse` afterwards.

        Raises:
            RuleBookConflictError: an etag is given and is not the rule's.
        """
        for index, (row, etag) in enumerate(self._wanted):
            before = self._stored.get(index)
            if etag and (before is None or etag != etag_of(before)):
                message = f"{FIELD}[{index}].etag: the rule has changed: read it again"
                raise RuleBookConflictError(message)
            self._check_type(index, row, before)
            if before is None:
                yield Change(None, row._replace(id=row.id or self._new_id(), revision=revision))
            elif before == row._replace(id=before.id, revision=before.revision):
                yield Change(before, before)
            else:
                yield Change(before, row._replace(id=before.id, revision=revision))
        for row in self._unwanted:
            if self._prune:
                yield Change(row, None)
            elif (taken := self._by_pair.get((row.endpoint, row.identifier_type))) is not None:
                text = f"the rule for this endpoint and identifier_type has the id {row.id}"
                self._complain(taken, "id", f"{text}: give it, none, or prune")

    def refuse(self) -> None:
        """Raise the recorded violations; before the comparison, with the undeclared types of all rules.

        Raises:
            RuleInvalidError: names the violated fields, such as ``rate_limits[3].limit``, and counts those beyond 15.
        """
        if self._named:
            for index, problem in self._undeclared.items():
                self._complain(index, "identifier_type", problem)
        if self._more:
            self._named.append(FieldViolation(FIELD, f"{self._more} more fields are wrong"))
        if self._named:
            raise RuleInvalidError(*self._named)

    def _check_type(self, index: int, row: RuleRow, before: RuleRow | None) -> None:
        problem = self._undeclared.pop(index, "")
        if problem and type_problem(row.identifier_type, types_beside(self._types, before)):
            self._complain(index, "identifier_type", problem)

    def _complain(self, index: int, field: str, text: str) -> None:
        if len(self._named) < MAX_NAMED:
            self._named.append(FieldViolation(f"{FIELD}[{index}].{field}", text))
        else:
            self._more += 1
