"""Arbitrary octets, and valid conversations cut anywhere, have only documented outcomes, with bounded memory."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import (
    ConnectionEnded,
    DataReceived,
    HeadTooLarge,
    RequestReceived,
    StreamReset,
    TrailersReceived,
)
from ratelimitd.http2.headers import RequestHead, static_block
from ratelimitd.http2.limits import Limits
from ratelimitd.http2.sending import UnaryAnswer
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import (
    GREETING,
    SETTINGS_ACK,
    frame,
    frames_of,
    last_data,
    priority,
    rst_stream,
    window_update,
)
from tests.http2_peer import settings as settings_frame
from tests.property.native_fuzz import cut, demand_bounds

ANSWER = UnaryAnswer(
    static_block([(b":status", b"200"), (b"content-type", b"application/grpc")]),
    static_block([(b"grpc-status", b"0")]),
)
HEAD_BLOCK = static_block([(b":status", b"200"), (b"x", b"y")])
TRAILER_BLOCK = static_block([(b"grpc-status", b"12")])
SMALL = Limits(
    max_streams=4,
    stream_window_bytes=200,
    connection_window_bytes=70_000,
    max_header_list_bytes=400,
    max_header_block_bytes=300,
    max_buffered_bytes=500,
    max_unread_bytes=2_000,
    frames_per_slice=3,
    bytes_per_slice=300,
)


def answer(connection: Connection, event) -> None:
    """Answer like a careless owner, at every opportunity."""
    if type(event) is tuple:
        stream_id, head, body = event
        assert isinstance(head, RequestHead)
        connection.send_unary(stream_id, ANSWER, body)
    elif isinstance(event, DataReceived):
        connection.acknowledge(event.stream_id, event.flow_bytes)
        connection.send_data(event.stream_id, event.data, ended=event.ended)
    elif isinstance(event, (RequestReceived, HeadTooLarge)):
        connection.send_headers(event.stream_id, HEAD_BLOCK)
        if event.ended:
            connection.send_trailers(event.stream_id, TRAILER_BLOCK)
    elif isinstance(event, TrailersReceived):
        connection.send_unary(event.stream_id, ANSWER, b"trailers")


def talk(parts, limits) -> list:
    """Feed parts and answer them; return the events. Asserts the invariants in between."""
    connection, events, sent = Connection(limits), [], b""
    for part in parts:
        fed = part
        while True:
            told = connection.receive(fed)
            events += told
            for event in told:
                answer(connection, event)
            sent += connection.data_to_send()
            demand_bounds(connection, limits)
            if not connection.has_more:
                break
            fed = b""
    ends = [event for event in events if isinstance(event, ConnectionEnded)]
    assert len(ends) <= 1
    if ends:
        assert isinstance(ends[0].code, ErrorCode)
        assert isinstance(ends[0].cause, Cause)
        assert events[-1] is ends[0]
        assert connection.open_streams == 0
    if not sent.startswith((b"HTTP/1.1 400", b"\x15\x03\x01")):
        frames_of(sent)  # whole frames only
    return events


STREAM_IDS = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 9, 11, 2, 2**31 + 5, 2**31 - 1])
NUMBERS = st.sampled_from([0, 1, 2, 100, 65_535, 2**31 - 1, 2**31, 2**32 - 1])
BLOCKS = st.one_of(
    st.just(b"\x83\x86\x84"),
    st.just(b"\x83\x86\x84\x00\x01x\x02yz"),
    st.just(b"\x83\x86\x84\x40\x0cgrpc-timeout\x021S"),
    st.just(b"\x83\x86\x84\x0f\x0d\x014"),
    st.just(b"\x83\x86\x84\xbe"),
    st.binary(max_size=60),
)
U32 = NUMBERS.map(lambda number: number.to_bytes(4, "big"))
FLAGS = st.integers(0, 255) | st.sampled_from([0, 1, 4, 5])
FRAMES = st.one_of(
    st.builds(frame, st.just(1), FLAGS, STREAM_IDS, BLOCKS),
    st.builds(frame, st.just(1), st.sampled_from([4, 5]), st.sampled_from([1, 3, 5, 7, 9]), BLOCKS),
    st.builds(frame, st.just(0), FLAGS, STREAM_IDS, st.binary(max_size=80)),
    st.builds(last_data, st.sampled_from([1, 3, 5, 7, 9]), st.binary(max_size=80)),
    st.builds(frame, st.just(9), FLAGS, STREAM_IDS, BLOCKS),
    st.builds(frame, st.sampled_from([3, 8]), FLAGS, STREAM_IDS, U32),
    st.builds(window_update, STREAM_IDS, st.integers(1, 50)),
    st.builds(rst_stream, STREAM_IDS),
    st.builds(priority, STREAM_IDS, STREAM_IDS),
    st.builds(
        lambda number, value: settings_frame(**{f"s{number}": value}), st.integers(0, 9), NUMBERS
    ),
    st.just(SETTINGS_ACK),
    st.builds(frame, st.integers(0, 12), FLAGS, STREAM_IDS, st.binary(max_size=20)),
)
CUTS = st.lists(st.integers(0, 2_000), max_size=20)


@given(st.binary(max_size=400), CUTS)
@example(b"GET / HTTP/1.1\r\n\r\n", [1, 2, 3])
@example(b"\x16\x03\x01", [1])
def test_any_octets(octets, at):
    talk(cut(octets, at), SMALL)


@given(st.binary(max_size=600), CUTS)
def test_any_octets_after_a_handshake(octets, at):
    talk(cut(GREETING + octets, at), SMALL)


@settings(max_examples=300)
@given(st.lists(FRAMES, max_size=40), CUTS)
def test_any_frames_after_a_handshake(frames, at):
    talk(cut(GREETING + b"".join(frames), at), SMALL)


# The same events for any division of the octets

EVENTS_OF_THE_PEER = (RequestReceived, DataReceived, TrailersReceived, HeadTooLarge, StreamReset)


def per_stream(events) -> dict:
    """Return the reports on each stream, merged from one or several events; 0 is the connection."""
    told: dict = {}
    for event in events:
        if type(event) is tuple:
            stream_id, head, body = event
            told.setdefault(stream_id, []).extend(
                (("head", head.fields, False), ("data", body, len(body), True))
            )
        elif isinstance(event, RequestReceived):
            told.setdefault(event.stream_id, []).append(("head", event.head.fields, event.ended))
        elif isinstance(event, DataReceived):
            told.setdefault(event.stream_id, []).append(("data", *event[1:]))
        else:
            stream_id = event.stream_id if isinstance(event, EVENTS_OF_THE_PEER) else 0
            told.setdefault(stream_id, []).append((type(event).__name__, *event))
    return told


def listen(parts, limits) -> tuple[dict, list]:
    """Feed parts to an owner that never answers; return the reports, and the octets to send."""
    connection, events, sent = Connection(limits), [], b""
    for part in parts:
        events += connection.receive(part)
        while connection.has_more:
            events += connection.receive(b"")
        sent += connection.data_to_send()
    return per_stream(events), [] if sent.startswith(b"HTTP") else frames_of(sent)


@settings(max_examples=300)
@given(st.lists(FRAMES, max_size=30), CUTS, st.integers(1, 5), st.integers(9, 500))
def test_the_division_of_octets_does_not_change_events_and_output(frames, at, count, size):
    octets = GREETING + b"".join(frames)
    told, sent = listen([octets], Limits(max_streams=4))
    sliced = Limits(max_streams=4, frames_per_slice=count, bytes_per_slice=size)
    told_again, sent_again = listen(cut(octets, at), sliced)
    assert told_again == told
    assert sent_again == sent
