"""A connection against the h2 library as the server, and against frames that no server should send."""

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd_client.transport import h2_call, payloads
from ratelimitd_client.transport import h2_connection as module
from ratelimitd_client.transport.h2_call import Call
from ratelimitd_client.transport.h2_connection import Connection
from ratelimitd_client.transport.payloads import PeerError
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import Setting
from tests import http2_peer as peer

HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0"), ("grpc-message", "")]
SETTINGS = peer.frame(peer.SETTINGS, 0, 0)


def message(content):
    return b"\0" + len(content).to_bytes(4, "big") + content


def call_of(content=b"question", limit=4_096):
    block = h2_call.request_block("/s/m", "node", "http", ()) + h2_call.timeout_field(20)
    return Call(block, content, limit)


class Pair:
    """A connection and a server of another make, joined octet by octet."""

    def __init__(self, **settings):
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.server = h2.connection.H2Connection(config)
        values = {SettingCodes[name]: value for name, value in settings.items()}
        self.server.local_settings = Settings(client=False, initial_values=values)
        self.server.initiate_connection()
        self.client = Connection()
        self.events = []
        self.exchange()

    def exchange(self):
        """Move octets until nobody has any; return the calls that ended."""
        ended = []
        while octets := self.client.octets_to_send():
            self.events += self.server.receive_data(octets)
            ended += self.client.receive(self.server.data_to_send())
        return ended

    def served(self):
        ended = self.client.receive(self.server.data_to_send())
        return ended + self.exchange()

    def asked(self, content=b"question", limit=4_096):
        call = call_of(content, limit)
        self.client.begin(call)
        ended = self.exchange()
        assert ended == []
        return call

    def answer(self, call, content=b"answer"):
        self.server.send_headers(call.stream_id, HEADERS)
        self.server.send_data(call.stream_id, message(content))
        self.server.send_headers(call.stream_id, TRAILERS, end_stream=True)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def test_a_call_is_answered():
    pair = Pair()
    assert pair.client.is_ready
    call = pair.asked()
    [data] = pair.of(h2.events.DataReceived)
    assert data.data == message(b"question")
    assert pair.of(h2.events.StreamEnded)
    pair.answer(call)
    assert pair.served() == [call]
    assert (call.answer, call.code) == (b"answer", grpc.StatusCode.OK)
    assert pair.client.is_idle
    assert pair.client.answers == 1


def test_an_answer_may_come_octet_by_octet():
    pair = Pair()
    call = pair.asked()
    pair.answer(call, b"x" * 100)
    ended = []
    for octet in pair.server.data_to_send():
        ended += pair.client.receive(bytes((octet,)))
    assert ended == [call]
    assert call.answer == b"x" * 100


def test_padded_data_and_headers_with_a_priority_are_read():
    pair = Pair()
    call = pair.asked()
    block = payloads.encode_block(HEADERS)
    pair.client.receive(
        peer.frame(
            peer.HEADERS,
            peer.END_HEADERS | peer.PADDED | peer.PRIORITIZED,
            call.stream_id,
            b"\x02" + bytes(5) + block + bytes(2),
        )
        + peer.frame(peer.DATA, peer.PADDED, call.stream_id, b"\x01" + message(b"a") + b"\0")
    )
    trailers = payloads.encode_block(TRAILERS)
    ends = peer.END_STREAM
    assert not pair.client.receive(peer.frame(peer.HEADERS, ends, call.stream_id, trailers[:3]))
    rest = peer.frame(peer.CONTINUATION, peer.END_HEADERS, call.stream_id, trailers[3:])
    assert pair.client.receive(rest) == [call]
    assert call.answer == b"a"


def test_an_answer_of_trailers_alone_is_a_status():
    pair = Pair()
    call = pair.asked()
    fields = [*HEADERS, ("grpc-status", "3"), ("grpc-message", "bad%20input")]
    pair.server.send_headers(call.stream_id, fields, end_stream=True)
    assert pair.served() == [call]
    assert (call.code, call.details) == (grpc.StatusCode.INVALID_ARGUMENT, "bad input")


