"""Converts rules between the wire and the model, and validates them; pure, as :mod:`ratelimitd.services.convert`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import Enforcement, Limit, Period, Rule
from ratelimitd.rules.applying import Change
from ratelimitd.rules.store import (
    EDITABLE,
    FIRST_LIMIT,
    LimitDraft,
    PlanDraft,
    RuleChanges,
    RuleDraft,
    in_order,
)
from ratelimitd.rules.validation import (
    MAX_QUOTED_CHARS,
    RuleRow,
    canonical_id,
    rule_within,
    stored_limit,
    validated,
)
from ratelimitd.services.convert import enforcement_of
from ratelimitd.services.wire import WireLimit, WireRule, parse_rule, text_of
from ratelimiter.v1 import ratelimiter_pb2

_ENFORCEMENTS: Final[Mapping[int, Enforcement]] = {
    ratelimiter_pb2.Enforcement.Value(member.name): member for member in Enforcement
}
_PERIODS: Final[Mapping[int, Period | None]] = {
    ratelimiter_pb2.PERIOD_UNSPECIFIED: None,
    **{ratelimiter_pb2.Period.Value(member.name): member for member in Period},
}

NOT_CHANGEABLE: Final = frozenset({"id", "etag"})
"""Fields that identify a rule and its version."""

MASK_FIELD: Final = "update_mask"


class Update(NamedTuple):
    """The change of an ``UpdateRateLimitRequest``; an empty ``etag`` matches every version.

    ``undeclared`` is the violation of a type that only a stored rule may keep.
    """

    rule_id: str
    changes: RuleChanges
    etag: str
    undeclared: Sequence[FieldViolation] = ()


def rate_limit_of(rule: Rule) -> ratelimiter_pb2.RateLimit:
    """Return the contract's message of a stored rule."""
    return ratelimiter_pb2.RateLimit(
        id=rule.id,
        endpoint=rule.endpoint,
        identifier_type=rule.identifier_type,
        limit=rule.limit,
        window_seconds=rule.window_seconds,
        algorithm=rule.algorithm,
        enabled=rule.enabled,
        etag=rule.etag,
        limits=map(_limit_of, rule.limits) if rule.has_list else (),
        plans={
            plan.name: ratelimiter_pb2.LimitList(limits=map(_limit_of, plan.limits))
            for plan in rule.plans
        },
    )


def change_of(change: Change, *, dry_run: bool) -> ratelimiter_pb2.RateLimitChange:
    """Return the contract's message of a change; in a dry run without the etag that the rule would get."""
    before, after = map(_row_message, change)
    if after is not None and dry_run:
        after.etag = ""
    return ratelimiter_pb2.RateLimitChange(before=before, after=after)


def _row_message(row: RuleRow | None) -> ratelimiter_pb2.RateLimit | None:
    if row is None:
        return None
    rule = rule_within(row)
    # A row that bypassed the service and is not a valid rule has only an id.
    return rate_limit_of(rule) if isinstance(rule, Rule) else ratelimiter_pb2.RateLimit(id=row.id)


def _limit_of(limit: Limit) -> ratelimiter_pb2.Limit:
    fields = stored_limit(limit)
    fields["enforcement"] = enforcement_of(limit.enforcement)
    if limit.calendar is not None:
        fields["period"] = ratelimiter_pb2.Period.Value(limit.calendar.period.name)
    return ratelimiter_pb2.Limit(**fields)


def draft_of(message: WireRule) -> RuleDraft:
    """Return the rule of a create, not yet validated.

    An unset ``enabled`` means true; the list of limits provides unset fields of the first limit.
    """
    fields = _fields_of(message)
    if message.limits:
        first = fields["limits"][0]
        fields |= {name: fields[name] or getattr(first, name) for name in FIRST_LIMIT}
    enabled = message.enabled if message.HasField("enabled") else True
    identity = {"id": text_of(message.id), "etag": text_of(message.etag)}
    return RuleDraft(**{**fields, **identity, "enabled": enabled})


