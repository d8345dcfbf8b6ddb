import asyncio
import contextlib
import socket
import time
from itertools import pairwise

import pytest
import uvloop
from starlette.responses import Response

from ratelimitd import fair_queue
from ratelimitd.errors import StartupError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.web import spop
from ratelimitd.web.spop import (
    FRAMES_PER_ITERATION,
    MAX_ARGUMENTS,
    Frame,
    FrameType,
    SpopConnection,
    SpopError,
    SpopServer,
    Status,
    arguments_of,
    frame,
    hello_answer,
    pairs,
    read_frame,
    variables,
    varint,
)

HELLO = {
    b"supported-versions": b"1.0, 2.0",
    b"max-frame-size": 16_380,
    b"capabilities": b"pipelining,async",
}
STRING = b"\x08"


def text(value):
    return varint(len(value)) + value


def message(*arguments, name=b"check"):
    typed = b"".join(text(key) + value for key, value in arguments)
    return text(name) + bytes([len(arguments)]) + typed


def notify(number=1, **arguments):
    payload = message(
        *(
            (key.encode().replace(b"_", b"-"), STRING + text(value))
            for key, value in arguments.items()
        )
    )
    return frame(FrameType.NOTIFY, payload, stream_id=7, frame_id=number)


@pytest.mark.parametrize(
    ("value", "octets"),
    [
        (0, b"\x00"),
        (239, b"\xef"),
        (240, b"\xf0\x00"),
        (2_287, b"\xff\x7f"),
        (2_288, b"\xf0\x80\x00"),
        (264_431, b"\xff\xff\x7f"),
        (264_432, b"\xf0\x80\x80\x00"),
    ],
)
def test_integers_have_the_lengths_of_the_protocol(value, octets):
    assert varint(value) == octets
    assert arguments_of(message((b"n", b"\x05" + octets))) == {b"n": str(value).encode()}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (b"\x00", b""),
        (b"\x11", b"true"),
        (b"\x01", b"false"),
        (b"\x02\x05", b"5"),
        (b"\x06\xc0\x00\x02\x07", b"192.0.2.7"),
        (b"\x07" + b"\x20\x01\x0d\xb8" + bytes(11) + b"\x01", b"2001:db8::1"),
        (b"\x08\x02ab", b"ab"),
        (b"\x09\x02\xff\x00", b"\xff\x00"),
    ],
)
def test_every_type_is_read_as_text(typed, value):
    several = message((b"First", typed)) + message((b"second", typed), name=b"other")
    assert arguments_of(several) == {b"first": value, b"second": value}


@pytest.mark.parametrize(
    "payload",
    [
        b"\x05che",
        b"\x05check",
        b"\x05check\x01",
        b"\x05check\x01\x01n",
        b"\x05check\x01\x01n\x0a",
        b"\x05check\x01\x01n\x06\x01",
        b"\x05check\x01\x01n\x05" + b"\xf0" + b"\xff" * 20,
    ],
)
def test_malformed_messages_are_refused(payload):
    with pytest.raises(SpopError) as caught:
        arguments_of(payload)
    assert caught.value.status is Status.INVALID


def test_written_frame_is_read_back():
    written = frame(FrameType.NOTIFY, b"payload", stream_id=1_000, frame_id=3)
    assert int.from_bytes(written[:4]) == len(written) - 4
    assert read_frame(written[4:]) == Frame(FrameType.NOTIFY, 1_000, 3, b"payload")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", Status.INVALID),
        (b"\x03", Status.INVALID),
        (b"\x03\x00\x00\x00\x00\x01\x01", Status.FRAGMENTED),
        (b"\x03\0\0\0\1\x01", Status.INVALID),
    ],
)
def test_frame_without_its_head_and_fragment_are_refused(data, status):
    with pytest.raises(SpopError) as caught:
        read_frame(data)
    assert caught.value.status is status


def test_variables_have_the_transaction_scope():
    assert variables({b"status": 429, b"x": b"y"}) == (
        b"\x01\x03\x02\x06status\x03" + varint(429) + b"\x01\x03\x02\x01x\x08\x01y"
    )


def test_hello_is_answered_with_the_common_capabilities():
    answer, is_health_check = hello_answer(pairs(HELLO))
    head = read_frame(answer[4:])
    assert (head.kind, is_health_check) == (FrameType.AGENT_HELLO, False)
    assert head.payload == pairs(
        {b"version": b"2.0", b"max-frame-size": 16_380, b"capabilities": b"pipelining"}
    )
    answer, _ = hello_answer(pairs({**HELLO, b"max-frame-size": 1_000_000}))
    assert pairs({b"max-frame-size": 65_536}) in answer


