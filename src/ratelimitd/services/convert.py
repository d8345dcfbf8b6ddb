"""Converts checks, resets and answers between the wire and the model, and validates them.

Pure, and total on every message that the parser accepts: a field is either valid or named in a ``CheckInvalidError``.
See ADR 0010.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Self

from ratelimitd.buckets.keys import joined
from ratelimitd.errors import CheckInvalidError, FieldViolation
from ratelimitd.model import (
    BLOCKED_PLAN,
    EVERY_ENDPOINT,
    EVERYBODY,
    GLOBAL_ENDPOINT,
    INT32_MAX,
    MAX_IDENTITIES,
    MAX_WAIT_MS,
    UNLIMITED_PLAN,
    AssignedPlan,
    Check,
    ConsideredRule,
    Decision,
    Enforcement,
    Explained,
    IdentifierType,
    Identity,
    LimitStatus,
    Match,
    Reason,
    types_within,
)
from ratelimitd.rules.assignments import MAX_IDENTIFIER_BYTES
from ratelimitd.rules.validation import CONTROL_CHARACTER, MAX_ENDPOINT_CHARS, choice_of
from ratelimitd.services.wire import WireCheck, WireIdentity, WireReset
from ratelimiter.v1 import ratelimiter_pb2

REMEMBERED_ENDPOINTS: Final = 4_096
"""Cached endpoints: route templates, so few. Saves decoding and validation, 0.4 µs. At most 1,020 bytes each, 8 MB in
all."""

REMEMBERED_ADDRESSES: Final = 16_384
"""Cached addresses: ``ipaddress`` takes 1 to 5 µs, the cache 0.1 µs. About 4 MB in all."""


class Identities(NamedTuple):
    """Identifier types that callers may name, by their octets; ``wait``: a check may set ``max_wait_ms``."""

    types: Mapping[bytes, str]
    wait: bool = True

    @classmethod
    def of(cls, declared: Iterable[str]) -> Self:
        """Return the types of the contract and those that a node declares."""
        return cls({name.encode(): name for name in (*IdentifierType, *declared)})


CONTRACT_IDENTITIES: Final = Identities.of(())


MAX_EXPLAINED: Final = 100
"""Rules in one explanation, which includes rules for identifier types that the check does not name."""


class Target(NamedTuple):
    """The bucket of a reset; fields as :meth:`ratelimitd.limiter.limiter.Limiter.reset` takes them."""

    identifier: bytes
    identifier_type: str
    endpoint: str


def check_of(message: WireCheck, identities: Identities = CONTRACT_IDENTITIES) -> Check:
    """Return the check of a message.

    Raises:
        CheckInvalidError: names every violated field.
    """
    try:
        identifier_type = _identifier_type(message.identifier_type, identities)
        return Check(
            _identifier(message.identifier, identifier_type),
            identifier_type,
            endpoint_of(message.endpoint),
            _cost(message.tokens_requested),
            message.timestamp,
            message.peek,
            _further(message, identities) if message.also else (),
            _max_wait_ms(message.max_wait_ms, identities) if message.max_wait_ms else 0,
        )
    except (ValueError, CheckInvalidError):
        raise CheckInvalidError(
            *_identity_violations(message, identities),
            *_violations("endpoint", lambda: endpoint_of(message.endpoint)),
            *_violations("tokens_requested", lambda: _cost(message.tokens_requested)),
            *_further_violations(message, identities),
            *_violations("max_wait_ms", lambda: _max_wait_ms(message.max_wait_ms, identities)),
        ) from None


def target_of(message: WireReset, identities: Identities = CONTRACT_IDENTITIES) -> Target:
    """Return the bucket of a reset.

    Raises:
        CheckInvalidError: names every violated field.
    """
    is_everybody = message.identifier_type == EVERYBODY.encode()
    if is_everybody:
        given = {"identifier": message.identifier, "also": message.also}
        text = f"must be empty with {EVERYBODY}"
        violations = [FieldViolation(name, text) for name in given if given[name]]
    else:
        violations = [*_identity_violations(message, identities)]
    violations += _violations("endpoint", lambda: _bucket_endpoint(message.endpoint))
    if not is_everybody:
        violations += _further_violations(message, identities)
    if violations:
        raise CheckInvalidError(*violations)
    endpoint = _bucket_endpoint(message.endpoint)
    if is_everybody:
        return Target(b"", EVERYBODY, endpoint)
    named = dict([identity_of(message, identities), *_further(message, identities)])
    types = sorted(named)
    return Target(joined([named[one] for one in types]), "+".join(types), endpoint)


def identity_of(message: WireIdentity, identities: Identities, path: str = "") -> Identity:
    """Return an identity, validated as in a check; ``path`` is the prefix of its fields, such as ``identity.``.

    Raises:
        CheckInvalidError: names every violated field.
    """
    try:
        kind = _identifier_type(message.identifier_type, identities)
        return kind, _identifier(message.identifier, kind)
    except ValueError:
        raise CheckInvalidError(*_identity_violations(message, identities, path)) from None


def answer_of(decision: Decision) -> ratelimiter_pb2.RateLimitResponse:
    """Return the contract's answer to one check."""
    allowed, remaining, reset_time, retry_after, reason, rule, limit, limits, wait_ms, plan = (
        decision
    )
    return ratelimiter_pb2.RateLimitResponse(
        allowed=allowed,
        remaining_tokens=remaining,
        reset_time=reset_time,
        retry_after_seconds=retry_after,
        # Reason's numbers are the contract's; the stub accepts only its own enum.
        reason=reason,  # type: ignore[arg-type]
        limit=limit.limit if limit else 0,
        window_seconds=limit.window_seconds if limit else 0,
        rule_id=rule.id if rule else "",
        limits=map(status_of, limits),
        limit_name=limit.name if limit else "",
        wait_ms=wait_ms,
        plan=plan,
    )


