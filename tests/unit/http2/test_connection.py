import pytest

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import ConnectionEnded, DataReceived, RequestReceived
from ratelimitd.http2.headers import static_block
from ratelimitd.http2.limits import Limits
from ratelimitd.http2.sending import UnaryAnswer
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import (
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    GREETING,
    HEADERS,
    NO_ERROR,
    PING,
    POST,
    PREFACE,
    PROTOCOL_ERROR,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    Frame,
    Peer,
    data,
    frame,
    frames_of,
    last_data,
    settings,
    window_update,
)

ANSWER = UnaryAnswer(static_block([(b":status", b"200")]), static_block([(b"grpc-status", b"0")]))


def peer(**limits):
    return Peer(Limits(**limits))


# The preface


def test_nothing_is_sent_before_the_whole_preface_of_the_peer():
    connection = Connection()
    for octet in PREFACE[:-1]:
        assert connection.receive(bytes((octet,))) == []
        assert connection.data_to_send() == b""
    assert connection.owes is Cause.SLOW_PREFACE
    connection.receive(PREFACE[-1:])
    own, window = frames_of(connection.data_to_send())
    assert (own.type, own.flags) == (SETTINGS, 0)
    assert window.type == WINDOW_UPDATE


def test_our_settings_announce_our_limits():
    connection = Connection(Limits(max_streams=7, stream_window_bytes=70_000))
    connection.receive(GREETING)
    own, window, _ = frames_of(connection.data_to_send())
    pairs = [own.payload[at : at + 6] for at in range(0, len(own.payload), 6)]
    assert pairs == [b"\0\3\0\0\0\x07", b"\0\4\0\x01\x11\x70", b"\0\6\0\0\x40\0"]
    assert window.payload == (1_048_576 - 65_535).to_bytes(4, "big")


def test_the_default_window_of_the_connection_needs_no_update():
    connection = Connection(Limits(connection_window_bytes=65_535))
    connection.receive(PREFACE)
    assert len(frames_of(connection.data_to_send())) == 1


def test_another_preface_is_answered_by_settings_and_a_goaway():
    client = Peer(greeting=b"")
    (event,) = client.feed(b"INVALID CONNECTION PREFACE\r\n\r\n")
    assert event == ConnectionEnded(PROTOCOL_ERROR, Cause.PREFACE, event.message)
    assert [sent.type for sent in client.sent] == [SETTINGS, WINDOW_UPDATE, GOAWAY]
    assert client.goaways == [(0, PROTOCOL_ERROR)]


