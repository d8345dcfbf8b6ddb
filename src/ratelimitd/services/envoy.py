"""Envoy's rate limit service: maps its messages to checks or settles, and answers with decisions. ADRs 0033, 0055."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from ratelimitd.algorithms.several import deciding
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    HoldEndedError,
    HoldSettledError,
    InvalidInputError,
)
from ratelimitd.limiter.holder import SettledHold
from ratelimitd.model import (
    ALLOWED,
    INT32_MAX,
    MAX_IDENTITIES,
    US_PER_S,
    Check,
    Decision,
    IdentifierType,
    Identity,
    Limit,
    Period,
    Reason,
)
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.convert import CONTRACT_IDENTITIES, Identities, check_of
from ratelimitd.services.holds import NO_HOLD, HoldsService, Ticket
from ratelimitd.services.wire import WireIdentity
from ratelimitd.services.wire_format import WHOLE_MESSAGE
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION, ratelimit_headers

PACKAGE: Final = "envoy.service.ratelimit.v3"
SERVICE: Final = f"{PACKAGE}.RateLimitService"

MAX_REQUEST_BYTES: Final = 65_536
"""Longer requests are refused unread: 4 MiB of empty entries would take 300 MB of memory only to be refused. Envoy
sends some hundred bytes."""

_Field = descriptor_pb2.FieldDescriptorProto
_WIDER: Final = {
    _Field.TYPE_STRING: _Field.TYPE_BYTES,
    _Field.TYPE_UINT32: _Field.TYPE_UINT64,
}


class WireEntry(Protocol):
    """``RateLimitDescriptor.Entry``."""

    key: bytes
    value: bytes


class WireAddend(Protocol):
    """``google.protobuf.UInt64Value``."""

    value: int


class WireDescriptor(Protocol):
    """``RateLimitDescriptor``. Whether ``hits_addend`` was sent, ``HasField`` knows."""

    entries: Sequence[WireEntry]
    hits_addend: WireAddend
    is_negative_hits: bool

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Whether a message field was sent."""


class WireRequest(Protocol):
    """``RateLimitRequest``."""

    domain: bytes
    descriptors: Sequence[WireDescriptor]
    hits_addend: int


def files() -> Iterable[descriptor_pb2.FileDescriptorProto]:
    """The files that describe the service, each behind those it imports."""
    data = Path(__file__).with_name("envoy_descriptors.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data).file


def parse_request(data: bytes) -> WireRequest:
    """Read a ``RateLimitRequest``.

    Raises:
        InvalidInputError: it is too long, or the bytes are none.
    """
    if len(data) > MAX_REQUEST_BYTES:
        message = f"must be at most {MAX_REQUEST_BYTES} bytes"
        raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, message))
    try:
        return cast("WireRequest", _REQUEST.FromString(data))
    except DecodeError:
        violation = FieldViolation(WHOLE_MESSAGE, "the bytes are no RateLimitRequest message")
        raise InvalidInputError(violation) from None


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in files():
        for message in file.message_type:
            _widen(message)
        pool.Add(file)
    return pool


def _widen(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.type = _WIDER.get(field.type, field.type)
    for nested in message.nested_type:
        _widen(nested)


_POOL: Final = _pool()


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
}
"""Windows that Envoy has a name for. It counts a month as no fixed number of seconds, so only one of a calendar is."""


