"""One call: what the parts of an answer make of it."""

import grpc
import pytest

from ratelimitd_client.transport import frames
from ratelimitd_client.transport.h2_call import Call

HEADERS = frames.encode_block([(":status", "200"), ("content-type", "application/grpc")])
TRAILERS = frames.encode_block([("grpc-status", "0")])
INTERIM = frames.encode_block([(":status", "103")])
GATEWAY = frames.encode_block([(":status", "503"), ("content-type", "text/html")])
ANSWER = b"\0\0\0\0\3abc"


def answered(*parts, limit=100):
    """A call that got header blocks, bodies as bytearrays, and a last block, until it ended."""
    call = Call(b"", b"question", limit)
    for at, part in enumerate(parts, 1):
        if isinstance(part, bytearray):
            call.take_data(bytes(part))
        else:
            call.take_block(part, last=at == len(parts))
        if call.ended:
            break
    return call


def test_a_question_is_sent_with_its_length():
    call = Call(b"", b"abc", 100)
    assert (call.body, call.unsent) == (ANSWER, len(ANSWER))


def test_an_answer_may_come_in_parts_after_an_interim_one():
    body = [bytearray(ANSWER[at : at + 2]) for at in range(0, len(ANSWER), 2)]
    call = answered(INTERIM, HEADERS, *body, TRAILERS)
    assert call.answer == b"abc"
    assert answered(HEADERS, bytearray(b"\0\0\0\0\0"), TRAILERS).answer == b""


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([HEADERS, TRAILERS], "INTERNAL"),
        ([HEADERS, bytearray(ANSWER[:-1]), TRAILERS], "INTERNAL"),
        ([HEADERS, bytearray(ANSWER + b"d"), TRAILERS], "INTERNAL"),
        ([HEADERS, bytearray(b"\1" + ANSWER[1:]), TRAILERS], "INTERNAL"),
        ([HEADERS, bytearray(b"\0\0\0\0\x65"), TRAILERS], "RESOURCE_EXHAUSTED"),
        ([HEADERS, bytearray(ANSWER), HEADERS], "UNKNOWN"),
        ([HEADERS, HEADERS, TRAILERS], "INTERNAL"),
        ([bytearray(ANSWER), TRAILERS], "INTERNAL"),
        ([GATEWAY, bytearray(b"<html>"), TRAILERS], "UNAVAILABLE"),
        ([GATEWAY], "UNAVAILABLE"),
        ([HEADERS], "UNKNOWN"),
    ],
    ids=[
        "no message",
        "cut off",
        "two messages",
        "compressed",
        "too long",
        "no status",
        "headers twice",
        "no headers",
        "a gateway",
        "a gateway's headers alone",
        "headers alone",
    ],
)
def test_what_is_no_answer_is_a_status(parts, status):
    call = answered(*parts)
    assert (call.answer, call.code) == (None, grpc.StatusCode[status])


def test_a_stream_that_ends_with_its_body_has_no_status():
    call = answered(HEADERS, bytearray(ANSWER), HEADERS)
    call = Call(b"", b"", 10)
    call.end_without_trailers()
    assert call.code is grpc.StatusCode.UNKNOWN


def test_a_call_that_is_restarted_is_as_new():
    call = Call(b"block", b"question", 100)
    call.stream_id, call.unsent = 7, 0
    call.fail(grpc.StatusCode.UNAVAILABLE, "refused", unprocessed=True)
    call.restart()
    assert (call.block, call.stream_id) == (b"block", 0)
    assert not call.ended
    assert not call.unprocessed
    assert (call.code, call.details) == (grpc.StatusCode.OK, "")
    assert (call.body, call.unsent) == (b"\0\0\0\0\x08question", 13)
