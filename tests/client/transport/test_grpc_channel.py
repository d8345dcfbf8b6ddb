"""The channel: what it is set to, and that it speaks TLS and mTLS to a real server."""

import grpc
import pytest

from ratelimitd_client import (
    AsyncRateLimiterClient,
    NodeClient,
    RateLimiterClient,
    Tls,
    open_async_channel,
    open_channel,
)
from ratelimitd_client.transport.grpc_channel import CHANNEL_OPTIONS
from tests.client.transport.certificates import MUTUAL, STRANGER, TRUSTING, server_credentials
from tests.fake_node import fake_node
from tests.servers import free_port, until


def test_the_channel_keeps_itself_alive_and_takes_four_mebibytes():
    assert CHANNEL_OPTIONS["grpc.keepalive_time_ms"] == 10_000
    assert CHANNEL_OPTIONS["grpc.keepalive_permit_without_calls"] == 1
    assert CHANNEL_OPTIONS["grpc.max_send_message_length"] == 4 * 1024 * 1024
    assert CHANNEL_OPTIONS["grpc.max_receive_message_length"] == 4 * 1024 * 1024


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with fake_node() as node, NodeClient(node.address) as client:
        assert client.check("alice", "user", "/x").allowed


def test_an_option_replaces_the_one_of_the_same_name():
    options = {"grpc.max_send_message_length": 10}
    with fake_node() as node, open_channel(node.address, options=options) as channel:
        client = NodeClient(channel=channel)
        with pytest.raises(grpc.RpcError) as refused:
            client.check("an identifier of more than ten bytes", "user", "/x")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tls_verifies_the_node_against_the_given_authority():
    with fake_node(server_credentials(mutual=False)) as node:
        with NodeClient(node.address, tls=TRUSTING) as client:
            assert client.check("alice", "user", "/x").allowed
        with (
            NodeClient(node.address, tls=STRANGER) as client,
            pytest.raises(grpc.RpcError) as refused,
        ):
            client.check("alice", "user", "/x")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_mutual_tls_shows_the_certificate_of_the_caller():
    with fake_node(server_credentials(mutual=True)) as node:
        with NodeClient(node.address, tls=MUTUAL) as client:
            assert client.check("alice", "user", "/x").allowed
        with (
            NodeClient(node.address, tls=TRUSTING) as client,
            pytest.raises(grpc.RpcError),
        ):
            client.check("alice", "user", "/x")


async def test_the_clients_that_decide_speak_tls_too():
    with fake_node(server_credentials(mutual=False)) as node:
        with RateLimiterClient(node.address, tls=TRUSTING, timeout_s=30) as client:
            assert not client.check("alice", "user", "/x").fail_open
        async with AsyncRateLimiterClient(node.address, tls=TRUSTING, timeout_s=30) as client:
            assert not (await client.check("alice", "user", "/x")).fail_open


def test_checks_go_to_all_nodes_behind_a_name_and_a_node_that_is_down_is_passed_over():
    with fake_node() as first, fake_node() as second:
        target = f"ipv4:{first.address},{second.address}"
        with RateLimiterClient(target, timeout_s=30) as client:
            until(
                lambda: client.check("alice", "user", "/x") and first.seen and second.seen,
                "both were asked",
            )
        with RateLimiterClient(f"ipv4:{first.address},127.0.0.1:{free_port()}") as client:
            assert client.wait_until_ready(30)
            for _ in range(10):
                assert not client.check("alice", "user", "/x", timeout_s=30).fail_open


@pytest.mark.parametrize(
    "make",
    [RateLimiterClient, AsyncRateLimiterClient, NodeClient, open_channel, open_async_channel],
)
def test_a_wrong_target_is_refused_before_anything_is_sent(make):
    with pytest.raises(ValueError, match=r"^target must be host:port"):
        make("http://127.0.0.1:9090")


@pytest.mark.parametrize("half", [{"cert": b"pem"}, {"key": b"pem"}])
def test_half_an_identity_is_refused(half):
    with pytest.raises(ValueError, match="together or not at all"):
        Tls(**half)


def test_a_private_key_is_never_shown():
    assert "KEY" not in repr(MUTUAL)


@pytest.mark.parametrize(
    "make",
    [RateLimiterClient, AsyncRateLimiterClient, NodeClient, open_channel, open_async_channel],
)
def test_what_is_no_tls_is_refused(make):
    with pytest.raises(TypeError, match="tls must be a Tls, not str"):
        make("127.0.0.1:9090", tls="ca.pem")
