"""The client that blocks, against a real node and against what is none."""

import logging
import os
import subprocess
import sys
import threading

import grpc
import pytest

from ratelimitd_client import Check, RateLimiterClient, Reason
from ratelimitd_client import sessions as sessions_module
from ratelimitd_client.sessions import Sessions, valid_timeout_s
from ratelimitd_client.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.client.hostile import BEHAVIOURS, bytes_server, never_answering, socket_server
from tests.fake_node import fake_node
from tests.servers import free_port, until

PATIENT_S = 30.0
"""A deadline that no answer of a living node misses, however busy the machine is."""


@pytest.fixture
def client(real_node):
    with RateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        yield client


def test_the_limit_of_a_real_node_is_kept_to_the_check(client):
    decisions = [client.check("sync", "user", "/five") for _ in range(7)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False] * 2
    assert decisions[4].remaining_tokens == 0
    assert decisions[5].headers()["Retry-After"] == str(decisions[5].retry_after_seconds)
    assert decisions[5].reason is Reason.LIMIT_EXCEEDED


def test_a_check_that_may_wait_returns_when_it_may_proceed(monkeypatch):
    slept = []
    monkeypatch.setattr(Sessions, "_sleep", staticmethod(slept.append))
    with fake_node() as node, RateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
        node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, wait_ms=250)
        decision = client.check("alice", "user", "/x", max_wait_s=0.5)
        assert (decision.allowed, decision.wait_ms, slept) == (True, 250, [0.25])
        assert node.seen[-1].request.max_wait_ms == 500
        assert client.check("alice", "user", "/x", max_wait_s=0.5, peek=True).wait_ms == 250
        node.answer = pb.RateLimitResponse(reason=pb.LIMIT_EXCEEDED, retry_after_seconds=1)
        assert not client.check("alice", "user", "/x", max_wait_s=0.5).allowed
        assert slept == [0.25]


def test_a_client_waits_no_longer_than_its_caller_may(monkeypatch):
    slept = []
    monkeypatch.setattr(Sessions, "_sleep", staticmethod(slept.append))
    with fake_node() as node, RateLimiterClient(node.address, timeout_s=PATIENT_S) as client:
        for allowed, wait_ms in ((True, 3_000), (True, -5), (False, 250)):
            node.answer = pb.RateLimitResponse(
                allowed=allowed, reason=pb.WITHIN_LIMIT, wait_ms=wait_ms
            )
            decision = client.check("alice", "user", "/x", max_wait_s=0.5)
            assert decision.allowed is allowed
        assert slept == [0.5]


def test_many_checks_are_decided_in_one_call_in_their_order(client):
    checks = [Check("many", "user", "/five", cost=cost) for cost in (3, 3, 2)]
    assert [decision.allowed for decision in client.check_many(checks)] == [True, False, True]
    assert client.check_many([]) == []


def test_peeking_spends_nothing(client):
    assert client.check("peek", "user", "/five", cost=5, peek=True).allowed
    assert client.check("peek", "user", "/five", cost=5).allowed


def test_rules_and_resets_go_over_the_same_channel_as_messages(client):
    assert [rule.endpoint for rule in client.admin.rules()] == ["/five"]
    client.check("reset", "user", "/five", cost=5)
    client.admin.reset("reset", "user", "/five")
    assert client.check("reset", "user", "/five", cost=5).allowed
    with pytest.raises(grpc.RpcError):
        client.admin.delete_rule("00000000-0000-0000-0000-000000000000")


def test_wrong_arguments_raise_before_anything_is_sent():
    with fake_node() as node, RateLimiterClient(node.address) as client:
        with pytest.raises(ValueError, match="identifier_type"):
            client.check("alice", "Nobody", "/x")
        with pytest.raises(ValueError, match="up to 1000 checks, not 1001"):
            client.check_many([Check("alice", "user", "/x")] * 1_001)
        with pytest.raises(ValueError, match="timeout_s"):
            client.check("alice", "user", "/x", timeout_s=0)
        assert node.seen == []


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 3_601])
def test_a_deadline_is_a_positive_number_of_seconds(timeout_s):
    with pytest.raises(ValueError, match="positive"):
        RateLimiterClient(timeout_s=timeout_s)
    assert valid_timeout_s(0.02) == 0.02


