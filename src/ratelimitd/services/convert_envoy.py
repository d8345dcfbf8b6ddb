"""Converts Envoy's messages: a request to checks, decisions and settled holds to an answer. Pure. ADRs 0033, 0055.

Each descriptor of a request is one check. Its identities are the entries whose keys are in the node's table of
identifiers, the first of each type; the endpoint is the domain and the other entries in order,
``domain/key=value/…``. Without an identity the last value is the identifier, as an API key, and every entry is part of
the endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import Message

from ratelimitd.algorithms.several import deciding
from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.limiter.holder import SettledHold
from ratelimitd.model import (
    ALLOWED,
    INT32_MAX,
    MAX_IDENTITIES,
    US_PER_S,
    Check,
    Decision,
    Reason,
)
from ratelimitd.rules.envoy_import import UNNAMED_TYPE
from ratelimitd.services.convert import CONTRACT_IDENTITIES, Identities, check_of, endpoint_of
from ratelimitd.services.wire import WireIdentity
from ratelimitd.services.wire_format import WHOLE_MESSAGE, parsed, widened_pool
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION, ratelimit_headers

PACKAGE: Final = "envoy.service.ratelimit.v3"

MAX_REQUEST_BYTES: Final = 65_536
"""Longer requests are refused unparsed: parsing 4 MiB of empty entries would take 300 MB of memory. Envoy sends a few
hundred bytes."""

MAX_DESCRIPTORS: Final = 32
"""Limit of descriptors per request; deciding them takes 0.5 to 0.7 ms. Envoy rarely sends more than three."""

MAX_ENTRIES: Final = 16
"""Limit of entries per descriptor."""

Identifiers = Mapping[bytes, str]
"""Key of an entry → identifier type of its value."""


class WireEntry(Protocol):
    """``RateLimitDescriptor.Entry``."""

    key: bytes
    value: bytes


class WireAddend(Protocol):
    """``google.protobuf.UInt64Value``."""

    value: int


class WireDescriptor(Protocol):
    """``RateLimitDescriptor``. ``HasField`` shows whether ``hits_addend`` was sent."""

    entries: Sequence[WireEntry]
    hits_addend: WireAddend
    is_negative_hits: bool

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Return whether a message field was sent."""


class WireRequest(Protocol):
    """``RateLimitRequest``."""

    domain: bytes
    descriptors: Sequence[WireDescriptor]
    hits_addend: int


def files() -> Iterable[descriptor_pb2.FileDescriptorProto]:
    """Return the files that describe the service, each after those it imports."""
    data = Path(__file__).with_name("envoy_descriptors.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data).file


def parse_request(data: bytes) -> WireRequest:
    """Parse a ``RateLimitRequest``.

    Raises:
        InvalidInputError: the bytes are too long, or malformed.
    """
    if len(data) > MAX_REQUEST_BYTES:
        message = f"must be at most {MAX_REQUEST_BYTES} bytes"
        raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, message))
    return cast("WireRequest", parsed(_REQUEST, data))


_POOL: Final = widened_pool(files())


def _message(name: str) -> type[Message]:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


_REQUEST: Final = _message("RateLimitRequest")
Response: Final[Any] = _message("RateLimitResponse")
"""``RateLimitResponse``; its texts are written as bytes."""


STANDARD_FIELDS: Final = "standard"
ALL_FIELDS: Final = "all"
NO_FIELDS: Final = "none"

_UNITS: Final = {
    1: Response.RateLimit.SECOND,
    60: Response.RateLimit.MINUTE,
    3_600: Response.RateLimit.HOUR,
    86_400: Response.RateLimit.DAY,
    604_800: Response.RateLimit.WEEK,
    2_592_000: Response.RateLimit.MONTH,
    31_536_000: Response.RateLimit.YEAR,
}
"""Windows with a name in Envoy, whose month has 30 days and whose year has 365, as has a calendar month nominally."""


