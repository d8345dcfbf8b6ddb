"""Rules between the wire and the model: drafts, changes and masks on their way in, rules on their way out.

Pure. What a valid rule is, :mod:`ratelimitd.rules.validation` knows; here is only what the messages mean: what unset
means, and which fields a mask may name. See ADR 0008.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import Rule
from ratelimitd.rules.store import EDITABLE, RuleChanges, RuleDraft
from ratelimitd.rules.validation import canonical_id, validated
from ratelimitd.services.wire import WireDelete, WireRule, WireUpdate
from ratelimiter.v1 import ratelimiter_pb2

NOT_CHANGEABLE: Final = frozenset({"id", "etag"})
"""Fields that say which rule is meant, and which version of it."""

MAX_QUOTED_CHARS: Final = 64

MASK_FIELD: Final = "update_mask"


class Update(NamedTuple):
    """What an ``UpdateRateLimitRequest`` asks for; an empty ``etag`` matches every version."""

    rule_id: str
    changes: RuleChanges
    etag: str


def rate_limit_of(rule: Rule) -> ratelimiter_pb2.RateLimit:
    """The contract's message of a stored rule."""
    return ratelimiter_pb2.RateLimit(
        id=rule.id,
        endpoint=rule.endpoint,
        identifier_type=rule.identifier_type,
        limit=rule.limit,
        window_seconds=rule.window_seconds,
        algorithm=rule.algorithm,
        enabled=rule.enabled,
        etag=rule.etag,
    )


def draft_of(message: WireRule) -> RuleDraft:
    """The rule that a create asks for, not yet validated; ``enabled`` unset means true."""
    return RuleDraft(
        endpoint=text_of(message.endpoint),
        identifier_type=text_of(message.identifier_type),
        limit=message.limit,
        window_seconds=message.window_seconds,
        algorithm=text_of(message.algorithm),
        enabled=message.enabled if message.HasField("enabled") else True,
        id=text_of(message.id),
    )


def update_of(message: WireUpdate) -> Update:
    """The change that an update asks for: the fields its mask names, or without a mask the whole rule.

    Raises:
        RuleInvalidError: names everything that is wrong and can be seen without the stored rule.
    """
    rule = message.rate_limit
    paths = list(dict.fromkeys(map(text_of, message.update_mask.paths)))
    violations = _mask_violations(paths) if paths else _rule_violations(rule)
    try:
        rule_id = canonical_id(text_of(rule.id), "rate_limit.id")
    except RuleInvalidError as error:
        raise RuleInvalidError(*error.violations, *violations) from None
    if violations:
        raise RuleInvalidError(*violations)
    return Update(rule_id, _changes_of(rule, paths), text_of(rule.etag))


def deleted_id_of(message: WireDelete) -> str:
    """The id of the rule that a delete asks for.

    Raises:
        RuleInvalidError: it is no UUID.
    """
    return canonical_id(text_of(message.id), "id")


def text_of(raw: bytes) -> str:
    """The text of a field. What is no UTF-8 becomes lone surrogates, which no rule's field admits."""
    return raw.decode("utf-8", "surrogateescape")


def _changes_of(rule: WireRule, paths: list[str]) -> RuleChanges:
    # Unset, enabled means true to a create, its zero to a mask, and to an update without one: leave it as it is.
    draft = replace(draft_of(rule), enabled=rule.enabled)
    whole = [name for name in EDITABLE if name != "enabled" or rule.HasField("enabled")]
    return RuleChanges(**{name: getattr(draft, name) for name in paths or whole})


def _rule_violations(rule: WireRule) -> list[FieldViolation]:
    """What is wrong with the fields of a whole rule, its id aside."""
    try:
        validated(replace(draft_of(rule), id=""), rule_id="", revision=0)
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
            violations.append(FieldViolation(MASK_FIELD, f"{shown} is no field of a rule"))
    return violations