@pytest.mark.parametrize(
    ("octets", "cause", "answer"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", Cause.HTTP1, b"HTTP/1.1 400 "),
        (b"\x16\x03\x01\x02\x00\x01\x00", Cause.TLS, b"\x15\x03\x01\x00\x02\x02"),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_another_protocol_is_answered_only_in_that_protocol(octets, cause, answer, size):
    connection = Connection()
    events = []
    for at in range(0, len(octets), size):
        events += connection.receive(octets[at : at + size])
    assert [event.cause for event in events] == [cause]
    assert connection.data_to_send().startswith(answer)
    assert connection.data_to_send() == b""


def test_a_client_may_send_preface_and_request_at_once():
    client = Peer(greeting=b"")
    events = client.feed(GREETING, SETTINGS_ACK, client.post(1))
    assert events[-1][0::2] == (1, b"body")


# Checks


def test_a_check_is_one_event_with_its_head_and_its_body():
    client = peer()
    (event,) = client.feed(client.post(1, b"message"))
    assert type(event) is tuple
    stream_id, head, body = event
    assert (stream_id, body) == (1, b"message")
    assert head.fields[-1] == (b"te", b"trailers")


def test_the_answer_to_a_check_is_one_string_of_octets():
    client = peer()
    client.feed(client.post(1))
    client.connection.send_unary(1, ANSWER, b"answer")
    assert client.connection.data_to_send() == ANSWER.octets(1, b"answer")
    assert client.connection.open_streams == 0


def test_all_heads_may_arrive_before_the_bodies():
    client = peer()
    events = client.feed(
        client.head(1), client.head(3), last_data(3, b"three"), last_data(1, b"one")
    )
    assert [(event[0], event[2]) for event in events] == [(3, b"three"), (1, b"one")]


def test_equal_blocks_share_a_head():
    client = peer()
    client.feed(client.post(1))
    first, second = client.feed(client.post(3), client.post(5))
    assert first[1] is second[1]


def test_a_body_may_be_empty():
    client = peer()
    (event,) = client.feed(client.post(1, b""))
    assert event[2] == b""


def test_a_body_in_the_next_read_is_a_separate_event():
    client = peer()
    (begun,) = client.feed(client.head(1))
    assert begun == RequestReceived(1, begun.head, ended=False)
    assert client.feed(last_data(1, b"body")) == [DataReceived(1, b"body", 4, ended=True)]
    client.connection.send_unary(1, ANSWER, b"answer")
    assert len(client.collect()) == 3


def test_a_malformed_check_resets_only_its_stream():
    client = peer()
    events = client.feed(
        client.head(1, POST[:1]), last_data(1, b"ignored"), client.post(3, b"three")
    )
    assert client.resets == [(1, PROTOCOL_ERROR)]
    assert events[-1][0::2] == (3, b"three")


def test_a_content_length_is_enforced():
    client = peer()
    fields = [*POST, ("content-length", "5")]
    client.feed(client.head(1, fields), last_data(1, b"four"))
    assert client.resets == [(1, PROTOCOL_ERROR)]


def test_a_body_of_the_announced_length_is_one_event():
    client = peer()
    events = client.feed(client.head(1, [*POST, ("content-length", "4")]), last_data(1, b"four"))
    assert events[-1][0::2] == (1, b"four")


def test_bodies_of_checks_are_acknowledged_without_the_owner():
    client = peer(connection_window_bytes=100_000)
    for stream_id in range(1, 81, 2):
        client.feed(client.post(stream_id, bytes(5_000)))
    assert client.connection.ended is None
    increments = [
        int.from_bytes(sent.payload, "big") for sent in client.sent if sent.type == WINDOW_UPDATE
    ]
    assert increments == [50_000] * 4


def test_bodies_of_checks_are_limited_by_the_window_of_the_connection():
    for size, code in ((10_000, None), (10_001, 3)):
        client = peer(connection_window_bytes=70_000)
        client.feed(client.head(1), *(data(1, bytes(10_000)) for _ in range(6)))
        client.feed(client.head(3), last_data(3, bytes(size)))
        assert [found for _, found in client.goaways] == ([code] if code else [])


def test_checks_are_limited_by_the_number_of_streams():
    client = peer(max_streams=3)
    client.feed(*(client.post(stream_id) for stream_id in (1, 3, 5, 7)))
    assert client.resets == [(7, 7)]
    client.connection.send_unary(1, ANSWER, b"x")
    client.forget()
    client.feed(client.post(9))
    assert client.resets == []


def test_a_request_that_skips_identifiers_is_served():
    client = peer()
    events = client.feed(client.post(7, b"seven"), client.post(9, b"nine"))
    assert per_stream(events)[7][1:] == [b"seven", "end"]
    assert per_stream(events)[9][1:] == [b"nine", "end"]


# Splits


def stories(client):
    """Octets of many kinds of requests."""
    return b"".join(
        (
            client.post(1),
            client.post(3, b""),
            client.head(5),
            client.post(7),
            data(5, b"five"),
            frame(PING, 0, 0, bytes(8)),
            last_data(5, b"more"),
            client.head(9, [*POST, ("content-length", "4")]),
            last_data(9, b"nine"),
            window_update(0, 9),
            client.get(11),
            client.head(13, [*POST, ("grpc-timeout", "1S")]),
            last_data(13, b"thirteen"),
            client.head(15, [*POST, ("grpc-timeout", "2S")]),
            last_data(15, b"fifteen"),
        )
    )


def per_stream(events):
    """Return the events by stream, in one form for complete and partial requests."""
    told = {}
    for event in events:
        if type(event) is tuple:
            stream_id, head, body = event
            told.setdefault(stream_id, []).extend((head.fields, body, "end"))
        elif isinstance(event, RequestReceived):
            told.setdefault(event.stream_id, []).append(event.head.fields)
            if event.ended:
                told[event.stream_id].append("end")
        elif isinstance(event, DataReceived):
            told[event.stream_id].append(event.data)
            if event.ended:
                told[event.stream_id].append("end")
        else:
            told.setdefault(0, []).append(event)
    return told


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 10, 50, 64, 100])
def test_reads_of_any_size_yield_the_same_events(size):
    whole, split = peer(), peer()
    octets = stories(whole)
    whole.feed(octets)
    for at in range(0, len(octets), size):
        split.feed(octets[at : at + size])
    assert per_stream(split.events) == per_stream(whole.events)
    assert split.sent == whole.sent


