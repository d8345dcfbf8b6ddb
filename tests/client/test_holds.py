"""Holds of both clients, against a real node and against what is none; leases against a real node."""

import asyncio
import signal
import sys
import threading
import time
import traceback
from contextlib import asynccontextmanager
from typing import get_args

import grpc
import pytest

from ratelimitd import testing
from ratelimitd_client import (
    AsyncHold,
    AsyncRateLimiterClient,
    Hold,
    NodeClient,
    RateLimiterClient,
    Reason,
    async_hold,
    async_sessions,
    sessions,
)
from ratelimitd_client.async_sessions import Transport
from ratelimitd_client.fail_open import MAX_HOLD_ANSWER_BYTES, CallError
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.client.conftest import NOON_US, node_in_a_thread
from tests.client.hostile import bytes_server, never_answering
from tests.client.kinds import PATIENT_S
from tests.fake_node import fake_node
from tests.servers import free_port, until

WHO = ("user", "/five")
MINUTE = {"window_seconds": 60, "algorithm": "token_bucket"}


@pytest.fixture
def client(real_node):
    with RateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        yield client


@pytest.fixture(params=get_args(Transport))
async def async_client(request, real_node):
    options = {"timeout_s": PATIENT_S, "transport": request.param}
    async with AsyncRateLimiterClient(real_node.grpc_address, **options) as client:
        client.name = f"holds {request.param}"
        yield client


def left_of(decision):
    return decision.remaining_tokens + decision.allowed  # a peek answers as if it spent one


def test_a_hold_is_settled_on_leaving(client):
    with client.hold("held", *WHO, cost=4) as hold:
        assert hold.allowed
        assert hold.is_held
        assert left_of(client.check("held", *WHO, peek=True)) == 1
        hold.actual = 1
    assert left_of(client.check("held", *WHO, peek=True)) == 4
    with client.hold("held", *WHO, cost=2):
        pass
    assert left_of(client.check("held", *WHO, peek=True)) == 2


async def test_a_hold_of_asyncio_is_settled_on_leaving(async_client):
    name = async_client.name
    async with await async_client.hold(name, *WHO, cost=4) as hold:
        hold.actual = 1
    assert left_of(await async_client.check(name, *WHO, peek=True)) == 4
    denied = await async_client.hold(name, *WHO, cost=5)
    assert (denied.allowed, denied.decision.reason) == (False, Reason.LIMIT_EXCEEDED)
    assert not await denied.settle(1)
    assert not await denied.extend()


async def test_a_block_that_is_cancelled_is_settled(async_client, real_node):
    name = f"{async_client.name} cancelled"
    entered = asyncio.Event()

    async def block():
        async with await async_client.hold(name, *WHO, cost=4) as hold:
            hold.actual = 1
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(block())
    await entered.wait()
    while not task.done():  # as anyio cancels, and so Starlette
        task.cancel()
        await asyncio.sleep(0)
    await async_client.close()  # which waits for the settle
    async with AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as other:
        assert left_of(await other.check(name, *WHO, peek=True)) == 4


GIVEN_BACK = pytest.mark.parametrize(
    ("hold_id", "methods"), [("", ["Hold", "Settle"]), ("kept for a repetition", ["Hold"])]
)


@GIVEN_BACK
@pytest.mark.parametrize("transport", get_args(Transport))
async def test_a_hold_that_is_cancelled_is_given_back_unless_it_has_an_id(
    transport, hold_id, methods, monkeypatch
):
    monkeypatch.setattr(async_hold, "ATTEMPT_S", async_hold.DEFAULT_SETTLE_S)
    options = {"timeout_s": PATIENT_S, "transport": transport}
    with fake_node() as node:
        async with AsyncRateLimiterClient(node.address, **options) as client:
            assert await client.wait_until_ready(PATIENT_S)
            node.answering.clear()
            holding = asyncio.ensure_future(client.hold("u", *WHO, hold_id=hold_id))
            while not node.seen:  # noqa: ASYNC110 - it is told by another thread
                await asyncio.sleep(0.001)
            holding.cancel()
            node.answering.set()
        # Closed at once, before the call has begun to give back.
        assert holding.cancelled()
        assert node.methods() == methods
        assert node.seen[-1].request == pb.SettleRequest(hold="hold-0") or hold_id