def test_the_deadline_travels_with_the_check_and_its_end_lets_through():
    left_s = []

    with (
        bytes_server(never_answering(left_s)) as address,
        RateLimiterClient(address, timeout_s=0.2) as client,
    ):
        assert client.wait_until_ready(PATIENT_S)
        decision = client.check("alice", "user", "/x")
        assert (decision.fail_open, decision.error) == (True, "DEADLINE_EXCEEDED")
        # A busy machine may let it pass before the call has arrived; one of those that follow does arrive.
        until(lambda: left_s or not client.check("alice", "user", "/x"), "a call arrived")
    assert left_s[0] < 0.3  # gRPC rounds deadlines up on the wire


def test_the_deadline_is_twenty_milliseconds_unless_told_otherwise():
    assert RateLimiterClient()._timeout_s == 0.02


@pytest.mark.parametrize("behave", BEHAVIOURS, ids=lambda behave: behave.__name__)
def test_whatever_a_peer_does_every_check_is_let_through(behave):
    clock = ManualClock()
    with socket_server(behave) as address, RateLimiterClient(address, clock=clock) as client:
        decisions = [client.check("alice", "user", "/x") for _ in range(7)]
    assert all(decision.fail_open for decision in decisions)
    assert [d.reason for d in decisions] == [Reason.NO_ANSWER] * 5 + [Reason.NOT_ASKED] * 2


def test_a_client_that_fails_closed_denies_what_no_node_answers():
    clock = ManualClock()
    port = free_port()
    options = {"timeout_s": PATIENT_S, "clock": clock, "on_unavailable": "deny"}
    with RateLimiterClient(f"127.0.0.1:{port}", **options) as client:
        decisions = [client.check("alice", "user", "/x") for _ in range(4)]
        decisions += client.check_many([Check("alice", "user", "/x")])
        decisions += [client.check("alice", "user", "/x"), client.hold("a", "user", "/x").decision]
        assert [d.reason for d in decisions] == [Reason.NO_ANSWER] * 5 + [Reason.NOT_ASKED] * 2
        assert all(d.fail_closed and d.headers() == {"Retry-After": "1"} for d in decisions)
        with fake_node(port=port) as node:
            assert client.wait_until_ready(PATIENT_S)
            clock.advance(1)
            assert client.check("alice", "user", "/x").fail_closed
            until(lambda: client.check("alice", "user", "/x").allowed, "the probe was answered")
            assert node.seen[0].request.peek
            node.answer = pb.RateLimitResponse(allowed=True, reason=pb.FAIL_OPEN_ERROR)
            assert client.check("alice", "user", "/x").fail_open


def test_a_target_that_is_the_http_port_is_named_once_in_the_log(real_node, caplog):
    target, clock = real_node.http_address, ManualClock()
    with RateLimiterClient(target, timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(3):
            assert client.check("alice", "user", "/x").error == "UNAVAILABLE"
            clock.advance(1)
    named = f"{target} answers HTTP/1.1 and is no gRPC port; that of a node is 9090 by default"
    assert [record.getMessage() for record in caplog.records].count(named) == 1


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(ValueError, match="on_unavailable must be"):
        RateLimiterClient(on_unavailable="maybe")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff" * 10, "GARBLED"),
        (b"\x0a\x00" * 100_000, "GARBLED"),
        (bytes(100_000_000), "RESOURCE_EXHAUSTED"),
    ],
    ids=["garbage", "too long", "100 MB"],
)
def test_bytes_that_are_no_answer_let_through(answer, error, caplog):
    caplog.set_level(logging.DEBUG)
    with (
        bytes_server(lambda _request, _context: answer) as address,
        RateLimiterClient(address, timeout_s=PATIENT_S) as client,
    ):
        decision = client.check("alice", "user", "/x")
    assert (decision.fail_open, decision.error) == (True, error)
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING] == ["ratelimitd_client"]


def test_a_batch_that_is_answered_for_fewer_checks_lets_all_through():
    short = pb.BatchRateLimitResponse(responses=[pb.RateLimitResponse()])
    with (
        bytes_server(lambda _request, _context: short.SerializeToString()) as address,
        RateLimiterClient(address, timeout_s=PATIENT_S) as client,
    ):
        decisions = client.check_many([Check("alice", "user", "/x")] * 2)
    assert [decision.fail_open for decision in decisions] == [True, True]