def test_hello_without_pipelining_has_empty_capabilities():
    answer, _ = hello_answer(pairs({**HELLO, b"capabilities": b""}))
    assert read_frame(answer[4:]).kind == FrameType.AGENT_HELLO


@pytest.mark.parametrize(
    ("missing", "status"),
    [(b"supported-versions", 5), (b"max-frame-size", 6), (b"capabilities", 7)],
)
def test_hello_without_a_mandatory_item_is_refused_with_the_status_of_the_protocol(missing, status):
    given = {name: value for name, value in HELLO.items() if name != missing}
    with pytest.raises(SpopError) as caught:
        hello_answer(pairs(given))
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({b"supported-versions": b"3.0"}, 8),
        ({b"max-frame-size": b"many"}, 4),
        ({b"max-frame-size": 255}, 9),
        ({b"max-frame-size": 10_000_000_000}, 9),
    ],
)
def test_hello_that_is_not_usable_is_refused_with_the_status_of_the_protocol(given, status):
    with pytest.raises(SpopError) as caught:
        hello_answer(pairs({**HELLO, **given}))
    assert caught.value.status == status


class Auth:
    """Records its requests, and answers when released."""

    def __init__(self):
        self.asked, self.ignored = [], 0
        self.proxies = {"127.0.0.1"}
        self.arrived = asyncio.Queue()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.response = Response(
            status_code=429,
            headers={"Retry-After": "5", "RateLimit": "r", "RateLimit-Policy": "p", "Other": "o"},
        )

    def trusts(self, peer):
        return peer in self.proxies

    def ignore(self):
        self.ignored += 1

    async def answer(self, request):
        self.asked.append(request)
        self.arrived.put_nowait(request)
        await self.may_answer.wait()
        return self.response


@pytest.fixture
async def auth():
    return Auth()


@pytest.fixture
async def server(auth):
    found = SpopServer(auth, "127.0.0.1", 0, reuse_port=True)
    found.address = await found.start()
    yield found
    await found.stop()
    await found.stop()