def answer_of(
    decisions: Sequence[Decision], now_us: int, fields: str, revision: str = NEWEST_REVISION
) -> bytes:
    """Return the answer to a request with these decisions, in the order of its descriptors.

    ``fields`` selects the header fields to add, ``revision`` the form of ``RateLimit``. One denied descriptor denies
    the request.
    """
    response = Response()
    denied = any(not decision.allowed for decision in decisions)
    response.overall_code = Response.OVER_LIMIT if denied else Response.OK
    for decision in decisions:
        _write_status(response.statuses.add(), decision, now_us)
    for name, value in _fields(_deciding(decisions), now_us, fields, revision).items():
        response.response_headers_to_add.add(key=name.encode(), value=value.encode())
    answer: bytes = response.SerializeToString()
    return answer


def _write_status(status: Any, decision: Decision, now_us: int) -> None:
    status.code = Response.OK if decision.allowed else Response.OVER_LIMIT
    rule, limit = decision.rule, decision.limit
    if rule is not None and limit is not None:
        status.current_limit.requests_per_unit = limit.limit
        status.current_limit.unit = _UNITS.get(limit.window_seconds, Response.RateLimit.UNKNOWN)
        status.current_limit.name = rule.id.encode()
        status.limit_remaining = decision.remaining
        status.duration_until_reset.seconds = _reset_s(decision, now_us)


def _deciding(decisions: Sequence[Decision]) -> Decision:
    """Return the decisive decision: the denial with the longest delay, else the limit with the fewest tokens left."""
    return max(
        decisions,
        key=lambda decision: (
            not decision.allowed,
            decision.retry_after,
            decision.rule is not None,
            -decision.remaining,
        ),
    )


