"""The RateLimiterHolds service: charges the maximum cost of a request, and settles its actual cost.

Callers receive a hold as a sealed text with keyed digests of its buckets: any node can settle it, callers cannot make
or alter one, it contains no identifier, and other principals cannot use it. See ADR 0055.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from heapq import nlargest
from struct import Struct
from typing import Final, NamedTuple

from ratelimitd.buckets.keys import STORED_KEY_BYTES, BucketKeys
from ratelimitd.counters import CheckStats
from ratelimitd.errors import CheckInvalidError, FieldViolation, HoldEndedError, InvalidInputError
from ratelimitd.ledger.holds import CHECK_DIGEST_BYTES, DEFAULT_TTL_S, MAX_TTL_S, NUMBER_BYTES
from ratelimitd.limiter.holder import HeldLimit, Holder, SettledHold
from ratelimitd.model import INT32_MAX, US_PER_S, Check
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.config import SEAL_BYTES, sealed, unsealed
from ratelimitd.services.convert import Identities, answer_of, check_of, status_of
from ratelimitd.services.wire import WireHold, parse, parse_extend, parse_hold, parse_settle
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiterHolds"

MAX_HOLD_ID: Final = 64
MAX_HOLD_CHARS: Final = 65_536
"""Longest hold on the wire; each limit with the longest names takes 160 characters."""

MAX_LISTED: Final = 1_000

_SEAL_PERSON: Final = b"rl-hold"
_NUMBER_PERSON: Final = b"rl-holdid"
_VERSION: Final = 1
_HEAD: Final = Struct(f"<B{NUMBER_BYTES}sqI")
_TEXTS: Final = 3


class Ticket(NamedTuple):
    """Content of a hold: its number, its first expiry in Unix seconds, its tokens, and its limits, if any."""

    number: bytes
    expire_time: int
    cost: int
    limits: Sequence[HeldLimit]


class HoldsService:
    """Handlers of holds.

    ``principal`` returns the principal of a call; only it can settle its holds. ``now_s`` is the node's time in Unix
    seconds.
    """

    def __init__(
        self,
        holder: Holder,
        keys: BucketKeys,
        principal: Callable[[Call], str],
        *,
        stats: CheckStats,
        identities: Identities,
        now_s: Callable[[], float],
    ) -> None:
        self._holder = holder
        self._keys = keys
        self._principal = principal
        self._stats = stats
        self._identities = identities
        self._now_s = now_s

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/Hold": self.hold,
                f"/{SERVICE}/Settle": self.settle,
                f"/{SERVICE}/Extend": self.extend,
                f"/{SERVICE}/ListHolds": self.list_holds,
            }
        )

    async def hold(self, data: bytes, call: Call) -> bytes:
        """Charge a check, and return the hold that settles it."""
        try:
            return await self._hold(parse_hold(data), self._principal(call))
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise

    async def settle(self, data: bytes, call: Call) -> bytes:
        """Charge the actual cost of a hold, once."""
        message = parse_settle(data)
        violations = []
        if not 0 <= message.actual <= INT32_MAX:
            violations.append(FieldViolation("actual", f"must be 0 to {INT32_MAX}"))
        ticket = self._ticket_of(message.hold, call, violations)
        known, limits = await self.settled(ticket, message.actual)
        return ratelimiter_pb2.SettleResponse(
            known=known, charged=message.actual if known else 0, limits=map(status_of, limits)
        ).SerializeToString()

    async def settled(self, ticket: Ticket, actual: int) -> SettledHold:
        """Charge ``actual`` tokens in place of those held, once; return the status of its limits.

        Raises: as :meth:`ratelimitd.ledger.holds.Holds.settle`.
        """
        if not ticket.limits:
            return SettledHold(known=False)
        settled = await self._holder.settle(ticket.number, ticket.limits, ticket.cost, actual)
        if not settled.known:
            self._refuse_ended(ticket)
        return settled

    async def extend(self, data: bytes, call: Call) -> bytes:
        """Extend a hold."""
        message = parse_extend(data)
        ticket = self._ticket_of(message.hold, call, _ttl_violations(message.ttl_seconds))
        expire_us = None
        if ticket.limits:
            ttl_us = (message.ttl_seconds or DEFAULT_TTL_S) * US_PER_S
            expire_us = await self._holder.extend(ticket.number, ticket.limits, ttl_us)
            if expire_us is None:
                self._refuse_ended(ticket)
        return ratelimiter_pb2.ExtendResponse(
            known=expire_us is not None, expire_time=_seconds(expire_us or 0)
        ).SerializeToString()

    def list_holds(self, data: bytes, _call: Call) -> bytes:
        """List the holds in flight by limit."""
        parse(ratelimiter_pb2.ListHoldsRequest, data)
        most = nlargest(MAX_LISTED, self._holder.in_flight(), key=lambda one: one.holds)
        return ratelimiter_pb2.ListHoldsResponse(
            limits=[
                ratelimiter_pb2.HoldsOfLimit(
                    rule_id=rule.id,
                    name=name,
                    endpoint=rule.endpoint,
                    identifier_type=rule.identifier_type,
                    holds=holds,
                    tokens=tokens,
                )
                for rule, name, holds, tokens in most
            ]
        ).SerializeToString()

    async def _hold(self, message: WireHold, principal: str) -> bytes:
        check, hold_id = self._asked(message)
        if hold_id:
            number = self._digest(NUMBER_BYTES, _NUMBER_PERSON, principal, hold_id)
        else:
            number = secrets.token_bytes(NUMBER_BYTES)
        ttl_us = (message.ttl_seconds or DEFAULT_TTL_S) * US_PER_S
        try:
            held = await self._holder.hold(
                check, number, self._digest_of(check), ttl_us, lease=message.lease
            )
        except CheckInvalidError as error:
            raise InvalidInputError(*_of_check(error)) from None
        answer = ratelimiter_pb2.HoldResponse(answer=answer_of(held.decision))
        if held.decision.allowed:
            expire_time = _seconds(held.expire_us) or int(self._now_s()) + ttl_us // US_PER_S
            ticket = Ticket(number, expire_time, check.cost, held.limits)
            answer.hold, answer.expire_time = self._sealed(ticket, principal), expire_time
        return answer.SerializeToString()

    def _asked(self, message: WireHold) -> tuple[Check, str]:
        """Return the check and the id of a requested hold.

        Raises:
            InvalidInputError: names every violated field.
        """
        violations: list[FieldViolation] = []
        check = None
        try:
            check = check_of(message.check, self._identities)
        except CheckInvalidError as error:
            violations += _of_check(error)
        for name in ("peek", "max_wait_ms"):
            if getattr(message.check, name):
                violations.append(FieldViolation(f"check.{name}", "is not for a hold"))
        hold_id = message.hold_id.decode("utf-8", "replace")
        if len(hold_id) > MAX_HOLD_ID or not (hold_id.isprintable() and hold_id.isascii()):
            text = f"must be at most {MAX_HOLD_ID} printable ASCII characters, best a UUID"
            violations.append(FieldViolation("hold_id", text))
        violations += _ttl_violations(message.ttl_seconds)
        if check is None or violations:
            raise InvalidInputError(*violations)
        return check, hold_id

    def _ticket_of(self, hold: bytes, call: Call, others: Sequence[FieldViolation]) -> Ticket:
        """Return the content of a hold.

        Raises:
            InvalidInputError: it was not made for this caller, or there are other violations.
        """
        ticket = self.opened(hold, call)
        if ticket is None:
            raise InvalidInputError(NO_HOLD, *others)
        if others:
            raise InvalidInputError(*others)
        return ticket

    def _refuse_ended(self, ticket: Ticket) -> None:
        if self._now_s() >= ticket.expire_time:
            raise HoldEndedError

    def _digest_of(self, check: Check) -> bytes:
        """Return a digest of the identities in any order, the endpoint and the cost of a hold."""
        identities = sorted(((check.identifier_type, check.identifier), *check.also))
        text = repr((identities, check.endpoint, check.cost))
        return self._digest(CHECK_DIGEST_BYTES, _NUMBER_PERSON, text)

    def _digest(self, size: int, person: bytes, *texts: str) -> bytes:
        text = "\0".join(texts).encode()
        return blake2b(text, digest_size=size, key=self._keys.secret, person=person).digest()

    def _sealed(self, ticket: Ticket, principal: str) -> str:
        parts = [_HEAD.pack(_VERSION, *ticket[:3])]
        for bucket, *texts in ticket.limits:
            parts.append(bucket)
            for text in texts:
                encoded = text.encode()
                parts += (bytes((len(encoded),)), encoded)
        return sealed(b"".join(parts), partial(self._seal, principal))

    def _seal(self, principal: str, body: bytes) -> bytes:
        # A digest of fixed length in place of the principal, so that a part of the body cannot pass for a part of it.
        whose = self._digest(SEAL_BYTES, _SEAL_PERSON, principal)
        return blake2b(
            whose + body, digest_size=SEAL_BYTES, key=self._keys.secret, person=_SEAL_PERSON
        ).digest()

    def opened(self, hold: bytes, call: Call) -> Ticket | None:
        """Return the content of a hold; ``None`` if it was not made for this caller, or has another form."""
        if len(hold) > MAX_HOLD_CHARS:
            return None
        body = unsealed(hold, partial(self._seal, self._principal(call)))
        return None if body is None or body[0] != _VERSION else _ticket(body)


def _ticket(body: bytes) -> Ticket:
    """Parse a body whose seal was verified, without further checks."""
    _, number, expire_time, cost = _HEAD.unpack_from(body)
    place, limits = _HEAD.size, []
    while place < len(body):
        bucket, place = body[place : place + STORED_KEY_BYTES], place + STORED_KEY_BYTES
        texts = []
        for _ in range(_TEXTS):
            start = place + 1
            place = start + body[place]
            texts.append(body[start:place].decode())
        limits.append(HeldLimit(bucket, *texts))
    return Ticket(number, expire_time, cost, limits)


_OWN_FIELDS: Final = ("hold_id", "lease")
NO_HOLD: Final = FieldViolation("hold", "is not a hold that was made for this caller")


def _of_check(error: CheckInvalidError) -> Iterable[FieldViolation]:
    """Return the violations of a check with the field paths of a hold."""
    return [
        one if one.field in _OWN_FIELDS else one._replace(field=f"check.{one.field}")
        for one in error.violations
    ]


def _ttl_violations(ttl_seconds: int) -> list[FieldViolation]:
    if 0 <= ttl_seconds <= MAX_TTL_S:
        return []
    text = f"must be 1 to {MAX_TTL_S}, or unset for {DEFAULT_TTL_S}"
    return [FieldViolation("ttl_seconds", text)]


def _seconds(time_us: int) -> int:
    return -(-time_us // US_PER_S)
