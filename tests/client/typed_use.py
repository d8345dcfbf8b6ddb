"""What users write, for the type checker alone (`make lint`): no part of it may be of unknown type."""
# mypy: disallow-untyped-defs, disallow-untyped-calls, disallow-any-generics, disallow-any-expr, check-untyped-defs

from pathlib import Path
from typing import assert_type

from ratelimitd_client import (
    AsyncRateLimiter,
    AsyncRateLimiterClient,
    Check,
    Counts,
    Decision,
    Observer,
    RateLimiter,
    RateLimiterClient,
    Reason,
    Tls,
)
from ratelimitd_client.observers.opentelemetry import OpenTelemetryObserver
from ratelimitd_client.observers.prometheus import PrometheusObserver
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter, ManualClock


def blocking() -> None:
    """A client that blocks."""
    tls = Tls(ca=Path("ca.pem"), cert=b"cert", key=b"key")
    with RateLimiterClient("limiter:9090", tls=tls, token="t", timeout_s=0.01) as limiter:
        decision = limiter.check("alice", "user", "/x", cost=2, peek=True, timeout_s=0.5)
        assert_type(decision, Decision)
        assert_type(decision.allowed, bool)
        assert_type(decision.fail_open, bool)
        assert_type(decision.reason, Reason)
        assert_type(decision.headers(x_ratelimit=True), dict[str, str])
        assert_type(limiter.check_many([Check("alice", "user", "/x")]), list[Decision])
        assert_type(limiter.wait_until_ready(1.0), bool)
        assert_type(limiter.admin.reset("alice", "user", "/x"), None)
        assert_type(limiter.counts.held_closed, int)


class Denials:
    """An observer of one's own."""

    def decided(self, decision: Decision, endpoint: str) -> None:
        """Take a decision on a check of an endpoint."""
        assert_type((endpoint, decision.reason), tuple[str, Reason])
        assert_type(decision.fail_closed, bool)


def observers() -> list[Observer]:
    """What a client may be given to report to."""
    denials = Denials()
    RateLimiterClient(on_unavailable="deny", observer=denials)
    return [denials, Counts(), PrometheusObserver(), OpenTelemetryObserver()]


async def asynchronous() -> None:
    """A client for asyncio."""
    async with AsyncRateLimiterClient("limiter:9090", linger_us=200) as limiter:
        assert_type(await limiter.check("alice", "user", "/x"), Decision)
        assert_type(await limiter.check_many([Check("alice", "user", "/x")]), list[Decision])
        assert_type(await limiter.wait_until_ready(), bool)
        await limiter.admin.reset("alice", "user", "/x")


def of_either_kind(limiter: RateLimiter) -> list[Decision]:
    """All that the client and the fake have in common."""
    if not limiter.wait_until_ready(1.0):
        limiter.close()
    with limiter as entered:
        assert_type(entered.check("alice", "user", "/x", timeout_s=0.5), Decision)
        return entered.check_many([Check("alice", "user", "/x")], timeout_s=0.5)


async def of_either_kind_for_asyncio(limiter: AsyncRateLimiter) -> list[Decision]:
    """All that the client and the fake for asyncio have in common."""
    if not await limiter.wait_until_ready(1.0):
        await limiter.close()
    async with limiter as entered:
        assert_type(await entered.check("alice", "user", "/x", timeout_s=0.5), Decision)
        return await entered.check_many([Check("alice", "user", "/x")], timeout_s=0.5)


def either_kind() -> tuple[list[RateLimiter], list[AsyncRateLimiter]]:
    """The protocols are those of the clients and of the fakes."""
    clock = ManualClock()
    return (
        [RateLimiterClient(clock=clock), FakeRateLimiter(clock)],
        [AsyncRateLimiterClient(clock=clock), AsyncFakeRateLimiter(clock)],
    )