def test_a_long_question_goes_out_as_the_windows_open():
    pair = Pair(INITIAL_WINDOW_SIZE=10)
    content = bytes(range(256)) * 400
    call = pair.asked(content)
    got = b""
    while not pair.of(h2.events.StreamEnded):
        for event in pair.of(h2.events.DataReceived):
            got += event.data
            pair.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if len(got) < 100:
                pair.server.increment_flow_control_window(10_000, event.stream_id)
        pair.events.clear()
        pair.served()
    got += b"".join(event.data for event in pair.of(h2.events.DataReceived))
    assert got == message(content)
    pair.answer(call)
    assert pair.served() == [call]


def test_settings_change_the_windows_of_calls_that_have_begun():
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    pair.asked()
    assert not pair.of(h2.events.DataReceived)
    pair.server.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.served()
    assert pair.of(h2.events.StreamEnded)


def test_no_more_streams_are_open_than_the_peer_allows():
    pair = Pair(MAX_CONCURRENT_STREAMS=1)
    first, second, third = pair.asked(), pair.asked(), pair.asked()
    assert (first.stream_id, second.stream_id) == (1, 0)
    pair.client.cancel(second)
    pair.answer(first)
    assert pair.served() == [first]
    pair.answer(third)
    assert pair.served() == [third]


def test_a_call_that_is_given_up_is_reset_and_its_late_answer_ignored():
    pair = Pair()
    call, other = call_of(), call_of()
    pair.client.begin(call)
    pair.client.begin(other)
    pair.events += pair.server.receive_data(pair.client.octets_to_send())
    pair.answer(call)
    pair.answer(other)
    late = pair.server.data_to_send()
    pair.client.cancel(call)
    pair.client.cancel(call)
    [reset] = peer.frames_of(pair.client.octets_to_send())
    assert (reset.type, reset.stream_id, reset.code) == (peer.RST_STREAM, 1, peer.CANCEL)
    assert pair.client.receive(late) == [other]


def test_of_a_leaving_server_only_what_it_began_ends_as_it_says():
    pair = Pair(MAX_CONCURRENT_STREAMS=2)
    begun, above, waiting = pair.asked(), pair.asked(), pair.asked()
    pair.server.close_connection(last_stream_id=begun.stream_id)
    assert pair.client.receive(pair.server.data_to_send()) == [above, waiting]
    assert pair.client.is_draining
    assert above.unprocessed
    assert waiting.unprocessed
    assert not begun.ended
    assert pair.client.lose() == [begun]
    assert (begun.code, begun.unprocessed) == (grpc.StatusCode.UNAVAILABLE, False)


@pytest.mark.parametrize(
    ("code", "status", "unprocessed"),
    [
        (ErrorCodes.REFUSED_STREAM, "UNAVAILABLE", True),
        (ErrorCodes.CANCEL, "CANCELLED", False),
        (ErrorCodes.INTERNAL_ERROR, "INTERNAL", False),
    ],
)
def test_a_reset_ends_its_call(code, status, unprocessed):
    pair = Pair()
    call = pair.asked()
    pair.server.reset_stream(call.stream_id, code)
    assert pair.served() == [call]
    assert (call.code, call.unprocessed) == (grpc.StatusCode[status], unprocessed)


def test_an_answer_before_the_whole_question_resets_the_stream():
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    call = pair.asked()
    pair.server.send_headers(call.stream_id, [*HEADERS, ("grpc-status", "8")], end_stream=True)
    assert pair.served() == [call]
    assert call.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert pair.of(h2.events.StreamReset)


def test_an_answer_that_is_too_long_is_not_read():
    pair = Pair()
    call = pair.asked(limit=10)
    pair.server.send_headers(call.stream_id, HEADERS)
    pair.server.send_data(call.stream_id, message(b"x" * 11))
    assert pair.served() == [call]
    assert call.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert pair.of(h2.events.StreamReset)