def explanation_of(check: Check, explained: Explained) -> ratelimiter_pb2.Explanation:
    """Return the contract's explanation of a check."""
    # Rules that judge come first; the sort is stable.
    ordered = sorted(explained.considered, key=lambda one: one.match is not Match.JUDGES)
    return ratelimiter_pb2.Explanation(
        answer=answer_of(explained.decision),
        rules=[
            ratelimiter_pb2.RuleExplanation(
                rule_id=one.rule.id,
                endpoint=one.rule.endpoint,
                identifier_type=one.rule.identifier_type,
                match=one.match,  # type: ignore[arg-type]  # as with reason
                limits=map(status_of, one.limits),
                remedy=_remedy(check, one),
                plan=one.plan,
            )
            for one in ordered[:MAX_EXPLAINED]
        ],
        plans=[
            ratelimiter_pb2.AssignedPlan(
                identifier_type=one.identifier_type,
                plan=one.plan,
                expire_time=one.expire_time,
                remedy=_plan_remedy(one, explained),
            )
            for one in explained.plans
        ],
        nearest=[
            ratelimiter_pb2.NearRule(
                rule_id=rule.id,
                endpoint=rule.endpoint,
                identifier_type=rule.identifier_type,
                why=why,
            )
            for rule, why in explained.nearest
        ],
    )


def _plan_remedy(assigned: AssignedPlan, explained: Explained) -> str:
    """Return the change that would let the check pass the plan, or let the plan judge."""
    kind, plan, expire_time = assigned
    if plan == BLOCKED_PLAN:
        wait = f", or wait {explained.decision.retry_after} s" if expire_time else ""
        return f"unassign the {kind} from {plan}{wait}"
    named = {one.name for considered in explained.considered for one in considered.rule.plans}
    if plan == UNLIMITED_PLAN or plan in named:
        return ""
    return f"give a rule limits for the plan {plan}: until then its own limits hold"


def _remedy(check: Check, considered: ConsideredRule) -> str:
    rule, match, limits, plan = considered
    if match is Match.PASSED_OVER:
        return f"unassign the identity from {plan}"
    if match is Match.DISABLED:
        return "enable the rule"
    if match is Match.OVERRIDDEN:
        return f"disable the rule of the endpoint for {rule.identifier_type}"
    if match is Match.NOT_NAMED:
        named = {check.identifier_type, *(kind for kind, _ in check.also)}
        missing = [kind for kind in types_within(rule.identifier_type) if kind not in named]
        return f"name the {' and the '.join(missing)} of the request"
    return _wait(check, limits)


def _wait(check: Check, limits: Iterable[LimitStatus]) -> str:
    """Return the change that lets a check pass the limits of a rule; empty if they allow it."""
    denial = max(
        (one for one in limits if not one.allowed), key=lambda one: one.retry_after, default=None
    )
    if denial is None:
        return ""
    limit = denial.limit
    if denial.reason is Reason.COST_EXCEEDS_LIMIT and limit is not None:
        number = "burst of" if limit.burst else "limit"
        return f"ask for at most {limit.capacity} tokens, or raise the {number} {limit.name} to {check.cost}"
    wait = f"wait {denial.retry_after} s"
    return f"{wait}, or ask for at most {denial.remaining} tokens" if denial.remaining else wait


def status_of(status: LimitStatus) -> ratelimiter_pb2.LimitStatus:
    """Return the contract's status of one limit."""
    allowed, remaining, reset_time, retry_after, reason, rule, limit, plan = status
    return ratelimiter_pb2.LimitStatus(
        rule_id=rule.id,
        name=limit.name if limit else "",
        identifier_type=rule.identifier_type,
        allowed=allowed,
        remaining_tokens=remaining,
        reset_time=reset_time,
        retry_after_seconds=retry_after,
        limit=limit.limit if limit else 0,
        window_seconds=limit.window_seconds if limit else 0,
        reason=reason,  # type: ignore[arg-type]
        enforcement=enforcement_of(limit.enforcement if limit else Enforcement.ENFORCE),
        plan=plan,
    )


def enforcement_of(enforcement: Enforcement) -> ratelimiter_pb2.Enforcement.ValueType:
    """Return the contract's number of an enforcement."""
    return ratelimiter_pb2.Enforcement.Value(enforcement.name)


