"""What the tool h2spec checks of a server (145 cases: generic, http2, hpack), octet for octet, by its own numbers.

The server under the octets is the plainest one: it answers every request that is complete with 200 and five octets.
A case that h2spec has in two suites stands here once. Beside each is what RFC 9113 or RFC 7541 ask for; where they
leave a choice, the test holds us to the one that we made.
"""

from itertools import pairwise
from typing import Any

import pytest

from ratelimitd.http2.events import (
    DataReceived,
    HeadTooLarge,
    RequestReceived,
    TrailersReceived,
)
from ratelimitd.http2.headers import static_block
from tests.http2_peer import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GET,
    GOAWAY,
    HEADERS,
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
    STREAM_CLOSED,
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

BODY = b"hello"
HEAD_BLOCK = static_block([(b":status", b"200")])
PING_OCTETS = b"h2spec\0\0"


class Server(Peer):
    """A connection whose owner answers every request."""

    def feed(self, *parts: bytes) -> list[Any]:
        events: list[Any] = super().feed(*parts)
        for event in events:
            if type(event) is tuple:
                self._answer(event[0])
            elif isinstance(event, DataReceived):
                self.connection.acknowledge(event.stream_id, event.flow_bytes)
                if event.ended:
                    self._answer(event.stream_id)
            elif isinstance(event, TrailersReceived) or (
                isinstance(event, (RequestReceived, HeadTooLarge)) and event.ended
            ):
                self._answer(event.stream_id)
        self.collect()
        return events

    def _answer(self, stream_id: int) -> None:
        self.connection.send_headers(stream_id, HEAD_BLOCK)
        self.connection.send_data(stream_id, BODY, ended=True)

    def answered(self, stream_id: int) -> bool:
        return any(sent.type == HEADERS and sent.stream_id == stream_id for sent in self.sent)

    def pings(self) -> bool:
        """Whether the connection still answers."""
        self.feed(ping(PING_OCTETS))
        return Frame(PING, ACK, 0, PING_OCTETS) in self.sent


@pytest.fixture
def server():
    return Server()


def connection_error(server, code):
    assert [found for _, found in server.goaways] == [code]
    assert server.connection.ended is not None


def stream_error(server, stream_id, code):
    assert server.resets == [(stream_id, code)]
    assert server.connection.ended is None


# Generic


def test_generic_1_the_first_frame_of_a_server_is_settings():
    server = Server(greeting=b"")
    server.feed(PREFACE)
    assert server.sent[0].type == SETTINGS
    assert server.sent[0].flags == 0


def test_generic_2_1_priority_on_an_idle_stream_is_accepted(server):
    server.feed(priority(1, weight=255))
    assert server.pings()


def test_generic_2_2_window_update_on_a_half_closed_stream_is_accepted(server):
    server.feed(settings(s4=0), server.get(1), window_update(1, 1))
    assert Frame(DATA, 0, 1, BODY[:1]) in server.sent


def test_generic_2_3_priority_on_a_half_closed_stream_is_accepted(server):
    server.feed(settings(s4=0), server.get(1), priority(1), window_update(1, 1))
    assert Frame(DATA, 0, 1, BODY[:1]) in server.sent


def test_generic_2_4_rst_stream_on_a_half_closed_stream_is_accepted(server):
    server.feed(settings(s4=0), server.get(1), rst_stream(1))
    assert server.pings()


def test_generic_2_5_priority_on_a_closed_stream_is_accepted(server):
    server.feed(server.get(1))
    server.feed(priority(1))
    assert server.pings()


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        ([END_STREAM], [b"test"]),
        ([0, END_STREAM], [b"test", b"test"]),
        ([END_STREAM | PADDED], [b"\x05test" + bytes(5)]),
    ],
)
def test_generic_3_1_data_is_accepted_in_one_frame_in_several_and_padded(server, flags, body):
    frames = [data(1, part, flag) for flag, part in zip(flags, body, strict=True)]
    server.feed(server.head(1), *frames)
    assert server.answered(1)


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [(0, b"", b""), (PADDED, b"\x08", bytes(8)), (PRIORITIZED, b"\0\0\0\0\xff", b"")],
)
def test_generic_3_2_headers_are_accepted_plain_padded_and_with_priority(
    server, flags, before, after
):
    payload = before + server.block(GET) + after
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM | flags, 1, payload))
    assert server.answered(1)