def _fields(decision: Decision, now_us: int, fields: str, revision: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if fields == NO_FIELDS:
        return found
    if not decision.allowed:
        found["Retry-After"] = str(decision.retry_after)
    rule, limit = decision.rule, decision.limit
    if rule is None or limit is None:
        return found
    reset_s = _reset_s(decision, now_us)
    found |= ratelimit_headers(
        rule.id,
        limit=limit.limit,
        window_s=limit.window_seconds,
        remaining=decision.remaining,
        allowed=decision.allowed,
        reset_s=reset_s,
        retry_after_s=decision.retry_after,
        revision=revision,
    )
    if fields == ALL_FIELDS:
        found["X-RateLimit-Limit"] = str(limit.limit)
        found["X-RateLimit-Remaining"] = str(decision.remaining)
        found["X-RateLimit-Reset"] = str(reset_s)
    return found


def _reset_s(decision: Decision, now_us: int) -> int:
    """Return the seconds until the whole limit is free again."""
    return max(0, -(-(decision.reset_time * US_PER_S - now_us) // US_PER_S))


@dataclass(slots=True)
class _AsIdentity:
    identifier: bytes
    identifier_type: bytes


@dataclass(slots=True)
class _AsCheck:
    """A descriptor as a ``RateLimitRequest`` of our own contract, so that one validation serves both."""

    identifier: bytes
    identifier_type: bytes
    endpoint: bytes
    tokens_requested: int
    timestamp: int
    peek: bool
    also: Sequence[WireIdentity]
    max_wait_ms: int = 0


def checks_of(
    request: WireRequest, identifiers: Identifiers, identities: Identities = CONTRACT_IDENTITIES
) -> list[Check]:
    """Return the checks of a request, one per descriptor.

    Raises:
        CheckInvalidError: names every violated field of the first descriptor that has one.
    """
    return [
        _check(request, descriptor, path, identifiers=identifiers, identities=identities)
        for path, descriptor in descriptors_of(request)
    ]


def descriptors_of(request: WireRequest) -> Iterable[tuple[str, WireDescriptor]]:
    """Return the descriptors of a request by their path.

    Raises:
        CheckInvalidError: the domain is missing, or the number of descriptors is out of bounds.
    """
    if not request.domain:
        raise CheckInvalidError(FieldViolation("domain", "must not be empty"))
    count = len(request.descriptors)
    if not 1 <= count <= MAX_DESCRIPTORS:
        message = f"must be 1 to {MAX_DESCRIPTORS} descriptors"
        raise CheckInvalidError(FieldViolation("descriptors", message))
    return [(f"descriptors[{index}]", one) for index, one in enumerate(request.descriptors)]


def hits_of(request: WireRequest, descriptor: WireDescriptor) -> int:
    """Return the tokens of a descriptor: its own, else those of the request."""
    own_hits = descriptor.HasField("hits_addend")
    return descriptor.hits_addend.value if own_hits else request.hits_addend


def _check(
    request: WireRequest,
    descriptor: WireDescriptor,
    path: str,
    *,
    identifiers: Identifiers,
    identities: Identities,
) -> Check:
    violations = [*_violations(descriptor, path)]
    if violations:
        raise CheckInvalidError(*violations)
    entries = descriptor.entries
    named: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if entry.key in identifiers and len(named) < MAX_IDENTITIES:
            named.setdefault(identifiers[entry.key], index)
    rest = [entry for index, entry in enumerate(entries) if index not in named.values()]
    places = [*named.values()] or [len(entries) - 1]
    first, *also = [
        _AsIdentity(
            entries[index].value, identifiers.get(entries[index].key, UNNAMED_TYPE).encode()
        )
        for index in places
    ]
    own_hits = descriptor.HasField("hits_addend")
    hits = hits_of(request, descriptor)
    check = _AsCheck(
        identifier=first.identifier,
        identifier_type=first.identifier_type,
        endpoint=b"/".join([request.domain, *(one.key + b"=" + one.value for one in rest)]),
        tokens_requested=hits,
        timestamp=0,
        peek=own_hits and not hits,
        also=also,
    )
    try:
        return check_of(check, identities)
    except CheckInvalidError as error:
        of_also = {
            f"also[{number}].identifier": f"{path}.entries[{index}].value"
            for number, index in enumerate(places[1:])
        }
        place = f"{path}.entries"
        try:
            endpoint_of(request.domain)
        except ValueError:
            place = "domain"
        fields = {
            **of_also,
            "identifier": f"{path}.entries[{places[0]}].value",
            "endpoint": place,
            "tokens_requested": f"{path}.hits_addend" if own_hits else "hits_addend",
        }
        texts = {"tokens_requested": f"must be 0 to {INT32_MAX}"} if own_hits else {}
        raise CheckInvalidError(
            *[FieldViolation(fields[one], texts.get(one, text)) for one, text in error.violations]
        ) from None


def _violations(descriptor: WireDescriptor, path: str) -> Iterator[FieldViolation]:
    count = len(descriptor.entries)
    if not 1 <= count <= MAX_ENTRIES:
        yield FieldViolation(f"{path}.entries", f"must be 1 to {MAX_ENTRIES} entries")
        return
    for index, entry in enumerate(descriptor.entries):
        if not entry.key:
            yield FieldViolation(f"{path}.entries[{index}].key", "must not be empty")
    if descriptor.is_negative_hits:
        text = "a request that gives back hits must not contain checks"
        yield FieldViolation(f"{path}.is_negative_hits", text)


_NOTHING_HELD: Final = Decision(ALLOWED, INT32_MAX, 0, 0, Reason.NO_RULE)


def decision_of(settled: SettledHold) -> Decision:
    """Return a settled hold as an allowing decision; of several limits, by the one that would decide a check."""
    if not settled.limits:
        return _NOTHING_HELD
    limits = [one.limit or one.rule for one in settled.limits]
    place = deciding(limits, [(*one[:5], None) for one in settled.limits])
    one = settled.limits[place]
    return Decision(ALLOWED, one.remaining, one.reset_time, 0, one.reason, one.rule, limits[place])
