import hpack
import pytest

from ratelimitd.http2.errors import ConnectionFailureError, StreamFailureError
from ratelimitd.http2.headers import static_block
from ratelimitd.http2.limits import Limits
from ratelimitd.http2.sending import Sender, UnaryAnswer
from ratelimitd.http2.streams import UNTOUCHED, ReceiveWindow, State, Stream, Streams
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_ERROR,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    frames_of,
    settings,
)

HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
TRAILERS = ((b"grpc-status", b"0"), (b"x", b"value"))
HEAD_BLOCK, TRAILER_BLOCK = static_block(HEAD), static_block(TRAILERS)
ANSWER = UnaryAnswer(HEAD_BLOCK, TRAILER_BLOCK)
LAST = END_HEADERS | END_STREAM


class Half:
    """The sending half, with complete requests that wait for their answers."""

    def __init__(self, *stream_ids, limits=None, receive_bytes=1_000):
        self.streams = Streams()
        self.receive_window = ReceiveWindow(receive_bytes)
        self.sender = Sender(self.streams, self.receive_window, limits or Limits())
        self.decoder = hpack.Decoder()
        for stream_id in stream_ids:
            self.streams.add(stream_id, UNTOUCHED)

    def open(self, stream_id, held_bytes=0):
        stream = Stream(State.OPEN, ReceiveWindow(1_000))
        stream.held_bytes = held_bytes
        self.streams.add(stream_id, stream)
        return stream

    def sent(self):
        return frames_of(self.sender.take())

    def peer_settings(self, **values):
        through = self.sender.settings_changed(settings(**values)[9:])
        assert self.sent()[0] == Frame(SETTINGS, ACK, 0, b"")
        return through

    def fields(self, frame):
        return self.decoder.decode(frame.payload, raw=True)


def sizes(frames):
    return [(sent.stream_id, len(sent.payload)) for sent in frames if sent.type == DATA]


def test_take_is_empty_without_frames():
    assert Half().sender.take() == b""


def test_octets_are_taken_once_and_in_order():
    half = Half()
    half.sender.frame(b"one")
    half.sender.frame(b"two")
    assert half.sender.take() == b"onetwo"
    assert half.sender.take() == b""


# One message


def test_a_unary_answer_is_three_frames_and_closes_the_stream():
    half = Half(1)
    half.sender.send_unary(1, ANSWER, b"message")
    head, message, trailers = half.sent()
    assert (head.type, head.flags, half.fields(head)) == (HEADERS, END_HEADERS, list(HEAD))
    assert message == Frame(DATA, 0, 1, b"message")
    assert (trailers.type, trailers.flags) == (HEADERS, LAST)
    assert half.fields(trailers) == list(TRAILERS)
    assert not half.streams.live
    assert half.streams.answered_total == 1


def test_a_removed_stream_is_not_answered():
    half = Half(1)
    half.sender.send_unary(1, ANSWER, b"message")
    half.sender.take()
    half.sender.send_unary(1, ANSWER, b"message")
    half.sender.send_headers(1, HEAD_BLOCK)
    half.sender.send_trailers(1, TRAILER_BLOCK)
    assert half.sender.send_data(1, b"message")
    assert half.sender.take() == b""


@pytest.mark.parametrize("touch", [False, True])
def test_the_fast_path_and_the_general_path_send_the_same_octets(touch):
    half = Half(1)
    if touch:
        half.streams.own(1)
    half.sender.send_unary(1, ANSWER, b"message")
    assert half.sender.take() == ANSWER.octets(1, b"message")
    assert half.sender.send_data(1, b"") is True


@pytest.mark.parametrize("sizes_sent", [[16_384] * 5, [16_384, 20_000, 40_000, 10, 0, 16_384]])
def test_answers_respect_the_windows_and_the_frame_size(sizes_sent):
    half = Half(*range(1, 2 * len(sizes_sent), 2))
    for stream_id, size in zip(half.streams.live.copy(), sizes_sent, strict=True):
        half.sender.send_unary(stream_id, ANSWER, bytes(size))
    frames = sizes(frames_of(half.sender.take()))
    assert sum(size for _, size in frames) == 65_535
    assert max(size for _, size in frames) == 16_384
    assert half.sender.buffered_bytes == sum(sizes_sent) - 65_535
    half.sender.connection_window_grown(100_000)
    assert half.sender.buffered_bytes == 0
    rest = sizes(frames_of(half.sender.take()))
    assert sum(size for _, size in rest) == sum(sizes_sent) - 65_535