@pytest.mark.parametrize(
    "octets",
    [
        priority(1, weight=0),
        priority(1, weight=255),
        priority(1, depends_on=3),
        priority(1, depends_on=0x8000_0003),
        priority(7),
    ],
)
def test_generic_3_3_priority_is_accepted_and_requests_go_on(server, octets):
    server.feed(octets, server.get(1))
    assert server.answered(1)


def test_generic_3_4_rst_stream_is_accepted(server):
    server.feed(server.head(1), rst_stream(1))
    assert server.pings()


def test_generic_3_5_settings_are_acknowledged(server):
    server.feed(settings(s1=4_096, s2=1, s3=100, s4=65_535, s5=16_384, s6=100))
    assert server.sent == [Frame(SETTINGS, ACK, 0, b"")]


def test_generic_3_7_ping_is_acknowledged(server):
    assert server.pings()


def test_generic_3_8_goaway_is_accepted(server):
    server.feed(frame(GOAWAY, 0, 0, bytes(8) + b"h2spec"))
    assert server.pings()


def test_generic_3_9_window_update_is_accepted_on_the_connection_and_on_a_stream(server):
    server.feed(window_update(0, 1))
    server.feed(server.head(1), window_update(1, 1), last_data(1))
    assert server.pings()
    assert server.answered(1)


@pytest.mark.parametrize("cuts", [(5,), (5, 10)])
def test_generic_3_10_continuation_is_accepted_once_and_more_often(server, cuts):
    block = server.block([*GET, ("user-agent", "h2spec")])
    edges = [0, *cuts, len(block)]
    parts = [block[low:high] for low, high in pairwise(edges)]
    frames = [frame(HEADERS, END_STREAM, 1, parts[0])]
    frames += [continuation(1, part) for part in parts[1:-1]]
    server.feed(*frames, last_continuation(1, parts[-1]))
    assert server.answered(1)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_generic_4_requests_of_any_method_are_accepted(server, method):
    fields = [(":method", method), *GET[1:]]
    if method == "POST":
        server.feed(server.head(1, fields), last_data(1, b"test"))
    else:
        server.feed(server.get(1, fields))
    assert server.answered(1)


def test_generic_4_trailers_are_accepted(server):
    trailers = server.head(1, [("x-test", "ok")], END_HEADERS | END_STREAM)
    server.feed(server.head(1, [*POST, ("trailer", "x-test")]), data(1, b"test"), trailers)
    assert server.answered(1)


PLAIN = b"\x82\x86\x84"  # GET / over http


@pytest.mark.parametrize(
    "representation",
    [
        b"\x90",  # indexed: accept-encoding: gzip, deflate
        b"\x7a\x06h2spec",  # literal with incremental indexing, indexed name
        b"\x7a\x84\x9c\x48\xac\xa4",  # the same by Huffman
        b"\x40\x04test\x06h2spec",  # literal with incremental indexing, new name
        b"\x0f\x2b\x06h2spec",  # literal without indexing, indexed name
        b"\x00\x04test\x06h2spec",  # literal without indexing, new name
        b"\x1f\x2b\x06h2spec",  # literal never indexed, indexed name
        b"\x10\x04test\x06h2spec",  # literal never indexed, new name
    ],
)
def test_generic_5_every_representation_of_a_field_is_accepted(server, representation):
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, PLAIN + representation))
    assert server.answered(1)


@pytest.mark.parametrize("updates", [b"\x20", b"\x20\x3f\xe1\x1f"])
def test_generic_5_table_size_updates_are_accepted(server, updates):
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, updates + PLAIN))
    assert server.answered(1)


# RFC 9113


