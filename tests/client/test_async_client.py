"""What only the client for asyncio does, over both of its transports; the rest is in test_clients.py."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from ratelimitd_client import AsyncRateLimiterClient, Check, Decision, Reason
from ratelimitd_client.async_sessions import AsyncSessions
from ratelimitd_client.leases import Leases
from ratelimitd_client.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.client.h2_node import h2_node
from tests.client.hostile import bytes_server, never_answering
from tests.client.kinds import PATIENT_S
from tests.fake_node import fake_node
from tests.servers import free_port

pytestmark = pytest.mark.usefixtures("transport")


@pytest.fixture
async def client(real_node):
    async with AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        yield client


async def test_a_check_that_is_let_through_never_waits(monkeypatch):
    monkeypatch.setattr(AsyncSessions, "_sleep", None)
    async with AsyncRateLimiterClient(f"127.0.0.1:{free_port()}") as client:
        for _ in range(10):  # until the breaker opens, and after it
            decision = await client.check("alice", "user", "/x", max_wait_s=60)
            assert (decision.fail_open, decision.wait_ms) == (True, 0)


async def test_checks_that_are_asked_together_are_decided_in_their_order(client, transport):
    decisions = await asyncio.gather(
        *(client.check(f"together {transport}", "user", "/five", cost=cost) for cost in (3, 3, 2))
    )
    assert [decision.allowed for decision in decisions] == [True, False, True]


async def test_checks_that_are_asked_together_travel_in_one_call():
    with fake_node() as node:
        node.limit = 1_000
        async with AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
            await asyncio.gather(*(client.check("alice", "user", "/x") for _ in range(50)))
            await client.check("alice", "user", "/x")
        assert node.methods() == ["BatchRateLimit", "RateLimit"]


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("transport", "carrier pigeon", ValueError),
        ("linger_us", -1, ValueError),
        ("linger_us", 1_000_001, ValueError),
        ("linger_us", "1", TypeError),
        ("lease_ms", -1, ValueError),
        ("lease_ms", 1_001, ValueError),
        ("lease_ms", "1", TypeError),
    ],
)
def test_its_own_arguments_are_validated(argument, value, error):
    with pytest.raises(error, match=f"{argument} must be"):
        AsyncRateLimiterClient(**{argument: value})


async def test_the_arguments_of_a_leased_check_are_validated_too(monkeypatch):
    leased = Decision(True, 1, 0, 0, Reason.WITHIN_LIMIT)
    monkeypatch.setattr(Leases, "take", lambda *_: leased)
    async with AsyncRateLimiterClient(lease_ms=500) as client:
        assert await client.check("alice", "user", "/x", timeout_s=1) is leased
        with pytest.raises(ValueError, match="timeout_s must be"):
            await client.check("alice", "user", "/x", timeout_s=-1)
        for argument, value in (("timestamp", None), ("timestamp", 0.0), ("peek", None)):
            with pytest.raises(TypeError, match=f"{argument} must be"):
                await client.check("alice", "user", "/x", **{argument: value})


async def test_an_error_inside_the_library_lets_through_too(real_node, monkeypatch, transport):
    async with AsyncRateLimiterClient(real_node.grpc_address) as client:

        def breaks(*_args, **_kwargs):
            raise OSError

        session = client._opened()
        monkeypatch.setitem(session._methods, "/ratelimiter.v1.RateLimiter/CheckRateLimit", breaks)
        if transport == "native":
            monkeypatch.setattr(session.channel, "begin", breaks)
        assert (await client.check("alice", "user", "/five")).error == "OSError"
        assert (await client.check_many([Check("alice", "user", "/five")]))[0].error == "OSError"


@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)  # the other makes no tasks
async def test_a_call_whose_task_is_cancelled_lets_through_and_holds_up_no_close():
    with bytes_server(never_answering([])) as address:
        client = AsyncRateLimiterClient(address, timeout_s=PATIENT_S)
        check = asyncio.ensure_future(client.check("alice", "user", "/x"))
        session = client._opened()
        for _ in range(2):
            await asyncio.sleep(0)
        [asking] = session._under_way
        asking.cancel()
        await asyncio.wait([asking])
        assert session.batcher._in_flight == 0
        assert (await check).error == "CancelledError"
        await client.close()


async def test_closing_waits_for_the_checks_that_are_under_way():
    with fake_node() as node:
        client = AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S)
        check = asyncio.ensure_future(client.check("alice", "user", "/x"))
        await asyncio.sleep(0)
        await client.close()
        assert not (await check).fail_open
    with pytest.raises(RuntimeError, match="closed"):
        await client.check("alice", "user", "/x")
    await client.close()


async def test_closing_waits_for_many_checks_in_one_call_too():
    with fake_node() as node:
        client = AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S)
        assert await client.wait_until_ready(PATIENT_S)
        node.answering.clear()
        checks = asyncio.ensure_future(client.check_many([Check("alice", "user", "/x")] * 2))
        while not node.seen:  # noqa: ASYNC110 - it is told by another thread
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        node.answering.set()
        await closing
        assert [decision.reason for decision in await checks] == [Reason.WITHIN_LIMIT] * 2


async def test_a_close_that_is_given_up_can_be_made_again(transport):
    with bytes_server(never_answering([])) as address:
        client = AsyncRateLimiterClient(address, timeout_s=0.1)
        assert await client.wait_until_ready(PATIENT_S)
        check = asyncio.ensure_future(client.check("alice", "user", "/x"))
        await asyncio.sleep(0)
        session = client._opened()
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await client.close()
        assert (await check).fail_open
        if transport == "native":
            assert not session.channel._links
            assert session.channel._keeper.done()


async def test_a_close_that_is_given_up_costs_nobody_their_answer():
    with bytes_server(never_answering([])) as address:
        client = AsyncRateLimiterClient(address, timeout_s=0.1)
        assert await client.wait_until_ready(PATIENT_S)
        checks = asyncio.ensure_future(client.check_many([Check("alice", "user", "/x")] * 2))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert all(decision.fail_open for decision in await checks)
        await client.close()


class FailingClock:
    """Raises once, and tells the time from then on."""

    def __init__(self):
        self.has_failed = False

    def now_s(self):
        if not self.has_failed:
            self.has_failed = True
            raise OSError
        return 0.0

    def monotonic_s(self):
        return 0.0


async def test_whatever_fails_at_an_answer_those_who_wait_are_let_through(real_node):
    clock = FailingClock()
    async with AsyncRateLimiterClient(
        real_node.grpc_address, timeout_s=PATIENT_S, clock=clock
    ) as client:
        first, second = (
            await client.check("alice", "user", "/x"),
            await client.check("bob", "user", "/x"),
        )
        assert (first.reason, first.error) == (Reason.NO_ANSWER, "OSError")
        assert not second.fail_open


async def test_whoever_waits_for_a_service_hears_when_the_client_is_closed():
    client = AsyncRateLimiterClient(f"127.0.0.1:{free_port()}")
    waiting = asyncio.ensure_future(client.wait_until_ready(PATIENT_S))
    await asyncio.sleep(0)
    await client.close()
    assert await waiting is False


async def test_many_checks_that_are_given_up_are_given_up_by_grpc_as_well():
    with fake_node() as node:
        node.answering.clear()
        async with AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
            checks = asyncio.ensure_future(client.check_many([Check("alice", "user", "/x")] * 2))
            await asyncio.sleep(0)
            [call] = client._opened()._under_way
            checks.cancel()
            with pytest.raises(asyncio.CancelledError):
                await checks
            assert call.cancelled()
            node.answering.set()


async def test_the_node_is_told_of_many_checks_that_are_given_up():
    async with (
        h2_node(lambda _peer, _stream: None) as node,
        AsyncRateLimiterClient(node.address, timeout_s=PATIENT_S) as client,
    ):
        checks = asyncio.ensure_future(client.check_many([Check("alice", "user", "/x")]))
        await node.until(lambda: node.peers and node.peers[0].headers)
        checks.cancel()
        await node.until(lambda: node.peers[0].resets)


async def test_a_lease_that_a_node_refuses_with_an_error_is_none(transport):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    with fake_node() as node:
        node.answer = pb.RateLimitResponse(
            allowed=True, reason=pb.WITHIN_LIMIT, limit=10_000, remaining_tokens=9_000
        )

        def refuse(request, context):
            if isinstance(request, pb.HoldRequest):
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no holds")

        node.on_call = refuse
        options = {"timeout_s": PATIENT_S, "lease_ms": 1_000, "transport": transport}
        async with AsyncRateLimiterClient(node.address, **options) as client:
            while "Hold" not in node.methods():
                assert (await client.check("alice", "user", "/x")).allowed
        assert client.counts.leased == 0
    gc.collect()
    assert problems == []


def test_a_client_serves_one_event_loop_after_another(real_node, transport):
    client = AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S)

    async def ask():
        return await client.check(f"loops {transport}", "user", "/five")

    assert [asyncio.run(ask()).remaining_tokens for _ in range(2)] == [4, 3]
    asyncio.run(client.close())


def test_each_of_many_loops_has_a_channel_that_goes_with_it(real_node):
    client = AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S)
    for _ in range(3):
        assert not asyncio.run(client.check("many-loops", "user", "/five")).fail_open
        assert len(client._sessions) == 1


def test_loops_that_run_at_once_keep_their_channels_and_share_what_they_learn(real_node, transport):
    client = AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S)
    both_asked = threading.Barrier(2)

    async def ask():
        decisions = [await client.check(f"at-once {transport}", "user", "/five") for _ in range(2)]
        channel = client._opened().channel
        await asyncio.to_thread(both_asked.wait)
        decisions.append(await client.check(f"at-once {transport}", "user", "/five"))
        assert client._opened().channel is channel
        fail_open = client._opened().fail_open
        await asyncio.to_thread(both_asked.wait)
        await client.close()
        return decisions, fail_open

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(asyncio.run, ask()) for _ in range(2)]
        (first, one), (second, other) = (future.result() for future in futures)
    assert sorted(decision.remaining_tokens for decision in first + second if decision.allowed) == [
        *range(5)
    ]
    assert one is other


async def test_every_other_call_takes_and_returns_messages():
    with fake_node() as node:
        node.page_size = 1
        async with AsyncRateLimiterClient(node.address) as client:
            admin = client.admin
            rule = await admin.create_rule(pb.RateLimit(endpoint="/x", limit=1), timeout_s=30)
            await admin.create_rule(pb.RateLimit(endpoint="/y", limit=1), timeout_s=30)
            changed = await admin.update_rule(
                pb.RateLimit(id=rule.id, limit=2), ["limit"], timeout_s=30
            )
            assert changed.limit == 2
            await admin.update_rule(changed, timeout_s=30)
            assert [rule.endpoint async for rule in admin.rules(timeout_s=30)] == ["/x", "/y"]
            assert (await admin.metrics(["m"], timeout_s=30)) == node.metrics_answer
            await admin.delete_rule(rule.id, etag="", timeout_s=30)
            assert [rule.endpoint for rule in node.rules.values()] == ["/y"]


async def test_in_a_process_forked_from_one_that_used_it_nothing_of_grpc_is_touched(real_node):
    async with AsyncRateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        await client.check("forked", "user", "/five")
        client._process = -1  # this process has another number than the one that used it
        decisions = await client.check_many([Check("forked", "user", "/five")] * 2)
        decisions.append(await client.check("forked", "user", "/five"))
        assert [decision.error for decision in decisions] == ["ForkedError"] * 3
        with pytest.raises(RuntimeError, match="before this process was forked"):
            await client.wait_until_ready()
        client._process = os.getpid()


async def test_an_open_breaker_holds_for_batches_too():
    async with AsyncRateLimiterClient(clock=ManualClock()) as client:
        for _ in range(5):
            client._opened().fail_open.breaker.failed()
        [decision] = await client.check_many([Check("alice", "user", "/x")])
        assert decision.reason is Reason.NOT_ASKED


FORKS = """
import asyncio, logging, os, sys
from ratelimitd_client import AsyncRateLimiterClient, Check
client = AsyncRateLimiterClient(sys.argv[1], timeout_s=30, transport=sys.argv[3])

async def ask():
    return (await client.check("alice", "user", "/x")), (await client.check_many([Check("a", "user", "/x")]))[0]

async def hold():
    return await client.hold("alice", "user", "/five")

async def settle(held):
    async with held:
        return await held.settle(1)

async def admin():
    return client.admin

used = sys.argv[2] == "used"
if used:
    assert not any(decision.fail_open for decision in asyncio.run(ask()))
    held = asyncio.run(hold())
    assert held.is_held
child = os.fork()
decisions = asyncio.run(ask())
if child == 0:
    assert [decision.fail_open for decision in decisions] == [used, used], decisions
    if used:
        assert not asyncio.run(settle(held))
        try:
            asyncio.run(admin())
        except RuntimeError as error:
            assert "forked" in str(error)
        asyncio.run(client.close())
    os._exit(0)
assert not any(decision.fail_open for decision in decisions), decisions
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("before", ["used", "unused"])
def test_after_a_fork_a_client_works_or_lets_through_and_never_hangs(real_node, before, transport):
    command = [sys.executable, "-c", FORKS, real_node.grpc_address, before, transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ("ForkedError" in ended.stderr) == (before == "used")