def answer_of(
    decisions: Sequence[Decision], now_us: int, fields: str, revision: str = NEWEST_REVISION
) -> bytes:
    """Return the answer to a request whose descriptors were decided so.

    ``fields`` says which header fields go with it, ``revision`` in which form ``RateLimit`` is.
    Statuses are in the order of the descriptors, and one that is denied denies the request.
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
        status.current_limit.unit = _unit(limit)
        status.current_limit.name = rule.id.encode()
        status.limit_remaining = decision.remaining
        status.duration_until_reset.seconds = _reset_s(decision, now_us)


def _unit(limit: Limit) -> Any:
    if limit.calendar is not None and limit.calendar.period is Period.MONTH:
        return Response.RateLimit.MONTH
    return _UNITS.get(limit.window_seconds, Response.RateLimit.UNKNOWN)


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


# Each descriptor of a request is one check. Its identities are the entries whose keys are in the node's table of
# identifiers, the first of each type; the endpoint is the domain and the other entries in order,
# ``domain/key=value/…``. Without such an entry the last value is the identifier, as an API key, and every entry is part
# of the endpoint.
MAX_DESCRIPTORS: Final = 32
"""Limit of descriptors per request, decided in 0.5 to 0.7 ms. Envoy rarely sends more than three."""

MAX_ENTRIES: Final = 16
"""Limit of entries per descriptor."""

UNNAMED_TYPE: Final = IdentifierType.API_KEY
"""Identifier of a descriptor without an identifying entry."""

Identifiers = Mapping[bytes, str]
"""Key of an entry → the type of identifier that its value is."""


@dataclass(slots=True)
class _AsIdentity:
    identifier: bytes
    identifier_type: bytes


@dataclass(slots=True)
class _AsCheck:
    """A descriptor as a ``RateLimitRequest`` of our own contract, so that one place says what a valid check is."""

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
        _check(request, descriptor, (identifiers, identities), path)
        for path, descriptor in _descriptors(request)
    ]


def _descriptors(request: WireRequest) -> Iterable[tuple[str, WireDescriptor]]:
    """Return the descriptors of a request by their path.

    Raises:
        CheckInvalidError: there is no domain, or not a number of descriptors that is allowed.
    """
    if not request.domain:
        raise CheckInvalidError(FieldViolation("domain", "must not be empty"))
    count = len(request.descriptors)
    if not 1 <= count <= MAX_DESCRIPTORS:
        message = f"must be 1 to {MAX_DESCRIPTORS} descriptors"
        raise CheckInvalidError(FieldViolation("descriptors", message))
    return [(f"descriptors[{index}]", one) for index, one in enumerate(request.descriptors)]


def _hits(request: WireRequest, descriptor: WireDescriptor) -> int:
    own_hits = descriptor.HasField("hits_addend")
    return descriptor.hits_addend.value if own_hits else request.hits_addend


def _check(
    request: WireRequest,
    descriptor: WireDescriptor,
    known: tuple[Identifiers, Identities],
    path: str,
) -> Check:
    violations = [*_violations(descriptor, path)]
    if violations:
        raise CheckInvalidError(*violations)
    entries, (identifiers, identities) = descriptor.entries, known
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
    hits = _hits(request, descriptor)
    check = _AsCheck(
        identifier=first.identifier,
        identifier_type=first.identifier_type,
        endpoint=_endpoint(request.domain, rest),
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
        fields = {
            **of_also,
            "identifier": f"{path}.entries[{places[0]}].value",
            "endpoint": f"{path}.entries" if rest else "domain",
            "tokens_requested": f"{path}.hits_addend" if own_hits else "hits_addend",
        }
        placed = (FieldViolation(fields[field], text) for field, text in error.violations)
        raise CheckInvalidError(*placed) from None


def _violations(descriptor: WireDescriptor, path: str) -> Iterator[FieldViolation]:
    count = len(descriptor.entries)
    if not 1 <= count <= MAX_ENTRIES:
        yield FieldViolation(f"{path}.entries", f"must be 1 to {MAX_ENTRIES} entries")
        return
    for index, entry in enumerate(descriptor.entries):
        if not entry.key:
            yield FieldViolation(f"{path}.entries[{index}].key", "must not be empty")
    if descriptor.is_negative_hits:
        text = "hits are not given back in a request that has checks as well"
        yield FieldViolation(f"{path}.is_negative_hits", text)


def _endpoint(domain: bytes, entries: Sequence[WireEntry]) -> bytes:
    return b"/".join([domain, *(entry.key + b"=" + entry.value for entry in entries)])


HOLD_KEY: Final = b"hold"
"""Key of the only entry of a descriptor that gives hits back; its value is the text of the hold."""

_Refunds = Sequence[tuple[str, Ticket, int]]
"""Path of each descriptor, its hold, and the tokens that remain charged."""

_NOTHING_HELD: Final = Decision(ALLOWED, INT32_MAX, 0, 0, Reason.NO_RULE)


def _decision_of(settled: SettledHold) -> Decision:
    """Return what a settle says as an answer that allows: of several limits, the one that would decide a check."""
    if not settled.limits:
        return _NOTHING_HELD
    limits = [one.limit or one.rule for one in settled.limits]
    place = deciding(limits, [(*one[:5], None) for one in settled.limits])
    one = settled.limits[place]
    return Decision(ALLOWED, one.remaining, one.reset_time, 0, one.reason, one.rule, limits[place])


METHOD: Final = f"/{SERVICE}/ShouldRateLimit"

_Bucket = tuple[bytes, str, str, tuple[Identity, ...]]
_Checks = dict[_Bucket, Check]
_Verdict = Decision | CheckInvalidError


class Checker(Protocol):
    """What this service needs of a :class:`ratelimitd.limiter.limiter.Limiter`."""

    def check_batch(
        self, checks: Sequence[Check], now_us: int | None = None
    ) -> Sequence[Decision | CheckInvalidError | None]:
        """Answer checks in order, at ``now_us``."""

    async def wait(self, checks: Sequence[Check]) -> Sequence[Decision | CheckInvalidError]:
        """Answer checks for which :meth:`check_batch` returned ``None``."""

    def all_pass(self, checks: Sequence[Check], now_us: int) -> bool | Awaitable[bool]:
        """Return whether all checks would pass at ``now_us``; charges nothing."""

    def now_us(self) -> int:
        """Return the node's time."""


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """Options: which entries identify callers, and which header fields Envoy adds."""

    identifiers: Identifiers
    identities: Identities
    fields: str
    ratelimit_headers: str
    """Revision of the ``RateLimit`` fields."""

    @classmethod
    def of(
        cls,
        identifiers: Iterable[str],
        fields: str,
        ratelimit_headers: str = NEWEST_REVISION,
        identities: Identities = CONTRACT_IDENTITIES,
    ) -> Self:
        """Return the options for valid settings: ``identifiers`` are ``KEY=TYPE``."""
        pairs = (pair.rpartition("=") for pair in identifiers)
        types = {key.encode(): kind for key, _, kind in pairs}
        return cls(types, identities, fields, ratelimit_headers)