@pytest.mark.parametrize("bound", [{"frames_per_slice": 1}, {"bytes_per_slice": 9}])
def test_slices_of_any_size_yield_the_same_events(bound):
    whole, sliced = peer(), peer(**bound)
    octets = stories(whole)
    whole.feed(octets)
    sliced.feed(octets)
    assert per_stream(sliced.events) == per_stream(whole.events)
    assert sliced.sent == whole.sent


# Slices


def test_a_slice_is_bounded_in_frames_and_reports_more():
    client = peer(frames_per_slice=4)
    connection = client.connection
    octets = b"".join(client.post(stream_id) for stream_id in (1, 3, 5))
    assert [event[0] for event in connection.receive(octets)] == [1, 3]
    assert connection.has_more
    assert [event[0] for event in connection.receive(b"")] == [5]
    assert not connection.has_more
    assert connection.receive(b"") == []


def test_a_slice_of_the_whole_input_reports_no_more():
    client = peer(frames_per_slice=2)
    assert len(client.connection.receive(client.post(1))) == 1
    assert not client.connection.has_more


def test_a_slice_is_bounded_in_octets():
    client = peer(bytes_per_slice=100)
    connection = client.connection
    connection.receive(b"".join(frame(PING, 0, 0, bytes(8)) for _ in range(7)))
    assert len(frames_of(connection.data_to_send())) == 6
    assert connection.has_more


def test_input_between_slices_is_handled_in_order():
    client = peer(frames_per_slice=2)
    connection = client.connection
    connection.receive(client.post(1) + client.post(3) + client.head(5))
    assert [event[0] for event in connection.receive(last_data(5))] == [3]
    assert [event[0] for event in connection.receive(b"")] == [5]


def test_an_incomplete_frame_does_not_report_more():
    client = peer(frames_per_slice=2)
    octets = client.post(1) + client.head(3)
    client.connection.receive(octets[:-1])
    assert not client.connection.has_more
    client.connection.receive(octets[-1:] + b"\0\0")
    assert not client.connection.has_more


def test_the_last_octets_of_a_large_read_are_copied():
    client = peer()
    client.connection.receive(client.head(1) + last_data(1, bytes(16_000)) + client.post(3)[:-1])
    assert 0 < len(client.connection._buffer) < 200
    assert client.connection._at == 0


def test_a_slice_that_ends_between_head_and_body_yields_both_events():
    client = peer(frames_per_slice=1)
    events = client.feed(client.post(1, b"body"))
    assert [type(event) for event in events] == [RequestReceived, DataReceived]


# Ends


@pytest.mark.parametrize("size", [16_385, 1 << 23, (1 << 24) - 1])
def test_a_frame_over_the_limit_ends_the_connection_before_its_payload(size):
    client = peer(frames_per_slice=1)
    client.feed(size.to_bytes(3, "big") + bytes((0, 0, 0, 0, 0, 1)))
    assert client.goaways == [(0, FRAME_SIZE_ERROR)]


def test_a_frame_at_the_limit_is_accepted():
    client = peer()
    (event,) = client.feed(client.post(1, bytes(16_384)))
    assert len(event[2]) == 16_384


def test_an_oversize_frame_behind_a_slice_ends_the_connection_in_the_next():
    client = peer(frames_per_slice=2)
    client.feed(client.post(1), b"\x7f\0\0\0\0\0\0\0\1")
    assert client.goaways == [(1, FRAME_SIZE_ERROR)]


def test_requests_in_one_read_with_an_oversize_frame_are_in_the_goaway():
    client = peer()
    events = client.feed(client.post(1), client.post(3), b"\x7f\0\0\0\0\0\0\0\1")
    assert [type(event) for event in events] == [tuple, tuple, ConnectionEnded]
    assert client.goaways == [(3, FRAME_SIZE_ERROR)]


def test_input_before_an_error_is_reported_before_the_end():
    client = peer()
    events = client.feed(client.post(1), client.head(3), data(0))
    assert [type(event) for event in events] == [tuple, RequestReceived, ConnectionEnded]
    assert client.goaways == [(3, PROTOCOL_ERROR)]


def test_after_the_end_input_is_ignored_and_nothing_is_sent():
    client = peer()
    client.feed(client.post(1), data(0))
    client.forget()
    assert client.feed(client.post(3)) == []
    client.connection.send_unary(1, ANSWER, b"x")
    client.connection.end(ErrorCode.NO_ERROR, Cause.OWNER, "again")
    assert client.collect() == []
    assert client.connection.ended.code == PROTOCOL_ERROR


