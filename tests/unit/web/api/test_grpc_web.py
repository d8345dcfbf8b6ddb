import gzip

import pytest
from starlette.datastructures import Headers

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import MessageReader, framed
from ratelimitd.web.api.connect import GrpcWeb, Types
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.web.api.turns import at_once

TYPES = Types(pb.RateLimitRequest, pb.RateLimitResponse)
PLAIN = Headers({})


async def test_message_is_taken_out_of_its_frame():
    assert await GrpcWeb().message_of(b"\x00\x00\x00\x00\x02ab", PLAIN, TYPES, at_once) == b"ab"
    assert await GrpcWeb().message_of(b"\x00\x00\x00\x00\x00", PLAIN, TYPES, at_once) == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x03ab",
        b"\x00\x00\x00\x00\x01ab",
        b"\x00\x00\x00\x00\x00" * 2,
    ],
)
async def test_body_that_is_not_one_plain_message_is_refused(body):
    with pytest.raises(RpcError, match="must be one message") as refused:
        await GrpcWeb().message_of(body, PLAIN, TYPES, at_once)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


async def test_body_of_many_messages_is_refused_after_two(monkeypatch):
    read = []
    feed = MessageReader.feed

    def counted(reader, octets):
        for part in feed(reader, octets):
            read.append(part)
            yield part

    monkeypatch.setattr(MessageReader, "feed", counted)
    with pytest.raises(RpcError, match="must be one message"):
        await GrpcWeb().message_of(bytes(4 << 20), PLAIN, TYPES, at_once)
    assert len(read) == 2


async def test_message_may_be_compressed():
    body = framed(gzip.compress(b"ab"))
    headers = Headers({"grpc-encoding": "gzip"})
    assert await GrpcWeb().message_of(b"\x01" + body[1:], headers, TYPES, at_once) == b"ab"
    # The flag of the message decides, not the header.
    assert await GrpcWeb().message_of(framed(b"ab"), headers, TYPES, at_once) == b"ab"


async def test_answer_is_a_message_and_trailers():
    response = await GrpcWeb().answer(b"ab", TYPES, at_once)
    assert (response.status_code, response.media_type) == (200, "application/grpc-web+proto")
    assert response.body == b"\x00\x00\x00\x00\x02ab\x80\x00\x00\x00\x10grpc-status: 0\r\n"


def test_failure_has_trailers_only():
    error = RpcError(StatusCode.NOT_FOUND, "no é\r\n", b"\x08")
    response = GrpcWeb().failure(error)
    assert response.status_code == 200
    assert response.body[:1] == b"\x80"
    assert int.from_bytes(response.body[1:5], "big") == len(response.body) - 5
    assert response.body[5:].split(b"\r\n") == [
        b"grpc-status: 5",
        b"grpc-message: no %C3%A9%0D%0A",
        b"grpc-status-details-bin: CA",
        b"",
    ]


def test_timeout_has_a_unit():
    assert GrpcWeb().timeout_s(Headers({})) is None
    assert GrpcWeb().timeout_s(Headers({"grpc-timeout": "250m"})) == 0.25


@pytest.mark.parametrize("text", ["", "1", "S", "123456789S", "é"])
def test_malformed_timeout_is_refused(text):
    with pytest.raises(RpcError, match="grpc-timeout") as refused:
        GrpcWeb().timeout_s(Headers({"grpc-timeout": text}))
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