@GIVEN_BACK
@pytest.mark.parametrize("transport", get_args(Transport))
async def test_a_hold_that_is_answered_late_is_given_back_unless_it_has_an_id(
    transport, hold_id, methods, monkeypatch
):
    monkeypatch.setattr(async_hold, "ATTEMPT_S", async_hold.DEFAULT_SETTLE_S)
    monkeypatch.setattr(async_sessions, "LATE_S", PATIENT_S)
    with fake_node() as node:
        async with AsyncRateLimiterClient(node.address, transport=transport) as client:
            assert await client.wait_until_ready(PATIENT_S)
            node.answering.clear()
            hold = await client.hold("u", *WHO, hold_id=hold_id, timeout_s=0.1)
            node.answering.set()
            assert hold.allowed
            assert hold.decision.error == "DEADLINE_EXCEEDED"
        # Closed at once, before the answer has come.
        assert node.methods() == methods
        assert node.seen[-1].request == pb.SettleRequest(hold="hold-0") or hold_id
        for _ in range(4):
            client._fail_open.breaker.failed()
        assert not client._fail_open.breaker.allows()  # the answer counted as none


@pytest.mark.parametrize("transport", get_args(Transport))
async def test_a_lease_that_is_answered_late_is_given_back(transport, monkeypatch):
    monkeypatch.setattr(async_hold, "ATTEMPT_S", async_hold.DEFAULT_SETTLE_S)
    monkeypatch.setattr(async_sessions, "LATE_S", PATIENT_S)
    late = threading.Event()
    with fake_node() as node:
        node.answer = pb.RateLimitResponse(
            allowed=True, reason=pb.WITHIN_LIMIT, limit=10_000, remaining_tokens=9_000
        )
        node.on_call = lambda request, _: (
            isinstance(request, pb.HoldRequest) and late.wait(PATIENT_S)
        )
        options = {"timeout_s": 0.1, "lease_ms": 1_000, "transport": transport}
        async with AsyncRateLimiterClient(node.address, **options) as client:
            while "Hold" not in node.methods():
                assert (await client.check("u", *WHO, timeout_s=PATIENT_S)).allowed
            # Its deadline is as long as the lease's, and ends later.
            other = await client.hold("v", *WHO, hold_id="kept for a repetition")
            assert other.decision.error == "DEADLINE_EXCEEDED"
            late.set()
        assert client.counts.leased == 0
        [settled] = [call.request for call in node.seen if call.method == "Settle"]
        assert settled.actual == 0


def test_a_hold_of_the_blocking_client_that_is_answered_late_is_given_back(monkeypatch):
    monkeypatch.setattr(sessions, "LATE_S", PATIENT_S)
    with fake_node() as node, RateLimiterClient(node.address) as client:
        assert client.wait_until_ready(PATIENT_S)
        node.answering.clear()
        hold = client.hold("u", *WHO, timeout_s=0.1)
        assert (hold.allowed, hold.decision.error) == (True, "DEADLINE_EXCEEDED")
        node.answering.set()
        while len(node.seen) < 2:
            time.sleep(0.001)
        assert node.seen[-1].request == pb.SettleRequest(hold="hold-0")


