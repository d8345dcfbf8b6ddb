"""Envoy's rate limit service: decides the descriptors of a request, or settles holds. ADRs 0033, 0055."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, cast

from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    HoldEndedError,
    HoldSettledError,
    InvalidInputError,
)
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import INT32_MAX, Check, Decision, Identity
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

_Bucket = tuple[bytes, str, str, tuple[Identity, ...]]
_Checks = dict[_Bucket, Check]
_Verdict = Decision | CheckInvalidError


class EnvoyService:
    """The handler. ``perf_counter_s`` is in seconds and measures the latency of checks.

    ``identifiers`` are the entries that identify callers, ``KEY=TYPE``. ``fields`` selects the header fields that Envoy
    adds, ``ratelimit_headers`` is the revision of the ``RateLimit`` fields.
    """

    def __init__(
        self,
        limiter: Limiter,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        *,
        identifiers: Iterable[str],
        fields: str,
        ratelimit_headers: str = NEWEST_REVISION,
        identities: Identities = CONTRACT_IDENTITIES,
        holds: HoldsService,
        dry_run: DryRun,
    ) -> None:
        self._limiter = limiter
        self._dry_run = dry_run
        self._holds = holds
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        pairs = (pair.rpartition("=") for pair in identifiers)
        self._identifiers = {key.encode(): kind for key, _, kind in pairs}
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
        checks = _one_for_each_bucket(asked)
        # A single check needs no dry run: it charges nothing unless it passes.
        # The dry run and the charge use the same time: a window that ends in between would allow without charging.
        now_us = self._limiter.now_us()
        passes = len(checks) == 1 or self._dry_run.all_pass([*checks.values()], now_us)
        if not isinstance(passes, bool):
            return self._wait(asked, checks, passes, started_s)
        final = checks if passes else _looks(checks)
        verdicts = self._limiter.check_batch([*final.values()], now_us)
        if not passes and _all_allowed([one for one in verdicts if one is not None]):
            # Each alone would pass, but not all together: they share a bucket without enough tokens for all.
            final = _looks(checks, sum(check.cost for check in checks.values() if not check.peek))
            verdicts = self._limiter.check_batch([*final.values()], now_us)
        if None in verdicts:
            return self._wait_for_charges(asked, final, verdicts, started_s)
        return self._answer(asked, final, verdicts, started_s)

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

    async def _wait(
        self, asked: Sequence[Check], checks: _Checks, passes: Awaitable[bool], started_s: float
    ) -> bytes:
        if not await passes:
            looks = _looks(checks)
            verdicts = await self._verdicts(looks, self._limiter.check_batch([*looks.values()]))
            if not _all_allowed(verdicts):
                return self._answer(asked, looks, verdicts, started_s)
            # By now all would pass. An answer of OK must be charged, so they are decided again by charging.
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
        """Return the verdicts; requests missing ones from the shared state."""
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
        # No verdict is an error: only a timestamp of the caller causes one, and Envoy sends none.
        by_bucket = dict(zip(checks, cast("Sequence[Decision]", verdicts), strict=True))
        decisions = [by_bucket[_bucket(check)] for check in asked]
        answer = self._written(decisions)
        self._stats.observe_latency(self._perf_counter_s() - started_s, len(checks))
        return answer

    def _written(self, decisions: Sequence[Decision]) -> bytes:
        now_us = self._limiter.now_us()
        return answer_of(decisions, now_us, self._fields, self._ratelimit_headers)


def _bucket(check: Check) -> _Bucket:
    return check.identifier, check.identifier_type, check.endpoint, check.also


def _one_for_each_bucket(asked: Sequence[Check]) -> _Checks:
    """Merge checks of the same bucket; decided separately, each could take all of its tokens.

    Peeks come first, so that they see no charge of the same request, as in the dry run.
    """
    checks: _Checks = {}
    for check in asked:
        bucket = _bucket(check)
        earlier = checks.get(bucket)
        if earlier is None or earlier.peek:
            checks[bucket] = check
        elif not check.peek:
            cost = min(earlier.cost + check.cost, INT32_MAX)
            checks[bucket] = earlier._replace(cost=cost)
    return dict(sorted(checks.items(), key=lambda one: not one[1].peek))


def _looks(checks: _Checks, cost: int = 0) -> _Checks:
    """Return the same checks as peeks, with this cost unless it is 0."""
    return {
        bucket: check._replace(peek=True, cost=min(cost, INT32_MAX) or check.cost)
        for bucket, check in checks.items()
    }


def _all_allowed(verdicts: Sequence[_Verdict | None]) -> bool:
    return all(isinstance(one, Decision) and one.allowed for one in verdicts)
