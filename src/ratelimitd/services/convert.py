"""Converts checks, resets and rules between the wire and the model, and validates them.

Pure, and total on every message the parser lets through: a field is either valid or named in a ``CheckInvalidError``.
Never does I/O, never decides anything. See ADR 0010.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from ratelimitd.errors import CheckInvalidError, FieldViolation, RuleInvalidError
from ratelimitd.model import (
    GLOBAL_ENDPOINT,
    INT32_MAX,
    Check,
    Decision,
    Enforcement,
    IdentifierType,
    Limit,
    LimitStatus,
    Reason,
    Rule,
)
from ratelimitd.rules.store import (
    EDITABLE,
    FIRST_LIMIT,
    LimitDraft,
    RuleChanges,
    RuleDraft,
)
from ratelimitd.rules.validation import (
    CONTROL_CHARACTER,
    MAX_ENDPOINT_CHARS,
    canonical_id,
    validated,
)
from ratelimitd.services.wire import (
    WireCheck,
    WireDelete,
    WireLimit,
    WireReset,
    WireRule,
    WireUpdate,
)
from ratelimiter.v1 import ratelimiter_pb2

MAX_IDENTIFIER_BYTES: Final = 256
"""Longest identifier, in bytes of UTF-8."""

REMEMBERED_ENDPOINTS: Final = 4_096
"""Cached endpoints; they are route templates, so few. Saves decoding and validation, 0.4 µs. At most 1,020 bytes each,
8 MB in all."""

REMEMBERED_ADDRESSES: Final = 16_384
"""Cached addresses: ``ipaddress`` takes 1 to 5 µs, the cache 0.1 µs. About 4 MB in all."""

_IDENTIFIER_TYPES: Final = {member.value.encode(): member for member in IdentifierType}
_TYPE_NAMES: Final = ", ".join(IdentifierType)
_ENFORCEMENTS: Final[Mapping[int, Enforcement]] = {
    ratelimiter_pb2.Enforcement.Value(member.name): member for member in Enforcement
}
T = TypeVar("T")


class Target(NamedTuple):
    """The bucket of a reset; fields as in :class:`ratelimitd.model.Check`."""

    identifier: bytes
    identifier_type: IdentifierType
    endpoint: str


def check_of(message: WireCheck) -> Check:
    """Return the check of a message.

    Raises:
        CheckInvalidError: names every violated field.
    """
    try:
        identifier_type = _identifier_type(message.identifier_type)
        return Check(
            _identifier(message.identifier, identifier_type),
            identifier_type,
            _endpoint(message.endpoint),
            _cost(message.tokens_requested),
            message.timestamp,
            message.peek,
        )
    except ValueError:
        tokens_violations = _violations("tokens_requested", _cost, message.tokens_requested)
        raise CheckInvalidError(*_target_violations(message), *tokens_violations) from None


def target_of(message: WireReset) -> Target:
    """Return the bucket of a reset.

    Raises:
        CheckInvalidError: names every violated field.
    """
    try:
        identifier_type = _identifier_type(message.identifier_type)
        identifier = _identifier(message.identifier, identifier_type)
        return Target(identifier, identifier_type, _endpoint(message.endpoint))
    except ValueError:
        raise CheckInvalidError(*_target_violations(message)) from None


def answer_of(decision: Decision) -> ratelimiter_pb2.RateLimitResponse:
    """Return the contract's answer to one check."""
    allowed, remaining, reset_time, retry_after, reason, rule, limit, limits = decision
    return ratelimiter_pb2.RateLimitResponse(
        allowed=allowed,
        remaining_tokens=remaining,
        reset_time=reset_time,
        retry_after_seconds=retry_after,
        # Reason's numbers are the contract's; the stub knows only its own enum.
        reason=reason,  # type: ignore[arg-type]
        limit=limit.limit if limit else 0,
        window_seconds=limit.window_seconds if limit else 0,
        rule_id=rule.id if rule else "",
        limits=map(_status_of, limits),
        limit_name=limit.name if limit else "",
    )


def _status_of(status: LimitStatus) -> ratelimiter_pb2.LimitStatus:
    allowed, remaining, reset_time, retry_after, reason, rule, limit = status
    return ratelimiter_pb2.LimitStatus(
        rule_id=rule.id,
        name=limit.name,
        identifier_type=rule.identifier_type,
        allowed=allowed,
        remaining_tokens=remaining,
        reset_time=reset_time,
        retry_after_seconds=retry_after,
        limit=limit.limit,
        window_seconds=limit.window_seconds,
        reason=reason,  # type: ignore[arg-type]
        enforcement=enforcement_of(limit.enforcement),
    )


def invalid_answer_of(error: CheckInvalidError, path: str) -> ratelimiter_pb2.RateLimitResponse:
    """Return the answer to a malformed item at ``path``, such as ``requests[3].``: not allowed, nothing charged."""
    placed = (violation._replace(field=path + violation.field) for violation in error.violations)
    text = str(CheckInvalidError(*placed))
    reason = Reason.INVALID_REQUEST
    return ratelimiter_pb2.RateLimitResponse(reason=reason, error=text)  # type: ignore[arg-type]


def _identifier_type(raw: bytes) -> IdentifierType:
    found = _IDENTIFIER_TYPES.get(raw)
    if found is None:
        message = f"must be one of {_TYPE_NAMES}"
        raise ValueError(message)
    return found


def _identifier(raw: bytes, identifier_type: IdentifierType | None) -> bytes:
    """Return the canonical identifier: as sent, but addresses as :mod:`ipaddress` writes them."""
    if not 0 < len(raw) <= MAX_IDENTIFIER_BYTES:
        message = f"must be 1 to {MAX_IDENTIFIER_BYTES} bytes"
        raise ValueError(message)
    if identifier_type is IdentifierType.IP:
        return _canonical_address(raw)
    if not raw.isascii():
        _text(raw)
    return raw


