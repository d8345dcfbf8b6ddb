"""Envoy's rate limit service: decides the descriptors of a request, or settles holds. ADRs 0033, 0055."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from ratelimitd.counters import CheckStats
from ratelimitd.errors import FieldViolation, HoldEndedError, HoldSettledError, InvalidInputError
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.limiter.together import Together
from ratelimitd.model import Decision
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.convert import CONTRACT_IDENTITIES, Identities
from ratelimitd.services.convert_envoy import (
    PACKAGE,
    WireRequest,
    answer_of,
    checks_of,
    decision_of,
    descriptors_of,
    hits_of,
    parse_request,
)
from ratelimitd.services.holds import NO_HOLD, HoldsService, Ticket
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION

SERVICE: Final = f"{PACKAGE}.RateLimitService"
METHOD: Final = f"/{SERVICE}/ShouldRateLimit"

HOLD_KEY: Final = b"hold"
"""Key of the only entry of a descriptor that refunds hits; its value is the text of the hold."""

_Refunds = Sequence[tuple[str, Ticket, int]]
"""Path of each descriptor, its hold, and the tokens that remain charged."""


class EnvoyService:
    """The handler. ``perf_counter_s`` is in seconds and measures the latency of checks.

    ``identifiers`` are the types of the entries that identify callers, by key. ``fields`` selects the header fields
    that Envoy adds, ``ratelimit_headers`` is the revision of the ``RateLimit`` fields.
    """

    def __init__(
        self,
        limiter: Limiter,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        *,
        identifiers: Mapping[str, str],
        fields: str,
        ratelimit_headers: str = NEWEST_REVISION,
        identities: Identities = CONTRACT_IDENTITIES,
        holds: HoldsService,
    ) -> None:
        self._limiter = limiter
        self._holds = holds
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._identifiers = {key.encode(): kind for key, kind in identifiers.items()}
        self._identities = identities
        self._fields = fields
        self._ratelimit_headers = ratelimit_headers

    def methods(self) -> Methods:
        """Return the handler by its path."""
        return Methods(unary={METHOD: self.should_rate_limit})

    def should_rate_limit(self, data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        """Decide the descriptors of a request, and charge them if all pass; or refund hits of holds.

        Raises:
            InvalidInputError: the request is malformed; nothing was charged or refunded.
        """
        started_s = self._perf_counter_s()
        try:
            request = parse_request(data)
            # Both paths refuse a request without descriptors.
            if all(one.is_negative_hits for one in request.descriptors):
                return self._settle(self._refunds(request, call))
            asked = checks_of(request, self._identifiers, self._identities)
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        decisions = Together(self._limiter, asked, call.time_remaining_s).decide()
        if isinstance(decisions, Awaitable):
            return self._wait(decisions, started_s)
        return self._answer(decisions, started_s)

    def _refunds(self, request: WireRequest, call: Call) -> _Refunds:
        """Return the holds whose hits a request refunds.

        Raises:
            InvalidInputError: names the first invalid field.
        """
        refunds = []
        for path, descriptor in descriptors_of(request):
            if [entry.key for entry in descriptor.entries] != [HOLD_KEY]:
                text = "hits can only be given back to a hold, by one entry with the key hold"
                raise InvalidInputError(FieldViolation(f"{path}.is_negative_hits", text))
            ticket = self._holds.opened(descriptor.entries[0].value, call)
            if ticket is None:
                raise InvalidInputError(NO_HOLD._replace(field=f"{path}.entries[0].value"))
            hits = hits_of(request, descriptor)
            if not 1 <= hits <= ticket.cost:
                text = f"must be 1 to {ticket.cost}, the tokens that were held"
                raise InvalidInputError(FieldViolation(f"{path}.hits_addend", text))
            refunds.append((path, ticket, ticket.cost - hits))
        return refunds

    async def _settle(self, refunds: _Refunds) -> bytes:
        """Settle holds in order. After an error the earlier ones stay settled; a repetition answers them alike."""
        decisions = []
        for path, ticket, actual in refunds:
            try:
                decisions.append(decision_of(await self._holds.settled(ticket, actual)))
            except (HoldEndedError, HoldSettledError) as error:
                raise type(error)(path) from None
        return self._written(decisions)

    async def _wait(self, decisions: Awaitable[Sequence[Decision]], started_s: float) -> bytes:
        return self._answer(await decisions, started_s)

    def _answer(self, decisions: Sequence[Decision], started_s: float) -> bytes:
        answer = self._written(decisions)
        self._stats.observe_latency(self._perf_counter_s() - started_s, len(decisions))
        return answer

    def _written(self, decisions: Sequence[Decision]) -> bytes:
        now_us = self._limiter.now_us()
        return answer_of(decisions, now_us, self._fields, self._ratelimit_headers)