def test_the_owner_may_end_the_connection_with_a_cause():
    client = peer()
    client.connection.end(ErrorCode.SETTINGS_TIMEOUT, Cause.SETTINGS_TIMEOUT, "no answer")
    (goaway,) = client.collect()
    assert (goaway.type, goaway.code, goaway.payload[8:]) == (GOAWAY, 4, b"no answer")
    assert client.connection.ended.cause is Cause.SETTINGS_TIMEOUT


def test_too_many_octets_that_wait_for_windows_end_the_connection():
    client = peer(max_unread_bytes=10)
    client.feed(settings(s4=0), client.post(1))
    client.connection.send_unary(1, ANSWER, bytes(11))
    assert client.collect()[-1].code == ENHANCE_YOUR_CALM
    assert client.connection.ended.cause is Cause.SEND_BUFFER
    assert client.collect() == []


# State and methods for the owner


def test_owes_changes_from_the_preface_to_none():
    client = Peer(greeting=b"")
    connection = client.connection
    assert connection.owes is Cause.SLOW_PREFACE
    client.feed(PREFACE)
    assert connection.owes is Cause.SLOW_PREFACE
    client.feed(settings())
    assert connection.owes is Cause.SETTINGS_TIMEOUT
    client.feed(SETTINGS_ACK)
    assert connection.owes is None


def test_owes_is_slow_headers_within_a_block():
    client = peer()
    client.feed(frame(HEADERS, END_STREAM, 1, client.block()))
    assert client.connection.owes is Cause.SLOW_HEADERS


def test_owes_is_slow_frame_within_a_frame():
    client = peer()
    client.feed(data(1, b"x")[:-1])
    assert client.connection.owes is Cause.SLOW_FRAME


def test_owes_is_none_while_input_is_unhandled():
    client = Peer(limits=Limits(frames_per_slice=1))
    client.connection.receive(client.post(1) + client.post(3)[:-1])
    assert client.connection.has_more
    assert client.connection.owes is None


def test_owes_is_stalled_window_while_octets_wait():
    client = peer()
    client.feed(settings(s4=0), client.post(1))
    client.connection.send_unary(1, ANSWER, b"abc")
    assert client.connection.owes is Cause.STALLED_WINDOW
    assert client.connection.buffered_bytes == 3
    before = client.connection.progress
    client.feed(window_update(1, 1))
    assert client.connection.progress > before
    client.feed(window_update(1, 2))
    assert client.connection.owes is None


def test_answers_count_as_progress():
    client = peer()
    client.feed(client.post(1))
    before = client.connection.progress
    client.connection.send_unary(1, ANSWER, b"abc")
    assert client.connection.progress > before


def test_ping_sends_its_payload():
    client = peer()
    client.connection.ping(b"12345678")
    assert client.collect() == [Frame(PING, 0, 0, b"12345678")]


def test_ticks_allow_more_pings():
    client = peer()
    for _ in range(200):
        client.feed(*(frame(PING, 0, 0, bytes(8)) for _ in range(10)))
        client.connection.tick()
    assert client.connection.ended is None


def test_no_stream_begins_on_the_fast_path_after_the_last_goaway():
    client = peer()
    client.feed(client.post(1))
    client.connection.go_away()
    client.connection.go_away()
    assert client.connection.drained
    assert client.feed(client.post(3)) == []
    assert client.goaways[-1] == (1, NO_ERROR)


def test_unknown_flags_are_ignored():
    client = peer()
    block = client.block()
    events = client.feed(frame(HEADERS, END_HEADERS | 0x2, 1, block), last_data(1, b"x"))
    assert [type(event) for event in events] == [RequestReceived, DataReceived]


def test_reserved_bits_of_stream_identifiers_are_ignored():
    client = peer()
    octets = bytearray(client.post(1))
    octets[5] |= 0x80
    events = client.feed(bytes(octets))
    assert per_stream(events)[1][-2:] == [b"body", "end"]


def test_checks_are_refused_while_too_many_octets_wait_for_windows():
    client = peer(max_buffered_bytes=2)
    client.feed(settings(s4=0), client.post(1), client.post(3))
    client.connection.send_unary(1, ANSWER, b"ab")
    client.connection.send_unary(3, ANSWER, b"c")
    client.feed(client.post(5))
    assert client.resets == [(5, 7)]
    client.feed(window_update(1, 2))
    client.feed(client.post(7))
    assert client.resets == [(5, 7)]


def test_the_owner_acknowledges_data():
    client = peer(stream_window_bytes=4, connection_window_bytes=100_000)
    client.feed(client.head(1))
    client.feed(data(1, b"four"))
    client.forget()
    client.connection.acknowledge(1, 4)
    assert client.collect() == [Frame(WINDOW_UPDATE, 0, 1, (4).to_bytes(4, "big"))]