@pytest.mark.parametrize(("values", "sent"), [({"s4": 3}, {1: 3, 3: 3}), ({"s1": 0}, {1: 7, 3: 3})])
def test_answers_respect_the_settings_of_the_peer(values, sent):
    half = Half(1, 3)
    half.peer_settings(**values)
    for stream_id, message in ((1, b"message"), (3, b"abc")):
        half.sender.send_unary(stream_id, ANSWER, message)
    assert dict(sizes(frames_of(half.sender.take()))) == sent


def test_a_message_may_use_the_whole_window_of_the_connection():
    half = Half(*range(1, 20, 2))
    for stream_id in (1, 3, 5):
        half.sender.send_unary(stream_id, ANSWER, bytes(16_384))
    half.sender.send_unary(7, ANSWER, bytes(16_383))
    assert sum(size for _, size in sizes(half.sent())) == 65_535
    half.sender.send_unary(9, ANSWER, b"")
    assert not half.streams.live.get(9)
    half.sent()
    half.sender.send_unary(11, ANSWER, b"x")
    assert [sent.type for sent in half.sent()] == [HEADERS]
    assert half.sender.buffered_bytes == 1


def test_a_pending_message_is_sent_with_its_trailers_when_the_window_opens():
    half = Half(1, 3, 5, 7, 9)
    for stream_id in (1, 3, 5, 7):
        half.sender.send_unary(stream_id, ANSWER, bytes(16_384))
    assert [sent.type for sent in half.sent()][-2:] == [HEADERS, DATA]
    assert half.sender.buffered_bytes == 1
    assert half.sender.connection_window_grown(1) == []
    data, trailers = half.sent()
    assert data == Frame(DATA, 0, 7, b"\0")
    assert (trailers.type, trailers.flags) == (HEADERS, LAST)
    assert 7 not in half.streams.live
    assert (half.sender.buffered_bytes, half.sender.drained_bytes) == (0, 1)


def test_a_message_longer_than_a_frame_takes_several():
    half = Half(1)
    half.sender.send_unary(1, ANSWER, bytes(16_385))
    assert sizes(half.sent()) == [(1, 16_384), (1, 1)]
    assert half.sender.data_frames == 2


def test_a_small_initial_window_limits_each_stream_separately():
    half = Half(1, 3)
    half.peer_settings(s4=3)
    half.sender.send_unary(1, ANSWER, b"abc")
    half.sender.send_unary(3, ANSWER, b"abcd")
    assert sizes(half.sent()) == [(1, 3), (3, 3)]
    assert half.sender.stream_window_grown(3, 1) == []
    assert sizes(half.sent()) == [(3, 1)]
    assert not half.streams.live


# Streams of messages


def test_an_answer_can_be_headers_only():
    half = Half(1)
    half.sender.send_headers(1, HEAD_BLOCK, ended=True)
    (head,) = half.sent()
    assert head.flags == LAST
    assert not half.streams.live


def test_an_answer_can_be_sent_in_parts():
    half = Half(1)
    half.sender.send_headers(1, HEAD_BLOCK)
    assert half.sender.send_data(1, b"one")
    assert half.sender.send_data(1, b"two")
    half.sender.send_trailers(1, TRAILER_BLOCK)
    head, one, two, trailers = half.sent()
    assert half.fields(head) == list(HEAD)
    assert (one.payload, two.payload) == (b"one", b"two")
    assert half.fields(trailers) == list(TRAILERS)
    assert not half.streams.live


def test_data_can_end_an_answer():
    half = Half(1)
    half.sender.send_headers(1, HEAD_BLOCK)
    assert half.sender.send_data(1, b"all", ended=True)
    assert half.sent()[-1] == Frame(DATA, END_STREAM, 1, b"all")
    assert not half.streams.live


def test_an_answer_can_end_with_empty_data_without_a_window():
    half = Half(1)
    half.peer_settings(s4=0)
    assert half.sender.send_data(1, b"", ended=True)
    assert half.sent() == [Frame(DATA, END_STREAM, 1, b"")]


def test_empty_data_without_end_is_not_sent():
    half = Half(1)
    assert half.sender.send_data(1, b"")
    assert half.sent() == []


def test_data_waits_for_the_stream_window_and_its_end_is_reported():
    half = Half(1)
    half.peer_settings(s4=2)
    assert not half.sender.send_data(1, b"abcde")
    assert not half.sender.send_data(1, b"fg")
    assert half.sent() == [Frame(DATA, 0, 1, b"ab")]
    assert half.sender.stream_window_grown(1, 4) == []
    assert half.sent() == [Frame(DATA, 0, 1, b"cdef")]
    assert half.sender.stream_window_grown(1, 100) == [1]
    assert half.sent() == [Frame(DATA, 0, 1, b"g")]
    assert half.sender.send_data(1, b"more")