def invalid_answer_of(error: CheckInvalidError, path: str) -> ratelimiter_pb2.RateLimitResponse:
    """Return the answer to a malformed item at ``path``, such as ``requests[3].``: not allowed, nothing charged."""
    placed = (violation._replace(field=path + violation.field) for violation in error.violations)
    text = str(CheckInvalidError(*placed))
    reason = Reason.INVALID_REQUEST
    return ratelimiter_pb2.RateLimitResponse(reason=reason, error=text)  # type: ignore[arg-type]


def _identifier_type(raw: bytes, identities: Identities) -> str:
    found = identities.types.get(raw)
    if found is None:
        message = f"must be one of {choice_of(identities.types.values())}"
        raise ValueError(message)
    return found


def _further(message: WireCheck | WireReset, identities: Identities) -> tuple[Identity, ...]:
    """Return the further identities of a message.

    Raises:
        CheckInvalidError: names every violated field of them.
    """
    if len(message.also) >= MAX_IDENTITIES:
        text = f"must be at most {MAX_IDENTITIES - 1} identities"
        raise CheckInvalidError(FieldViolation("also", text))
    further: list[Identity] = []
    violations: list[FieldViolation] = []
    seen = {message.identifier_type}
    for index, one in enumerate(message.also):
        try:
            further.append(identity_of(one, identities, f"also[{index}]."))
        except CheckInvalidError as error:
            violations += error.violations
        else:
            if one.identifier_type in seen:
                text = "must differ from those of the other identities"
                violations.append(FieldViolation(f"also[{index}].identifier_type", text))
        seen.add(one.identifier_type)
    if violations:
        raise CheckInvalidError(*violations)
    return tuple(further)


def _identifier(raw: bytes, identifier_type: str | None) -> bytes:
    """Return the canonical identifier: as sent, but addresses as :mod:`ipaddress` writes them."""
    if not 0 < len(raw) <= MAX_IDENTIFIER_BYTES:
        message = f"must be 1 to {MAX_IDENTIFIER_BYTES} bytes"
        raise ValueError(message)
    if identifier_type == IdentifierType.IP:
        return _canonical_address(raw)
    if not raw.isascii():
        _text(raw)
    return raw


def is_canonical_address(raw: bytes) -> bool:
    """Return whether these octets are an address in canonical form.

    Raises:
        ValueError: they are not an address.
    """
    return _canonical_address(raw) == raw


@lru_cache(REMEMBERED_ADDRESSES)
def _canonical_address(raw: bytes) -> bytes:
    try:
        address = ipaddress.ip_address(_text(raw))
    except ValueError:
        # Not the library's text, which quotes the identifier.
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
def endpoint_of(raw: bytes) -> str:
    """Return the endpoint of a check.

    Raises:
        ValueError: it is not valid.
    """
    endpoint = _text(raw)
    if not 0 < len(endpoint) <= MAX_ENDPOINT_CHARS:
        message = f"must be 1 to {MAX_ENDPOINT_CHARS} characters"
        raise ValueError(message)
    if endpoint in {GLOBAL_ENDPOINT, EVERY_ENDPOINT}:
        message = f"must be an endpoint; {endpoint} is only for rules"
        raise ValueError(message)
    if CONTROL_CHARACTER.search(endpoint):
        message = "must not contain control characters"
        raise ValueError(message)
    return endpoint


def _bucket_endpoint(raw: bytes) -> str:
    return EVERY_ENDPOINT if raw == EVERY_ENDPOINT.encode() else endpoint_of(raw)


def _cost(tokens_requested: int) -> int:
    if not 0 <= tokens_requested <= INT32_MAX:
        message = f"must be 0 to {INT32_MAX}; 0 means 1"
        raise ValueError(message)
    return tokens_requested or 1


def _max_wait_ms(max_wait_ms: int, identities: Identities) -> int:
    if not 0 <= max_wait_ms <= MAX_WAIT_MS:
        message = f"must be 0 to {MAX_WAIT_MS}"
        raise ValueError(message)
    if max_wait_ms and not identities.wait:
        message = "needs a node without shared state"
        raise ValueError(message)
    return max_wait_ms


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        message = "must be valid UTF-8"
        raise ValueError(message) from None


def _identity_violations(
    message: WireIdentity, identities: Identities, path: str = ""
) -> Iterator[FieldViolation]:
    # Without a valid type the identifier is validated as opaque bytes: the other rules hold for every type.
    known_type = identities.types.get(message.identifier_type)
    yield from _violations(f"{path}identifier", lambda: _identifier(message.identifier, known_type))
    yield from _violations(
        f"{path}identifier_type", lambda: _identifier_type(message.identifier_type, identities)
    )


def _further_violations(
    message: WireCheck | WireReset, identities: Identities
) -> Sequence[FieldViolation]:
    try:
        _further(message, identities)
    except CheckInvalidError as error:
        return error.violations
    return ()


def _violations(field: str, read: Callable[[], object]) -> Iterator[FieldViolation]:
    try:
        read()
    except ValueError as error:
        yield FieldViolation(field, str(error))