def test_a_hold_of_the_blocking_client_that_is_interrupted_is_given_back(monkeypatch):
    """As by Ctrl-C, by ``gevent.Timeout``, or where a greenlet is killed."""
    caller = threading.get_ident()

    def waits():
        stack = traceback.walk_stack(sys._current_frames()[caller])
        return any(frame.f_code.co_name == "result" for frame, _ in stack)

    def interrupt(*_):
        until(waits, "the caller waits for the answer")
        signal.pthread_kill(caller, signal.SIGINT)

    monkeypatch.setattr(sessions, "LATE_S", PATIENT_S)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with fake_node() as node, RateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
            node.answering.clear()
            node.on_call = interrupt
            with pytest.raises(KeyboardInterrupt):
                client.hold("u", *WHO)
            node.on_call = None
            node.answering.set()
            until(lambda: len(node.seen) == 2, "the hold is given back")
            assert node.seen[-1].request == pb.SettleRequest(hold="hold-0")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("transport", get_args(Transport))
async def test_closing_waits_for_a_hold_and_for_a_settle(transport, monkeypatch):
    monkeypatch.setattr(async_hold, "ATTEMPT_S", PATIENT_S)
    with fake_node() as node:
        client = AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S, transport=transport)
        assert await client.wait_until_ready(PATIENT_S)
        hold = await client.hold("u", *WHO)
        node.answering.clear()
        holding = asyncio.ensure_future(client.hold("u", *WHO))
        settling = asyncio.ensure_future(hold.settle(1, timeout_s=PATIENT_S))
        while len(node.seen) < 3:  # noqa: ASYNC110 - it is told by another thread
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        node.answering.set()
        await closing
        assert (await holding).decision.reason is Reason.WITHIN_LIMIT
        assert await settling


@pytest.mark.parametrize("transport", get_args(Transport))
async def test_a_hold_whose_call_is_cancelled_is_let_through(transport):
    with bytes_server(never_answering([])) as address:
        options = {"timeout_s": PATIENT_S, "transport": transport}
        async with AsyncRateLimiterClient(address, **options) as client:
            holding = asyncio.ensure_future(client.hold("u", *WHO))
            await asyncio.sleep(0)
            [call] = client._opened()._under_way
            call.cancel()
            decision = (await holding).decision
            assert (decision.reason, decision.error) == (Reason.NO_ANSWER, "CANCELLED")


async def test_no_settle_is_tried_again_once_the_client_is_closed(monkeypatch):
    with fake_node() as node:
        client = RateLimiterClient(node.address, timeout_s=PATIENT_S)
        hold = client.hold("u", *WHO)
        client.close()
        async_client = AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S)
        other = await async_client.hold("u", *WHO)
        await async_client.close()
        for module in ("hold", "async_hold"):  # no pause before another try can be computed
            monkeypatch.setattr(f"ratelimitd_client.{module}.FIRST_PAUSE_S", None)
        assert not hold.settle(1)
        assert not await other.settle(1)
        assert node.methods() == ["Hold"] * 2


@pytest.mark.parametrize("transport", get_args(Transport))
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_hold_of_another_event_loop_is_neither_settled_nor_extended(
    real_node, transport, is_closed
):
    options = {"timeout_s": PATIENT_S, "transport": transport}
    client = AsyncRateLimiterClient(real_node.grpc_address, **options)

    async def use(hold):
        async with asyncio.timeout(PATIENT_S), hold:
            return await hold.extend(), await hold.settle(1)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        hold = first.run(client.hold(f"loops {transport} {is_closed}", *WHO))
        assert hold.is_held
        if is_closed:
            first.close()
        assert second.run(use(hold)) == (False, False)
        if not is_closed:
            assert first.run(hold.settle(1))
            first.run(client.close())


async def test_a_settle_is_done_once_and_an_extension_is_told(async_client):
    name = f"{async_client.name} once"
    hold = await async_client.hold(name, *WHO, cost=3, ttl_s=5)
    ends = hold.expire_time
    assert await hold.extend(100)
    for wrong, error in ((0, ValueError), (3_601, ValueError), ("60", TypeError)):
        with pytest.raises(error, match="ttl_s"):
            await hold.extend(wrong)
    assert hold.expire_time == ends + 95
    assert await hold.settle(2)
    assert await hold.settle(2)
    assert not await hold.settle(3)
    assert not await hold.extend()
    assert left_of(await async_client.check(name, *WHO, peek=True)) == 3