def test_a_smaller_table_for_headers_is_acknowledged_with_the_next_call():
    pair = Pair()
    pair.server.update_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
    assert pair.served() == []
    call = pair.asked()
    pair.answer(call)
    assert pair.served() == [call]


def test_the_own_window_is_opened_again():
    pair = Pair()
    call = pair.asked(limit=2**23)
    pair.server.send_headers(call.stream_id, HEADERS)
    content = message(bytes(6 * 2**20))
    for at in range(0, len(content), 16_384):
        pair.server.send_data(call.stream_id, content[at : at + 16_384])
        assert pair.served() == []
    updates = pair.of(h2.events.WindowUpdated)
    assert [update.stream_id for update in updates] == [0, 0]  # that of the start is the first
    assert updates[1].delta == 2**22 + 16_384, "as much as came"


def test_pings_are_answered_and_answers_to_pings_noticed():
    pair = Pair()
    pair.server.ping(b"12345678")
    pair.served()
    [acknowledged] = pair.of(h2.events.PingAckReceived)
    assert acknowledged.ping_data == b"12345678"
    pair.client.ping()
    assert pair.client.awaits_ping
    pair.exchange()
    assert not pair.client.awaits_ping


def test_a_peer_that_changes_the_table_is_told_that_there_is_none():
    pair = Pair(HEADER_TABLE_SIZE=0)
    call = pair.asked()
    pair.answer(call)
    assert pair.served() == [call]


def test_a_connection_drains_before_its_streams_are_used_up():
    pair = Pair()
    pair.client._next_id = module.MAX_STREAM_ID + 1
    pair.client.begin(call_of())
    assert pair.client.is_draining


def settings(name, value):
    payload = name.to_bytes(2, "big") + value.to_bytes(4, "big")
    return peer.frame(peer.SETTINGS, 0, 0, payload)