def test_http2_3_4_an_invalid_preface_ends_the_connection():
    server = Server(greeting=b"")
    server.feed(b"INVALID CONNECTION PREFACE\r\n\r\n")
    connection_error(server, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "octets",
    [
        b"\0\0\x08\x16\0\0\0\0\0" + bytes(8),  # an unknown type
        b"\0\0\x08\x06\x16\0\0\0\0" + bytes(8),  # undefined flags of a PING
        b"\0\0\x08\x06\x16\x80\0\0\0" + bytes(8),  # the reserved bit
    ],
)
def test_http2_4_1_what_has_no_meaning_is_ignored(server, octets):
    server.feed(octets)
    assert server.pings()


def test_http2_4_2_a_frame_of_16384_octets_is_accepted(server):
    server.feed(server.head(1), last_data(1, bytes(16_384)))
    assert server.answered(1)


@pytest.mark.parametrize("frame_type", [DATA, HEADERS])
def test_http2_4_2_a_larger_frame_is_refused(server, frame_type):
    server.feed(server.head(1))
    server.feed(frame(frame_type, END_STREAM, 3 if frame_type == HEADERS else 1, bytes(16_385)))
    connection_error(server, FRAME_SIZE_ERROR)


def test_http2_4_3_an_invalid_block_ends_the_connection(server):
    # A literal with a Huffman code that ends in EOS.
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x00\x81\xff\x81\xff"))
    connection_error(server, COMPRESSION_ERROR)


@pytest.mark.parametrize(
    "intruder", [priority(1), frame(HEADERS, END_HEADERS, 3, PLAIN), last_data(1)]
)
def test_http2_4_3_and_6_2_nothing_comes_within_a_block(server, intruder):
    server.feed(frame(HEADERS, 0, 1, PLAIN), intruder)
    connection_error(server, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "octets",
    [
        data(1, b"test", END_STREAM),
        rst_stream(1),
        window_update(1, 100),
        last_continuation(1, PLAIN),
    ],
)
def test_http2_5_1_an_idle_stream_takes_headers_and_priority_alone(server, octets):
    server.feed(octets)
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_1_data_on_a_half_closed_stream_resets_it(server):
    server.feed(settings(s4=0), server.get(1))
    server.feed(last_data(1, b"test"))
    stream_error(server, 1, STREAM_CLOSED)


def test_http2_5_1_headers_on_a_half_closed_stream_reset_it(server):
    server.feed(settings(s4=0), server.get(1))
    server.feed(server.get(1))
    stream_error(server, 1, STREAM_CLOSED)


def test_http2_5_1_data_after_rst_stream_is_an_error(server):
    server.feed(server.head(1), rst_stream(1, CANCEL), last_data(1, b"test"))
    stream_error(server, 1, STREAM_CLOSED)


def test_http2_5_1_headers_after_rst_stream_are_an_error(server):
    server.feed(server.head(1), rst_stream(1, CANCEL), server.get(1))
    connection_error(server, STREAM_CLOSED)


def test_http2_5_1_data_on_a_closed_stream_is_an_error(server):
    server.feed(server.get(1))
    server.feed(last_data(1, b"test"))
    stream_error(server, 1, STREAM_CLOSED)


def test_http2_5_1_headers_on_a_closed_stream_end_the_connection(server):
    server.feed(server.get(1))
    server.feed(server.get(1))
    connection_error(server, STREAM_CLOSED)


@pytest.mark.parametrize("before", ["half closed", "reset", "closed"])
def test_http2_5_1_continuation_without_a_block_ends_the_connection(server, before):
    server.feed(settings(s4=0 if before == "half closed" else 100))
    server.feed(server.head(1) + rst_stream(1) if before == "reset" else server.get(1))
    server.feed(last_continuation(1, PLAIN))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_1_1_an_even_identifier_ends_the_connection(server):
    server.feed(server.get(2))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_1_1_a_lower_identifier_ends_the_connection(server):
    server.feed(server.get(5), server.get(3))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_1_2_streams_over_the_announced_number_are_refused(server):
    server.feed(settings(s4=0), *(server.get(stream_id) for stream_id in range(1, 514, 2)))
    stream_error(server, 513, REFUSED_STREAM)