class Peer:
    """HAProxy, as far as needed."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def frame(self):
        size = int.from_bytes(await self.reader.readexactly(4))
        return read_frame(await self.reader.readexactly(size))

    def send(self, *frames):
        self.writer.write(b"".join(frames))

    async def ended(self):
        """Return the status of the final frame."""
        told = await self.frame()
        assert told.kind == FrameType.AGENT_DISCONNECT
        assert await self.reader.read() == b""
        return told.payload

    async def greet(self):
        self.send(frame(FrameType.HAPROXY_HELLO, pairs(HELLO)))
        assert (await self.frame()).kind == FrameType.AGENT_HELLO


@pytest.fixture
async def connect(server):
    async with contextlib.AsyncExitStack() as stack:

        async def connected(*, handshake=True):
            host, _, port = server.address.rpartition(":")
            peer = Peer(*await asyncio.open_connection(host, int(port)))
            stack.callback(peer.writer.close)
            if handshake:
                await peer.greet()
            return peer

        yield connected


def disconnect(status):
    return pairs({b"status-code": int(status), b"message": status.name.lower().encode()})


async def test_request_is_checked_and_its_answer_sets_variables(auth, connect):
    peer = await connect()
    peer.send(notify(3, x_forwarded_uri=b"/a", x_api_key=b"", query=b"cost=2"))
    answer = await peer.frame()
    assert answer[:3] == (FrameType.ACK, 7, 3)
    assert answer.payload == variables(
        {b"status": 429, b"retry_after": b"5", b"ratelimit": b"r", b"ratelimit_policy": b"p"}
    )
    [request] = auth.asked
    assert request.scope["query_string"] == b"cost=2"
    assert request.headers.raw == [(b"x-forwarded-uri", b"/a")]
    assert request.client.host == "127.0.0.1"


async def test_untrusted_peers_are_not_answered(auth, connect):
    auth.proxies = set()
    peer = await connect(handshake=False)
    peer.send(frame(FrameType.HAPROXY_HELLO, pairs(HELLO)))
    with contextlib.suppress(ConnectionError):
        assert await peer.reader.read() == b""
    assert not auth.asked
    assert auth.ignored == 1


async def test_connection_reset_by_its_peer_is_closed(auth):
    class Reset(asyncio.Transport):
        aborted = False

        def abort(self):
            self.aborted = True

    transport, connections = Reset(), {}
    SpopConnection(auth, connections, FairQueue(time.monotonic)).connection_made(transport)
    assert transport.aborted
    assert not connections


async def test_connections_share_the_frames_of_an_iteration_in_rotation(
    auth, connect, server, monkeypatch
):
    monkeypatch.setattr(fair_queue, "BUDGET_S", 60.0)
    auth.may_answer.clear()
    peers = [await connect() for _ in range(3)]
    for peer in peers:
        peer.send(*(notify(number) for number in range(3 * FRAMES_PER_ITERATION)))
    counts = [0]
    while counts[-1] < 9 * FRAMES_PER_ITERATION:
        await asyncio.sleep(0)
        pending = [len(one.pending) for one in server.connections]
        assert max(pending) - min(pending) <= 1
        counts.append(sum(pending))
    assert max(b - a for a, b in pairwise(counts)) == FRAMES_PER_ITERATION


def test_frame_with_too_many_arguments_is_refused():
    fits = message(*((b"", b"\x00") for _ in range(MAX_ARGUMENTS - 1)))
    assert arguments_of(fits) == {b"": b""}
    with pytest.raises(SpopError) as caught:
        arguments_of(fits + message())
    assert caught.value.status is Status.TOO_BIG


async def test_frames_may_arrive_in_any_pieces(auth, connect):
    peer = await connect()
    for octet in notify():
        peer.send(bytes([octet]))
        await peer.writer.drain()
        await asyncio.sleep(0)
    assert (await peer.frame()).kind == FrameType.ACK


async def test_pending_requests_of_a_connection_are_bounded(auth, connect, monkeypatch):
    monkeypatch.setattr(spop, "MAX_PENDING", 2)
    auth.may_answer.clear()
    peer = await connect()
    peer.send(*(notify(number) for number in range(5)))
    await auth.arrived.get()
    await auth.arrived.get()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(auth.asked) == 2
    auth.may_answer.set()
    assert {(await peer.frame()).frame_id for _ in range(5)} == set(range(5))


async def test_peer_that_reads_no_answers_is_no_longer_read(auth, connect, server):
    peer = await connect()
    [connection] = server.connections
    connection.pause_writing()
    peer.send(notify())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not auth.asked
    connection.resume_writing()
    assert (await peer.frame()).kind == FrameType.ACK


async def test_health_check_ends_after_the_hello(connect):
    peer = await connect(handshake=False)
    healthcheck = text(b"healthcheck") + b"\x11"
    peer.send(frame(FrameType.HAPROXY_HELLO, pairs(HELLO) + healthcheck))
    assert (await peer.frame()).kind == FrameType.AGENT_HELLO
    assert await peer.reader.read() == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (notify(), Status.INVALID),
        (frame(FrameType.ACK, b""), Status.INVALID),
        (frame(FrameType.HAPROXY_HELLO, pairs({})), Status.NO_VERSION),
        (frame(FrameType.HAPROXY_DISCONNECT, b""), Status.NORMAL),
        (b"\x00\x01\x00\x01", Status.TOO_BIG),
        (b"\x00\x00\x00\x00", Status.INVALID),
        (b"GET / HTTP/1.1\r\n", Status.TOO_BIG),
    ],
)
async def test_peer_without_a_valid_hello_is_disconnected_with_the_reason(connect, sent, status):
    peer = await connect(handshake=False)
    peer.send(sent)
    assert await peer.ended() == disconnect(status)


async def test_second_hello_or_malformed_request_ends_the_connection(auth, connect):
    for sent in (
        frame(FrameType.HAPROXY_HELLO, pairs(HELLO)),
        frame(FrameType.NOTIFY, b"\x05"),
    ):
        peer = await connect()
        peer.send(sent, notify())
        assert await peer.ended() == disconnect(Status.INVALID)
    assert not auth.asked


async def test_connection_beyond_the_bound_closes_the_longest_silent_one(connect, monkeypatch):
    monkeypatch.setattr(spop, "MAX_CONNECTIONS", 2)
    first, second = await connect(), await connect()
    first.send(notify())
    await first.frame()
    third = await connect()
    assert await second.ended() == disconnect(Status.NORMAL)
    for peer in (first, third):
        peer.send(notify())
        assert (await peer.frame()).kind == FrameType.ACK


async def test_connection_that_waits_for_an_answer_is_closed_only_if_all_wait(
    connect, auth, monkeypatch
):
    monkeypatch.setattr(spop, "MAX_CONNECTIONS", 2)
    auth.may_answer.clear()
    waiting = await connect()
    waiting.send(notify())
    await auth.arrived.get()
    idle = await connect()
    third = await connect()
    assert await idle.ended() == disconnect(Status.NORMAL)
    third.send(notify())
    await auth.arrived.get()
    await connect()  # the one that was heard longest ago goes
    assert await waiting.ended() == disconnect(Status.NORMAL)


@pytest.mark.parametrize(("uri", "expected"), [(b"", "/"), (b"/orders", "/orders")])
async def test_absent_path_is_the_root(connect, auth, uri, expected):
    peer = await connect()
    peer.send(notify(x_forwarded_uri=uri))
    await peer.frame()
    assert auth.asked[0].headers["x-forwarded-uri"] == expected


UNREAD_BYTES = 20_000_000
"""More than the kernel buffers for a peer that does not read."""


async def test_connection_beyond_the_bound_closes_an_unreading_one_at_once(
    connect, server, monkeypatch
):
    monkeypatch.setattr(spop, "MAX_CONNECTIONS", 1)
    stuck = await connect()
    [connection] = server.connections
    connection._transport.write(bytes(UNREAD_BYTES))
    await connect()
    assert connection not in server.connections
    received = 0
    with contextlib.suppress(ConnectionError):
        while octets := await stuck.reader.read(1_000_000):
            received += len(octets)
    assert received < UNREAD_BYTES


async def test_peer_that_ignores_its_disconnect_is_aborted_after_the_grace_period(
    connect, server, monkeypatch
):
    monkeypatch.setattr(spop, "CLOSING_GRACE_S", 0.1)
    await connect()
    [connection] = server.connections
    connection._transport.write(bytes(UNREAD_BYTES))
    await server.stop()
    assert [*server.connections] == [connection]
    while server.connections:  # noqa: ASYNC110 -- a protocol tells nobody
        await asyncio.sleep(0.01)


async def test_disconnected_peer_has_no_pending_requests(auth, connect, server):
    auth.may_answer.clear()
    peer = await connect()
    peer.send(notify())
    await auth.arrived.get()
    [connection] = server.connections
    [task] = connection.pending
    peer.writer.close()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not server.connections


async def test_stop_answers_requests_in_progress(auth, connect, server):
    auth.may_answer.clear()
    peer = await connect()
    peer.send(notify())
    await auth.arrived.get()
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    auth.may_answer.set()
    await stopping
    assert (await peer.frame()).kind == FrameType.ACK
    assert await peer.ended() == disconnect(Status.NORMAL)


async def test_stop_answers_requests_that_the_event_loop_has_not_read(auth, connect, server):
    peers = [await connect(), await connect()]
    for peer in peers:
        peer.send(notify())
    assert not auth.asked
    await server.stop()
    for peer in peers:
        assert (await peer.frame()).kind == FrameType.ACK
        assert await peer.ended() == disconnect(Status.NORMAL)


def test_stop_answers_a_request_of_a_connection_that_uvloop_has_just_accepted():
    async def scenario():
        server = SpopServer(Auth(), "127.0.0.1", 0, reuse_port=False)
        host, _, port = (await server.start()).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(frame(FrameType.HAPROXY_HELLO, pairs(HELLO)) + notify())
            await asyncio.sleep(0)
            await server.stop()
            received = b""
            while octets := await asyncio.to_thread(peer.recv, 65_536):
                received += octets
        assert variables({b"status": 429}) in received
        assert received.endswith(disconnect(Status.NORMAL))

    uvloop.run(scenario())  # asyncio would accept it after the stop


async def test_stop_ends_connections_one_after_the_other(auth, connect, server, monkeypatch):
    monkeypatch.setattr(spop, "STOP_POLL_S", 0.3)
    monkeypatch.setattr(spop, "STOP_SPREAD_S", 0.9)
    first, _, last = [await connect() for _ in range(3)]
    stopping = asyncio.create_task(server.stop())
    assert await first.ended() == disconnect(Status.NORMAL)
    last.send(notify())
    assert (await last.frame()).kind == FrameType.ACK
    assert await last.ended() == disconnect(Status.NORMAL)
    await stopping


async def test_stop_ends_after_the_grace_period_while_requests_wait(
    auth, connect, server, monkeypatch
):
    monkeypatch.setattr(spop, "STOP_GRACE_S", 0.1)
    auth.may_answer.clear()
    idle, waiting = await connect(), await connect()
    waiting.send(notify())
    await auth.arrived.get()
    stopping = asyncio.create_task(server.stop())
    assert await idle.ended() == disconnect(Status.NORMAL)
    assert not stopping.done()
    assert await waiting.ended() == disconnect(Status.NORMAL)
    await stopping


async def test_address_in_use_is_a_start_up_error_that_names_the_setting(auth):
    first = SpopServer(auth, "127.0.0.1", 0, reuse_port=False)
    host, _, port = (await first.start()).rpartition(":")
    with pytest.raises(StartupError, match=r"cannot listen on 127.0.0.1:\d+ \(SPOE_LISTEN\): "):
        await SpopServer(auth, host, int(port), reuse_port=False).start()
    await first.stop()


async def test_disconnect_of_a_client_is_never_reported(auth, connect):
    peer = await connect()
    peer.send(notify())
    await peer.frame()
    receiving = asyncio.ensure_future(auth.asked[0].receive())
    await asyncio.sleep(0)
    assert not receiving.done()
    receiving.cancel()
