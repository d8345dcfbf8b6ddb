"""Routes of heads, and their cache."""

import socket
from dataclasses import replace

import hpack
import pytest

from ratelimitd.http2.headers import HeadReader, RequestHead
from ratelimitd.rpc.interface import Methods, StatusCode, TransportError
from ratelimitd.rpc.messages import Encoding
from ratelimitd.rpc.routing import (
    NativeCall,
    Peer,
    Router,
    address_of,
    http_fallback,
    peer_of,
    routes_of,
    sans_of,
)

PEER = Peer("ipv4:10.0.0.1:5000", ("a.example",))


def echo(data, _call):
    return data


async def stream(_data, _call):
    yield b""


METHODS = Methods({"/s/m": echo, "/s/n": echo}, {"/s/w": stream}, {"/s/b": stream}, {"/s/m": list})


@pytest.fixture
def reader():
    return Router(routes_of(METHODS), PEER, lambda: 100.0)


def timeout_s(reader, head):
    """Return the remaining time of a call that has just arrived."""
    return reader.call(reader.read(head), head, 100.0).time_remaining_s()


def head(model=None, varying=(), **fields):
    """Return the head of a valid call, with fields changed, added or (None) omitted; ``__`` stands for a colon."""
    named = {
        ":method": "POST", ":path": "/s/m", "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    named |= {name.replace("__", ":").replace("_", "-"): text for name, text in fields.items()}
    encoded = tuple((name.encode(), text.encode()) for name, text in named.items() if text)
    return RequestHead(encoded, model=model, varying=varying)


def test_each_method_is_found_with_its_handler(reader):
    unary = reader.read(head())
    assert (unary.unary, unary.server_stream, unary.bidi_stream) == (echo, None, None)
    assert unary.call.method == "/s/m"
    watch = reader.read(head(__path="/s/w"))
    assert (watch.unary, watch.server_stream, watch.bidi_stream) == (None, stream, None)
    bidi = reader.read(head(__path="/s/b"))
    assert (bidi.unary, bidi.server_stream, bidi.bidi_stream) == (None, None, stream)


def test_a_route_has_the_bulk_handler_of_its_method(reader):
    assert reader.read(head()).bulk is list
    for path in ("/s/n", "/s/w", "/s/b", "/s/x"):
        assert reader.read(head(__path=path)).bulk is None


@pytest.mark.parametrize("timeout", ["0S", "0n", "00000000H"])
def test_a_call_late_on_arrival_has_no_bulk_handler(reader, timeout):
    plan = reader.read(head(grpc_timeout=timeout))
    assert (plan.bulk, plan.unary, plan.timeout_s) == (None, echo, 0.0)
    assert timeout_s(reader, head(grpc_timeout=timeout)) == 0.0


def test_among_varying_deadlines_only_late_ones_have_no_bulk_handler(reader):
    model = head(grpc_timeout="1S")
    plan = reader.read(model)
    assert plan.bulk is list
    for timeout, shortcut in (
        ("2S", list),
        ("0S", None),
        ("1n", list),
        ("0m", None),
        ("01S", list),
    ):
        other = head(model, ((b"grpc-timeout", timeout.encode()),), grpc_timeout=timeout)
        found = reader.read(other)
        assert (found.bulk, found.unary) == (shortcut, echo)
        assert (timeout_s(reader, other) == 0) is (shortcut is None)
    assert reader.read(model) is plan
    assert timeout_s(reader, model) == 1.0
    bad = head(model, ((b"grpc-timeout", b"soon"),), grpc_timeout="soon")
    assert reader.read(bad).bulk is None


def test_a_head_with_another_compression_keeps_the_bulk_handler(reader):
    model = head(grpc_encoding="gzip")
    reader.read(model)
    other = head(model, ((b"grpc-encoding", b"identity"),), grpc_encoding="identity")
    assert reader.read(other).bulk is list


RECORDED, UNRECORDED = (f"00-{'a' * 32}-{'b' * 16}-{flags}" for flags in ("01", "00"))


def test_sampled_calls_of_traced_methods_have_no_bulk_handler():
    reader = Router(routes_of(replace(METHODS, bulk_unless_sampled=True)), PEER, lambda: 100.0)
    assert reader.read(head()).bulk is list
    assert reader.read(head(traceparent=UNRECORDED)).bulk is list
    assert reader.read(head(traceparent=RECORDED)).bulk is None
    assert reader.read(head(__path="/s/n", traceparent=RECORDED)).unary is echo
    model = head()
    for traceparent, bulk in ((UNRECORDED, list), (RECORDED, None), (UNRECORDED, list)):
        varying = ((b"traceparent", traceparent.encode()),)
        one = head(model, varying, traceparent=traceparent)
        assert reader.read(one).bulk is bulk
        assert reader.call(reader.read(one), one, 0.0).metadata("traceparent") == traceparent


def test_sampling_is_ignored_for_methods_without_traces(reader):
    assert reader.read(head(traceparent=RECORDED)).bulk is list
    varying = ((b"traceparent", RECORDED.encode()),)
    assert reader.read(head(head(), varying, traceparent=RECORDED)).bulk is list


def test_an_unknown_method_is_unimplemented(reader):
    plan = reader.read(head(__path="/s/x"))
    assert plan.refusal.error.code is StatusCode.UNIMPLEMENTED
    assert plan.refusal.cause is TransportError.UNKNOWN_METHOD
    assert plan.route is None


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        (None, Encoding.IDENTITY),
        ("identity", Encoding.IDENTITY),
        ("gzip", Encoding.GZIP),
        ("deflate", Encoding.DEFLATE),
    ],
)
def test_known_compressions_are_accepted(reader, name, encoding):
    assert reader.read(head(grpc_encoding=name)).encoding is encoding


