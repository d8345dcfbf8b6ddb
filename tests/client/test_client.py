"""What only the client that blocks does; the rest is in test_clients.py."""

import os
import subprocess
import sys
import threading

import pytest

from ratelimitd_client import RateLimiterClient, Reason
from ratelimitd_client import sessions as sessions_module
from ratelimitd_client.check import valid_timeout_s
from ratelimitd_client.testing import ManualClock
from tests.client.kinds import PATIENT_S
from tests.fake_node import fake_node
from tests.servers import free_port, until


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 3_601])
def test_a_deadline_is_a_positive_number_of_seconds(timeout_s):
    with pytest.raises(ValueError, match="positive"):
        RateLimiterClient(timeout_s=timeout_s)
    for no_number in (str(timeout_s), None, True):
        with pytest.raises(TypeError, match="timeout_s must be a number of seconds, not"):
            RateLimiterClient(timeout_s=no_number)
    assert valid_timeout_s(0.02) == 0.02


def test_the_deadline_is_twenty_milliseconds_unless_told_otherwise():
    assert RateLimiterClient()._timeout_s == 0.02


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(ValueError, match="on_unavailable must be"):
        RateLimiterClient(on_unavailable="maybe")


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


def test_waiting_until_ready_leaves_no_thread_in_grpc_that_a_fork_could_meet(real_node):
    before = set(threading.enumerate())
    with RateLimiterClient(real_node.grpc_address) as client:
        assert client.wait_until_ready(PATIENT_S)
        assert set(threading.enumerate()) <= before


def test_nothing_is_opened_before_the_first_check():
    client = RateLimiterClient()
    assert client._sessions == {}
    client.close()
    assert os.getpid() not in client._sessions


@pytest.mark.parametrize("timeout_s", [0, float("inf"), "5"])
def test_invalid_wait_for_a_node_is_refused(timeout_s):
    with RateLimiterClient() as client, pytest.raises((ValueError, TypeError), match="timeout_s"):
        client.wait_until_ready(timeout_s)
