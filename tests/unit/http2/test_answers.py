import hpack
import pytest

from ratelimitd.http2.headers import static_block
from ratelimitd.http2.sending import UnaryAnswer
from tests.http2_peer import DATA, END_HEADERS, END_STREAM, HEADERS, Frame, frames_of

ANSWER = UnaryAnswer(b"head", b"trailers")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1_023, 1_024, 16_384])
def test_an_answer_is_three_frames_whatever_the_size_of_its_message(size):
    message = bytes(range(256)) * 64
    assert frames_of(ANSWER.octets(7, message[:size])) == [
        Frame(HEADERS, END_HEADERS, 7, b"head"),
        Frame(DATA, 0, 7, message[:size]),
        Frame(HEADERS, END_HEADERS | END_STREAM, 7, b"trailers"),
    ]


def test_the_stream_is_written_in_full():
    assert {sent.stream_id for sent in frames_of(ANSWER.octets(2**31 - 1, b"x"))} == {2**31 - 1}


def test_a_message_over_one_frame_is_not_for_this():
    with pytest.raises(ValueError):
        ANSWER.octets(1, bytes(16_385))


def test_a_static_block_is_the_same_for_every_connection_at_every_time():
    fields = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-status", b"0")]
    block = static_block(fields)
    decoder = hpack.Decoder()
    for _ in range(3):
        assert decoder.decode(block, raw=True) == fields
    assert not decoder.header_table.dynamic_entries
    strict = hpack.Decoder()
    strict.header_table_size = 0
    assert block == static_block(fields)
    assert block[0] == 0x88
