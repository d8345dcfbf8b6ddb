"""Fake clients and a manual clock, for tests of code that checks requests.

The fakes count in fixed windows, aligned to the Unix epoch, whatever the algorithm of your rules. Use a real node to
test the edges of a window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self, TypeAlias

import grpc

from ratelimitd_client.async_hold import DEFAULT_TTL_S, AsyncHold
from ratelimitd_client.check import MAX_COST, NO_IDENTITIES, Check, hold_of, request_of, requests_of
from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import (
    Decision,
    OnUnavailable,
    Reason,
    require_on_unavailable,
    unchecked,
)
from ratelimitd_client.fail_open import SETTLE, CallError
from ratelimitd_client.hold import Hold
from ratelimitd_client.observers import Counts, Observer, report_to
from ratelimitd_client.sessions import valid_timeout_s
from ratelimiter.v1 import ratelimiter_pb2 as pb


class ManualClock:
    """A clock that only :meth:`advance` moves."""

    def __init__(self, now_s: float = 1_700_006_400.0) -> None:
        self._now_s = now_s
        self._monotonic_s = 0.0

    def monotonic_s(self) -> float:
        """Return the seconds advanced since the clock was created."""
        return self._monotonic_s

    def now_s(self) -> float:
        """Return the Unix time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance both clocks.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            message = "time does not pass backwards"
            raise ValueError(message)
        self._now_s += seconds
        self._monotonic_s += seconds


class _Limit(NamedTuple):
    limit: int
    window_seconds: int


_Bucket: TypeAlias = tuple[str, str, str, int]
"""Identifier type, identifier, endpoint, number of the window."""


class _Counts:
    """The limits and counts of a fake, and whether its service is available."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        on_unavailable: OnUnavailable = "allow",
        observer: Observer | None = None,
    ) -> None:
        require_on_unavailable(on_unavailable)
        self.on_unavailable: Final[OnUnavailable] = on_unavailable
        self.clock: Final = ManualClock() if clock is None else clock
        self.counts: Final[Counts] = Counts()
        observers = [self.counts] if observer is None else [self.counts, observer]
        self._report = report_to(self.clock, *observers)
        self.checks: Final[list[Check]] = []
        """All checks in order, also those while the service is not available."""
        self.available = True
        """Set to ``False`` to answer all checks as when the service does not answer."""
        self._closed = False
        self._limits: dict[tuple[str, str], _Limit] = {}
        self._spent: dict[_Bucket, int] = {}

    def limit(
        self, endpoint: str, identifier_type: str, limit: int, window_seconds: int = 60
    ) -> None:
        """Limit an endpoint, or with ``*`` all endpoints without a limit.

        Raises:
            ValueError, TypeError: a limit or a window is below 1, or no check can have the endpoint or the type.
        """
        Check("192.0.2.1", identifier_type, "/" if endpoint == "*" else endpoint)
        if limit < 1 or window_seconds < 1:
            message = "a limit and its window are at least 1"
            raise ValueError(message)
        self._limits[endpoint, identifier_type] = _Limit(limit, window_seconds)

    def _decide_all(self, checks: Iterable[Check], timeout_s: float | None) -> list[Decision]:
        """Decide, with the same errors as the real clients."""
        asked = list(checks)
        self._require_usable(asked, timeout_s)
        return [self._decide(check)[0] for check in asked]

    def _hold(
        self, check: Check, ttl_s: int, hold_id: str, timeout_s: float | None
    ) -> tuple[Decision, int, _Held]:
        """Decide a check, and return when its hold ends and what settles it; with the errors of the real clients."""
        hold_of(check.message(), ttl_s, hold_id)
        self._require_usable([check], timeout_s)
        decision, charged = self._decide(check)
        held = _Held(self._spent, charged, check.cost, now_s=self.clock.now_s)
        return decision, int(self.clock.now_s()) + ttl_s, held

    def _require_usable(self, checks: Sequence[Check], timeout_s: float | None) -> None:
        requests_of(checks)
        if timeout_s is not None:
            valid_timeout_s(timeout_s)
        if self._closed:
            message = "the client is closed"
            raise RuntimeError(message)

    def _decide(self, check: Check) -> tuple[Decision, Sequence[_Bucket]]:
        """Return the decision, which is reported, and the buckets that it charged."""
        self.checks.append(check)
        decision, charged = self._judged(check)
        self._report(decision, check.endpoint)
        return decision, charged

    def _judged(self, check: Check) -> tuple[Decision, Sequence[_Bucket]]:
        now_s = self.clock.now_s()
        if not self.available:
            return unchecked(Reason.NO_ANSWER, "UNAVAILABLE", now_s, self.on_unavailable), ()
        judged: dict[_Bucket, Decision] = {}
        for kind, identifier in {check.identifier_type: check.identifier, **check.also}.items():
            found = self._limits.get((check.endpoint, kind)) or self._limits.get(("*", kind))
            if found is not None:
                window = int(now_s) // found.window_seconds
                bucket = (kind, identifier, check.endpoint, window)
                judged[bucket] = self._judge(check.cost, found, bucket, now_s)
        if not judged:
            return Decision(True, MAX_COST, 0, 0, Reason.NO_RULE, decided_at_s=now_s), ()  # noqa: FBT003 - allowed
        denials = [one for one in judged.values() if not one.allowed]
        if denials:
            return max(denials, key=lambda one: one.retry_after_seconds), ()
        least = min(judged.values(), key=lambda one: one.remaining_tokens / one.limit)
        if check.peek:
            return least, ()
        for bucket in judged:
            self._spent[bucket] = self._spent.get(bucket, 0) + check.cost
        return least, tuple(judged)

    def _judge(self, cost: int, rule: _Limit, bucket: _Bucket, now_s: float) -> Decision:
        limit, window_seconds = rule
        left = limit - self._spent.get(bucket, 0)
        allowed = cost <= left
        if allowed:
            left -= cost
        window = bucket[-1]
        reset_time = (window + 1) * window_seconds
        wait_s = max(1, -int(-(reset_time - now_s) // 1))
        reason, retry_after_s = Reason.WITHIN_LIMIT, 0 if left else wait_s
        if not allowed:
            reason, retry_after_s = Reason.LIMIT_EXCEEDED, wait_s
        if cost > limit:
            reason, retry_after_s = Reason.COST_EXCEEDS_LIMIT, window_seconds
        return Decision(
            allowed,
            left,
            reset_time if left < limit else int(now_s),
            retry_after_s,
            reason,
            limit,
            window_seconds,
            rule_id="fake",
            decided_at_s=now_s,
        )


_FAKE: Final = "fake"


class _Held:
    """Tokens of a fake's counts that are settled once."""

    def __init__(
        self,
        spent: dict[_Bucket, int],
        charged: Sequence[_Bucket],
        cost: int,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._spent = spent
        self._charged = charged
        self._cost = cost
        self._now_s = now_s
        self._actual: int | None = None

    def answer(self, path: str, message: bytes) -> bytes:
        """Answer a settle or an extension as a node does."""
        if not self._charged:
            return b""
        if path != SETTLE:
            ttl_s = pb.ExtendRequest.FromString(message).ttl_seconds
            expire_time = int(self._now_s()) + ttl_s
            return pb.ExtendResponse(known=True, expire_time=expire_time).SerializeToString()
        actual = pb.SettleRequest.FromString(message).actual
        if self._actual is None:
            self._actual = actual
            for bucket in self._charged:
                self._spent[bucket] += actual - self._cost
        if actual != self._actual:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION)
        return pb.SettleResponse(known=True, charged=actual).SerializeToString()


