"""One call: what header blocks and the parts of an answer make of it."""

import grpc
import hpack
import pytest

from ratelimitd_client.transport import h2_call, payloads
from ratelimitd_client.transport.h2_call import Call
from ratelimitd_wire.codes import ErrorCode

HEADERS = payloads.encode_block([(":status", "200"), ("content-type", "application/grpc")])
TRAILERS = payloads.encode_block([("grpc-status", "0")])
INTERIM = payloads.encode_block([(":status", "103")])
GATEWAY = payloads.encode_block([(":status", "503"), ("content-type", "text/html")])
ANSWER = b"\0\0\0\0\3abc"
DETAILS = "grpc-status-details-bin"


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


GRPC = [(":status", "200"), ("content-type", "application/grpc+proto")]


def read(*fields):
    return h2_call.read_head(payloads.encode_block(fields))


def test_the_headers_of_an_answer_hold_no_status_yet():
    assert read(*GRPC) == h2_call.Head(False, None, None, "", b"")


def test_trailers_hold_a_status_and_its_text():
    head = read(("grpc-status", "3"), ("grpc-message", "gr%C3%BC%C3%9Fe 100%"))
    assert (head.status, head.text) == (grpc.StatusCode.INVALID_ARGUMENT, "grüße 100%")


def test_trailers_hold_the_details_of_a_status():
    sent = payloads.encode_block([("grpc-status", "8"), (DETAILS, "CAgSAW5v")])
    call = answered(HEADERS, sent)
    assert (call.code, call.status_details) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        b"\x08\x08\x12\x01no",
    )
    call.restart()
    assert call.status_details == b""
    for value, details in (("CAg", b"\x08\x08"), ("CAg=", b"\x08\x08"), ("C", b""), ("", b"")):
        assert read(("grpc-status", "8"), (DETAILS, value)).status_details == details


@pytest.mark.parametrize("number", ["17", "-1", "x", ""])
def test_a_status_that_nobody_knows_is_unknown(number):
    assert read(*GRPC, ("grpc-status", number)).status is grpc.StatusCode.UNKNOWN


def test_no_more_of_a_text_is_read_than_anybody_would():
    assert len(read(("grpc-message", "x" * 5_000)).text) == h2_call.MAX_TEXT_BYTES
    assert read(("grpc-message", "%ff%")).text == "\ufffd%"


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        ("200", "UNKNOWN"),
        ("401", "UNAUTHENTICATED"),
        ("403", "PERMISSION_DENIED"),
        ("404", "UNIMPLEMENTED"),
        ("503", "UNAVAILABLE"),
        ("418", "UNKNOWN"),
    ],
)
def test_an_answer_that_is_none_of_grpc_is_refused(status, refusal):
    head = read((":status", status), ("content-type", "text/html"))
    assert head.refusal is grpc.StatusCode[refusal]


def test_an_interim_answer_is_none():
    assert read((":status", "103")).is_informational


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.02, "20m"),
        (0.0199, "20m"),
        (1e-9, "1m"),
        (3600, "3600000m"),
        (200_000, "200000S"),
        (2e8, "3333334M"),
        (1e10, "2777778H"),
        (1e300, "99999999H"),
    ],
)
def test_a_deadline_is_written_with_eight_digits_at_most(seconds, written):
    block = h2_call.timeout_field(h2_call.milliseconds(seconds))
    assert hpack.Decoder().decode(block) == [("grpc-timeout", written)]


def test_a_question_says_what_grpc_demands():
    block = h2_call.request_block("/s/m", "node:1", "https", (("authorization", "Bearer t"),))
    fields = dict(hpack.Decoder().decode(block))
    assert fields.pop("user-agent")
    assert fields == {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/s/m",
        ":authority": "node:1",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": "Bearer t",
    }


def test_a_reset_stands_for_a_status():
    assert h2_call.status_of_reset(ErrorCode.REFUSED_STREAM) is grpc.StatusCode.UNAVAILABLE
    assert h2_call.status_of_reset(12_345) is grpc.StatusCode.INTERNAL
