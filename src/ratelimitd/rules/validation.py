"""Validates rules: drafts on their way into the store, and rows on their way out.

Rows are validated like requests, because they may be written past the service, and one invalid row must not affect the
others. For the same reason values are untyped: SQLite stores any type in any column. See ADR 0010.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import INT32_MAX, Algorithm, IdentifierType, Rule
from ratelimitd.rules.store import EDITABLE, RuleDraft, SkippedRow

MAX_ENDPOINT_CHARS: Final = 255
MAX_IDENTIFIER_TYPE_CHARS: Final = 50
CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Not allowed in the endpoint of a rule or of a check."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# A look-up takes a sixth of Enum's by-value call, and a load makes 200,000 of them.
_IDENTIFIER_TYPES: Final = {member.value: member for member in IdentifierType}
_ALGORITHMS: Final = {member.value: member for member in Algorithm}


class RuleRow(NamedTuple):
    """One stored rule, column by column, not yet validated."""

    id: Any
    endpoint: Any
    identifier_type: Any
    limit: Any
    window_seconds: Any
    algorithm: Any
    enabled: Any
    revision: Any

    @classmethod
    def of(cls, rule: Rule) -> RuleRow:
        """Return the row of a rule."""
        return cls._make(getattr(rule, name) for name in cls._fields)

    def draft(self) -> RuleDraft:
        """Return the row as a draft, without its id, which no edit changes."""
        return RuleDraft(**{name: getattr(self, name) for name in EDITABLE})


def validated(draft: RuleDraft, *, rule_id: str, revision: int) -> Rule:
    """Return the rule of a draft, with this id and revision.

    Raises:
        RuleInvalidError: names every violated field by its path in the contract.
    """
    violations = [
        FieldViolation(f"rate_limit.{field}", description)
        for field, description in _violations(draft)
    ]
    if draft.id and _UUID.fullmatch(draft.id) is None:
        violations.insert(0, FieldViolation("rate_limit.id", "the id must be a UUID"))
    if violations:
        raise RuleInvalidError(*violations)
    row = RuleRow(
        rule_id, draft.endpoint, draft.identifier_type, draft.limit, draft.window_seconds,
        draft.algorithm, draft.enabled, revision,
    )  # fmt: skip
    return _rule(row)


def canonical_id(rule_id: str, field: str) -> str:
    """Return the id in lower case with hyphens; ``field`` is its place in the request.

    Raises:
        RuleInvalidError: the id is no UUID.
    """
    if _UUID.fullmatch(rule_id) is None:
        raise RuleInvalidError(FieldViolation(field, "the id must be a UUID"))
    return rule_id.lower()


def rule_from_row(row: RuleRow) -> Rule | SkippedRow:
    """Return the rule of a stored row, or why it is invalid."""
    if not isinstance(row.id, str) or _UUID.fullmatch(row.id) is None:
        return SkippedRow("", "id: the id must be a UUID")
    if not isinstance(row.revision, int):
        return SkippedRow(row.id, "revision: the revision must be a whole number")
    reasons = [f"{field}: {description}" for field, description in _violations(row)]
    if reasons:
        return SkippedRow(row.id, "; ".join(reasons))
    return _rule(row)


def etag_of(row: RuleRow) -> str:
    """Return an opaque text that differs after every edit.

    It covers content and revision: a database restored from a backup counts the same revisions again.
    """
    text = "\x00".join(map(str, row))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()


def _rule(row: RuleRow) -> Rule:
    return Rule(
        id=row.id,
        endpoint=row.endpoint,
        identifier_type=_IDENTIFIER_TYPES[row.identifier_type],
        limit=row.limit,
        window_seconds=row.window_seconds,
        algorithm=_ALGORITHMS[row.algorithm],
        enabled=row.enabled,
        etag=etag_of(row),
        revision=row.revision,
    )


def _violations(fields: RuleDraft | RuleRow) -> Iterator[tuple[str, str]]:
    """Yield each violated field of a draft or row with a description, in the contract's order."""
    if problem := _endpoint_problem(fields.endpoint):
        yield "endpoint", problem
    if problem := _identifier_type_problem(fields.identifier_type):
        yield "identifier_type", problem
    if problem := _number_problem("limit", fields.limit):
        yield "limit", problem
    if problem := _number_problem("window", fields.window_seconds):
        yield "window_seconds", problem
    if not isinstance(fields.algorithm, str) or fields.algorithm not in _ALGORITHMS:
        yield "algorithm", f"unsupported algorithm: use one of {', '.join(_ALGORITHMS)}"
    if not isinstance(fields.enabled, bool):
        yield "enabled", "enabled must be true or false"


def _endpoint_problem(endpoint: Any) -> str:
    if not isinstance(endpoint, str) or not endpoint:
        return "the endpoint must not be empty; * is the global rule"
    if len(endpoint) > MAX_ENDPOINT_CHARS:
        return f"the endpoint must be at most {MAX_ENDPOINT_CHARS} characters"
    if CONTROL_CHARACTER.search(endpoint):
        return "the endpoint must not contain control characters"
    if _SURROGATE.search(endpoint):
        return "the endpoint must be valid Unicode"
    return ""


def _identifier_type_problem(identifier_type: Any) -> str:
    if isinstance(identifier_type, str):
        if identifier_type in _IDENTIFIER_TYPES:
            return ""
        if len(identifier_type) > MAX_IDENTIFIER_TYPE_CHARS:
            return f"the identifier type must be at most {MAX_IDENTIFIER_TYPE_CHARS} characters"
    return f"the identifier type must be one of {', '.join(_IDENTIFIER_TYPES)}"


def _number_problem(name: str, value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return f"the {name} must be a whole number"
    if value <= 0:
        return f"the {name} must be positive"
    if value > INT32_MAX:
        return f"the {name} must be at most {INT32_MAX}"
    return ""