async def test_the_same_id_is_the_same_hold(async_client):
    name = f"{async_client.name} same"
    hold_id = name.ljust(64, "~")
    holds = [await async_client.hold(name, *WHO, cost=3, hold_id=hold_id) for _ in range(3)]
    assert [hold.allowed for hold in holds] == [True] * 3
    assert await holds[2].settle(0)
    assert left_of(await async_client.check(name, *WHO, peek=True)) == 5


async def test_more_than_the_limit_is_refused_and_not_let_through(async_client):
    hold = await async_client.hold("much", *WHO, cost=6)
    assert (hold.allowed, hold.decision.reason) == (False, Reason.INVALID_REQUEST)
    assert "check.tokens_requested" in hold.decision.error


@pytest.mark.parametrize("of_node", ["native", "grpcio"])
async def test_a_caller_with_as_many_holds_as_may_be_is_denied_and_costs_nobody_else(of_node):
    settings = {"max_holds_per_bucket": 1, "transport": of_node}
    with node_in_a_thread(clock=testing.ManualClock(NOON_US), **settings) as node:
        with NodeClient(node.grpc_address, timeout_s=PATIENT_S) as admin:
            admin.create_rule(
                pb.RateLimit(endpoint="/five", identifier_type="user", limit=5, **MINUTE)
            )
        with RateLimiterClient(node.grpc_address, timeout_s=PATIENT_S) as client:
            assert client.check("poor", *WHO, cost=5).allowed
            assert client.hold("greedy", *WHO).is_held
            denied = [client.hold("greedy", *WHO) for _ in range(6)]
            assert not client.check("poor", *WHO).allowed
            assert (client.counts.denied, client.counts.unanswered) == (7, 0)
        for transport in get_args(Transport):
            options = {"timeout_s": PATIENT_S, "transport": transport}
            async with AsyncRateLimiterClient(node.grpc_address, **options) as other:
                denied += [await other.hold("greedy", *WHO) for _ in range(6)]
                assert not (await other.check("poor", *WHO)).allowed
    assert {hold.allowed for hold in denied} == {False}
    assert {hold.decision.error for hold in denied} == {"TOO_MANY_HOLDS"}


async def test_without_a_rule_nothing_is_held(async_client):
    hold = await async_client.hold("free", "user", "/nothing")
    assert hold.allowed
    assert not hold.is_held
    assert not await hold.settle(3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"ttl_s": 0}, ValueError),
        ({"ttl_s": 3_601}, ValueError),
        ({"ttl_s": 1.5}, TypeError),
        ({"hold_id": "x" * 65}, ValueError),
        ({"hold_id": "\n"}, ValueError),
        ({"hold_id": 5}, TypeError),
        ({"cost": 0}, ValueError),
    ],
    ids=map(str, range(7)),
)
async def test_what_no_node_would_take_is_an_error_and_not_sent(arguments, error):
    with fake_node() as node, RateLimiterClient(node.address) as client:
        with pytest.raises(error):
            client.hold("u", *WHO, **arguments)
        async with AsyncRateLimiterClient(node.address) as other:
            with pytest.raises(error):
                await other.hold("u", *WHO, **arguments)
        assert not node.seen


async def test_a_service_that_is_away_lets_holds_through_and_opens_the_breaker():
    async with AsyncRateLimiterClient(f"127.0.0.1:{free_port()}") as client:
        holds = [await client.hold("u", *WHO) for _ in range(7)]
        assert {hold.allowed for hold in holds} == {True}
        assert [hold.decision.reason for hold in holds[:5]] == [Reason.NO_ANSWER] * 5
        assert holds[6].decision.reason is Reason.NOT_ASKED
        async with holds[6] as hold:
            hold.actual = 5
    with RateLimiterClient(f"127.0.0.1:{free_port()}") as client:
        assert client.hold("u", *WHO).decision.reason is Reason.NO_ANSWER


