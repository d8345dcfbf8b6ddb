"""Calls as the interceptors know them."""

import grpc
import pytest

from ratelimitd_client.middleware.grpc_call import Call, arrival_of, handler_of, peer_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipv4:192.0.2.7:40000", "192.0.2.7:40000"),
        ("ipv6:[2001:db8::1]:40000", "[2001:db8::1]:40000"),
        ("ipv6:%5B2001:db8::1%5D:40000", "[2001:db8::1]:40000"),
        ("unix:", None),
        ("unix:/run/shop.sock", None),
        ("", None),
    ],
)
def test_a_peer_is_its_address(text, address):
    assert peer_of(text) == address


def test_a_call_has_the_metadata_that_is_text():
    call = Call("/shop.Orders/Get", [("k", "a"), ("k-bin", b"b"), ("k", "c")], "192.0.2.7:1", None)
    assert call.header("k") == ["a", "c"]
    assert call.header("k-bin") == []


def test_a_call_arrives_under_its_full_name_without_a_user():
    call = Call("/shop.Orders/Get", (), None, None)
    arrival = arrival_of(call, print)
    assert (arrival.method, arrival.route, arrival.view) == ("POST", "/shop.Orders/Get", print)
    assert arrival.user() is None
    assert arrival.peer is None


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_a_handler_keeps_its_kind_and_how_it_reads_and_writes(kind):
    given = getattr(grpc, f"{kind}_rpc_method_handler")(print, bytes, bytearray)
    handler = handler_of(given)
    assert handler.behaviour is print
    other = handler.with_behaviour(repr)
    assert getattr(other, kind) is repr
    assert (other.request_streaming, other.response_streaming) == (
        given.request_streaming,
        given.response_streaming,
    )
    assert (other.request_deserializer, other.response_serializer) == (bytes, bytearray)