class EnvoyService:
    """The handler. ``perf_counter_s`` is in seconds and measures how long a check takes."""

    def __init__(
        self,
        limiter: Checker,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        options: EnvoyOptions,
        *,
        holds: HoldsService,
    ) -> None:
        self._limiter = limiter
        self._holds = holds
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._options = options

    def methods(self) -> Methods:
        """Return the handler by its path."""
        return Methods(unary={METHOD: self.should_rate_limit})

    def should_rate_limit(self, data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        """Decide the descriptors of a request, and charge them if all pass; or give hits of holds back.

        Raises:
            InvalidInputError: the request is malformed; nothing was charged or given back.
        """
        started_s = self._perf_counter_s()
        try:
            options = self._options
            request = parse_request(data)
            # Without descriptors either way refuses it.
            if all(one.is_negative_hits for one in request.descriptors):
                return self._settle(self._refunds(request, call))
            asked = checks_of(request, options.identifiers, options.identities)
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        checks = _one_for_each_bucket(asked)
        # A single check charges nothing unless it passes, without being looked at before.
        # One time for judging and charging: a window that ends in between would allow what was not charged.
        now_us = self._limiter.now_us()
        passes = len(checks) == 1 or self._limiter.all_pass([*checks.values()], now_us)
        if not isinstance(passes, bool):
            return self._wait(asked, checks, passes, started_s)
        final = checks if passes else _looks(checks)
        verdicts = self._limiter.check_batch([*final.values()], now_us)
        if not passes and _all_allowed([one for one in verdicts if one is not None]):
            # Each would pass, and not all of them: they share a bucket, which has not the tokens of all.
            final = _looks(checks, sum(check.cost for check in checks.values() if not check.peek))
            verdicts = self._limiter.check_batch([*final.values()], now_us)
        if None in verdicts:
            return self._wait_for_charges(asked, final, verdicts, started_s)
        return self._answer(asked, final, verdicts, started_s)

    def _refunds(self, request: WireRequest, call: Call) -> _Refunds:
        """Return the holds that a request gives hits back of.

        Raises:
            InvalidInputError: names the first field that is wrong.
        """
        refunds = []
        for path, descriptor in _descriptors(request):
            if [entry.key for entry in descriptor.entries] != [HOLD_KEY]:
                text = "hits are given back to a hold only, by one entry with the key hold"
                raise InvalidInputError(FieldViolation(f"{path}.is_negative_hits", text))
            ticket = self._holds.opened(descriptor.entries[0].value, call)
            if ticket is None:
                raise InvalidInputError(NO_HOLD._replace(field=f"{path}.entries[0].value"))
            hits = _hits(request, descriptor)
            if not 1 <= hits <= ticket.cost:
                text = f"must be 1 to {ticket.cost}, the tokens that were held"
                raise InvalidInputError(FieldViolation(f"{path}.hits_addend", text))
            refunds.append((path, ticket, ticket.cost - hits))
        return refunds

    async def _settle(self, refunds: _Refunds) -> bytes:
        """Settle holds in order. An error leaves the earlier ones settled: repeated, these are answered alike."""
        decisions = []
        for path, ticket, actual in refunds:
            try:
                decisions.append(_decision_of(await self._holds.settled(ticket, actual)))
            except (HoldEndedError, HoldSettledError) as error:
                raise type(error)(path) from None
        return self._written(decisions)

    async def _wait(
        self, asked: Sequence[Check], checks: _Checks, passes: Awaitable[bool], started_s: float
    ) -> bytes:
        if not await passes:
            looks = _looks(checks)
            verdicts = await self._verdicts(looks, self._limiter.check_batch([*looks.values()]))
            if not _all_allowed(verdicts):
                return self._answer(asked, looks, verdicts, started_s)
            # All would pass by now. What is answered OK is charged, so they are judged by charging them.
        charges = self._limiter.check_batch([*checks.values()])
        return await self._wait_for_charges(asked, checks, charges, started_s)

    async def _wait_for_charges(
        self,
        asked: Sequence[Check],
        checks: _Checks,
        verdicts: Sequence[_Verdict | None],
        started_s: float,
    ) -> bytes:
        return self._answer(asked, checks, await self._verdicts(checks, verdicts), started_s)

    async def _verdicts(
        self, checks: _Checks, verdicts: Sequence[_Verdict | None]
    ) -> Sequence[_Verdict]:
        """Return the verdicts, after asking the shared state for missing ones."""
        pairs = zip(checks.values(), verdicts, strict=True)
        late = iter(await self._limiter.wait([check for check, known in pairs if known is None]))
        return [next(late) if known is None else known for known in verdicts]

    def _answer(
        self,
        asked: Sequence[Check],
        checks: _Checks,
        verdicts: Sequence[_Verdict | None],
        started_s: float,
    ) -> bytes:
        # None of them is an error: only a caller's timestamp makes one, and Envoy sends none.
        by_bucket = dict(zip(checks, cast("Sequence[Decision]", verdicts), strict=True))
        decisions = [by_bucket[_bucket(check)] for check in asked]
        answer = self._written(decisions)
        self._stats.observe_latency(self._perf_counter_s() - started_s, len(checks))
        return answer

    def _written(self, decisions: Sequence[Decision]) -> bytes:
        options = self._options
        now_us = self._limiter.now_us()
        return answer_of(decisions, now_us, options.fields, options.ratelimit_headers)


def _bucket(check: Check) -> _Bucket:
    return check.identifier, check.identifier_type, check.endpoint, check.also


def _one_for_each_bucket(asked: Sequence[Check]) -> _Checks:
    """Merge checks of the same bucket: decided separately, each would have the bucket for itself."""
    checks: _Checks = {}
    for check in asked:
        bucket = _bucket(check)
        earlier = checks.get(bucket)
        if earlier is None or earlier.peek:
            checks[bucket] = check
        elif not check.peek:
            cost = min(earlier.cost + check.cost, INT32_MAX)
            checks[bucket] = earlier._replace(cost=cost)
    return checks


def _looks(checks: _Checks, cost: int = 0) -> _Checks:
    """Return the same checks as peeks, of this cost unless it is 0."""
    return {
        bucket: check._replace(peek=True, cost=min(cost, INT32_MAX) or check.cost)
        for bucket, check in checks.items()
    }


def _all_allowed(verdicts: Sequence[_Verdict | None]) -> bool:
    return all(isinstance(one, Decision) and one.allowed for one in verdicts)