BAD = {
    "no settings": (b"", peer.frame(peer.PING, 0, 0, bytes(8))),
    "acknowledged settings first": (b"", peer.frame(peer.SETTINGS, peer.ACK, 0)),
    "HTTP/1.1": (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a long frame": (SETTINGS, b"\0\x40\x01\0\0\0\0\0\1"),
    "data of nobody": (SETTINGS, peer.frame(peer.DATA, 0, 3, b"x")),
    "data on the connection": (SETTINGS, peer.frame(peer.DATA, 0, 0, b"x")),
    "headers of nobody": (SETTINGS, peer.frame(peer.HEADERS, peer.END_HEADERS, 2, b"\x88")),
    "begun headers of nobody": (SETTINGS, peer.frame(peer.HEADERS, 0, 5, b"\x88")),
    "a continuation of nothing": (SETTINGS, peer.frame(peer.CONTINUATION, 4, 1, b"\x88")),
    "an interrupted block": (
        SETTINGS + peer.frame(peer.HEADERS, 0, 1, b"\x88"),
        peer.frame(peer.DATA, 0, 1, b"x"),
    ),
    "a block of a table": (SETTINGS, peer.frame(peer.HEADERS, peer.END_HEADERS, 1, b"\xbe")),
    "endless continuations": (
        SETTINGS + peer.frame(peer.HEADERS, 0, 1, bytes(16_000)),
        peer.frame(peer.CONTINUATION, 0, 1, bytes(1_000)),
    ),
    "a push": (SETTINGS, peer.frame(peer.PUSH_PROMISE, 4, 1, bytes(4))),
    "a push allowed": (b"", settings(Setting.ENABLE_PUSH, 1)),
    "a huge window": (b"", settings(Setting.INITIAL_WINDOW_SIZE, 2**31)),
    "tiny frames": (b"", settings(Setting.MAX_FRAME_SIZE, 1)),
    "half a setting": (b"", peer.frame(peer.SETTINGS, 0, 0, bytes(5))),
    "settings on a stream": (SETTINGS, peer.frame(peer.SETTINGS, 0, 1)),
    "an acknowledgement with settings": (SETTINGS, peer.frame(peer.SETTINGS, 1, 0, bytes(6))),
    "a short ping": (SETTINGS, peer.frame(peer.PING, 0, 0, bytes(7))),
    "a short goodbye": (SETTINGS, peer.frame(peer.GOAWAY, 0, 0, bytes(7))),
    "a short reset": (SETTINGS, peer.frame(peer.RST_STREAM, 0, 1, bytes(3))),
    "a short update": (SETTINGS, peer.frame(peer.WINDOW_UPDATE, 0, 0, bytes(3))),
    "a window opened by nothing": (SETTINGS, peer.frame(peer.WINDOW_UPDATE, 0, 0, bytes(4))),
    "too large a window": (SETTINGS, peer.frame(peer.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")),
}


@pytest.mark.parametrize(("before", "bad"), BAD.values(), ids=BAD)
def test_what_no_server_may_send_ends_the_connection_and_its_calls(before, bad):
    client = Connection()
    call = call_of()
    client.begin(call)
    assert client.receive(before) == []
    with pytest.raises(PeerError) as refused:
        client.receive(bad)
    client.octets_to_send()
    assert client.give_up(refused.value) == [call]
    assert call.code is grpc.StatusCode.UNAVAILABLE
    [goodbye] = peer.frames_of(client.octets_to_send())
    assert (goodbye.type, goodbye.code) == (peer.GOAWAY, refused.value.code)
    assert client.is_idle
    assert client.is_draining


def test_a_block_that_continues_on_another_stream_ends_the_connection():
    client = Connection()
    for _ in range(2):
        client.begin(call_of())
    client.receive(SETTINGS + peer.frame(peer.HEADERS, 0, 1, b"\x88"))
    with pytest.raises(PeerError) as refused:
        client.receive(peer.frame(peer.CONTINUATION, peer.END_HEADERS, 3, b""))
    assert refused.value.code is ErrorCode.PROTOCOL_ERROR


EARLY_HINTS = payloads.encode_block([(":status", "103")])
FLOODS = {
    "pings": peer.frame(peer.PING, 0, 0, bytes(8)),
    "settings": SETTINGS,
    "empty data": peer.frame(peer.DATA, 0, 1),
    "unknown frames": peer.frame(0xEE, 0, 7, b"?"),
    "resets": peer.frame(peer.RST_STREAM, 0, 1, bytes(4)),
    "informational headers": peer.frame(peer.HEADERS, peer.END_HEADERS, 1, EARLY_HINTS),
    "empty continuations": peer.frame(peer.CONTINUATION, 0, 1),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_that_are_of_no_use_ends_the_connection(flood):
    client = Connection()
    client.begin(call_of())
    client.receive(SETTINGS)
    if flood == "empty continuations":
        client.receive(peer.frame(peer.HEADERS, 0, 1))
    with pytest.raises(PeerError) as refused:
        client.receive(FLOODS[flood] * (module.MAX_USELESS_FRAMES + 10))
    assert refused.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_headers_for_a_call_that_was_given_up_are_ignored():
    client = Connection()
    call = call_of()
    client.begin(call)
    client.receive(SETTINGS)
    client.cancel(call)
    late = peer.frame(peer.HEADERS, peer.END_HEADERS, 1, b"\xbe")
    assert client.receive(late + peer.frame(peer.WINDOW_UPDATE, 0, 1, bytes(4))) == []


def test_answers_that_are_too_long_together_end_the_connection():
    client = Connection()
    client.receive(SETTINGS)
    calls = [call_of(limit=2**23) for _ in range(3)]
    block = payloads.encode_block(HEADERS)
    for call in calls:
        client.begin(call)
        client.receive(peer.frame(peer.HEADERS, peer.END_HEADERS, call.stream_id, block))
    begin = b"\0\0\x40\0\0"
    for call in calls:
        client.receive(peer.frame(peer.DATA, 0, call.stream_id, begin))
    with pytest.raises(PeerError) as refused:  # noqa: PT012 - which of them it is does not matter
        for _ in range(200):
            for call in calls:
                client.receive(peer.frame(peer.DATA, 0, call.stream_id, bytes(16_384)))
    assert refused.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("increment", [0, 2**31 - 1])
def test_a_stream_whose_window_is_opened_wrongly_fails_alone(increment):
    pair = Pair(INITIAL_WINDOW_SIZE=1)
    call = pair.asked(bytes(100_000))
    update = peer.frame(peer.WINDOW_UPDATE, 0, call.stream_id, increment.to_bytes(4, "big"))
    assert pair.client.receive(update + update) == [call]
    assert call.code is grpc.StatusCode.INTERNAL


def test_data_that_ends_a_stream_is_an_answer_without_a_status():
    pair = Pair()
    call = pair.asked()
    pair.server.send_headers(call.stream_id, HEADERS)
    pair.server.send_data(call.stream_id, message(b"a"), end_stream=True)
    assert pair.served() == [call]
    assert call.code is grpc.StatusCode.UNKNOWN


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10),
            st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0xFF]),
            st.sampled_from([0, 1, 1, 1, 3, 5]),
            st.binary(max_size=20) | st.just(bytes(8)) | st.just(b"\0\0\0\1"),
        )
        | st.binary(max_size=30),
        max_size=20,
    )
)
def test_whatever_comes_a_call_ends_once_or_stays(parts):
    client = Connection()
    calls = [call_of(), call_of()]
    for call in calls:
        client.begin(call)
    octets = SETTINGS + b"".join(
        part if isinstance(part, bytes) else peer.frame(*part) for part in parts
    )
    try:
        ended = client.receive(octets)
    except PeerError as error:
        ended = client.give_up(error)
        assert client.is_idle
    else:
        ended += client.lose()
    assert sorted(map(id, ended)) == sorted(map(id, calls))
    assert all(call.ended for call in calls)


