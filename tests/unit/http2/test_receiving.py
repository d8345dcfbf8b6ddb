"""Each type of frame, through a whole connection, since the receiving half needs the sending one."""

import pytest

from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import (
    ConnectionEnded,
    DataReceived,
    HeadTooLarge,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from ratelimitd.http2.headers import static_block
from ratelimitd.http2.limits import ALLOWANCES, Limits
from ratelimitd.http2.sending import UnaryAnswer
from tests.http2_peer import (
    ACK,
    CANCEL,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GET,
    GOAWAY,
    GREETING,
    HEADERS,
    NO_ERROR,
    PADDED,
    PING,
    POST,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Frame,
    Peer,
    continuation,
    data,
    frame,
    last_continuation,
    last_data,
    ping,
    priority,
    rst_stream,
    settings,
    window_update,
)

RESPONSE = static_block([(b":status", b"200")])
ANSWER = UnaryAnswer(RESPONSE, static_block([(b"grpc-status", b"0")]))


def peer(**limits):
    return Peer(Limits(**limits))


def open_stream(client, stream_id=1, fields=None):
    """Open a request without its body, and announce it to the owner."""
    (event,) = client.feed(client.head(stream_id, fields))
    assert isinstance(event, RequestReceived)
    client.forget()


def ends(client, *parts):
    """Send octets that must end the connection; return the code and the cause."""
    client.feed(*parts)
    ((_, code),) = client.goaways
    assert isinstance(client.connection.ended, ConnectionEnded)
    assert client.connection.ended.code == code
    return code, client.end_cause


def resets(client, *parts):
    """Send octets that must reset one stream, but not end the connection; return stream, code and cause."""
    client.feed(*parts)
    assert client.connection.ended is None
    ((stream_id, code),) = client.resets
    (cause,) = client.reset_causes
    client.forget()
    client.feed(ping(b"lives on"))
    assert client.sent == [Frame(PING, ACK, 0, b"lives on")]
    return stream_id, code, cause


# SETTINGS and the beginning


def test_settings_are_acknowledged():
    client = peer()
    assert client.feed(settings(s4=10, s5=20_000)) == []
    assert client.sent == [Frame(SETTINGS, ACK, 0, b"")]


def test_our_settings_are_acknowledged_once():
    client = Peer(greeting=GREETING)
    assert not client.connection.ended
    assert client.feed(SETTINGS_ACK) == []
    assert ends(client, SETTINGS_ACK) == (PROTOCOL_ERROR, "protocol")


@pytest.mark.parametrize(
    "first", [ping(bytes(8)), SETTINGS_ACK, frame(0x77, 0, 0), window_update(0, 1)]
)
def test_the_first_frame_is_settings(first):
    client = Peer(greeting=b"")
    assert ends(client, PREFACE, first) == (PROTOCOL_ERROR, "protocol")


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
        (frame(SETTINGS, ACK, 0, b"\0"), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
        (settings(s2=2), PROTOCOL_ERROR),
        (settings(s4=2**31), FLOW_CONTROL_ERROR),
    ],
)
def test_broken_settings_end_the_connection(octets, code):
    assert ends(peer(), octets)[0] == code


# Requests


def test_a_request_without_a_body_is_reported_at_once():
    client = peer()
    (event,) = client.feed(client.get(1))
    assert isinstance(event, RequestReceived)
    assert (event.stream_id, event.ended, event.head.fields[0]) == (1, True, (b":method", b"GET"))


def test_a_request_in_parts_is_reported_in_parts():
    client = peer()
    events = client.feed(client.head(1), data(1, b"one"), data(1, b"two"), last_data(1, b"three"))
    assert isinstance(events[0], RequestReceived)
    assert events[1:] == [
        DataReceived(1, b"one", 3, ended=False),
        DataReceived(1, b"two", 3, ended=False),
        DataReceived(1, b"three", 5, ended=True),
    ]


def test_trailers_end_a_request():
    client = peer()
    open_stream(client)
    trailers = client.head(1, [("x-checksum", "1")], END_HEADERS | END_STREAM)
    assert client.feed(data(1, b"one"), trailers) == [
        DataReceived(1, b"one", 3, ended=False),
        TrailersReceived(1, ((b"x-checksum", b"1"),)),
    ]
    assert resets(client, last_data(1)) == (1, STREAM_CLOSED, "stream_closed")


