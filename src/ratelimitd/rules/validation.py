"""Validates rules: drafts before they are stored, and rows as they are read.

Rows are validated like requests, because they may be written outside the service, and one invalid row must not affect
the others. Their values are untyped: SQLite stores any type in any column. See ADR 0010.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, NamedTuple

from ratelimitd.algorithms.calendar_window import is_time_zone
from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import (
    DEFAULT_LIMIT,
    EVERYBODY,
    INT32_MAX,
    NOMINAL_SECONDS,
    RESERVED_PLANS,
    TYPE_NAME,
    Algorithm,
    Calendar,
    Enforcement,
    IdentifierType,
    Limit,
    Period,
    Plan,
    Rule,
    types_within,
)
from ratelimitd.rules.store import (
    EDITABLE,
    FIRST_LIMIT,
    LIMIT_FIELDS,
    LimitDraft,
    PlanDraft,
    RuleDraft,
    SkippedRow,
)

MAX_ENDPOINT_CHARS: Final = 255
MAX_IDENTIFIER_TYPE_CHARS: Final = 255

REMEMBERED_TYPES: Final = 1_024
"""Cache size for parsed identifier types: a load looks them up 100,000 times."""

MAX_LIMITS: Final = 8
"""Limits per rule: each adds a bucket look-up to a check."""
MAX_ANCHOR_DAY: Final = 31

MAX_PLANS: Final = 32
"""Plans per rule: a price list is shorter, and each plan takes memory and bytes of an answer."""

_MOST_LIMITS: Final = 2 + MAX_LIMITS * (1 + MAX_PLANS)
"""Largest :attr:`RuleRow.limit_count` of a valid row."""

MAX_QUOTED_CHARS: Final = 64
"""Characters of an unknown name that an error quotes."""

CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Not allowed in the endpoint of a rule or a check."""

RULE_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
NAME = re.compile(r"[a-z0-9_-]{1,32}")
"""Format of the name of a limit or a plan."""
SURROGATE = re.compile(r"[\ud800-\udfff]")

# A dict look-up takes a sixth of Enum's by-value call, and a load makes 200,000.
_ALGORITHMS: Final = {member.value: member for member in Algorithm}

_PERIODS: Final = {member.value: member for member in Period}

_ENFORCEMENTS: Final = {member.value: member for member in Enforcement}

_NO_LIMIT: Final = LimitDraft(None, None, None, None)
"""Placeholder for a stored value that is not a list of limits."""

_NO_PLAN: Final = PlanDraft("", ())
"""Placeholder for invalid stored plans."""

_ONLY: Final = LimitDraft("", None, None, None)
"""Holds the defaults of a rule's only limit."""

