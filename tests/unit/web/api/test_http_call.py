import asyncio
import gzip

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.auth import is_loopback
from ratelimitd.web.api.http_call import (
    MAX_DISCARDED_BYTES,
    BodyTooLargeError,
    EncodingUnsupportedError,
    HttpCall,
    body_of,
    handled,
    http_call,
    peer_of,
    uncompressed,
)
from tests.unit.services.fake_call import FakeCall


def request(client=("192.0.2.1", 5), headers=()):
    return Request({"type": "http", "client": client, "headers": list(headers)})


@pytest.mark.parametrize(
    ("client", "peer"),
    [
        (("192.0.2.1", 50_000), "ipv4:192.0.2.1:50000"),
        (("::1", 50_000), "ipv6:[::1]:50000"),
        (("2001:db8::7", 1), "ipv6:[2001:db8::7]:1"),
        (("fe80::1%eth0", 1), "ipv6:[fe80::1%eth0]:1"),
        (("::ffff:192.0.2.1", 2), "ipv4:192.0.2.1:2"),
        (("testclient", 2), "unknown:"),
        (None, "unknown:"),
    ],
)
def test_peer_has_grpcs_format(client, peer):
    assert peer_of(request(client)) == peer


def test_unknown_peer_is_not_local():
    assert not is_loopback(http_call(request(None), "/s/m"))
    assert is_loopback(http_call(request(("127.0.0.1", 1)), "/s/m"))


def test_call_has_the_headers_of_its_request_and_no_certificate_or_deadline():
    call = http_call(request(headers=[(b"authorization", b"Bearer a"), (b"x", b"1")]), "/s/m")
    assert call.method == "/s/m"
    assert (call.metadata("authorization"), call.metadata("x")) == ("Bearer a", "1")
    assert call.metadata("y") is None
    assert list(call.peer_sans) == []
    assert call.time_remaining_s() is None


def test_login_replaces_the_authorization_header():
    headers = Headers({"authorization": "Bearer theirs", "x": "1"})
    call = HttpCall("/s/m", "unknown:", headers, "Bearer ours")
    assert (call.metadata("authorization"), call.metadata("x")) == ("Bearer ours", "1")


async def never():
    await asyncio.Event().wait()


def handle(handler, *, receive=never, timeout_s=None):
    deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    return handled(handler, b"in", FakeCall(), receive=receive, deadline_s=deadline_s)


async def test_immediate_answer_is_returned():
    assert await handle(lambda data, call: data + call.peer.encode()[:4]) == b"inipv4"


async def test_pending_answer_is_awaited():
    async def later(data, _call):
        await asyncio.sleep(0)
        return data

    assert await handle(later, timeout_s=60) == b"in"


async def test_error_of_the_handler_is_raised():
    async def fail(_data, _call):
        raise RpcError(StatusCode.NOT_FOUND, "no")

    with pytest.raises(RpcError, match="no"):
        await handle(fail)


async def test_handler_is_not_called_after_the_deadline():
    called = []
    with pytest.raises(RpcError) as refused:
        await handle(lambda data, call: called.append(data), timeout_s=0)
    assert refused.value.code is StatusCode.DEADLINE_EXCEEDED
    assert not called


class Work:
    """A handler that takes time and records how it ended."""

    def __init__(self):
        self.started = asyncio.Event()
        self.cancelled = False

    async def __call__(self, _data, _call):
        self.started.set()
        try:
            await never()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_work_ends_at_its_deadline():
    work = Work()
    with pytest.raises(RpcError) as refused:
        await handle(work, timeout_s=0.01)
    assert refused.value.code is StatusCode.DEADLINE_EXCEEDED
    assert work.cancelled


async def test_work_ends_when_the_caller_disconnects():
    work = Work()
    events = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def leave():
        await work.started.wait()
        return events.pop(0)

    with pytest.raises(ClientDisconnect):
        await handle(work, receive=leave)
    assert work.cancelled


async def test_work_ends_when_the_request_is_cancelled():
    work = Work()
    request = asyncio.create_task(handle(work))
    await work.started.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert work.cancelled


class Sent:
    """A request whose body arrives in these parts, followed by a disconnect."""

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


async def test_body_parts_are_joined():
    assert await body_of(Sent(b"ab", b"", b"cd").request, 4) == b"abcd"


async def test_oversized_body_is_refused_after_reading_it():
    sent = Sent(b"abc", b"de", b"f")
    with pytest.raises(BodyTooLargeError) as refused:
        await body_of(sent.request, 4)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.message == "the body must be at most 4 bytes"
    assert not sent.parts


async def test_endless_body_is_read_up_to_a_bound():
    sent = Sent(*[bytes(MAX_DISCARDED_BYTES // 2)] * 4)
    with pytest.raises(BodyTooLargeError):
        await body_of(sent.request, 4)
    assert len(sent.parts) == 1


async def test_caller_may_disconnect_before_the_end_of_the_body():
    with pytest.raises(ClientDisconnect):
        await body_of(Sent(b"a", complete=False).request, 4)


def test_body_is_inflated_up_to_the_bound():
    assert uncompressed(b"ab", "identity", 1) == b"ab"
    assert uncompressed(b"", "gzip", 2) == b""
    for encoding in ("gzip", "GZIP", "x-gzip"):
        assert uncompressed(gzip.compress(b"ab", mtime=0), encoding, 2) == b"ab"
    with pytest.raises(BodyTooLargeError):
        uncompressed(gzip.compress(b"abc", mtime=0), "gzip", 2)


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (b"ab", "gzip", StatusCode.INVALID_ARGUMENT),
        # Without the time of day, which would appear in the names of the tests.
        (gzip.compress(b"ab", mtime=0)[:-1], "gzip", StatusCode.INVALID_ARGUMENT),
        (gzip.compress(b"ab", mtime=0) + b"c", "gzip", StatusCode.INVALID_ARGUMENT),
    ],
)
def test_invalid_compression_is_refused(body, encoding, code):
    with pytest.raises(RpcError) as refused:
        uncompressed(body, encoding, 100)
    assert refused.value.code is code


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip"])
def test_other_encodings_than_gzip_are_refused(encoding):
    with pytest.raises(EncodingUnsupportedError, match="with gzip only"):
        uncompressed(b"ab", encoding, 100)