def test_padding_and_priority_of_headers_are_removed():
    client = peer()
    block = client.block(GET)
    flags = END_HEADERS | END_STREAM | PADDED | PRIORITIZED
    payload = b"\x03" + b"\x80\0\0\0\x10" + block + bytes(3)
    (event,) = client.feed(frame(HEADERS, flags, 3, payload))
    assert event.head.fields[2] == (b":path", b"/")


def test_padding_of_data_counts_for_flow_control_but_is_removed():
    client = peer()
    open_stream(client)
    assert client.feed(data(1, b"\x03four\0\0\0", PADDED | END_STREAM)) == [
        DataReceived(1, b"four", 8, ended=True)
    ]


def test_a_block_may_arrive_in_parts():
    client = peer()
    block = client.block(GET)
    events = client.feed(
        frame(HEADERS, END_STREAM, 1, block[:1]),
        continuation(1, block[1:2]),
        last_continuation(1, block[2:]),
    )
    (event,) = events
    assert (event.stream_id, event.ended, len(event.head.fields)) == (1, True, 4)


@pytest.mark.parametrize(
    "intruder",
    [
        priority(1),
        frame(0x77, 0, 1),
        last_data(1),
        last_continuation(3, b""),
        ping(bytes(8)),
    ],
)
def test_other_frames_within_a_block_end_the_connection(intruder):
    client = peer()
    begun = frame(HEADERS, 0, 1, client.block())
    assert ends(client, begun, intruder) == (PROTOCOL_ERROR, "protocol")


def test_a_new_request_within_a_block_ends_the_connection():
    client = peer()
    block = client.block()
    other = frame(HEADERS, END_HEADERS, 3, block)
    assert ends(client, frame(HEADERS, 0, 1, block), other) == (PROTOCOL_ERROR, "protocol")


def test_a_second_head_within_a_block_ends_the_connection():
    client = peer()
    block = client.block()
    again = frame(HEADERS, END_HEADERS, 1, block)
    assert ends(client, frame(HEADERS, 0, 1, block), again) == (PROTOCOL_ERROR, "protocol")
    assert client.connection.ended.message == "a frame came within a header block"


def test_the_body_of_an_earlier_request_within_a_block_ends_the_connection():
    client = peer()
    first, second = client.head(1), frame(HEADERS, 0, 3, client.block())
    assert ends(client, first, second, last_data(1)) == (PROTOCOL_ERROR, "protocol")


def test_continuation_needs_a_block():
    assert ends(peer(), last_continuation(1)) == (PROTOCOL_ERROR, "protocol")


@pytest.mark.parametrize(
    ("flags", "payload", "code"),
    [
        (END_HEADERS | PADDED, b"\x01", PROTOCOL_ERROR),
        (END_HEADERS | PRIORITIZED, bytes(4), FRAME_SIZE_ERROR),
        (END_HEADERS | PRIORITIZED, b"\0\0\0\x01\x10\x82", PROTOCOL_ERROR),
        (END_HEADERS, b"\x80", 9),
    ],
)
def test_broken_headers_end_the_connection(flags, payload, code):
    assert ends(peer(), frame(HEADERS, flags, 1, payload))[0] == code


@pytest.mark.parametrize("stream_id", [0, 2])
def test_a_request_has_an_odd_identifier(stream_id):
    client = peer()
    assert ends(client, client.head(stream_id)) == (PROTOCOL_ERROR, "protocol")


def test_identifiers_only_grow():
    client = peer()
    assert ends(client, client.get(5), client.get(3)) == (PROTOCOL_ERROR, "protocol")


def test_headers_of_an_answered_stream_end_the_connection():
    client = peer()
    client.feed(client.get(1))
    client.connection.send_headers(1, RESPONSE, ended=True)
    assert ends(client, client.get(1)) == (STREAM_CLOSED, "stream_closed")