async def test_an_answer_that_means_nothing_lets_the_request_through(real_node):
    with fake_node() as node:
        node.answer = pb.RateLimitResponse()
        async with AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
            hold = await client.hold("u", *WHO)
            assert hold.allowed
            assert not hold.is_held


@pytest.mark.parametrize(
    ("transport", "error"), [("native", "RESOURCE_EXHAUSTED"), ("grpcio", "GARBLED")]
)
async def test_an_answer_that_is_too_long_lets_the_request_through(transport, error):
    answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT)
    long = pb.HoldResponse(answer=answer, hold="x" * MAX_HOLD_ANSWER_BYTES).SerializeToString()
    with bytes_server(lambda _request, _context: long) as address:
        options = {"timeout_s": PATIENT_S, "transport": transport}
        async with AsyncRateLimiterClient(address, **options) as client:
            hold = await client.hold("u", *WHO)
            assert (hold.allowed, hold.is_held) == (True, False)
            assert (hold.decision.reason, hold.decision.error) == (Reason.NO_ANSWER, error)


class Failing:
    """What settles fail at, a few times."""

    def __init__(self, *codes):
        self.codes, self.calls = list(codes), 0

    async def call(self, *_):
        self.calls += 1
        if self.codes:
            raise CallError(self.codes.pop(0))
        return pb.SettleResponse(known=True).SerializeToString()


async def test_a_settle_is_tried_again_unless_another_try_would_end_alike(real_node):
    decision = (await AsyncFakeRateLimiter().hold("u", *WHO)).decision
    for codes, done, calls, timeout_s in (
        ([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED], True, 3, 5),
        ([grpc.StatusCode.FAILED_PRECONDITION], False, 1, 5),
        ([grpc.StatusCode.UNAVAILABLE] * 99, False, None, 0.2),  # until its time is over
    ):
        session = Failing(*codes)
        hold = AsyncHold(decision, hold="text", session=session)
        assert await hold.settle(1, timeout_s=timeout_s) is done
        assert calls is None or session.calls == calls


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0, -1, "1"])
async def test_a_settle_and_an_extension_need_a_deadline(timeout_s):
    error = TypeError if timeout_s == "1" else ValueError
    hold, blocking = await AsyncFakeRateLimiter().hold("u", *WHO), FakeRateLimiter().hold("u", *WHO)
    for method, argument in (("settle", 1), ("extend", 60)):
        with pytest.raises(error, match="timeout_s must be"):
            await getattr(hold, method)(argument, timeout_s=timeout_s)
        with pytest.raises(error, match="timeout_s must be"):
            getattr(blocking, method)(argument, timeout_s=timeout_s)


class Garbled:
    """What answers with what is no message."""

    def call(self, *_):
        return b"\xff"


class AsyncGarbled:
    """As :class:`Garbled`."""

    async def call(self, *_):
        return b"\xff"

    def keep(self, _):
        pass


async def test_an_answer_that_means_nothing_is_no_error_of_the_application():
    decision = FakeRateLimiter().hold("u", *WHO).decision
    with Hold(decision, hold="text", expire_time=9, session=Garbled()) as hold:
        assert not hold.extend()
    async with AsyncHold(decision, hold="text", expire_time=9, session=AsyncGarbled()) as other:
        assert not await other.extend()
    assert (hold.expire_time, other.expire_time) == (9, 9)
    with pytest.raises(KeyError):  # its own
        async with AsyncHold(decision, hold="text", session=AsyncGarbled()):
            raise KeyError