def test_a_service_that_returns_is_asked_again_and_nobody_waits_for_the_probe():
    clock = ManualClock()
    port = free_port()
    with RateLimiterClient(f"127.0.0.1:{port}", timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(5):
            assert client.check("alice", "user", "/x").error == "UNAVAILABLE"
        assert client.check("alice", "user", "/x").reason is Reason.NOT_ASKED
        with fake_node(port=port) as node:
            assert client.wait_until_ready(PATIENT_S)
            assert client.check("alice", "user", "/x").reason is Reason.NOT_ASKED
            assert node.seen == []
            clock.advance(1)
            node.answering.clear()
            assert client.check("alice", "user", "/probe").reason is Reason.NOT_ASKED
            assert client.check("alice", "user", "/x").reason is Reason.NOT_ASKED
            node.answering.set()
            until(
                lambda: (
                    client.check("alice", "user", "/x", peek=True).reason is not Reason.NOT_ASKED
                ),
                "the probe closed the breaker",
            )
            assert node.seen[0].request.endpoint == "/probe"


def test_a_probe_that_fails_keeps_the_breaker_open():
    clock = ManualClock()
    with RateLimiterClient(f"127.0.0.1:{free_port()}", timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(5):
            client.check("alice", "user", "/x")
        fail_open = client._opened().fail_open
        clock.advance(1)
        client.check("alice", "user", "/x")
        until(lambda: fail_open.breaker.state == "open", "the probe failed")


def test_a_probe_under_way_when_the_client_closes_ends_with_it():
    clock = ManualClock()
    with fake_node() as node:
        client = RateLimiterClient(node.address, timeout_s=PATIENT_S, clock=clock)
        fail_open = client._opened().fail_open
        for _ in range(5):
            fail_open.breaker.failed()
        clock.advance(1)
        node.answering.clear()
        client.check("alice", "user", "/x")
        until(lambda: node.seen, "the probe arrived")
        client.close()
        until(lambda: fail_open.breaker.state == "open", "the probe ended")


def test_a_channel_that_another_thread_closes_lets_through_and_raises_nothing():
    clock = ManualClock()
    with fake_node() as node:
        client = RateLimiterClient(node.address, timeout_s=PATIENT_S, clock=clock)
        session = client._opened()
        session.grpc_channel.close()
        for _ in range(5):
            assert client.check("alice", "user", "/x").error == "ValueError"
        clock.advance(1)
        assert client.check("alice", "user", "/probe").reason is Reason.NOT_ASKED
        assert session.fail_open.breaker.state == "open"
        client.close()
        assert node.seen == []


def test_waiting_for_a_service_that_is_not_there_ends():
    with RateLimiterClient(f"127.0.0.1:{free_port()}") as client:
        assert not client.wait_until_ready(0.01)


def test_the_token_travels_with_checks_and_a_bad_one_is_refused():
    with fake_node() as node:
        with RateLimiterClient(node.address, token="s3cret", timeout_s=PATIENT_S) as client:
            client.check("alice", "user", "/x")
            client.admin.health()
        assert [call.metadata["authorization"] for call in node.seen] == ["Bearer s3cret"] * 2
    with pytest.raises(ValueError, match="bearer token"):
        RateLimiterClient(token="two words")


def test_a_closed_client_says_so():
    client = RateLimiterClient()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.check("alice", "user", "/x")


def test_threads_that_begin_at_once_share_one_channel(real_node):
    barrier, sessions = threading.Barrier(8), []
    with RateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:

        def begin():
            barrier.wait()
            sessions.append(client._opened())

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, sessions))) == 1
        assert client.check("threads", "user", "/five").allowed


def test_of_two_sessions_that_are_opened_at_once_one_is_kept(real_node, monkeypatch):
    with RateLimiterClient(real_node.grpc_address, timeout_s=PATIENT_S) as client:
        opened, open_ = [], sessions_module.open_channel

        def slowly(*args, **options):
            channel = open_(*args, **options)
            if not opened:
                opened.append(channel)
                opened.append(client._opened())  # another thread was faster
            return channel

        monkeypatch.setattr(sessions_module, "open_channel", slowly)
        assert client._opened() is opened[1]
        assert client.check("twice", "user", "/five").allowed


FORKS = """
import os, sys
from ratelimitd_client import RateLimiterClient
client = RateLimiterClient(sys.argv[1], timeout_s=30)
if sys.argv[2] == "used":
    assert not client.check("alice", "user", "/x").fail_open
child = os.fork()
decision = client.check("alice", "user", "/x")
assert not decision.fail_open, decision
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not client.check("alice", "user", "/x").fail_open
client.close()
"""


@pytest.mark.parametrize("before", ["used", "unused"])
def test_a_client_works_on_both_sides_of_a_fork(real_node, before):
    command = [sys.executable, "-c", FORKS, real_node.grpc_address, before]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_nothing_is_opened_before_the_first_check():
    client = RateLimiterClient()
    assert client._sessions == {}
    client.close()
    assert os.getpid() not in client._sessions