def test_http2_5_3_1_a_stream_that_depends_on_itself_is_an_error(server):
    payload = b"\0\0\0\1\xff" + PLAIN
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM | PRIORITIZED, 1, payload))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_3_1_so_is_a_priority_that_says_so(server):
    server.feed(priority(1, depends_on=1))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_5_4_1_a_broken_ping_is_answered_by_goaway(server):
    server.feed(ping(bytes(6)))
    connection_error(server, FRAME_SIZE_ERROR)


def test_http2_5_5_an_unknown_frame_within_a_block_ends_the_connection(server):
    server.feed(frame(HEADERS, END_STREAM, 1, PLAIN), frame(0xA, 0, 1, bytes(8)))
    connection_error(server, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (last_data(0, b"test"), PROTOCOL_ERROR),  # 6.1
        (frame(HEADERS, END_HEADERS | END_STREAM, 0, PLAIN), PROTOCOL_ERROR),  # 6.2
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + PLAIN), PROTOCOL_ERROR),
        (priority(0), PROTOCOL_ERROR),  # 6.3
        (frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
        (rst_stream(0), PROTOCOL_ERROR),  # 6.4
        (rst_stream(1), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, b"\0"), FRAME_SIZE_ERROR),  # 6.5
        (frame(SETTINGS, 0, 1, b"\0\3\0\0\0\x64"), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"\0\3\0"), FRAME_SIZE_ERROR),
        (settings(s2=2), PROTOCOL_ERROR),  # 6.5.2
        (settings(s4=2**31), FLOW_CONTROL_ERROR),
        (settings(s5=16_383), PROTOCOL_ERROR),
        (settings(s5=2**24), PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),  # 6.7
        (ping(bytes(6)), FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),  # 6.8
        (window_update(0, 0), PROTOCOL_ERROR),  # 6.9
        (frame(0x8, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
        (window_update(0, 2**31 - 1), FLOW_CONTROL_ERROR),  # 6.9.1
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + PLAIN), PROTOCOL_ERROR),  # 8.4
    ],
)
def test_http2_6_a_broken_frame_ends_the_connection(server, octets, code):
    server.feed(octets)
    connection_error(server, code)