@pytest.mark.parametrize(
    ("actual", "error"), [(12.0, TypeError), ("3", TypeError), (-1, ValueError)]
)
async def test_a_cost_that_is_not_valid_is_refused_when_it_is_set(actual, error):
    sync, other = FakeRateLimiter(), AsyncFakeRateLimiter()
    for fake in (sync, other):
        fake.limit("/five", "user", 5)
    with pytest.raises(error, match="actual must be"), sync.hold("u", *WHO, cost=4) as hold:
        hold.actual = actual
    with pytest.raises(error, match="actual must be"):
        async with await other.hold("u", *WHO, cost=4) as hold_of_asyncio:
            hold_of_asyncio.actual = actual
    assert (hold.actual, hold_of_asyncio.actual) == (None, None)
    assert left_of(sync.check("u", *WHO, peek=True)) == 1
    assert left_of(await other.check("u", *WHO, peek=True)) == 1


async def test_the_fakes_settle_as_nodes_do():
    sync, other = FakeRateLimiter(), AsyncFakeRateLimiter()
    for fake in (sync, other):
        fake.limit("/five", "user", 5)
    with sync.hold("u", *WHO, cost=4) as hold:
        hold.actual = 1
    assert left_of(sync.check("u", *WHO, peek=True)) == 4
    hold = await other.hold("u", *WHO, cost=4)
    assert await hold.extend(30)
    assert await hold.settle(0)
    assert not await hold.settle(1)
    assert not await hold.extend(30)
    assert left_of(await other.check("u", *WHO, peek=True)) == 5
    assert not await (await other.hold("u", "user", "/free")).settle(1)


@asynccontextmanager
async def leasing(limit, clients):
    """So many clients with leases, and a node with a limit of a minute on its own clock, which stands still."""
    async with testing.running_node(clock=testing.ManualClock(NOON_US), log_level="error") as node:
        rule = pb.RateLimit(
            endpoint="/hot", identifier_type="user", limit=limit, window_seconds=60,
            algorithm="token_bucket",
        )  # fmt: skip
        create = NodeClient(node.grpc_address, timeout_s=PATIENT_S)
        await asyncio.to_thread(create.create_rule, rule)
        create.close()
        options = {"timeout_s": PATIENT_S, "lease_ms": 200}
        made = [AsyncRateLimiterClient(node.grpc_address, **options) for _ in range(clients)]
        try:
            yield node, made
        finally:
            for client in made:
                await client.close()


async def test_eight_clients_with_leases_use_the_whole_limit_and_no_more():
    limit = 20_000
    async with leasing(limit, 8) as (node, clients):

        async def spend(client):
            allowed = denied = 0
            while denied < 50:
                decision = await client.check("u", "user", "/hot")
                assert not decision.fail_open
                allowed += decision.allowed
                denied += not decision.allowed
            return allowed

        total = sum(await asyncio.gather(*map(spend, clients)))
        asked = node.stats.allowed_total + node.stats.blocked_total
        assert 0.97 * limit <= total <= limit
        assert asked < 0.8 * total
        assert node.stats.holds["made"] > 8


async def test_a_client_that_closes_gives_back_what_its_leases_hold():
    async with leasing(100_000, 1) as (node, [client]):
        checks = 0
        while not node.stats.holds["made"] or checks < 100:
            assert (await client.check("u", "user", "/hot")).allowed
            checks += 1
        await client.close()
        async with AsyncRateLimiterClient(node.grpc_address, timeout_s=PATIENT_S) as other:
            left = left_of(await other.check("u", "user", "/hot", peek=True))
        assert left == 100_000 - checks


async def test_a_reset_is_felt_when_the_lease_ends():
    async with leasing(100_000, 1) as (node, [client]):
        while not node.stats.holds["made"]:
            await client.check("u", "user", "/hot")
        async with AsyncRateLimiterClient(node.grpc_address, timeout_s=PATIENT_S) as other:
            await other.admin.reset("u", "user", "/hot")
            await client.close()
            left = left_of(await other.check("u", "user", "/hot", peek=True))
    # What the lease held is gone with the bucket; what was asked for since the reset is charged.
    assert 100_000 - 200 <= left <= 100_000
