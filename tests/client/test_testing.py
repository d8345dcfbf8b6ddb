"""The fakes for users' tests: they count, they go away, and they take what the real clients take."""

import inspect
import time
from unittest.mock import create_autospec

import pytest

from ratelimitd_client import (
    AsyncRateLimiter,
    AsyncRateLimiterClient,
    Check,
    RateLimiter,
    RateLimiterClient,
    Reason,
)
from ratelimitd_client.clock import SystemClock
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter, ManualClock
from tests.client.kinds import result_of


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def limiter(clock):
    with FakeRateLimiter(clock) as limiter:
        limiter.limit("/x", "user", limit=2, window_seconds=60)
        yield limiter


def test_time_moves_when_it_is_told_to_and_never_backwards(clock):
    began_s = clock.now_s()
    clock.advance(1.5)
    assert (clock.now_s() - began_s, clock.monotonic_s()) == (1.5, 1.5)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_window_is_spent_and_ends(limiter, clock):
    decisions = [limiter.check("alice", "user", "/x") for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [decision.remaining_tokens for decision in decisions] == [1, 0, 0]
    assert [decision.retry_after_seconds for decision in decisions] == [0, 60, 60]
    assert limiter.check("bob", "user", "/x").allowed
    clock.advance(decisions[2].retry_after_seconds)
    assert limiter.check("alice", "user", "/x").remaining_tokens == 1


def test_a_denial_has_the_headers_of_a_real_one(limiter, clock):
    clock.advance(20)
    limiter.check("alice", "user", "/x", cost=2)
    assert limiter.check("alice", "user", "/x").headers() == {
        "Retry-After": "40",
        "RateLimit-Policy": '"default";q=2;w=60',
        "RateLimit": '"default";r=0;t=40',
    }


def test_peeking_spends_nothing_and_a_denial_neither(limiter):
    assert limiter.check("alice", "user", "/x", cost=2, peek=True).allowed
    assert limiter.check("alice", "user", "/x", cost=3).reason is Reason.COST_EXCEEDS_LIMIT
    assert limiter.check("alice", "user", "/x", cost=2).allowed


def test_a_limit_for_all_holds_where_there_is_no_other(limiter):
    limiter.limit("*", "user", limit=1)
    assert limiter.check("alice", "user", "/y").limit == 1
    assert limiter.check("alice", "user", "/x").limit == 2
    decision = limiter.check("192.0.2.7", "ip", "/y")
    assert (decision.allowed, decision.reason) == (True, Reason.NO_RULE)


def test_an_outage_lets_everything_through_and_is_marked(limiter):
    limiter.available = False
    assert limiter.check("alice", "user", "/x", cost=9).fail_open
    assert not limiter.wait_until_ready()
    assert limiter.checks == [Check("alice", "user", "/x", 9)]


async def test_a_fake_that_fails_closed_denies_during_an_outage():
    limiter, asynchronous = (
        FakeRateLimiter(on_unavailable="deny"),
        AsyncFakeRateLimiter(on_unavailable="deny"),
    )
    limiter.available = asynchronous.available = False
    assert limiter.check("alice", "user", "/x").fail_closed
    assert not limiter.hold("alice", "user", "/x").allowed
    assert (await asynchronous.check("alice", "user", "/x")).fail_closed
    assert not (await asynchronous.hold("alice", "user", "/x")).allowed
    with pytest.raises(ValueError, match="on_unavailable must be"):
        FakeRateLimiter(on_unavailable="closed")


def test_wrong_arguments_raise_as_with_a_real_client(limiter):
    with pytest.raises(ValueError, match="identifier_type"):
        limiter.check("alice", "Nobody", "/x")
    for limit, error in ((0, ValueError), ("1", TypeError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^limit must be"):
            limiter.limit("/x", "user", limit)
        with pytest.raises(error, match=r"^window_seconds must be"):
            limiter.limit("/x", "user", 1, limit)
    with pytest.raises(ValueError, match="identifier_type"):
        limiter.limit("*", "Tenant", limit=1)
    with pytest.raises(ValueError, match="endpoint"):
        limiter.limit("", "user", limit=1)
    with pytest.raises(ValueError, match=r"endpoint must not be \*\*: a fake"):
        limiter.limit("**", "user", limit=1)


@pytest.mark.parametrize("kind", [FakeRateLimiter, AsyncFakeRateLimiter])
@pytest.mark.parametrize(
    ("clock", "what"), [("127.0.0.1:9090", "str"), (ManualClock, "a class"), (0, "int")]
)
def test_what_is_no_clock_is_refused(kind, clock, what):
    with pytest.raises(TypeError, match=f"clock must be a ManualClock .*, not {what}$"):
        kind(clock)


@pytest.mark.parametrize("kind", [FakeRateLimiter, AsyncFakeRateLimiter])
def test_a_fake_has_no_admin(kind):
    fake = kind()
    assert not hasattr(fake, "admin")
    assert create_autospec(fake).check
    with pytest.raises(AttributeError, match=r"a fake has no admin: set limits with limit\(\)"):
        _ = fake.admin


@pytest.mark.parametrize("kind", [FakeRateLimiter, AsyncFakeRateLimiter])
async def test_a_hold_is_neither_settled_nor_extended_in_an_outage_or_after_closing(kind):
    limiter = kind()
    limiter.limit("/x", "user", limit=2)
    hold = await result_of(limiter.hold("alice", "user", "/x", cost=2, ttl_s=9))
    ends = hold.expire_time
    limiter.available = False
    assert not await result_of(hold.settle(1))
    assert not await result_of(hold.extend(60))
    limiter.available = True
    await result_of(limiter.close())
    assert not await result_of(hold.settle(1))
    assert not await result_of(hold.extend(60))
    assert hold.expire_time == ends


def test_a_hold_that_is_denied_holds_nothing_and_never_ends(limiter):
    held, denied = (limiter.hold("alice", "user", "/x", cost=2, ttl_s=9) for _ in range(2))
    assert (held.is_held, held.expire_time) == (True, int(limiter.clock.now_s()) + 9)
    assert (denied.allowed, denied.is_held, denied.expire_time) == (False, False, 0)


def test_many_checks_are_decided_in_their_order(limiter):
    decisions = limiter.check_many([Check("alice", "user", "/x")] * 3)
    assert [decision.allowed for decision in decisions] == [True, True, False]


def test_a_check_counts_for_all_its_identities_or_for_none(limiter):
    limiter.limit("*", "tenant", limit=3)
    assert limiter.check("alice", "user", "/x", also={"tenant": "acme"}).remaining_tokens == 1
    assert limiter.check("bob", "user", "/x", cost=2, also={"tenant": "acme"}).limit == 2
    denied = limiter.check("carol", "user", "/x", also={"tenant": "acme"})
    assert (denied.allowed, denied.limit) == (False, 3)
    assert limiter.check("carol", "user", "/x", cost=2).allowed


async def test_the_fake_for_asyncio_does_the_same():
    async with AsyncFakeRateLimiter() as limiter:
        limiter.limit("/x", "user", limit=1)
        assert await limiter.wait_until_ready()
        assert (await limiter.check("alice", "user", "/x")).allowed
        [decision] = await limiter.check_many([Check("alice", "user", "/x")])
        assert decision.reason is Reason.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("real", "protocol"),
    [(RateLimiterClient, RateLimiter), (AsyncRateLimiterClient, AsyncRateLimiter)],
)
@pytest.mark.parametrize("method", ["check", "check_many", "hold", "wait_until_ready", "close"])
def test_the_protocol_takes_what_the_client_takes(real, protocol, method):
    assert inspect.signature(getattr(protocol, method)) == inspect.signature(getattr(real, method))


@pytest.mark.parametrize("kind", [FakeRateLimiter, AsyncFakeRateLimiter])
async def test_what_the_real_ones_refuse_the_fakes_refuse(kind):
    limiter, check = kind(), Check("alice", "user", "/x")
    with pytest.raises(ValueError, match="a batch holds up to 1000"):
        await result_of(limiter.check_many([check] * 1_001))
    with pytest.raises(ValueError, match="timeout_s"):
        await result_of(limiter.check("alice", "user", "/x", timeout_s=-1))
    with pytest.raises(ValueError, match="max_wait_s"):
        await result_of(limiter.check("alice", "user", "/x", max_wait_s=-1))
    assert limiter.checks == []
    await result_of(limiter.close())
    with pytest.raises(RuntimeError, match="closed"):
        await result_of(limiter.check("alice", "user", "/x"))


def test_the_clocks_are_those_of_the_machine():
    clock = SystemClock()
    before_s = time.monotonic(), time.time()
    told_s = clock.monotonic_s(), clock.now_s()
    after_s = time.monotonic(), time.time()
    assert before_s[0] <= told_s[0] <= after_s[0]
    assert before_s[1] <= told_s[1] <= after_s[1]