def test_pending_data_can_end_the_answer():
    half = Half(1)
    half.peer_settings(s4=2)
    assert not half.sender.send_data(1, b"abc", ended=True)
    assert half.sent() == [Frame(DATA, 0, 1, b"ab")]
    assert half.sender.stream_window_grown(1, 1) == []
    assert half.sent() == [Frame(DATA, END_STREAM, 1, b"c")]
    assert not half.streams.live


def test_trailers_may_follow_while_data_is_pending():
    half = Half(1)
    half.peer_settings(s4=2)
    half.sender.send_data(1, b"abc")
    assert not half.sender.send_data(1, b"", ended=True)
    half.sent()
    half.sender.stream_window_grown(1, 1)
    assert half.sent() == [Frame(DATA, END_STREAM, 1, b"c")]


def test_waiting_streams_send_one_frame_each_in_rotation():
    half = Half(1, 3, 5)
    half.peer_settings(s4=100_000)
    half.sender.send_data(1, bytes(65_535))
    for stream_id in (3, 5):
        half.sender.send_data(stream_id, bytes(40_000))
    half.sent()
    half.sender.connection_window_grown(1 << 20)
    assert [stream_id for stream_id, _ in sizes(half.sent())] == [3, 5, 3, 5, 3, 5]


def test_a_stream_without_a_window_does_not_block_another():
    half = Half(1, 3)
    half.peer_settings(s4=10)
    half.sender.send_data(1, bytes(20))
    half.sender.send_data(3, bytes(20))
    half.sent()
    half.sender.stream_window_grown(3, 10)
    assert sizes(half.sent()) == [(3, 10)]


def test_an_opened_stream_window_waits_for_the_connection_window():
    half = Half(1, 3)
    half.peer_settings(s4=65_535)
    half.sender.send_data(1, bytes(65_535))
    half.sender.send_data(3, bytes(70_000))
    half.sent()
    assert half.sender.stream_window_grown(3, 10) == []
    assert half.sent() == []
    half.sender.connection_window_grown(65_545)
    assert sum(size for _, size in sizes(half.sent())) == 65_545


# Settings and windows of the peer


def test_an_initial_window_can_be_lowered_below_what_was_sent():
    half = Half(1)
    half.sender.send_data(1, b"abc")
    half.sent()
    half.peer_settings(s4=1)
    assert not half.sender.send_data(1, b"d")
    assert half.sent() == []
    assert half.sender.stream_window_grown(1, 2) == []
    assert half.sent() == []
    assert half.sender.stream_window_grown(1, 1) == [1]
    assert half.sent() == [Frame(DATA, 0, 1, b"d")]


def test_a_higher_initial_window_releases_pending_data():
    half = Half(1, 3)
    half.peer_settings(s4=0)
    half.sender.send_data(1, b"abc")
    assert half.sender.settings_changed(settings(s4=2)[9:]) == []
    assert half.sent() == [Frame(SETTINGS, ACK, 0, b""), Frame(DATA, 0, 1, b"ab")]
    assert half.peer_settings(s4=3) == [1]


def test_an_initial_window_that_overflows_a_stream_ends_the_connection():
    half = Half(1)
    half.peer_settings(s4=0)
    half.sender.stream_window_grown(1, 1)
    half.peer_settings(s4=2**31 - 2)
    with pytest.raises(ConnectionFailureError) as caught:
        half.peer_settings(s4=2**31 - 1)
    assert caught.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_windows_grow_to_the_maximum_and_not_above():
    half = Half(1)
    half.sender.connection_window_grown(2**31 - 1 - 65_535)
    with pytest.raises(ConnectionFailureError) as caught:
        half.sender.connection_window_grown(1)
    assert caught.value.code is ErrorCode.FLOW_CONTROL_ERROR
    half.sender.stream_window_grown(1, 2**31 - 1 - 65_535)
    with pytest.raises(StreamFailureError) as stream_caught:
        half.sender.stream_window_grown(1, 1)
    assert stream_caught.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_a_smaller_table_is_signalled_before_the_next_block_even_a_prepared_one():
    half = Half(1, 3)
    half.peer_settings(s1=0)
    half.sender.send_unary(1, ANSWER, b"x")
    head, _, trailers = half.sent()
    assert head.payload == b"\x20" + ANSWER.head_block
    assert trailers.payload == ANSWER.trailer_block
    half.sender.send_unary(3, ANSWER, b"x")
    assert half.sender.take() == ANSWER.octets(3, b"x")


def test_a_table_that_was_smaller_in_between_is_signalled_once():
    half = Half(1, 3)
    half.peer_settings(s1=0)
    half.peer_settings(s1=4_096)
    half.sender.send_headers(1, HEAD_BLOCK)
    assert half.sent()[0].payload == b"\x20" + HEAD_BLOCK
    half.peer_settings(s1=100)
    half.sender.send_headers(3, HEAD_BLOCK)
    assert half.sent()[-1].payload == HEAD_BLOCK