def test_an_unknown_compression_is_refused_with_a_list_of_known_ones(reader):
    refusal = reader.read(head(grpc_encoding="snappy")).refusal
    assert refusal.error.code is StatusCode.UNIMPLEMENTED
    assert refusal.fields == ((b"grpc-accept-encoding", b"identity, deflate, gzip"),)


@pytest.mark.parametrize(
    "content_type",
    ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"],
)
def test_a_grpc_content_type_is_a_call(reader, content_type):
    assert reader.read(head(content_type=content_type)).plain is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content_type", None),
        ("content_type", "application/json"),
        ("content_type", "application/grpc-web"),
        ("__method", "GET"),
        ("__method", "PUT"),
    ],
)
def test_a_request_without_grpc_content_type_gets_an_http_answer(reader, name, value):
    plan = reader.read(head(**{name: value}))
    assert plan.plain is not None
    assert plan.route is None


def test_a_deadline_is_read_from_the_head(reader):
    assert timeout_s(reader, head(grpc_timeout="250m")) == 0.25
    assert timeout_s(reader, head()) is None
    refusal = reader.read(head(grpc_timeout="soon")).refusal
    assert refusal.error.message == "Error parsing 'grpc-timeout' metadata"


def test_the_first_of_repeated_fields_counts(reader):
    twice = RequestHead((*head(grpc_timeout="1S").fields, (b"grpc-timeout", b"2S")))
    assert timeout_s(reader, twice) == 1.0


def test_a_head_is_routed_once_and_similar_ones_share_its_route(reader):
    model = head(grpc_timeout="1S", user_agent="a")
    plan = reader.read(model)
    assert reader.read(model) is plan
    like = head(model, ((b"grpc-timeout", b"3S"), (b"user-agent", b"b")), grpc_timeout="3S")
    assert reader.read(like) is plan
    assert timeout_s(reader, like) == 3.0
    assert like.owner_data is None
    same = head(model, grpc_timeout="1S", user_agent="a")
    assert reader.read(same) is plan
    assert timeout_s(reader, same) == 1.0
    assert same.owner_data is plan


def test_a_head_that_varies_in_a_meaningful_field_is_routed_again(reader):
    model = head(grpc_encoding="gzip", grpc_timeout="1S")
    plan = reader.read(model)
    other = head(model, ((b"grpc-encoding", b"deflate"),), grpc_encoding="deflate")
    assert reader.read(other).encoding is Encoding.DEFLATE
    late = head(model, ((b"grpc-timeout", b"soon"),), grpc_timeout="soon")
    assert reader.read(late).refusal is not None
    assert reader.read(model) is plan


def told(*timeouts):
    """Return the remaining seconds, or the status of the refusal, of calls with these deadlines on one connection."""
    blocks, reader = hpack.Encoder(), Router(routes_of(METHODS), PEER, lambda: 100.0)
    heads, ends = HeadReader(16_384), []
    for several in timeouts:
        fields = [(b":scheme", b"http"), *head().fields[:2], (b"content-type", b"application/grpc")]
        fields += [(b"grpc-timeout", value) for value in several]
        one = heads.read(blocks.encode(fields))
        plan = reader.read(one)
        if plan.refusal is not None:
            ends.append(plan.refusal.error.code)
        else:
            ends.append(reader.call(plan, one, 100.0).time_remaining_s())
            assert (plan.bulk is None) is (ends[-1] == 0)
    return ends


def test_an_invalid_deadline_affects_only_its_call():
    timeouts = [[b"x"], [b"5S"], [b"6S"], [b"0S"], [b"05S"], [b"x"], [b"7S"]]
    bad = StatusCode.INTERNAL
    assert told(*timeouts) == [bad, 5.0, 6.0, 0.0, 5.0, bad, 7.0]
    assert told([b"0S"], [b"5S"], [b"0S"], [b"6S"]) == [0.0, 5.0, 0.0, 6.0]


def test_the_first_of_repeated_deadlines_counts_in_every_call():
    assert told([b"1S", b"1S"], [b"1S", b"x"], [b"1S", b"5S"], [b"2S", b"9S"], [b"0S", b"5S"]) == [
        1.0, 1.0, 1.0, 2.0, 0.0,
    ]  # fmt: skip


