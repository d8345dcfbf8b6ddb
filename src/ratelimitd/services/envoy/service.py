"""``envoy.service.ratelimit.v3.RateLimitService``: what Envoy, and gateways that took over its contract, ask.

All descriptors of a request are judged, and none is charged unless all pass. On buckets of the node's own that is
exact: between judging and charging nothing else has its turn. In a cluster another node may spend in between; ADR 0033
says what follows. Never decides anything itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, cast

from ratelimitd.errors import CheckInvalidError, InvalidInputError
from ratelimitd.model import INT32_MAX, Check, Decision, IdentifierType
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.envoy.answers import answer_of
from ratelimitd.services.envoy.descriptors import Identifiers, checks_of
from ratelimitd.services.envoy.messages import SERVICE, parse_request
from ratelimitd.stats import CheckStats

METHOD: Final = f"/{SERVICE}/ShouldRateLimit"

_Bucket = tuple[bytes, IdentifierType, str]
_Checks = dict[_Bucket, Check]
_Verdict = Decision | CheckInvalidError


class Checker(Protocol):
    """What this service needs of a :class:`ratelimitd.limiter.Limiter`."""

    def check_batch(
        self, checks: Sequence[Check], now_us: int | None = None
    ) -> Sequence[Decision | CheckInvalidError | None]:
        """Answer checks as one by one in their order, at ``now_us``; answer i is to check i."""

    async def wait(self, checks: Sequence[Check]) -> Sequence[Decision | CheckInvalidError]:
        """Answer checks for which :meth:`check_batch` had ``None``."""

    def all_pass(self, checks: Sequence[Check], now_us: int) -> bool | Awaitable[bool]:
        """Whether each of these checks would pass at ``now_us``; charges nothing."""

    def now_us(self) -> int:
        """The node's time."""


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """How a node speaks with Envoy: what says who is limited, and which header fields it adds."""

    identifiers: Identifiers
    fields: str

    @classmethod
    def of(cls, identifiers: Iterable[str], fields: str) -> Self:
        """The options for settings that are valid: ``KEY=TYPE``, and one of the names in ``answers``."""
        pairs = (pair.rpartition("=") for pair in identifiers)
        return cls({key.encode(): IdentifierType(kind) for key, _, kind in pairs}, fields)


class EnvoyService:
    """The handler. ``perf_counter_s`` is in seconds and measures how long a check takes."""

    def __init__(
        self,
        limiter: Checker,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        options: EnvoyOptions,
    ) -> None:
        self._limiter = limiter
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._options = options

    def methods(self) -> Methods:
        """The handler by its path."""
        return Methods(unary={METHOD: self.should_rate_limit})

    def should_rate_limit(self, data: bytes, _call: Call) -> bytes | Awaitable[bytes]:
        """Judge the descriptors of a request, and charge them if all of them pass.

        Raises:
            InvalidInputError: the request is malformed; nothing was charged.
        """
        started_s = self._perf_counter_s()
        try:
            asked = checks_of(parse_request(data), self._options.identifiers)
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
        if None in verdicts:
            return self._wait_for_charges(asked, final, verdicts, started_s)
        return self._answer(asked, final, verdicts, started_s)

    async def _wait(
        self, asked: Sequence[Check], checks: _Checks, passes: Awaitable[bool], started_s: float
    ) -> bytes:
        if not await passes:
            looks = _looks(checks)
            verdicts = await self._verdicts(looks, self._limiter.check_batch([*looks.values()]))
            if not all(isinstance(one, Decision) and one.allowed for one in verdicts):
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
        """The verdicts, those that are missing by the shared state."""
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
        answer = answer_of(decisions, self._limiter.now_us(), self._options.fields)
        self._stats.observe_latency(self._perf_counter_s() - started_s, len(checks))
        return answer


def _bucket(check: Check) -> _Bucket:
    return check.identifier, check.identifier_type, check.endpoint


def _one_for_each_bucket(asked: Sequence[Check]) -> _Checks:
    """The same checks, where those of one bucket are one: judged one by one, each would seem to have it for itself."""
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


def _looks(checks: _Checks) -> _Checks:
    """The same checks, charging nothing."""
    return {bucket: check._replace(peek=True) for bucket, check in checks.items()}
