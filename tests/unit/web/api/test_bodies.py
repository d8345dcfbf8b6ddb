import gzip

import pytest
from starlette.requests import ClientDisconnect, Request

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.web.api.http_call import (
    MAX_DISCARDED_BYTES,
    BodyTooLargeError,
    EncodingUnsupportedError,
    body_of,
    uncompressed,
)


class Sent:
    """A request whose body comes in these parts, after which the caller is gone."""

    def __init__(self, *parts, complete=True):
        self.parts = list(parts)
        self.complete = complete
        self.request = Request({"type": "http", "headers": []}, self.receive)

    async def receive(self):
        if not self.parts:
            return {"type": "http.disconnect"}
        body = self.parts.pop(0)
        more_body = bool(self.parts) or not self.complete
        return {"type": "http.request", "body": body, "more_body": more_body}


async def test_a_body_is_put_together():
    assert await body_of(Sent(b"ab", b"", b"cd").request, 4) == b"abcd"


async def test_one_that_is_too_long_is_refused_and_read_all_the_same():
    sent = Sent(b"abc", b"de", b"f")
    with pytest.raises(BodyTooLargeError) as refused:
        await body_of(sent.request, 4)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.message == "the body must be at most 4 bytes"
    assert not sent.parts


async def test_one_without_end_is_not_read_for_ever():
    sent = Sent(*[bytes(MAX_DISCARDED_BYTES // 2)] * 4)
    with pytest.raises(BodyTooLargeError):
        await body_of(sent.request, 4)
    assert len(sent.parts) == 1


async def test_a_caller_may_leave_before_the_end():
    with pytest.raises(ClientDisconnect):
        await body_of(Sent(b"a", complete=False).request, 4)


def test_a_body_is_inflated_up_to_the_bound():
    assert uncompressed(b"ab", "identity", 1) == b"ab"
    assert uncompressed(b"", "gzip", 2) == b""
    assert uncompressed(gzip.compress(b"ab", mtime=0), "gzip", 2) == b"ab"
    with pytest.raises(BodyTooLargeError):
        uncompressed(gzip.compress(b"abc", mtime=0), "gzip", 2)


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (b"ab", "gzip", StatusCode.INVALID_ARGUMENT),
        # Without the time of day, which would be in the names of the tests.
        (gzip.compress(b"ab", mtime=0)[:-1], "gzip", StatusCode.INVALID_ARGUMENT),
        (gzip.compress(b"ab", mtime=0) + b"c", "gzip", StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_cannot_be_inflated_is_refused(body, encoding, code):
    with pytest.raises(RpcError) as refused:
        uncompressed(body, encoding, 100)
    assert refused.value.code is code


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip"])
def test_another_encoding_than_gzip_is_refused(encoding):
    with pytest.raises(EncodingUnsupportedError, match="with gzip only"):
        uncompressed(b"ab", encoding, 100)