def test_the_call_of_a_head_has_its_metadata_and_its_deadline(reader):
    model = head(grpc_timeout="1S", x_a="1")
    plan = reader.read(model)
    call = reader.call(plan, head(x_a="2"), 100.5)
    assert (call.method, call.metadata("x-a")) == ("/s/m", "2")
    assert call.time_remaining_s() == 1.5


def test_calls_that_differ_in_their_metadata_are_different_calls(reader):
    model = head(authorization="Bearer a")
    other = head(model, ((b"authorization", b"Bearer b"),), authorization="Bearer b")
    plan = reader.read(model)
    assert reader.read(other) is plan
    tokens = [
        reader.call(plan, one, 100.0).metadata("authorization") for one in (model, other, model)
    ]
    assert tokens == ["Bearer a", "Bearer b", "Bearer a"]
    assert reader.call(plan, model, 100.0) is reader.call(plan, model, 101.0)


def call_with(*fields, deadline_s=None, now_s=0.0):
    return NativeCall("/s/m", fields, PEER, lambda: now_s, deadline_s=deadline_s)


def test_the_first_value_of_a_text_key_is_the_metadata():
    call = call_with((b":path", b"/s/m"), (b"a", b"1"), (b"a", b"2"), (b"b-bin", b"AAEC"))
    assert [call.metadata(key) for key in ("a", "b-bin", "c", ":path")] == ["1", None, None, None]


def test_metadata_with_invalid_utf8_is_decoded_as_latin_1():
    call = call_with((b"a", b"\xc3\xa9"), (b"b", b"\xff"))
    assert (call.metadata("a"), call.metadata("b")) == ("\u00e9", "\u00ff")


def test_no_header_changes_the_peer():
    call = call_with((b"x509_subject_alternative_name", b"forged"))
    assert (call.peer, call.peer_sans) == PEER


def test_the_remaining_time_is_never_negative():
    assert call_with().time_remaining_s() is None
    assert call_with(deadline_s=3.0, now_s=1.0).time_remaining_s() == 2.0
    assert call_with(deadline_s=3.0, now_s=4.0).time_remaining_s() == 0.0


@pytest.mark.parametrize(
    ("method", "is_grpc", "status"),
    [(b"GET", False, "405"), (b"GET", True, "405"), (b"", True, "405"), (b"POST", False, "415")],
)
def test_a_request_other_than_grpc_gets_an_answer_with_a_body(method, is_grpc, status):
    block, body = http_fallback(method, is_grpc=is_grpc)
    fields = dict(hpack.Decoder().decode(block))
    assert fields[":status"] == status
    assert fields["content-length"] == str(len(body))
    assert b"gRPC" in body
    assert ("allow" in fields) == (status == "405")


def test_an_answer_to_head_is_headers_alone():
    block, body = http_fallback(b"HEAD", is_grpc=False)
    assert (block, body) == (http_fallback(b"GET", is_grpc=False).head_block, b"")


@pytest.mark.parametrize(
    ("family", "name", "address"),
    [
        (socket.AF_INET, ("127.0.0.1", 5000), "ipv4:127.0.0.1:5000"),
        (socket.AF_INET6, ("::1", 5000, 0, 0), "ipv6:[::1]:5000"),
        (socket.AF_INET6, ("fe80::1%eth0", 5000, 0, 2), "ipv6:[fe80::1%eth0]:5000"),
        (socket.AF_INET6, ("::ffff:10.0.0.1", 5000, 0, 0), "ipv4:10.0.0.1:5000"),
        (socket.AF_UNIX, "", "unix:"),
        (None, None, "unknown:"),
    ],
)
def test_addresses_have_the_form_of_grpc(family, name, address):
    assert address_of(family, name) == address


def test_subject_alternative_names_are_those_that_the_other_transport_returns():
    names = (
        ("DNS", "a.example"),
        ("Registered ID", "1.2.3.4"),
        ("IP Address", "2001:DB8:0:0:0:0:0:1"),
        ("IP Address", "<invalid>"),
        ("DirName", (("x", "y"),)),
        ("email", "c@example.com"),
        ("othername", "<unsupported>"),
        ("URI", "spiffe://b"),
    )
    found = sans_of({"subjectAltName": names})
    assert found == ("a.example", "2001:db8::1", "c@example.com", "spiffe://b")
    assert sans_of({}) == ()


class Transport:
    """A transport of asyncio with extra information."""

    def __init__(self, **info):
        self.get_extra_info = info.get


class Certified:
    def getpeercert(self):
        return {"subjectAltName": (("DNS", "a.example"),)}


def test_a_peer_has_the_address_of_its_socket_and_the_names_of_its_certificate():
    with socket.socket() as sock:
        plain = peer_of(Transport(socket=sock, peername=("10.0.0.1", 1)))
        certified = peer_of(
            Transport(socket=sock, peername=("10.0.0.1", 1), ssl_object=Certified())
        )
    assert plain == ("ipv4:10.0.0.1:1", ())
    assert certified == ("ipv4:10.0.0.1:1", ("a.example",))


def test_a_lost_connection_has_an_unknown_peer():
    assert peer_of(Transport()).address == "unknown:"
