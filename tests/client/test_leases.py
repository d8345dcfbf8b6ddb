"""Leases: which buckets get one, what is decided by it, and what is given back."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from ratelimitd_client.async_hold import AsyncHold
from ratelimitd_client.decision import Decision, Reason
from ratelimitd_client.fail_open import CallError
from ratelimitd_client.leases import HOT, MAX_BUCKETS, MAX_LEASE_MS, PART, SPARE, Leases
from ratelimiter.v1 import ratelimiter_pb2 as pb

BUCKET = ("u", "user", "/a")
LEASE_S = 0.01


def decision(remaining, *, limit=1_000_000, allowed=True):
    return Decision(allowed, remaining, 1_700_000_060, 0, Reason.WITHIN_LIMIT, limit, 60, "rule")


class Loop:
    """The running loop, with a clock and timers that tests let run."""

    def __init__(self):
        self.create_task = asyncio.get_running_loop().create_task
        self.now_s = 0.0
        self._timers = []

    def time(self):
        return self.now_s

    def call_later(self, delay_s, call, *arguments):
        assert delay_s == LEASE_S
        self._timers.append((call, arguments))

    async def run_timers(self):
        """Let the time of a lease pass."""
        self.now_s += LEASE_S
        timers, self._timers = self._timers, []
        for call, arguments in timers:
            call(*arguments)
        await settled_down()


async def settled_down():
    """Let tasks run that wait for nothing."""
    for _ in range(5):
        await asyncio.sleep(0)


class Node:
    """What leases are held by; settles are kept by their order."""

    def __init__(self, remaining=1_000_000):
        self.remaining = remaining
        self.held = []
        self.settled = []
        self.denies = False

    async def acquire(self, bucket, tokens):
        await asyncio.sleep(0)
        if self.denies:
            return AsyncHold(decision(0, allowed=False))
        self.held.append(tokens)
        self.remaining -= tokens
        hold = f"{bucket}:{len(self.held)}"
        return AsyncHold(decision(self.remaining), cost=tokens, hold=hold, session=self)

    async def call(self, _path, message, _timeout_s):
        settle = pb.SettleRequest.FromString(message)
        self.settled.append(settle.actual)
        return pb.SettleResponse(known=True).SerializeToString()


@asynccontextmanager
async def leases_of(node):
    loop = Loop()
    leases = Leases(node.acquire, lease_s=LEASE_S, loop=loop, now_s=loop.time)
    try:
        yield leases, loop
    finally:
        await leases.close()


async def heat(leases, node, *, checks=HOT, cost=1):
    """Ask so often that the bucket is leased."""
    for _ in range(checks):
        assert leases.take(BUCKET, cost) is None
        leases.record(BUCKET, cost, decision(node.remaining))
    await settled_down()


async def test_a_hot_bucket_is_leased_and_decided_here_until_the_lease_is_used_up():
    node = Node()
    async with leases_of(node) as (leases, _):
        await heat(leases, node)
        assert node.held == [int(HOT * SPARE)]
        answers = [leases.take(BUCKET, 1) for _ in range(node.held[0])]
        assert all(one.allowed for one in answers)
        left = [one.remaining_tokens - node.remaining for one in answers]
        assert left == [*reversed(range(node.held[0]))]
        assert leases.take(BUCKET, 1) is None


async def test_what_is_no_bucket_or_no_cost_is_left_to_those_that_are_sent():
    node = Node()
    async with leases_of(node) as (leases, _):
        await heat(leases, node)
        assert {leases.take(BUCKET, cost) for cost in ("1", None, 1.0, 1.5, True, 0, -5)} == {None}
        assert leases.take(([], "user", "/a"), 1) is None
        assert leases.take(BUCKET, node.held[0]) is not None


async def test_what_was_not_used_is_given_back_when_the_lease_ends():
    node = Node()
    async with leases_of(node) as (leases, loop):
        await heat(leases, node)
        for _ in range(4):
            assert leases.take(BUCKET, 2) is not None
        await loop.run_timers()
        assert leases.take(BUCKET, 1) is None
    assert node.settled == [8]


async def test_a_lease_decides_nothing_after_its_end_although_its_timer_is_late():
    node = Node()
    async with leases_of(node) as (leases, loop):
        await heat(leases, node)
        assert leases.take(BUCKET, 2) is not None
        loop.now_s += LEASE_S  # the process was suspended, or its loop was blocked
        assert leases.take(BUCKET, 1) is None
        await loop.run_timers()
    assert node.settled == [2]


async def test_a_lease_whose_answer_comes_after_the_longest_time_of_one_is_given_back():
    node = Node()
    async with leases_of(node) as (leases, loop):
        for _ in range(HOT):
            leases.record(BUCKET, 1, decision(node.remaining))
        await asyncio.sleep(0)  # it was asked for
        loop.now_s += MAX_LEASE_MS / 1_000
        await settled_down()
        assert leases.take(BUCKET, 1) is None
        assert node.settled == [0]
        await loop.run_timers()
        await heat(leases, node)
        assert leases.take(BUCKET, 1) is not None


async def test_a_lease_that_is_used_up_early_is_followed_by_a_larger_one():
    node = Node()
    async with leases_of(node) as (leases, _):
        await heat(leases, node, checks=HOT, cost=10)
        first = node.held[0]
        while leases.take(BUCKET, 10) is not None:
            pass
        await settled_down()
        assert node.held == [first, int(first * SPARE)]
        assert node.settled == [first - first % 10]
        assert leases.take(BUCKET, 10) is not None
    assert sum(node.settled) <= sum(node.held)


async def test_closing_gives_back_what_is_left():
    node = Node()
    async with leases_of(node) as (leases, _):
        await heat(leases, node)
        assert leases.take(BUCKET, 3) is not None
    assert node.settled == [3]


async def test_a_bucket_with_little_left_is_not_leased():
    node = Node(remaining=HOT * PART - 1)
    async with leases_of(node) as (leases, _):
        await heat(leases, node)
        assert node.held == []


async def test_a_lease_takes_a_part_of_what_is_left_at_most():
    node = Node(remaining=HOT * PART)
    async with leases_of(node) as (leases, _):
        await heat(leases, node, checks=2 * HOT)
        assert node.held == [HOT]


async def test_a_bucket_that_is_seldom_asked_for_or_has_no_limit_is_not_leased():
    node = Node()
    async with leases_of(node) as (leases, loop):
        await heat(leases, node, checks=HOT - 1)
        for _ in range(2 * HOT):
            leases.record(("v", "user", "/a"), 1, decision(node.remaining, limit=0))
        await loop.run_timers()
        await heat(leases, node, checks=HOT - 1)
        assert node.held == []


async def test_a_refused_lease_is_not_asked_for_again_at_once():
    node = Node()
    async with leases_of(node) as (leases, loop):
        node.denies = True
        await heat(leases, node)
        node.denies = False
        await heat(leases, node, checks=2 * HOT)
        assert node.held == []
        await loop.run_timers()
        await heat(leases, node)
        assert len(node.held) == 1


async def test_a_refused_renewal_is_not_asked_for_again_at_once():
    node = Node()
    async with leases_of(node) as (leases, loop):
        await heat(leases, node)
        for _ in range(HOT):
            assert leases.take(BUCKET, 1) is not None
        node.denies = True
        await loop.run_timers()
        node.denies = False
        await heat(leases, node, checks=2 * HOT)
        assert len(node.held) == 1
        await loop.run_timers()
        await heat(leases, node)
        assert len(node.held) == 2


async def test_a_bucket_whose_renewal_was_refused_is_leased_again():
    node = Node()
    async with leases_of(node) as (leases, loop):
        await heat(leases, node)
        for _ in range(HOT):
            assert leases.take(BUCKET, 1) is not None
        await loop.run_timers()  # another lease follows, and no check is counted
        assert len(node.held) == 2
        node.denies = True
        while leases.take(BUCKET, 1) is not None:
            await settled_down()
        await loop.run_timers()
        node.denies = False
        await heat(leases, node)
        assert len(node.held) == 3


async def test_callers_with_ever_new_buckets_take_no_memory():
    node = Node()
    async with leases_of(node) as (leases, _):
        for number in range(2 * MAX_BUCKETS):
            leases.record((str(number), "user", "/a"), 1, decision(node.remaining))
        await heat(leases, node)
        assert len(node.held) == 1


async def test_a_settle_that_no_node_takes_ends_the_lease_all_the_same(monkeypatch):
    node = Node()

    async def refuse(*_):
        raise CallError(grpc.StatusCode.NOT_FOUND)

    async with leases_of(node) as (leases, loop):
        await heat(leases, node)
        monkeypatch.setattr(node, "call", refuse)
        assert leases.take(BUCKET, 1) is not None
        await loop.run_timers()
        assert leases.take(BUCKET, 1) is None


async def test_a_lease_that_comes_while_the_client_closes_is_given_back():
    node = Node()
    async with leases_of(node) as (leases, _):
        for _ in range(HOT):
            leases.record(BUCKET, 1, decision(node.remaining))
    assert node.settled == [0]