class _Calls(NamedTuple):
    """Takes the place of a session of the blocking client."""

    held: _Held

    def call(self, path: str, message: bytes, _timeout_s: float) -> bytes:
        """Answer as a node does."""
        return self.held.answer(path, message)


class _AsyncCalls(NamedTuple):
    """Takes the place of a session of the asyncio client."""

    held: _Held

    async def call(self, path: str, message: bytes, _timeout_s: float) -> bytes:
        """Answer as a node does."""
        return self.held.answer(path, message)

    def keep(self, _task: asyncio.Task[bool]) -> None:
        """Do nothing: a call of a fake never waits."""


class FakeRateLimiter(_Counts):
    """Replaces a :class:`ratelimitd_client.RateLimiterClient`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Raise RuntimeError for further checks."""
        self._closed = True

    def wait_until_ready(self, timeout_s: float = 5.0) -> bool:  # noqa: ARG002 - as the real client
        """Return whether the service is available."""
        return self.available

    def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        also: Mapping[str, str] = NO_IDENTITIES,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Decision:
        """As the real client, with the same errors. Windows do not wait, so ``max_wait_s`` changes nothing."""
        request_of(identifier, identifier_type, endpoint, max_wait_s=max_wait_s)
        check = Check(identifier, identifier_type, endpoint, cost, timestamp, peek, also)
        return self._decide_all([check], timeout_s)[0]

    def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """As the real client, with the same errors."""
        return self._decide_all(checks, timeout_s)

    def hold(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        also: Mapping[str, str] = NO_IDENTITIES,
        ttl_s: int = DEFAULT_TTL_S,
        hold_id: str = "",
        timeout_s: float | None = None,
    ) -> Hold:
        """As the real client, with the same errors. Every call is a hold of its own, which never ends by time."""
        check = Check(identifier, identifier_type, endpoint, cost, also=also)
        decision, expire_time, held = self._hold(check, ttl_s, hold_id, timeout_s)
        return Hold(decision, cost=cost, hold=_FAKE, expire_time=expire_time, session=_Calls(held))


class AsyncFakeRateLimiter(_Counts):
    """Replaces an :class:`ratelimitd_client.AsyncRateLimiterClient`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Raise RuntimeError for further checks."""
        self._closed = True

    async def wait_until_ready(self, timeout_s: float = 5.0) -> bool:  # noqa: ARG002 - as the real client
        """Return whether the service is available."""
        return self.available

    async def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        also: Mapping[str, str] = NO_IDENTITIES,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Decision:
        """As the real client, with the same errors. Windows do not wait, so ``max_wait_s`` changes nothing."""
        request_of(identifier, identifier_type, endpoint, max_wait_s=max_wait_s)
        check = Check(identifier, identifier_type, endpoint, cost, timestamp, peek, also)
        return self._decide_all([check], timeout_s)[0]

    async def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """As the real client, with the same errors."""
        return self._decide_all(checks, timeout_s)

    async def hold(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        also: Mapping[str, str] = NO_IDENTITIES,
        ttl_s: int = DEFAULT_TTL_S,
        hold_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncHold:
        """As the real client, with the same errors. Every call is a hold of its own, which never ends by time."""
        check = Check(identifier, identifier_type, endpoint, cost, also=also)
        decision, expire_time, held = self._hold(check, ttl_s, hold_id, timeout_s)
        return AsyncHold(
            decision, cost=cost, hold=_FAKE, expire_time=expire_time, session=_AsyncCalls(held)
        )