def test_a_malformed_request_is_reset():
    client = peer()
    assert resets(client, client.get(1, GET[:1])) == (1, PROTOCOL_ERROR, "malformed")
    assert resets(client, client.head(3, GET[:1])) == (3, PROTOCOL_ERROR, "malformed")


def test_malformed_trailers_reset():
    client = peer()
    open_stream(client)
    trailers = client.head(1, [(":path", "/")], END_HEADERS | END_STREAM)
    assert resets(client, trailers) == (1, PROTOCOL_ERROR, "malformed")


def test_a_second_head_that_does_not_end_the_request_resets():
    client = peer()
    open_stream(client)
    assert resets(client, client.head(1)) == (1, PROTOCOL_ERROR, "protocol")


def test_a_head_over_the_limit_is_reported_for_an_answer():
    client = peer(max_header_list_bytes=300)
    large = [*POST, ("x", "v" * 300)]
    assert client.feed(client.head(1, large)) == [HeadTooLarge(1, ended=False)]
    assert client.feed(client.get(3, large)) == [HeadTooLarge(3, ended=True)]
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.collect()
    assert client.resets == [(1, NO_ERROR)]


# content-length


def sized(length):
    return [*POST, ("content-length", str(length))]


@pytest.mark.parametrize("parts", [[b"f", b"our"], [b"four", b""]])
def test_a_body_of_the_announced_length_is_valid(parts):
    client = peer()
    *first, last = parts
    events = client.feed(
        client.head(1, sized(4)), *(data(1, part) for part in first), last_data(1, last)
    )
    assert events[-1] == DataReceived(1, last, len(last), ended=True)


@pytest.mark.parametrize("parts", [[b"five5"], [b"thr"], [b"f", b"ou"], [b"f", b"ours"], [b""]])
def test_another_length_resets(parts):
    client = peer()
    *first, last = parts
    octets = (client.head(1, sized(4)), *(data(1, part) for part in first), last_data(1, last))
    assert resets(client, *octets) == (1, PROTOCOL_ERROR, "malformed")


def test_a_body_above_the_announced_length_resets_before_its_end():
    client = peer()
    assert resets(client, client.head(1, sized(4)), data(1, b"five5")) == (
        1,
        PROTOCOL_ERROR,
        "malformed",
    )


def test_an_announced_length_without_a_body_resets():
    client = peer()
    assert resets(client, client.get(1, sized(1))) == (1, PROTOCOL_ERROR, "malformed")
    (event,) = client.feed(client.get(3, sized(0)))
    assert event.ended


def test_trailers_before_the_announced_length_reset():
    client = peer()
    open_stream(client, fields=sized(4))
    trailers = client.head(1, [("x", "y")], END_HEADERS | END_STREAM)
    assert resets(client, data(1, b"thr"), trailers) == (1, PROTOCOL_ERROR, "malformed")


# DATA


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (last_data(0, b"x"), PROTOCOL_ERROR),
        (last_data(1, b"x"), PROTOCOL_ERROR),
        (data(1, b"\x05four", PADDED), PROTOCOL_ERROR),
        (data(1, b"", PADDED), PROTOCOL_ERROR),
    ],
)
def test_broken_data_ends_the_connection(octets, code):
    assert ends(peer(), octets)[0] == code


def test_data_after_the_end_resets_and_later_data_is_ignored():
    client = peer()
    client.feed(client.get(1))
    client.forget()
    assert resets(client, data(1, b"x")) == (1, STREAM_CLOSED, "stream_closed")
    client.feed(data(1, b"x"), client.head(1), rst_stream(1), window_update(1, 0))
    assert [sent.type for sent in client.sent] == [PING]
    assert client.connection.ended is None


def test_data_for_an_answered_stream_resets():
    client = peer()
    client.feed(client.get(1))
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.forget()
    assert resets(client, data(1, b"x")) == (1, STREAM_CLOSED, "stream_closed")


def test_ignored_headers_still_update_the_table():
    client = peer()
    open_stream(client)
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.feed(client.head(1, [("x", "new in the table")], END_HEADERS | END_STREAM))
    (event,) = client.feed(client.get(3, [*GET, ("x", "new in the table")]))
    assert event.head.fields[-1] == (b"x", b"new in the table")


