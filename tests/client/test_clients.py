"""What every kind of client does, against a real node and against what is none."""

import asyncio
import logging
from dataclasses import replace
from functools import partial

import grpc
import pytest

from ratelimitd_client import Check, Reason, async_sessions, sessions
from ratelimitd_client.async_sessions import AsyncSessions
from ratelimitd_client.sessions import Sessions
from ratelimitd_client.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.client.hostile import BEHAVIOURS, bytes_server, never_answering, socket_server
from tests.client.kinds import KINDS, PATIENT_S, Asked, opened, result_of
from tests.client.transport.certificates import MUTUAL, STRANGER, TRUSTING, server_credentials
from tests.fake_node import fake_node
from tests.servers import START_S, free_port

ALICE = ("alice", "user", "/x")

LONGEST = ("u" * 256, "t" * 32, "\U0001f600" * 255)
LONGEST_ALSO = {kind * 32: "i" * 256 for kind in "abcdefg"}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def new_client(kind):
    """Opens clients of each kind in turn."""
    return partial(opened, kind)


@pytest.fixture
async def client(real_node, new_client):
    async with new_client(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        yield client


@pytest.fixture
def slept(monkeypatch):
    """The seconds that the clients have slept, without sleeping."""
    seconds = []

    async def sleep(pause_s):
        seconds.append(pause_s)

    monkeypatch.setattr(Sessions, "_sleep", staticmethod(seconds.append))
    monkeypatch.setattr(AsyncSessions, "_sleep", staticmethod(sleep))
    return seconds


async def until(condition):
    """Wait for what the other side does in its own time."""
    async with asyncio.timeout(START_S):
        while not await condition():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.001)


async def test_the_limit_of_a_real_node_is_kept_to_the_check(client, kind):
    decisions = [await client.check(f"limit {kind}", "user", "/five") for _ in range(7)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 2
    assert decisions[4].remaining_tokens == 0
    assert decisions[5].headers()["Retry-After"] == str(decisions[5].retry_after_seconds)
    assert decisions[5].reason is Reason.LIMIT_EXCEEDED


async def test_a_check_that_may_wait_returns_when_it_may_proceed(new_client, slept):
    with fake_node() as node:
        async with new_client(node.address, timeout_s=PATIENT_S) as client:
            node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, wait_ms=250)
            decision = await client.check(*ALICE, max_wait_s=0.5)
            assert (decision.allowed, decision.wait_ms, slept) == (True, 250, [0.25])
            assert node.seen[-1].request.max_wait_ms == 500
            assert (await client.check(*ALICE, max_wait_s=0.5, peek=True)).wait_ms == 250
            node.answer = pb.RateLimitResponse(reason=pb.LIMIT_EXCEEDED, retry_after_seconds=1)
            assert not (await client.check(*ALICE, max_wait_s=0.0019)).allowed
            assert node.seen[-1].request.max_wait_ms == 1
            assert slept == [0.25]


async def test_a_client_waits_no_longer_than_its_caller_may(new_client, slept):
    with fake_node() as node:
        async with new_client(node.address, timeout_s=PATIENT_S) as client:
            for allowed, wait_ms in ((True, 3_000), (True, -5), (False, 250)):
                node.answer = pb.RateLimitResponse(
                    allowed=allowed, reason=pb.WITHIN_LIMIT, wait_ms=wait_ms
                )
                assert (await client.check(*ALICE, max_wait_s=0.5)).allowed is allowed
            assert slept == [0.5]


async def test_a_replaced_file_of_an_authority_is_used_without_a_restart(new_client, tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_bytes(STRANGER.ca)

    async def is_answered():
        return not (await client.check(*ALICE)).fail_open

    with fake_node(server_credentials(mutual=True)) as node:
        node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT)
        tls = replace(MUTUAL, ca=ca)
        async with new_client(node.address, tls=tls, timeout_s=PATIENT_S) as client:
            assert [await is_answered() for _ in range(10)] == [False] * 10
            ca.write_bytes(TRUSTING.ca)
            await until(is_answered)


async def test_many_checks_are_decided_in_one_call_in_their_order(client, kind):
    checks = [Check(f"many {kind}", "user", "/five", cost=cost) for cost in (3, 3, 2)]
    decisions = await client.check_many(checks)
    assert [decision.allowed for decision in decisions] == [True, False, True]
    assert await client.check_many([]) == []


async def test_peeking_spends_nothing(client, kind):
    for peek in (True, False):
        assert (await client.check(f"peek {kind}", "user", "/five", cost=5, peek=peek)).allowed