def test_a_long_block_is_split_by_the_frame_size_of_the_peer():
    half = Half(1, 3)
    block = static_block([(b"x", bytes(range(256)) * 80)])
    half.sender.send_headers(1, block)
    first, second = half.sent()
    assert (first.type, second.type, second.flags) == (HEADERS, CONTINUATION, END_HEADERS)
    half.peer_settings(s5=1 << 20)
    half.sender.send_headers(3, block)
    assert len(half.sent()) == 1


# Ends


@pytest.mark.parametrize("ending", ["headers", "data", "trailers", "unary"])
def test_an_answer_that_ends_before_its_request_resets_the_stream(ending):
    half = Half()
    half.open(1)
    sender = half.sender
    {
        "headers": lambda: sender.send_headers(1, HEAD_BLOCK, ended=True),
        "data": lambda: sender.send_data(1, b"x", ended=True),
        "trailers": lambda: sender.send_trailers(1, TRAILER_BLOCK),
        "unary": lambda: sender.send_unary(1, ANSWER, b"x"),
    }[ending]()
    *_, last, reset = half.sent()
    assert last.flags & END_STREAM
    assert (reset.type, reset.code) == (RST_STREAM, NO_ERROR)
    assert not half.streams.live


def test_a_reset_stream_drops_pending_and_unacknowledged_octets():
    half = Half(receive_bytes=20)
    half.open(1, held_bytes=10)
    half.peer_settings(s4=0)
    half.sender.send_data(1, b"abc")
    half.sender.reset(1, ErrorCode.CANCEL)
    reset, credit = half.sent()
    assert (reset.type, reset.code) == (RST_STREAM, ErrorCode.CANCEL)
    assert credit == Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big"))
    assert half.sender.buffered_bytes == 0
    half.sender.connection_window_grown(10)
    assert half.sent() == []


def test_a_reset_stream_leaves_the_rotation():
    half = Half(1, 3)
    half.peer_settings(s4=100_000)
    half.sender.send_data(1, bytes(65_535))
    half.sender.send_data(3, b"waits for the connection")
    half.sender.reset(3, ErrorCode.CANCEL)
    half.sent()
    assert half.sender.connection_window_grown(100) == []
    assert half.sent() == []
    assert half.sender.buffered_bytes == 0


def test_an_answered_stream_acknowledges_its_held_octets():
    half = Half(receive_bytes=20)
    half.open(1, held_bytes=10).state = State.REMOTE_CLOSED
    half.sender.send_trailers(1, TRAILER_BLOCK)
    assert half.sent()[-1] == Frame(WINDOW_UPDATE, 0, 0, (10).to_bytes(4, "big"))


def test_forgetting_an_unknown_or_untouched_stream_sends_nothing():
    half = Half(1)
    half.sender.forget(1, discard=False)
    half.sender.forget(3, discard=False)
    assert half.sent() == []


# Bounds


def test_pending_octets_above_the_bound_overflow():
    half = Half(1, 3, limits=Limits(max_unread_bytes=10))
    half.peer_settings(s4=0)
    half.sender.send_data(1, bytes(10))
    assert not half.sender.overflowed
    half.sender.send_data(3, bytes(1))
    assert half.sender.overflowed
    assert half.sender.buffered_bytes == 0
    assert not half.streams.live


def test_nothing_is_sent_after_an_overflow():
    half = Half(1, 3, limits=Limits(max_unread_bytes=10))
    half.peer_settings(s4=0)
    half.sender.send_unary(1, ANSWER, bytes(11))
    assert half.sender.overflowed
    half.sender.take()
    half.sender.send_unary(3, ANSWER, b"x")
    half.sender.send_data(3, b"x")
    half.sender.send_trailers(3, TRAILER_BLOCK)
    assert half.sender.take() == b""


PLAIN = UnaryAnswer(b"head", b"trailers")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1_023, 1_024, 16_384])
def test_an_answer_is_three_frames_for_every_size_of_message(size):
    message = bytes(range(256)) * 64
    assert frames_of(PLAIN.octets(7, message[:size])) == [
        Frame(HEADERS, END_HEADERS, 7, b"head"),
        Frame(DATA, 0, 7, message[:size]),
        Frame(HEADERS, END_HEADERS | END_STREAM, 7, b"trailers"),
    ]


def test_the_stream_is_written_in_full():
    assert {sent.stream_id for sent in frames_of(PLAIN.octets(2**31 - 1, b"x"))} == {2**31 - 1}


def test_a_message_above_one_frame_is_refused():
    with pytest.raises(ValueError):
        PLAIN.octets(1, bytes(16_385))
