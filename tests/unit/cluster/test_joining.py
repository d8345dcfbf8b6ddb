"""A node's part in a cluster, with a real Valkey: start, joint work and drain."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import SystemClock
from ratelimitd.cluster import node as cluster_module
from ratelimitd.cluster.membership import SharedTime
from ratelimitd.cluster.redis.opening import open_cluster
from ratelimitd.counters import CheckStats
from ratelimitd.errors import RateLimitdError, StartupError
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.retry import Background
from ratelimitd.rules.book import RuleBook
from ratelimitd.settings.table import Settings
from tests.servers import free_port
from tests.unit.cluster.redis.asking import soon

WINDOW_S = 2**31 - 1
"""A window from 1970 to 2038: no test crosses its edge, as it could with an hour."""

RULE = Rule(
    "1",
    "/a",
    IdentifierType.USER,
    limit=1_000,
    window_seconds=WINDOW_S,
    algorithm=Algorithm.FIXED_WINDOW,
    revision=1,
)
KEY = b"a key of a bucket"
SECRET = "s" * 32


class Feed:
    """Counts notifications of new rules."""

    def __init__(self):
        self.book, self.asked = None, 0

    async def notify(self):
        self.asked += 1


class Member:
    """A node's part in a cluster, without the rest of the node."""

    def __init__(self, url, *, secret=SECRET, **settings):
        # Long timeouts, so that a busy machine does not affect the tests.
        flags = {"REDIS_URL": url, "REDIS_TIMEOUT_MS": "1000", **settings}
        self.clock, self.stats, self.feed = SystemClock(), CheckStats(), Feed()
        self.shared_time, self.restarts = SharedTime(), {}
        self.keys = keys = BucketKeys(secret.encode())
        self.cluster = open_cluster(
            Settings.load({}, flags),
            keys=keys,
            fingerprint=keys.fingerprint,
            clock=self.clock,
            shared_time=self.shared_time,
            stats=self.stats,
            feed=self.feed,
        )

    async def check(self, cost=1):
        buckets, now_us = self.cluster.buckets, self.clock.now_us()
        outcome = buckets.apply(KEY, RULE, DECIDE[RULE.algorithm], now_us, cost)
        return outcome or await buckets.wait(KEY, RULE, now_us, cost, peek=False)


@asynccontextmanager
async def running(*members):
    """Start nodes and their jobs; drain them at the end."""
    for member in members:
        await member.cluster.start()
    backgrounds = [Background(member.restarts) for member in members]
    for member, background in zip(members, backgrounds, strict=True):
        member.cluster.start_jobs(background)
    try:
        yield
    finally:
        for member, background in zip(members, backgrounds, strict=True):
            await background.stop()
            await member.cluster.drain(10)
            assert not any(member.restarts.values())


async def test_a_store_that_acknowledges_nothing_is_not_connected(valkey, monkeypatch):
    member = Member(valkey.url)
    async with running(member):
        monkeypatch.setattr(cluster_module, "MAX_SYNC_LAG_S", 0.0)
        assert not member.cluster.shared_state.connected


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_store_that_was_never_reached_is_not_connected(scheme):
    member = Member(f"{scheme}://127.0.0.1:{free_port()}")
    async with running(member):
        assert not member.cluster.shared_state.connected


async def test_nodes_share_buckets_and_count_each_other(valkey):
    one, two = Member(valkey.url), Member(valkey.url)
    async with running(one, two):
        assert (await one.check(600))[:2] == (True, 400)
        assert (await one.check(300))[:2] == (True, 100)  # beyond its share: it asks
        await soon(lambda: one.cluster.unsettled_buckets == 0)
        assert (await two.check())[:2] == (True, 99)
        await soon(lambda: one.cluster.membership.count == two.cluster.membership.count == 2)
        assert one.shared_time.is_known
        assert one.cluster.shared_state == (True, "closed", 0.0)
        assert len(one.cluster.cache) == 1
        buckets = one.cluster.buckets
        assert (buckets.asked_total, buckets.late_total) == (1, 0)
        assert one.cluster.store.corrupt_total == 0