# Flow control of input


def test_a_stream_may_fill_its_window_but_not_exceed_it():
    client = peer(stream_window_bytes=10)
    open_stream(client)
    client.feed(data(1, bytes(10)))
    assert resets(client, data(1, b"x")) == (1, FLOW_CONTROL_ERROR, "flow_control")


def test_all_streams_may_fill_the_connections_window_but_not_exceed_it():
    client = peer(connection_window_bytes=70_000)
    open_stream(client)
    client.feed(*(data(1, bytes(10_000)) for _ in range(7)))
    assert client.connection.ended is None
    assert ends(client, data(1, b"x")) == (FLOW_CONTROL_ERROR, "flow_control")


def test_acknowledged_octets_reopen_the_windows():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    open_stream(client)
    client.feed(data(1, bytes(10)))
    client.connection.acknowledge(1, 4)
    assert client.collect() == []
    client.connection.acknowledge(1, 6)
    assert client.collect() == [
        Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big")),
        Frame(WINDOW_UPDATE, 0, 1, (10).to_bytes(4, "big")),
    ]
    client.feed(data(1, bytes(10)))
    assert client.connection.ended is None
    assert client.resets == []


def test_acknowledgements_are_limited_to_received_octets():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    open_stream(client)
    client.feed(data(1, bytes(5)))
    client.connection.acknowledge(1, 1_000)
    assert client.collect() == [Frame(WINDOW_UPDATE, 0, 1, (5).to_bytes(4, "big"))]
    client.connection.acknowledge(1, 1_000)
    client.connection.acknowledge(99, 1_000)
    assert client.collect() == []