_DEFAULTS: Final = {field: getattr(_ONLY, field) for field in LIMIT_FIELDS if field != "name"}


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
    limits: Any = None
    """JSON: an array of the limits as objects, the first with its name only; ``None`` for one limit without a name."""
    plans: Any = None
    """JSON: an object with an array of limits per plan; ``None`` without plans."""

    @property
    def limit_count(self) -> int:
        """About the number of its limits, its own and those of its plans: the time to read them grows with it."""
        return 1 + sum(
            text.count("{") for text in (self.limits, self.plans) if isinstance(text, str)
        )

    @classmethod
    def of(cls, rule: Rule) -> RuleRow:
        """Return the row of a rule."""
        return _row(rule, rule.id, rule.revision)

    def draft(self) -> RuleDraft:
        """Return the row as a draft, without its id, which no edit changes."""
        lists: dict[str, Any] = {"limits": self._limits(), "plans": self._plans()}
        fields = {name: getattr(self, name) for name in EDITABLE if name not in lists}
        return RuleDraft(**fields, **lists)

    def _limits(self) -> tuple[LimitDraft, ...]:
        if self.limits is None:
            return ()
        try:
            first, *more = json.loads(self.limits)
            numbers = {name: getattr(self, name) for name in FIRST_LIMIT}
            return tuple(LimitDraft(**limit) for limit in ({**first, **numbers}, *more))
        except (ValueError, TypeError, RecursionError):
            return (_NO_LIMIT,)

    def _plans(self) -> tuple[PlanDraft, ...]:
        if self.plans is None:
            return ()
        try:
            return tuple(
                PlanDraft(name, tuple(LimitDraft(**limit) for limit in limits))
                for name, limits in json.loads(self.plans).items()
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return (_NO_PLAN,)


def validated(
    draft: RuleDraft, *, rule_id: str, revision: int, types: Collection[str] | None = None
) -> Rule:
    """Return the validated rule of a draft, with this id and revision.

    ``types`` are the identifier types that it may have or combine.

    Raises:
        RuleInvalidError: names every violated field by its path in the contract.
    """
    violations = [
        FieldViolation(f"rate_limit.{field}", description)
        for field, description in _violations(draft, types)
    ]
    if draft.id and RULE_ID.fullmatch(draft.id) is None:
        violations.insert(0, FieldViolation("rate_limit.id", "the id must be a UUID"))
    if violations:
        raise RuleInvalidError(*violations)
    return _rule(draft, _row(draft, rule_id, revision))


def canonical_id(rule_id: str, field: str) -> str:
    """Return the id in lower case with hyphens; ``field`` is its place in the request.

    Raises:
        RuleInvalidError: the id is no UUID.
    """
    if RULE_ID.fullmatch(rule_id) is None:
        raise RuleInvalidError(FieldViolation(field, "the id must be a UUID"))
    return rule_id.lower()


def is_rule_id(value: Any) -> bool:
    """Return whether a value is the id of a rule."""
    return isinstance(value, str) and RULE_ID.fullmatch(value) is not None


def rule_from_row(row: RuleRow) -> Rule | SkippedRow:
    """Return the rule of a stored row, or why it is invalid."""
    if not is_rule_id(row.id):
        return SkippedRow("", "id: the id must be a UUID")
    if not isinstance(row.revision, int):
        return SkippedRow(row.id, "revision: the revision must be a whole number")
    return rule_within(row)


def rule_within(row: RuleRow) -> Rule | SkippedRow:
    """Return the rule of a row, or why it is invalid, without validating id and revision."""
    if row.limit_count > _MOST_LIMITS:  # written by hand; reading 100,000 would take a second
        most = f"a rule has at most {MAX_LIMITS} limits and {MAX_PLANS} plans"
        return SkippedRow(row.id, f"limits, plans: {most}")
    draft = row.draft()
    reasons = [f"{field}: {description}" for field, description in _violations(draft)]
    if reasons:
        return SkippedRow(row.id, "; ".join(reasons))
    return _rule(draft, row)


def etag_of(row: RuleRow) -> str:
    """Return an opaque text that differs after every edit.

    It covers content and revision: a database restored from a backup assigns the same revisions again.
    """
    # A rule without a list of limits or without plans keeps its etag from releases without those columns.
    lists = (row.limits, row.plans)
    length = len(row) - (2 if lists == (None, None) else lists[1] is None)
    text = "\x00".join(map(str, row[:length]))
    # equivalent: the length of an etag has no meaning
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()


def _row(rule: Rule | RuleDraft, rule_id: str, revision: int) -> RuleRow:
    return RuleRow(
        rule_id, rule.endpoint, rule.identifier_type, rule.limit, rule.window_seconds,
        rule.algorithm, rule.enabled, revision, _stored_limits(rule.limits),
        _stored_plans(rule.plans),
    )  # fmt: skip


def _rule(draft: RuleDraft, row: RuleRow) -> Rule:
    """Return the rule of a valid draft and its row."""
    first = draft.limits[0] if draft.limits else _ONLY
    return Rule(
        row.id,
        row.endpoint,
        sys.intern(row.identifier_type),
        **_limit_fields(row, first, row.revision),
        enabled=row.enabled,
        etag=etag_of(row),
        more=tuple(_limit(limit, row.revision) for limit in draft.limits[1:]),
        plans=tuple(
            Plan(sys.intern(plan.name), tuple(_limit(one, row.revision) for one in plan.limits))
            for plan in draft.plans
        ),
    )


def _limit(draft: LimitDraft, revision: int) -> Limit:
    return Limit(**_limit_fields(draft, draft, revision))


def _limit_fields(
    numbers: RuleRow | LimitDraft, others: LimitDraft, revision: int
) -> dict[str, Any]:
    """Return the fields of a valid limit, with the fields of ``FIRST_LIMIT`` from ``numbers``."""
    return {
        "limit": numbers.limit,
        "window_seconds": numbers.window_seconds,
        "algorithm": _ALGORITHMS[numbers.algorithm],
        "name": others.name or DEFAULT_LIMIT,
        "enforcement": _ENFORCEMENTS[others.enforcement],
        "burst": others.burst,
        "calendar": _calendar(others),
        "revision": revision,
    }


def _calendar(draft: LimitDraft) -> Calendar | None:
    if draft.period is None:
        return None
    return Calendar(_PERIODS[draft.period], draft.time_zone, draft.anchor_day or 1)


def _stored_limits(limits: Sequence[Limit | LimitDraft]) -> str | None:
    stored = [*map(stored_limit, limits)]
    for field in FIRST_LIMIT if stored else ():
        del stored[0][field]
    if stored in ([], [{"name": DEFAULT_LIMIT}]):
        return None
    return json.dumps(stored, separators=(",", ":"))


def _stored_plans(plans: Sequence[Plan | PlanDraft]) -> str | None:
    stored = {plan.name: [*map(stored_limit, plan.limits)] for plan in plans}
    return json.dumps(stored, separators=(",", ":")) if stored else None


def stored_limit(limit: Limit | LimitDraft) -> dict[str, Any]:
    """Return the fields of a limit that differ from their defaults."""
    draft = limit if isinstance(limit, LimitDraft) else LimitDraft.of(limit)
    given = {field: getattr(draft, field) for field in LIMIT_FIELDS}
    given["name"] = draft.name or DEFAULT_LIMIT
    return {field: value for field, value in given.items() if value != _DEFAULTS.get(field)}


def _violations(
    fields: RuleDraft, types: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each violated field of a draft with a description, in the contract's order."""
    if problem := _endpoint_problem(fields.endpoint):
        yield "endpoint", problem
    if problem := type_problem(fields.identifier_type, types):
        yield "identifier_type", problem
    if not fields.limits:
        yield from _number_violations(fields)
    enabled: object = fields.enabled
    if not isinstance(enabled, bool):
        yield "enabled", "enabled must be true or false"
    if fields.limits:
        yield from _limit_violations(fields)
    if fields.plans:
        yield from _plan_violations(fields.plans)
        if fields.identifier_type == EVERYBODY:
            yield (
                "plans",
                f"a rule for {EVERYBODY} has no plans: plans are assigned to single identities",
            )


def _limit_violations(rule: RuleDraft) -> Iterator[tuple[str, str]]:
    """Yield the violations of the list of limits, by place, such as ``limits[1].name``."""
    if len(rule.limits) > MAX_LIMITS:
        yield "limits", f"a rule has at most {MAX_LIMITS} limits"
        return
    first = rule.limits[0]
    if first == _NO_LIMIT:
        yield "limits", "must be a list of limits"
        return
    for name in FIRST_LIMIT:
        if getattr(rule, name) != getattr(first, name):
            yield name, f"the {name} must be unset or equal that of limits[0]"
    yield from _list_violations("limits", rule.limits)


def _plan_violations(plans: Sequence[PlanDraft]) -> Iterator[tuple[str, str]]:
    """Yield the violations of plans, by place, such as ``plans[pro].limits[1].name``."""
    if plans == (_NO_PLAN,):
        yield "plans", "must be lists of limits by the name of a plan"
        return
    if len(plans) > MAX_PLANS:
        yield "plans", f"a rule has at most {MAX_PLANS} plans"
        return
    for name, limits in plans:
        if NAME.fullmatch(name) is None:
            shown = ascii(name[:MAX_QUOTED_CHARS])
            yield "plans", f"the name {shown} must be 1 to 32 characters of a-z, 0-9, _ and -"
            continue
        if name in RESERVED_PLANS:
            yield f"plans[{name}]", f"{name} is reserved: a rule has no limits for it"
        elif not 0 < len(limits) <= MAX_LIMITS:
            yield f"plans[{name}].limits", f"a plan has 1 to {MAX_LIMITS} limits"
        else:
            yield from _list_violations(f"plans[{name}].limits", limits)


def _list_violations(place: str, limits: Sequence[LimitDraft]) -> Iterator[tuple[str, str]]:
    names: set[Any] = set()
    for index, limit in enumerate(limits):
        at = f"{place}[{index}]."
        name = limit.name if index or limit.name else DEFAULT_LIMIT
        if index and name == "":
            yield f"{at}name", "is missing: only the first limit may have no name"
        elif not isinstance(name, str) or NAME.fullmatch(name) is None:
            yield f"{at}name", "the name must be 1 to 32 characters of a-z, 0-9, _ and -"
        elif name in names:
            owner = "rule" if place == "limits" else "plan"
            yield f"{at}name", f"the name must be unique in the {owner}"
        else:
            names.add(name)
        if not isinstance(limit.enforcement, str) or limit.enforcement not in _ENFORCEMENTS:
            yield f"{at}enforcement", f"use one of {', '.join(_ENFORCEMENTS)}"
        found = chain(
            _number_violations(limit), _burst_violations(limit), _calendar_violations(limit)
        )
        yield from ((f"{at}{field}", text) for field, text in found)


def _number_violations(limit: RuleDraft | LimitDraft) -> Iterator[tuple[str, str]]:
    if problem := _number_problem("limit", limit.limit):
        yield "limit", problem
    if problem := _number_problem("window", limit.window_seconds, _WINDOW):
        yield "window_seconds", problem
    if not isinstance(limit.algorithm, str) or limit.algorithm not in _ALGORITHMS:
        yield "algorithm", f"unsupported algorithm: use one of {', '.join(_ALGORITHMS)}"


def _calendar_violations(limit: LimitDraft) -> Iterator[tuple[str, str]]:
    period, time_zone = limit.period, limit.time_zone
    is_known = isinstance(period, str) and period in _PERIODS
    if period is None:
        if time_zone is not None:
            yield "time_zone", "only a limit with a period has a time zone"
    elif not is_known:
        yield "period", f"use one of {', '.join(_PERIODS)}"
    elif limit.algorithm != Algorithm.FIXED_WINDOW:
        yield "period", f"only a limit with the algorithm {Algorithm.FIXED_WINDOW} has a period"
    elif problem := _nominal_problem(period, limit.window_seconds):
        yield "window_seconds", problem
    if is_known and not (isinstance(time_zone, str) and is_time_zone(time_zone)):
        yield "time_zone", "unknown time zone: use an IANA name such as Europe/Berlin"
    if problem := _anchor_problem(limit):
        yield "anchor_day", problem


def _anchor_problem(limit: LimitDraft) -> str:
    if limit.anchor_day is None:
        return ""
    if limit.period != Period.MONTH:
        return f"only the period {Period.MONTH} has an anchor day"
    if _number_problem("anchor day", limit.anchor_day) or limit.anchor_day > MAX_ANCHOR_DAY:
        return f"the anchor day must be 1 to {MAX_ANCHOR_DAY}"
    return ""


def _nominal_problem(period: str, window_seconds: Any) -> str:
    nominal = NOMINAL_SECONDS[_PERIODS[period]]
    if _number_problem("window", window_seconds) or window_seconds == nominal:
        return ""  # a value that is not a number is reported elsewhere
    return f"the window of a {period} must be unset or {nominal}"


def _burst_violations(limit: LimitDraft) -> Iterator[tuple[str, str]]:
    if limit.burst == 0 and not isinstance(limit.burst, bool):
        return
    if problem := _number_problem("burst", limit.burst):
        yield "burst", problem
    elif limit.algorithm != Algorithm.TOKEN_BUCKET:
        yield "burst", f"only a {Algorithm.TOKEN_BUCKET} has a burst"
    elif (
        not any(_number_violations(limit))
        and limit.burst * limit.window_seconds > INT32_MAX * limit.limit
    ):
        # Buckets store the seconds until they are full in 31 bits.
        yield "burst", f"the burst must be refilled by limit and window in at most {INT32_MAX} s"


def _endpoint_problem(endpoint: Any) -> str:
    if not isinstance(endpoint, str) or not endpoint:
        return "the endpoint must not be empty; * is the global rule"
    if len(endpoint) > MAX_ENDPOINT_CHARS:
        return f"the endpoint must be at most {MAX_ENDPOINT_CHARS} characters"
    if CONTROL_CHARACTER.search(endpoint):
        return "the endpoint must not contain control characters"
    if SURROGATE.search(endpoint):
        return "the endpoint must be valid Unicode"
    return ""


def type_problem(identifier_type: Any, types: Collection[str] | None = None) -> str:
    """Return the problem of a rule's identifier type, or an empty text; ``types`` are those it may have or combine."""
    if isinstance(identifier_type, str) and _has_form_of_type(identifier_type):
        parts = types_within(identifier_type)
        if types is None or all(part in types for part in parts):
            return ""
    elif isinstance(identifier_type, str) and len(identifier_type) > MAX_IDENTIFIER_TYPE_CHARS:
        return f"the identifier type must be at most {MAX_IDENTIFIER_TYPE_CHARS} characters"
    named = choice_of(types or IdentifierType, f", several joined by +, or {EVERYBODY}")
    return f"must be one of {named}"


def types_beside(declared: Iterable[str], stored: Rule | RuleRow | None) -> tuple[str, ...]:
    """Return the identifier types that an edit may use: declared ones, and those of the stored rule, which may stay."""
    kept = types_within(str(stored.identifier_type)) if stored else ()
    return tuple(dict.fromkeys((*declared, *kept)))


def choice_of(types: Iterable[str], more: str = "") -> str:
    """List identifier types and ``more`` for an error message, with the setting that declares further types.

    The types come first: a status has room for 120 characters.
    """
    return f"{', '.join(types)}{more} (the node's setting IDENTIFIER_TYPES declares others)"


@lru_cache(REMEMBERED_TYPES)
def _has_form_of_type(identifier_type: str) -> bool:
    parts = types_within(identifier_type)
    return (
        len(identifier_type) <= MAX_IDENTIFIER_TYPE_CHARS
        and [*parts] == sorted(set(parts))
        and EVERYBODY not in parts
        and all(TYPE_NAME.fullmatch(part) for part in parts)
    )


_WINDOW: Final = "a whole number of seconds, or a duration such as 30s, 1m, 12h or 1d"


def _number_problem(name: str, value: Any, what: str = "a whole number") -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return f"the {name} must be {what}"
    if value <= 0:
        return f"the {name} must be positive"
    if value > INT32_MAX:
        return f"the {name} must be at most {INT32_MAX}"
    return ""
