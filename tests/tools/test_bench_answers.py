import re

import pytest
from hpack import Encoder

from bench.answers import Answers, WrongAnswerError
from ratelimitd_wire import frames
from ratelimitd_wire.frames import ACK, END_STREAM, FrameType

HEAD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]
GRANT = frames.window_update(0, 1000)


def answer(encoder, stream_id, trailers=OK, head=HEAD):
    return (
        frames.headers(stream_id, encoder.encode(head), ended=False)
        + frames.frame(FrameType.DATA, 0, stream_id, b"\0\0\0\0\x02\x08\x01")
        + frames.headers(stream_id, encoder.encode(trailers), ended=True)
    )


def test_an_answer_counts_once_wherever_the_reads_cut_it():
    encoder = Encoder()
    octets = b"".join(answer(encoder, stream_id) for stream_id in (1, 3, 5)) + GRANT
    for size in range(1, len(octets)):
        answers = Answers(streams=3)
        reads = [octets[at : at + size] for at in range(0, len(octets), size)]
        assert sum(answers.feed(read) for read in reads) == 3
        assert answers.credit == 65_535 + 1000


def test_an_answer_may_end_with_its_data():
    octets = frames.headers(1, Encoder().encode([(":status", "200")]), ended=False)
    octets += frames.frame(FrameType.DATA, END_STREAM, 1, b"Hello, world\n")
    assert Answers(streams=1).feed(octets) == 1


def test_another_grpc_status_ends_the_run():
    encoder, answers = Encoder(), Answers(streams=2)
    assert answers.feed(answer(encoder, 1)) == 1
    with pytest.raises(WrongAnswerError, match="grpc-status"):
        answers.feed(answer(encoder, 3, trailers=[("grpc-status", "8")]))


def test_another_http_status_ends_the_run():
    octets = frames.headers(1, Encoder().encode([(":status", "404")]), ended=True)
    with pytest.raises(WrongAnswerError, match="404"):
        Answers(streams=1).feed(octets)


def test_the_same_octets_are_looked_at_again_once_the_table_has_changed():
    encoder, answers = Encoder(), Answers(streams=1)
    for stream_id in (1, 3, 5):
        assert answers.feed(answer(encoder, stream_id)) == 1
    newest = bytes([0x80 | 62])
    # The newest field was `grpc-status: 0` all the time; now it is another.
    changed = answer(encoder, 7, trailers=[*OK, ("grpc-message", "none")])
    assert answers.feed(changed) == 1
    with pytest.raises(WrongAnswerError, match="none"):
        answers.feed(frames.headers(9, newest, ended=True))


@pytest.mark.parametrize(
    "octets", [frames.rst_stream(1, 7), frames.go_away(1, 0)], ids=["RST_STREAM", "GOAWAY"]
)
def test_a_call_or_connection_that_the_server_ends_ends_the_run(octets):
    with pytest.raises(WrongAnswerError):
        Answers(streams=1).feed(octets)


def test_fewer_streams_than_wanted_end_the_run():
    answers = Answers(streams=65)
    with pytest.raises(WrongAnswerError, match="64"):
        answers.feed(frames.settings([(0x3, 64)]))


def test_settings_and_pings_are_answered():
    answers = Answers(streams=1)
    answers.feed(frames.settings([(0x3, 256)]) + frames.ping(b"12345678") + frames.SETTINGS_ACK)
    assert answers.to_send == frames.SETTINGS_ACK + frames.ping(b"12345678", ack=True)


def test_room_for_data_is_granted_before_it_is_used_up(monkeypatch):
    monkeypatch.setattr("bench.answers.WINDOW_BYTES", 20)
    answers = Answers(streams=2)
    answers.feed(frames.frame(FrameType.DATA, 0, 1, b"0123456789"))
    assert answers.to_send == b""
    answers.feed(frames.frame(FrameType.DATA, 0, 1, b"0"))
    assert answers.to_send == frames.window_update(0, 11)


def test_an_acknowledged_ping_is_not_answered():
    answers = Answers(streams=1)
    answers.feed(frames.frame(FrameType.PING, ACK, 0, b"12345678"))
    assert answers.to_send == b""


ALLOWED = re.compile(rb"\0\0\0\0\x02\x08\x01")


def test_every_answer_must_begin_as_one_that_allows():
    encoder, answers = Encoder(), Answers(streams=2, allowed=ALLOWED)
    octets = answer(encoder, 1) + frames.frame(FrameType.DATA, 0, 3, b"\0\0\0\0\2\x08\x02")
    assert answers.feed(octets[:-1]) == 1
    with pytest.raises(WrongAnswerError, match="x02"):
        answers.feed(octets[-1:])


def test_an_answer_without_a_message_allows_nothing():
    answers = Answers(streams=1, allowed=ALLOWED)
    head = frames.headers(1, Encoder().encode(HEAD), ended=False)
    with pytest.raises(WrongAnswerError, match="without a message"):
        answers.feed(head + frames.frame(FrameType.DATA, END_STREAM, 1, b""))