def is_canonical_address(raw: bytes) -> bool:
    """Return whether these octets are an address in canonical form.

    Raises:
        ValueError: they are no address.
    """
    return _canonical_address(raw) == raw


@lru_cache(REMEMBERED_ADDRESSES)
def _canonical_address(raw: bytes) -> bytes:
    try:
        address = ipaddress.ip_address(_text(raw))
    except ValueError:
        # Not the library's text: it quotes the identifier.
        message = "must be an IPv4 or IPv6 address"
        raise ValueError(message) from None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            message = "must be an address without a zone"
            raise ValueError(message)
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
    return str(address).encode()


@lru_cache(REMEMBERED_ENDPOINTS)
def _endpoint(raw: bytes) -> str:
    endpoint = _text(raw)
    if not 0 < len(endpoint) <= MAX_ENDPOINT_CHARS:
        message = f"must be 1 to {MAX_ENDPOINT_CHARS} characters"
        raise ValueError(message)
    if endpoint == GLOBAL_ENDPOINT:
        message = "must be an endpoint; * is only for rules"
        raise ValueError(message)
    if CONTROL_CHARACTER.search(endpoint):
        message = "must not contain control characters"
        raise ValueError(message)
    return endpoint


def _cost(tokens_requested: int) -> int:
    if not 0 <= tokens_requested <= INT32_MAX:
        message = f"must be 0 to {INT32_MAX}; 0 means 1"
        raise ValueError(message)
    return tokens_requested or 1


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        message = "must be valid UTF-8"
        raise ValueError(message) from None


def _target_violations(message: WireCheck | WireReset) -> Iterator[FieldViolation]:
    # With no valid type the identifier is judged as opaque bytes: its other rules hold for every type.
    known_type = _IDENTIFIER_TYPES.get(message.identifier_type)
    yield from _violations(
        "identifier", lambda raw: _identifier(raw, known_type), message.identifier
    )
    yield from _violations("identifier_type", _identifier_type, message.identifier_type)
    yield from _violations("endpoint", _endpoint, message.endpoint)


def _violations(field: str, read: Callable[[T], object], value: T) -> Iterator[FieldViolation]:
    try:
        read(value)
    except ValueError as error:
        yield FieldViolation(field, str(error))


NOT_CHANGEABLE: Final = frozenset({"id", "etag"})
"""Fields that identify a rule and its version."""

MAX_QUOTED_CHARS: Final = 64

MASK_FIELD: Final = "update_mask"


class Update(NamedTuple):
    """The change of an ``UpdateRateLimitRequest``; an empty ``etag`` matches every version."""

    rule_id: str
    changes: RuleChanges
    etag: str


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
    )


def _limit_of(limit: Limit) -> ratelimiter_pb2.Limit:
    return ratelimiter_pb2.Limit(
        name=limit.name,
        limit=limit.limit,
        window_seconds=limit.window_seconds,
        algorithm=limit.algorithm,
        enforcement=enforcement_of(limit.enforcement),
    )


def enforcement_of(enforcement: Enforcement) -> ratelimiter_pb2.Enforcement.ValueType:
    """Return the contract's number of an enforcement."""
    return ratelimiter_pb2.Enforcement.Value(enforcement.name)


def draft_of(message: WireRule) -> RuleDraft:
    """Return the rule of a create, not yet validated.

    ``enabled`` unset means true; a field of the first limit unset means that of the list.
    """
    fields = _fields_of(message)
    if message.limits:
        first = fields["limits"][0]
        fields |= {name: fields[name] or getattr(first, name) for name in FIRST_LIMIT}
    enabled = message.enabled if message.HasField("enabled") else True
    return RuleDraft(**{**fields, "enabled": enabled}, id=text_of(message.id))


def _fields_of(message: WireRule) -> dict[str, Any]:
    """Return the editable fields as they were sent."""
    return {
        "endpoint": text_of(message.endpoint),
        "identifier_type": text_of(message.identifier_type),
        "limit": message.limit,
        "window_seconds": message.window_seconds,
        "algorithm": text_of(message.algorithm),
        "enabled": message.enabled,
        "limits": tuple(map(_limit_draft, message.limits)),
    }


def _limit_draft(limit: WireLimit) -> LimitDraft:
    return LimitDraft(
        text_of(limit.name),
        limit.limit,
        limit.window_seconds,
        text_of(limit.algorithm),
        _ENFORCEMENTS.get(limit.enforcement, limit.enforcement),
    )


def update_of(message: WireUpdate) -> Update:
    """Return the change of an update: the fields of its mask, or without a mask the whole rule.

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
    """Return the id of the rule of a delete.

    Raises:
        RuleInvalidError: it is no UUID.
    """
    return canonical_id(text_of(message.id), "id")


def text_of(raw: bytes) -> str:
    """Decode a field. Invalid UTF-8 becomes lone surrogates, which validation refuses."""
    return raw.decode("utf-8", "surrogateescape")


def _changes_of(rule: WireRule, paths: list[str]) -> RuleChanges:
    # Unset, enabled means true to a create, its zero to a mask, and to an update without one: leave it as it is.
    if paths:
        fields = _fields_of(rule)
        return RuleChanges(**{name: fields[name] for name in paths})
    draft = draft_of(rule)
    whole = [name for name in EDITABLE if name != "enabled" or rule.HasField("enabled")]
    return RuleChanges(**{name: getattr(draft, name) for name in whole})


def _rule_violations(rule: WireRule) -> list[FieldViolation]:
    """Return the violations of the fields of a rule, without its id."""
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