def test_http2_6_1_padding_longer_than_its_frame_ends_the_connection(server):
    server.feed(server.head(1), data(1, b"\x05test", PADDED | END_STREAM))
    connection_error(server, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "octets",
    [
        settings(s255=1),  # 6.5.2: an unknown setting
        settings(s3=100),
        frame(PING, ACK, 0, b"invalid\0"),  # 6.7: nobody asked
        frame(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff"),  # 7: an unknown code
    ],
)
def test_http2_6_5_2_6_7_and_7_what_is_unknown_is_ignored(server, octets):
    server.feed(octets)
    assert server.pings()


def test_http2_7_an_unknown_code_of_rst_stream_is_accepted(server):
    server.feed(server.head(1), rst_stream(1, 0xFF))
    assert server.pings()


def test_http2_6_5_3_of_several_values_the_last_one_stands(server):
    server.feed(settings(s4=100, s1=4_096) + settings(s4=1), server.get(1))
    assert [len(sent.payload) for sent in server.sent if sent.type == DATA] == [1]


def test_http2_6_9_1_an_answer_goes_as_far_as_the_window(server):
    server.feed(settings(s4=1), server.get(1))
    assert [sent.payload for sent in server.sent if sent.type == DATA] == [BODY[:1]]


def test_http2_6_9_a_window_of_a_stream_grows_by_something(server):
    server.feed(server.head(1), window_update(1, 0))
    stream_error(server, 1, PROTOCOL_ERROR)


def test_http2_6_9_1_a_window_of_a_stream_has_a_maximum(server):
    server.feed(server.head(1), window_update(1, 2**31 - 1))
    stream_error(server, 1, FLOW_CONTROL_ERROR)


def test_http2_6_9_2_a_changed_initial_window_holds_for_open_streams(server):
    server.feed(settings(s4=0), server.get(1))
    assert not [sent for sent in server.sent if sent.type == DATA]
    server.feed(settings(s4=1))
    assert [sent.payload for sent in server.sent if sent.type == DATA] == [BODY[:1]]


def test_http2_6_9_2_a_window_may_become_negative(server):
    server.feed(settings(s4=3), server.get(1))
    server.feed(settings(s4=2), window_update(1, 2))
    assert [sent.payload for sent in server.sent if sent.type == DATA] == [BODY[:3], BODY[3:4]]


@pytest.mark.parametrize("stray", [b"", "headers", "continuation", "data"])
def test_http2_6_10_continuation_follows_headers_without_their_end(server, stray):
    if stray == b"":
        parts = continuation(1), last_continuation(1)
        server.feed(frame(HEADERS, END_STREAM, 1, PLAIN), *parts)
        assert server.answered(1)
        return
    server.feed(
        {
            "headers": frame(HEADERS, END_HEADERS, 1, PLAIN),
            "continuation": frame(HEADERS, 0, 1, PLAIN) + last_continuation(1),
            "data": frame(HEADERS, END_HEADERS, 1, PLAIN) + data(1, b"test"),
        }[stray],
        last_continuation(1),
    )
    connection_error(server, PROTOCOL_ERROR)


@pytest.mark.parametrize("stream_id", [0, 3])
def test_http2_6_10_continuation_is_on_the_stream_of_its_headers(server, stream_id):
    server.feed(frame(HEADERS, 0, 1, PLAIN), last_continuation(stream_id))
    connection_error(server, PROTOCOL_ERROR)


def test_http2_8_1_a_second_head_has_to_end_the_request(server):
    server.feed(server.head(1), server.head(1, [("x-test", "ok")]))
    stream_error(server, 1, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "fields",
    [
        [*GET, ("X-TEST", "ok")],  # 8.2.1
        [*GET, (":test", "ok")],  # 8.3
        [*GET, (":status", "200")],
        [*GET[:3], ("x-test", "ok"), GET[3]],
        [*GET, ("connection", "keep-alive")],  # 8.2.2
        [*GET, ("te", "trailers, deflate")],
        [GET[0], GET[1], (":path", ""), GET[3]],  # 8.3.1
        GET[1:],
        [GET[0], *GET[2:]],
        [*GET[:2], GET[3]],
        [GET[0], *GET],
        [GET[1], *GET],
        [GET[2], *GET],
    ],
)
def test_http2_8_a_malformed_request_is_reset(server, fields):
    server.feed(server.get(1, fields))
    stream_error(server, 1, PROTOCOL_ERROR)


def test_http2_8_1_trailers_have_no_pseudo_header_fields(server):
    trailers = server.head(1, [(":method", "200")], END_HEADERS | END_STREAM)
    server.feed(server.head(1), data(1, b"test"), trailers)
    stream_error(server, 1, PROTOCOL_ERROR)


@pytest.mark.parametrize("parts", [[b"test"], [b"test", b"test"]])
def test_http2_8_1_1_the_content_length_is_that_of_the_body(server, parts):
    frames = [data(1, part) for part in parts[:-1]] + [last_data(1, parts[-1])]
    server.feed(server.head(1, [*POST, ("content-length", "1")]), *frames)
    stream_error(server, 1, PROTOCOL_ERROR)


# RFC 7541


@pytest.mark.parametrize(
    "representation",
    [
        b"\xc6",  # 2.3.3: an index behind the table
        b"\x80",  # 6.1: the index 0
        b"\x21",  # 4.2: an update at the end of a block
        b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff",  # 5.2: padding over 7 bits
        b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90",  # padding of zeros
        b"\x00\x85\xf2\xb2\x4a\x87\xff\xff\xff\xfd\x25\x42\x7f",  # EOS within a string
    ],
)
def test_hpack_a_broken_block_ends_the_connection(server, representation):
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, PLAIN + representation))
    connection_error(server, COMPRESSION_ERROR)


def test_hpack_6_3_an_update_over_the_announced_size_ends_the_connection(server):
    server.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x3f\xe2\x1f" + PLAIN))
    connection_error(server, COMPRESSION_ERROR)