async def test_rules_and_resets_are_calls_of_its_admin(client, kind):
    who, admin = (f"reset {kind}", "user", "/five"), Asked(client.client.admin)
    page = await admin.list_rules(pb.ListRateLimitsRequest())
    assert [rule.endpoint for rule in page.rate_limits] == ["/five"]
    await client.check(*who, cost=5)
    await admin.reset(*who)
    assert (await client.check(*who, cost=5)).allowed
    with pytest.raises(grpc.RpcError):
        await admin.delete_rule("00000000-0000-0000-0000-000000000000")


async def test_wrong_arguments_raise_before_anything_is_sent(new_client):
    with fake_node() as node:
        async with new_client(node.address) as client:
            with pytest.raises(ValueError, match="identifier_type"):
                await client.check("alice", "Nobody", "/x")
            with pytest.raises(ValueError, match="up to 1000 checks, not 1001"):
                await client.check_many([Check(*ALICE)] * 1_001)
            with pytest.raises(ValueError, match="timeout_s"):
                await client.check(*ALICE, timeout_s=0)
            with pytest.raises(TypeError, match="checks must be of Check, not int"):
                await client.check_many([1])
        assert node.seen == []


async def test_the_deadline_travels_with_the_check_and_its_end_lets_through(new_client):
    left_s = []

    async def arrived():
        return left_s or not await client.check(*ALICE)

    with bytes_server(never_answering(left_s)) as address:
        async with new_client(address, timeout_s=0.2) as client:
            assert await client.wait_until_ready(PATIENT_S)
            decisions = await asyncio.gather(*(client.check(*ALICE) for _ in range(3)))
            assert {decision.error for decision in decisions} == {"DEADLINE_EXCEEDED"}
            assert all(decision.fail_open for decision in decisions)
            # A busy machine may let it pass before the call has arrived; one of those that follow does arrive.
            await until(arrived)
    assert left_s[0] < 0.3  # gRPC rounds deadlines up on the wire


async def test_the_longest_checks_are_asked_in_every_way(new_client):
    most = {"cost": 2**31 - 1, "also": LONGEST_ALSO}
    longest = partial(Check, *LONGEST, timestamp=2**63 - 1, peek=True, **most)
    with fake_node() as node:
        node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT)
        async with new_client(node.address, timeout_s=PATIENT_S) as client:
            decisions = await client.check_many([longest()] * 2)
            decisions.append((await client.hold(*LONGEST, **most)).decision)
            # In asyncio these are one batch.
            decisions += await asyncio.gather(
                client.check(*ALICE),
                *(client.check(*LONGEST, **most, max_wait_s=60) for _ in range(2)),
            )
    assert {decision.reason for decision in decisions} == {Reason.WITHIN_LIMIT}


async def test_an_error_before_a_call_lets_all_its_checks_through(new_client, monkeypatch):
    def breaks(_requests):
        raise OSError

    clock = ManualClock()
    for module in (async_sessions, sessions):
        monkeypatch.setattr(module, "call_of", breaks)
    async with new_client(clock=clock) as client:
        decisions = await asyncio.gather(*(client.check(*ALICE) for _ in range(3)))
        decisions += await client.check_many([Check(*ALICE)] * 2)
        assert {decision.error for decision in decisions} == {"OSError"}
        fail_open = client.client._opened().fail_open
        while fail_open.breaker.allows():
            fail_open.breaker.failed()
        clock.advance(1)
        assert (await client.check(*ALICE)).reason is Reason.NOT_ASKED
    assert fail_open.breaker.state == "open"  # the probe has ended


@pytest.mark.parametrize("on_unavailable", ["allow", "deny"])
@pytest.mark.parametrize("behave", BEHAVIOURS, ids=lambda behave: behave.__name__)
async def test_whatever_a_peer_does_every_check_is_decided_as_was_chosen(
    new_client, behave, on_unavailable
):
    options = {"clock": ManualClock(), "on_unavailable": on_unavailable}
    with socket_server(behave) as address:
        async with new_client(address, **options) as client:
            decisions = [await client.check(*ALICE) for _ in range(6)]
            decisions += await client.check_many([Check(*ALICE)])
    how = "fail_open" if on_unavailable == "allow" else "fail_closed"
    assert all(getattr(decision, how) for decision in decisions)
    assert [d.reason for d in decisions] == [Reason.NO_ANSWER] * 5 + [Reason.NOT_ASKED] * 2