def message_draft(message: ratelimiter_pb2.RateLimit) -> RuleDraft:
    """Return a stored rule in its message as :func:`draft_of` does."""
    return draft_of(parse_rule(message.SerializeToString()))


def _fields_of(message: WireRule) -> dict[str, Any]:
    """Return the editable fields as they were sent."""
    return {
        "endpoint": text_of(message.endpoint),
        "identifier_type": in_order(text_of(message.identifier_type)),
        "limit": message.limit,
        "window_seconds": message.window_seconds,
        "algorithm": text_of(message.algorithm),
        "enabled": message.enabled,
        "limits": tuple(map(_limit_draft, message.limits)),
        "plans": _plan_drafts(message),
    }


def _plan_drafts(message: WireRule) -> tuple[PlanDraft, ...]:
    # As in a map, the last of several entries with the same key counts.
    plans = {text_of(entry.key): entry.value.limits for entry in message.plans}
    return tuple(PlanDraft(name, tuple(map(_limit_draft, plans[name]))) for name in sorted(plans))


def _limit_draft(limit: WireLimit) -> LimitDraft:
    period = _PERIODS.get(limit.period, limit.period)
    has_window = limit.window_seconds or not isinstance(period, Period)
    return LimitDraft(
        text_of(limit.name),
        limit.limit,
        limit.window_seconds if has_window else None,
        text_of(limit.algorithm),
        burst=limit.burst,
        period=period,
        time_zone=text_of(limit.time_zone) or None,
        anchor_day=limit.anchor_day or None,
        enforcement=_ENFORCEMENTS.get(limit.enforcement, limit.enforcement),
    ).completed()


def update_of(message: Any, types: Collection[str] | None = None) -> Update:
    """Return the change of an update: the fields of its mask, or without a mask the whole rule.

    ``types`` are the identifier types that rules may have, alone or combined.

    Raises:
        RuleInvalidError: names every violation that can be found without the stored rule.
    """
    rule = message.rate_limit
    paths = list(dict.fromkeys(map(text_of, message.update_mask.paths)))
    violations = _mask_violations(paths) if paths else _rule_violations(rule, types)
    try:
        rule_id = canonical_id(text_of(rule.id), "rate_limit.id")
    except RuleInvalidError as error:
        raise RuleInvalidError(*error.violations, *violations) from None
    if violations and (paths or _rule_violations(rule)):
        raise RuleInvalidError(*violations)
    return Update(rule_id, _changes_of(rule, paths), text_of(rule.etag), (*violations,))


def _changes_of(rule: WireRule, paths: list[str]) -> RuleChanges:
    # An unset ``enabled`` is true in a create, false under a mask, and unchanged in an update without a mask.
    if paths:
        fields = _fields_of(rule)
        return RuleChanges(**{name: fields[name] for name in paths})
    draft = draft_of(rule)
    whole = [name for name in EDITABLE if name != "enabled" or rule.HasField("enabled")]
    return RuleChanges(**{name: getattr(draft, name) for name in whole})


def _rule_violations(rule: WireRule, types: Collection[str] | None = None) -> list[FieldViolation]:
    """Return the violations of the fields of a rule, without its id."""
    try:
        validated(replace(draft_of(rule), id=""), rule_id="", revision=0, types=types)
    except RuleInvalidError as error:
        return list(error.violations)
    return []


def _mask_violations(paths: list[str]) -> list[FieldViolation]:
    violations = []
    for path in paths:
        if path in NOT_CHANGEABLE:
            violations.append(FieldViolation(MASK_FIELD, f"{path} cannot be changed"))
        elif path not in EDITABLE:
            shown = ascii(path[:MAX_QUOTED_CHARS])
            violations.append(FieldViolation(MASK_FIELD, f"{shown} is not a field of a rule"))
    return violations