async def test_a_leaving_node_settles_all_it_allowed_and_is_no_longer_counted(valkey):
    one, two = Member(valkey.url), Member(valkey.url)
    async with running(one):
        await two.cluster.start()
        await two.check(7)
        await two.cluster.drain(10)
        await soon(lambda: one.cluster.membership.count == 1)
        assert (await one.check())[:2] == (True, 1_000 - 7 - 1)


async def test_nodes_publish_their_status_until_they_leave(valkey):
    one, two = Member(valkey.url), Member(valkey.url)
    async with running(one):
        async with running(two):
            await soon(lambda: one.cluster.membership.count == two.cluster.membership.count == 2)
            two.cluster.board.publish(b"well")
            await soon(lambda: valkey.ask("KEYS", "rl1:*:status:*"))
            assert list((await one.cluster.board.read()).values()) == [b"well"]
        assert await one.cluster.board.read() == {}


async def test_a_rule_change_on_one_node_notifies_the_others(valkey):
    one, two = Member(valkey.url), Member(valkey.url)
    async with running(one, two):
        await soon(lambda: two.feed.asked > 0)  # at its start it may have missed some
        await one.cluster.notify()
        assert one.feed.asked > 0  # it has no book to publish
        one.feed.book = RuleBook.of([RULE], 7)
        known = two.feed.asked

        async def tell():
            while two.feed.asked == known:
                await one.cluster.notify()
                await asyncio.sleep(0.05)

        await tell()


async def test_a_reset_on_one_node_reaches_the_others(valkey):
    one, two = Member(valkey.url), Member(valkey.url)
    async with running(one, two):
        await one.check(400)
        await soon(lambda: one.cluster.unsettled_buckets == 0)
        assert (await two.check())[1] == 599
        await one.check()
        assert _left(one) in {599, 598}  # in use now: the message makes the node read it again
        await two.cluster.buckets.reset([KEY], [RULE])
        # Unknown is valid, too: a busy machine may have packed it, and the next check asks the store.
        await soon(lambda: _left(one) in {1_000, None})


def _left(member):
    outcome = member.cluster.buckets.peek(KEY, RULE, None, member.clock.now_us(), 1_001)
    return outcome and outcome[1]


async def test_a_node_with_another_secret_does_not_start(valkey):
    one, stranger = Member(valkey.url), Member(valkey.url, secret="x" * 32)
    async with running(one):
        with pytest.raises(StartupError, match="KEY_SECRET"):
            await stranger.cluster.start()
        await stranger.cluster.drain(0)


async def test_without_a_server_a_node_starts_reports_it_and_loses_its_spends(caplog):
    url = f"redis://127.0.0.1:{free_port()}"
    member = Member(url, ON_BREAKER_OPEN="local", BREAKER_FAILURES="1")
    with caplog.at_level(logging.WARNING):
        await member.cluster.start()
        assert not member.cluster.shared_state.connected
        await member.check()  # it opens the breaker
        connected, breaker_state, retry_s = member.cluster.shared_state
        assert (connected, breaker_state) == (False, "open")
        assert 0 < retry_s < 31
        assert (await member.check())[0]
        assert member.cluster.unsettled_buckets == 1
        await member.cluster.drain(0)
    assert "not all spends reached the shared state" in caplog.text
    assert "shared state" in caplog.text


async def test_a_strict_node_lets_the_store_decide_everything(valkey):
    one = Member(valkey.url, CONSISTENCY="strict")
    async with running(one):
        assert [(await one.check(600))[0] for _ in range(2)] == [True, False]
        assert one.cluster.buckets.asked_total == 2
        assert len(one.cluster.cache) == 0


async def test_the_shared_state_decides_the_last_of_a_thousand_concurrent_strict_checks(valkey):
    """The server needs far longer than the timeout of one check; the timeout grows with the checks ahead."""
    member = Member(valkey.url, CONSISTENCY="strict", REDIS_TIMEOUT_MS="2", BREAKER_FAILURES="1000")
    async with running(member):

        async def burst():
            outcomes = await asyncio.gather(*(member.check(cost=0) for _ in range(1_000)))
            return sum(isinstance(outcome, RateLimitdError) for outcome in outcomes)

        # A busy machine may fail some rounds; without the longer timeout every round would fail.
        while await burst():
            pass