def test_of_a_connection_that_breaks_what_was_not_sent_may_be_sent_again():
    pair = Pair(MAX_CONCURRENT_STREAMS=1)
    sent, waiting = pair.asked(), pair.asked()
    assert pair.client.lose() == [sent, waiting]
    assert [call.unprocessed for call in (sent, waiting)] == [False, True]


def test_calls_wait_together_for_the_window_of_the_connection():
    pair = Pair()
    first, second = pair.asked(bytes(100_000)), pair.asked(bytes(10))
    third = pair.asked(bytes(10))
    pair.server.increment_flow_control_window(10)
    assert pair.served() == []
    assert all(call.unsent for call in (first, second, third))


def test_windows_that_grow_octet_by_octet_cost_one_look_at_what_waits():
    client = Connection()
    call = call_of(bytes(100))
    initial = peer.frame(peer.SETTINGS, 0, 0, b"\0\4" + bytes(4))
    client.receive(initial)
    client.begin(call)
    client.octets_to_send()
    grown = peer.frame(peer.WINDOW_UPDATE, 0, 0, b"\0\0\0\1")
    client.receive((grown + peer.frame(peer.WINDOW_UPDATE, 0, 1, b"\0\0\0\1")) * 50)
    assert client.octets_to_send() == peer.frame(peer.DATA, 0, 1, message(bytes(100))[:50])


def test_of_a_setting_that_comes_again_and_again_the_last_holds():
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    pair.asked()
    again = b"".join(b"\0\4" + size.to_bytes(4, "big") for size in (7, 2**31 - 1, 100))
    pair.client.receive(peer.frame(peer.SETTINGS, 0, 0, again))
    octets = pair.client.octets_to_send()
    assert message(b"question") in octets


def test_data_before_any_headers_is_no_part_of_what_is_kept():
    client = Connection()
    client.receive(SETTINGS)
    for stream_id in (1, 3):
        client.begin(call_of())
        client.receive(peer.frame(peer.DATA, 0, stream_id, b"x" * 1_000))
    assert client._buffered == 0