async def test_a_client_that_fails_closed_denies_what_no_node_answers(new_client):
    clock, port = ManualClock(), free_port()
    options = {"timeout_s": PATIENT_S, "clock": clock, "on_unavailable": "deny"}
    async with new_client(f"127.0.0.1:{port}", **options) as client:
        decisions = [await client.check(*ALICE) for _ in range(4)]
        decisions += await client.check_many([Check(*ALICE)])
        decisions += [await client.check(*ALICE), (await client.hold(*ALICE)).decision]
        assert [d.reason for d in decisions] == [Reason.NO_ANSWER] * 5 + [Reason.NOT_ASKED] * 2
        assert all(d.fail_closed and d.headers() == {"Retry-After": "1"} for d in decisions)

        async def probed():
            return (await client.check(*ALICE)).allowed

        with fake_node(port=port) as node:
            assert await client.wait_until_ready(PATIENT_S)
            clock.advance(1)
            assert (await client.check(*ALICE)).fail_closed
            await until(probed)
            assert node.seen[0].request.peek
            node.answer = pb.RateLimitResponse(allowed=True, reason=pb.FAIL_OPEN_ERROR)
            assert (await client.check(*ALICE)).fail_open


async def test_a_target_that_is_the_http_port_is_named_once_in_the_log(
    new_client, real_node, caplog
):
    target, clock = real_node.http_address, ManualClock()
    async with new_client(target, timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(3):
            assert (await client.check(*ALICE)).error == "UNAVAILABLE"
            clock.advance(1)
    named = f"{target} answers HTTP/1.1, not gRPC; a node's gRPC port is 9090 by default"
    assert [record.getMessage() for record in caplog.records].count(named) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff" * 10, "GARBLED"),
        (b"\x0a\x00" * 100_000, "too long"),
        (bytes(100_000_000), "RESOURCE_EXHAUSTED"),
    ],
    ids=["garbage", "too long", "100 MB"],
)
async def test_bytes_that_are_no_answer_let_through(new_client, kind, answer, error, caplog):  # noqa: PLR0917 -- fixtures
    if error == "too long":  # gRPC has read it before it is judged
        error = "RESOURCE_EXHAUSTED" if kind == "native" else "GARBLED"
    caplog.set_level(logging.WARNING)
    with bytes_server(lambda _request, _context: answer) as address:
        async with new_client(address, timeout_s=PATIENT_S) as client:
            decision = await client.check(*ALICE)
    assert (decision.fail_open, decision.error) == (True, error)
    assert [r.name for r in caplog.records if r.name != "asyncio"] == ["ratelimitd_client"]


async def test_a_batch_that_is_answered_for_fewer_checks_lets_all_through(new_client):
    short = pb.BatchRateLimitResponse(responses=[pb.RateLimitResponse()]).SerializeToString()
    with bytes_server(lambda _request, _context: short) as address:
        async with new_client(address, timeout_s=PATIENT_S) as client:
            decisions = await client.check_many([Check(*ALICE)] * 2)
    assert [decision.fail_open for decision in decisions] == [True, True]


async def test_a_service_that_returns_is_asked_again_and_nobody_waits_for_the_probe(new_client):
    clock, port = ManualClock(), free_port()
    async with new_client(f"127.0.0.1:{port}", timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(5):
            assert (await client.check(*ALICE)).error == "UNAVAILABLE"

        async def is_asked(endpoint="/x"):
            decision = await client.check("alice", "user", endpoint, peek=True)
            return decision.reason is not Reason.NOT_ASKED

        assert not await is_asked()
        with fake_node(port=port) as node:
            assert await client.wait_until_ready(PATIENT_S)
            assert not await is_asked()
            assert node.seen == []
            clock.advance(1)
            node.answering.clear()
            assert not await is_asked("/probe")
            assert not await is_asked()
            node.answering.set()
            await until(is_asked)
            assert node.seen[0].request.endpoint == "/probe"


async def test_waiting_for_a_service_that_is_not_there_ends(new_client):
    async with new_client(f"127.0.0.1:{free_port()}") as client:
        assert not await client.wait_until_ready(0.01)


async def test_the_token_travels_with_checks_and_a_bad_one_is_refused(new_client, kind):
    with fake_node() as node:
        async with new_client(node.address, token="s3cret", timeout_s=PATIENT_S) as client:
            await client.check(*ALICE)
            await result_of(client.client.admin.health())
        assert [call.metadata["authorization"] for call in node.seen] == ["Bearer s3cret"] * 2
    with pytest.raises(ValueError, match="bearer token"):
        KINDS[kind](token="two words")
    with pytest.raises(TypeError, match="token must be text, not bytes"):
        KINDS[kind](token=b"s3cret")


async def test_a_closed_client_says_so(new_client):
    async with new_client() as client:
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.check(*ALICE)
