"""What header blocks say: statuses of HTTP and gRPC, texts, deadlines."""

import grpc
import hpack
import pytest

from ratelimitd_client.transport import frames, h2_call
from ratelimitd_wire.codes import ErrorCode

GRPC = [(":status", "200"), ("content-type", "application/grpc+proto")]


def read(*fields):
    return h2_call.read_head(frames.encode_block(fields))


def test_the_headers_of_an_answer_hold_no_status_yet():
    assert read(*GRPC) == h2_call.Head(False, None, None, "")


def test_trailers_hold_a_status_and_its_text():
    head = read(("grpc-status", "3"), ("grpc-message", "gr%C3%BC%C3%9Fe 100%"))
    assert (head.status, head.text) == (grpc.StatusCode.INVALID_ARGUMENT, "grüße 100%")


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