def test_a_finished_request_reopens_only_the_window_of_the_connection():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    open_stream(client)
    client.feed(last_data(1, bytes(10)))
    client.connection.acknowledge(1, 10)
    assert client.collect() == [Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big"))]


def test_requests_between_other_frames_are_acknowledged_exactly():
    client = peer(connection_window_bytes=20)
    client.forget()
    for stream_id in range(1, 41, 2):
        client.feed(client.post(stream_id, b"x") + ping(b"8 octets"))
    told = [sent.payload for sent in client.sent if sent.type == WINDOW_UPDATE]
    assert sum(int.from_bytes(payload, "big") for payload in told) == 20


def test_ignored_data_is_acknowledged_at_once():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    client.feed(client.get(1))
    client.forget()
    client.feed(data(1, bytes(10)))  # resets the stream
    client.feed(data(1, bytes(10)))  # is ignored
    credits_ = [sent for sent in client.sent if sent.type == WINDOW_UPDATE]
    assert credits_ == [Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big"))] * 2


def test_a_reset_acknowledges_outstanding_octets():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    open_stream(client)
    client.feed(data(1, bytes(10)), rst_stream(1))
    assert client.sent == [Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big"))]


def test_padding_without_data_is_acknowledged_at_once():
    client = peer(stream_window_bytes=10, connection_window_bytes=20)
    open_stream(client)
    assert client.feed(data(1, b"\x09" + bytes(9), PADDED)) == []
    assert client.sent == [
        Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big")),
        Frame(WINDOW_UPDATE, 0, 1, (10).to_bytes(4, "big")),
    ]


# WINDOW_UPDATE


def stalled():
    """Return a connection with a stream that waits for its window."""
    client = peer()
    client.feed(settings(s4=0), client.get(1))
    client.connection.send_headers(1, RESPONSE)
    client.connection.send_data(1, b"abc")
    client.collect()
    client.forget()
    return client


def test_an_opened_window_is_reported_once_no_octets_are_pending():
    client = stalled()
    assert client.feed(window_update(1, 2)) == []
    assert client.feed(window_update(1, 1)) == [WindowOpened(1)]
    assert [sent.payload for sent in client.sent] == [b"ab", b"c"]


def test_pending_octets_use_the_whole_window():
    client = peer()
    client.feed(settings(s4=0), client.get(1))
    client.connection.send_data(1, bytes(20_000))
    client.forget()
    client.feed(window_update(1, 16_385))
    assert sum(len(sent.payload) for sent in client.sent) == 16_385


def test_settings_can_open_windows():
    client = stalled()
    assert client.feed(settings(s4=3)) == [WindowOpened(1)]


def test_the_window_of_the_connection_opens_for_all_streams():
    client = peer()
    client.feed(settings(s4=1 << 20), client.get(1), window_update(0, 1))
    client.connection.send_data(1, bytes(65_537))
    client.forget()
    assert client.feed(window_update(0, 1)) == [WindowOpened(1)]


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
        (window_update(0, 0), PROTOCOL_ERROR),
        (window_update(0, 2**31 - 65_535), FLOW_CONTROL_ERROR),
        (window_update(1, 1), PROTOCOL_ERROR),
    ],
)
def test_a_broken_window_update_ends_the_connection(octets, code):
    assert ends(peer(), octets)[0] == code


@pytest.mark.parametrize(
    ("increment", "code", "cause"),
    [(0, PROTOCOL_ERROR, "protocol"), (2**31 - 1, FLOW_CONTROL_ERROR, "flow_control")],
)
def test_a_broken_window_update_of_a_stream_resets_it(increment, code, cause):
    client = peer()
    client.feed(client.get(1))
    client.forget()
    assert resets(client, window_update(1, increment)) == (1, code, cause)


def test_the_reserved_bit_of_an_increment_is_ignored():
    client = stalled()
    assert client.feed(window_update(1, 2**31 + 3)) == [WindowOpened(1)]


def test_a_window_update_for_an_answered_stream_is_ignored():
    client = peer()
    client.feed(client.get(1))
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.forget()
    client.feed(window_update(1, 1), window_update(1, 0))
    assert (client.sent[1:], client.connection.ended) == ([], None)


# RST_STREAM, PRIORITY, PING, GOAWAY, unknown types


def test_a_reset_is_reported():
    client = peer()
    open_stream(client)
    assert client.feed(rst_stream(1, CANCEL)) == [StreamReset(1, CANCEL, Cause.PEER_RESET)]
    assert client.connection.open_streams == 0
    client.forget()
    assert resets(client, data(1, b"x")) == (1, STREAM_CLOSED, "stream_closed")


def test_an_unknown_error_code_is_reported_unchanged():
    client = peer()
    open_stream(client)
    assert client.feed(rst_stream(1, 0xFF)) == [StreamReset(1, 0xFF, Cause.PEER_RESET)]


def test_a_reset_in_the_same_read_is_reported_after_its_request():
    client = peer()
    first, second = client.feed(client.head(1), rst_stream(1))
    assert isinstance(first, RequestReceived)
    assert isinstance(second, StreamReset)


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (rst_stream(0), PROTOCOL_ERROR),
        (rst_stream(1), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (priority(0), PROTOCOL_ERROR),
        (priority(1, depends_on=1), PROTOCOL_ERROR),
        (frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (ping(bytes(6)), FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    ],
)
def test_other_broken_frames_end_the_connection(octets, code):
    assert ends(peer(), octets)[0] == code


def test_priorities_are_ignored_in_every_state():
    client = peer()
    client.feed(priority(5, depends_on=3), client.get(1), priority(1))
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.forget()
    assert client.feed(priority(1)) == []
    assert client.connection.ended is None


def test_a_ping_is_answered_with_its_own_octets():
    client = peer()
    client.feed(frame(PING, 0x16, 0x8000_0000, b"12345678"))
    assert client.sent == [Frame(PING, ACK, 0, b"12345678")]


def test_a_ping_acknowledgement_is_not_answered():
    client = peer()
    assert client.feed(frame(PING, ACK, 0, b"12345678")) == []
    assert client.sent == []


def test_requests_continue_after_a_goaway_of_the_peer():
    client = peer()
    debug = (3).to_bytes(4, "big") + (0xFF).to_bytes(4, "big") + b"debug"
    assert client.feed(frame(GOAWAY, 0, 0, debug)) == []
    assert len(client.feed(client.get(1))) == 1


@pytest.mark.parametrize("stream_id", [0, 1])
def test_frames_of_unknown_types_are_ignored(stream_id):
    client = peer()
    assert client.feed(frame(0x16, 0xFF, stream_id, bytes(8)), frame(0xA, 0, stream_id)) == []
    assert (client.sent, client.connection.ended) == ([], None)


# Limits, each at its bound and one above


def test_streams_over_the_maximum_are_refused_until_others_end():
    client = peer(max_streams=2)
    client.feed(client.head(1), client.head(3))
    client.forget()
    assert resets(client, client.head(5)) == (5, REFUSED_STREAM, "too_many_streams")
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.forget()
    client.feed(client.head(7))
    assert client.resets == [(1, NO_ERROR)]


def test_streams_over_the_maximum_in_the_same_read_are_refused():
    client = peer(max_streams=2)
    heads = client.head(1) + client.head(3) + client.head(5)
    assert resets(client, heads) == (5, REFUSED_STREAM, "too_many_streams")


def test_requests_are_refused_while_too_many_octets_wait_for_windows():
    client = peer(max_buffered_bytes=3)
    client.feed(settings(s4=0), client.get(1))
    client.connection.send_data(1, b"abc")
    client.feed(client.get(3))
    assert client.resets == []
    client.connection.send_data(3, b"d")
    client.forget()
    assert resets(client, client.get(5)) == (5, REFUSED_STREAM, "too_many_streams")


def test_a_block_is_bounded_in_frames():
    for parts, ended in ((16, False), (17, True)):
        client = peer()
        block = client.block(GET)
        client.feed(
            frame(HEADERS, END_STREAM, 1, block),
            *(continuation(1) for _ in range(parts - 1)),
        )
        assert client.connection.ended is None
        client.feed(last_continuation(1))
        assert (client.end_cause == "header_block") is ended


def test_a_block_is_bounded_in_octets():
    for extra, cause in ((0, None), (1, "header_block")):
        client = peer(max_header_block_bytes=100, max_header_list_bytes=1_000)
        block = client.block(GET)
        block += b"\x00\x01x" + bytes((97 + extra - len(block) - 1,))
        block += b"v" * (100 + extra - len(block))
        client.feed(frame(HEADERS, 0, 1, block[:50]), last_continuation(1, block[50:]))
        assert client.end_cause == cause
        client = peer(max_header_block_bytes=100, max_header_list_bytes=1_000)
        client.feed(frame(HEADERS, 0, 1, block))
        assert client.end_cause == cause


def test_a_header_bomb_ends_the_connection():
    client = peer()
    # One entry of 4,000 octets in the table, then references of one octet to it.
    client.feed(client.get(1, [*GET, ("x", "v" * 4_000)]))
    block = client.block(GET) + b"\xbe" * 16_000
    assert ends(client, frame(HEADERS, END_HEADERS | END_STREAM, 3, block)) == (
        ENHANCE_YOUR_CALM,
        "header_bomb",
    )


SOUND = b"\x82\x86\x84"  # GET / over http, from the static table
MALFORMED = SOUND[:1]


def numbered(number, block):
    """HEADERS of the request with this number after the first."""
    return frame(HEADERS, END_HEADERS, 2 * number + 3, block)


FLOODS = {
    Cause.RAPID_RESET: lambda number: numbered(number, SOUND) + rst_stream(2 * number + 3),
    Cause.PROVOKED_RESET: lambda number: numbered(number, MALFORMED),
    Cause.SETTINGS_FLOOD: lambda _: settings(),
    Cause.PING_FLOOD: lambda _: ping(bytes(8)),
    Cause.WINDOW_UPDATE_FLOOD: lambda _: window_update(0, 1),
    Cause.EMPTY_DATA_FLOOD: lambda _: data(1),
    Cause.PRIORITY_FLOOD: lambda _: priority(99),
    Cause.UNKNOWN_FRAME_FLOOD: lambda _: frame(0x77, 0, 0),
}


@pytest.mark.parametrize("cause", FLOODS)
def test_a_flood_ends_the_connection_at_its_bound_with_few_answers(cause):
    client = peer()
    open_stream(client)
    flood, burst = FLOODS[cause], ALLOWANCES[cause].burst
    spent = 1 if cause is Cause.SETTINGS_FLOOD else 0  # the greeting
    client.feed(*(flood(number) for number in range(burst - spent)))
    assert client.connection.ended is None
    assert ends(client, flood(burst)) == (ENHANCE_YOUR_CALM, cause.value)
    assert len(client.sent) <= burst + 2


def test_each_data_frame_with_content_allows_an_empty_one():
    client = peer()
    open_stream(client)
    burst = ALLOWANCES[Cause.EMPTY_DATA_FLOOD].burst
    client.feed(*[data(1, b"x")] * 50, *[data(1)] * (burst + 50))
    assert client.connection.ended is None
    assert ends(client, data(1)) == (ENHANCE_YOUR_CALM, "empty_data_flood")


def test_each_answered_check_allows_two_pings():
    client = peer()
    client.feed(*(client.post(number) for number in range(1, 100, 2)))
    for number in range(1, 100, 2):
        client.connection.send_unary(number, ANSWER, b"")
    client.feed(*(FLOODS[Cause.PING_FLOOD](number) for number in range(1_000 + 2 * 50)))
    assert client.connection.ended is None
    assert ends(client, FLOODS[Cause.PING_FLOOD](0)) == (ENHANCE_YOUR_CALM, "ping_flood")


def test_a_flood_of_requests_over_the_maximum_ends_the_connection():
    client = peer(max_streams=0)
    client.feed(*(client.get(2 * number + 1) for number in range(1_000)))
    assert client.connection.ended is None
    assert ends(client, client.get(2_001)) == (ENHANCE_YOUR_CALM, "too_many_streams")


@pytest.mark.parametrize("what", ["RST_STREAM", "DATA", "HEADERS"])
def test_a_flood_of_frames_for_closed_streams_ends_the_connection(what):
    client = peer()
    open_stream(client)
    client.connection.send_headers(1, RESPONSE, ended=True)
    client.forget()
    trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1)
    octets = {"RST_STREAM": rst_stream(1), "DATA": data(1, b"x"), "HEADERS": trailers}[what]
    client.feed(octets * 1_000)
    assert client.connection.ended is None
    assert ends(client, octets) == (ENHANCE_YOUR_CALM, "stale_frame_flood")


def test_answered_requests_allow_resets():
    client = peer()
    for number in range(5_000):
        stream_id = 4 * number + 1
        client.feed(client.post(stream_id))
        client.connection.send_headers(stream_id, RESPONSE, ended=True)
        client.feed(client.head(stream_id + 2), rst_stream(stream_id + 2))
    assert client.connection.ended is None


# GOAWAY of ours


def test_a_graceful_shutdown_takes_two_steps():
    client = peer()
    client.feed(client.get(1))
    client.connection.go_away()
    client.collect()
    assert client.goaways == [(2**31 - 1, NO_ERROR)]
    ping = client.sent[-1]
    assert ping.type == PING
    client.feed(client.get(3))  # was in flight
    assert not client.connection.drained
    client.feed(frame(PING, ACK, 0, ping.payload))
    assert client.goaways == [(2**31 - 1, NO_ERROR), (3, NO_ERROR)]
    assert client.connection.drained
    assert client.connection.open_streams == 2


def test_after_the_second_step_requests_are_ignored_but_update_the_table():
    client = peer()
    client.feed(client.get(1))
    client.connection.go_away()
    client.connection.go_away()
    client.connection.go_away()
    client.collect()
    assert client.goaways == [(2**31 - 1, NO_ERROR), (1, NO_ERROR)]
    client.forget()
    assert client.feed(client.head(3, [*POST, ("x", "y")]), last_data(3, b"x")) == []
    assert client.feed(client.post(5), rst_stream(5), window_update(7, 1)) == []
    assert (client.sent, client.connection.ended) == ([], None)
    client.connection.send_headers(1, RESPONSE, ended=True)
    assert client.connection.open_streams == 0


def test_an_unsolicited_ping_acknowledgement_does_not_drain():
    client = peer()
    client.feed(frame(PING, ACK, 0, b"draining"))
    assert not client.connection.drained
    assert client.goaways == []
