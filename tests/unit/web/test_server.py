import asyncio
import socket
import ssl
import stat
from collections import Counter
from itertools import count
from typing import NamedTuple

import pytest
import trustme
import uvloop
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from ratelimitd.errors import StartupError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc import acceptor
from ratelimitd.rpc.tls import TlsFiles, web_context
from ratelimitd.web import server as web_server
from ratelimitd.web.server import (
    EVENTS_PER_STEP,
    MAX_HEADER_BYTES,
    MAX_HEADER_LINES,
    HttpServer,
    listening_at,
    short_name,
)
from tests.unit.rpc.test_tls_contexts import write

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello(scope, receive, send):
    await PlainTextResponse("hello")(scope, receive, send)


class Slow:
    """An application that answers when released."""

    def __init__(self):
        self.began, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.began.set()
        await self.may_go_on.wait()
        await hello(scope, receive, send)


class Listening(NamedTuple):
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    """TLS context of a client."""


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, ca):
    found = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "not-there.pem")
    write(found, ca)
    return found


@pytest.fixture(scope="module")
def client(ca):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


connections_of_test: list[asyncio.StreamWriter] = []
"""Those that :func:`talk` opened; closed before their server stops."""


def close_connections():
    while connections_of_test:
        connections_of_test.pop().close()


@pytest.fixture(params=["http", "https"])
async def listening(request, files, client):
    """Start servers, over plaintext and over TLS."""
    servers = []
    tls = request.param == "https"

    async def start(app=hello):
        server = HttpServer(app, "127.0.0.1", 0, tls=web_context(files) if tls else None)
        servers.append(server)
        host, _, port = (await server.start()).rpartition(":")
        start.server = server
        return Listening(host, int(port), client if tls else None)

    yield start
    close_connections()
    for server in servers:
        await server.stop()


OVER_TLS = pytest.mark.parametrize("listening", ["https"], indirect=True)
# asyncio's own client cannot discard unread data over TLS.
UNREAD = pytest.mark.parametrize("listening", ["http"], indirect=True)


async def talk(address, data=REQUEST):
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
    connections_of_test.append(writer)
    writer.write(data)
    return reader, writer


async def closed_by_server(reader):
    try:
        while await reader.read(65_536):
            pass
    except (ConnectionResetError, ssl.SSLError):
        pass
    return True


async def test_ipv6_address_is_reported_in_brackets():
    server = HttpServer(hello, "::1", 0)
    try:
        assert (await server.start()).startswith("[::1]:")
    finally:
        await server.stop()


async def test_address_in_use_is_a_start_up_error_that_names_it(listening):
    host, port, _ = await listening()
    with pytest.raises(StartupError, match=rf"cannot listen on {host}:{port} \(HTTP_LISTEN\): "):
        await HttpServer(hello, host, port).start()


async def test_unknown_host_is_a_start_up_error():
    with pytest.raises(StartupError, match="HTTP_LISTEN"):
        await HttpServer(hello, "no.such.host.invalid", 0).start()


async def test_stop_frees_the_address_and_closes_connections(listening):
    address = await listening()
    reader, _ = await talk(address)
    await reader.readuntil(b"hello")
    await listening.server.stop()
    assert await closed_by_server(reader)
    with pytest.raises(OSError):
        await asyncio.open_connection(address.host, address.port)
    await listening.server.stop()


async def test_stop_cuts_off_an_endless_answer_without_a_log_line(listening, monkeypatch, caplog):
    began, cut_off = asyncio.Event(), asyncio.Event()

    async def endless(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200})
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut_off.set()

    monkeypatch.setattr(web_server, "STOP_GRACE_S", 0.02)
    reader, _ = await talk(await listening(endless))
    await began.wait()
    await listening.server.stop()
    assert cut_off.is_set()
    assert await closed_by_server(reader)
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []


async def test_stop_lets_a_nearly_complete_answer_finish(listening):
    slow = Slow()
    reader, _ = await talk(await listening(slow))
    await slow.began.wait()
    stopping = asyncio.create_task(listening.server.stop())
    await asyncio.sleep(0)
    slow.may_go_on.set()
    await stopping
    assert (await reader.read()).endswith(b"hello")


async def test_request_on_its_way_to_a_stopping_server_is_answered_and_told_that_it_is_the_last(
    listening, connections, monkeypatch
):
    monkeypatch.setattr(web_server, "IDLE_GRACE_S", 60.0)
    monkeypatch.setattr(web_server, "STOP_GRACE_S", 60.0)
    address = await listening()
    used, writer = await talk(address)
    await used.readuntil(b"hello")
    fresh, first = await talk(address, b"")
    while len(connections) < 2:  # noqa: ASYNC110 -- of a real socket
        await asyncio.sleep(0)
    stopping = asyncio.create_task(listening.server.stop())
    while not listening.server.server_state.is_over:  # noqa: ASYNC110 -- its own task stops it
        await asyncio.sleep(0)
    for reader, last in ((used, writer), (fresh, first)):
        last.write(REQUEST)
        answer = await reader.read()
        assert b" 200 " in answer
        assert answer.lower().count(b"connection: close") == 1
    await stopping


def test_connection_accepted_in_the_iteration_of_the_stop_is_answered():
    async def scenario():
        server = HttpServer(hello, "127.0.0.1", 0)
        host, _, port = (await server.start()).rpartition(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(REQUEST)
            await server.stop()
            assert b" 200 " in await asyncio.to_thread(peer.recv, 1_000)

    uvloop.run(scenario())  # asyncio accepts in a later iteration


async def test_connection_that_stays_idle_is_closed_before_a_slow_answer_is_cut_off(
    listening, monkeypatch
):
    monkeypatch.setattr(web_server, "IDLE_GRACE_S", 0.0)
    monkeypatch.setattr(web_server, "STOP_GRACE_S", 60.0)
    slow = Slow()
    address = await listening(slow)
    in_progress, _ = await talk(address)
    await slow.began.wait()
    idle, _ = await talk(address, b"GET / HT")
    stopping = asyncio.create_task(listening.server.stop())
    assert await closed_by_server(idle)
    slow.may_go_on.set()
    assert (await in_progress.read()).endswith(b"hello")
    await stopping


async def test_answer_cancelled_otherwise_is_logged(listening, caplog):
    async def cancelled(_scope, _receive, _send):
        raise asyncio.CancelledError

    reader, _ = await talk(await listening(cancelled))
    assert b" 500 " in await reader.readline()
    assert "Exception in ASGI application" in caplog.text


async def test_date_header_is_updated(listening, monkeypatch):
    monkeypatch.setattr(web_server, "DATE_S", 0.0)
    address = await listening()
    monkeypatch.setattr("uvicorn.server.formatdate", lambda *_, **__: "later")
    for _ in range(5):
        await asyncio.sleep(0)
    reader, _ = await talk(address)
    assert b"date: later\r\n" in await reader.readuntil(b"hello")


async def test_server_that_was_never_started_can_be_stopped():
    await HttpServer(hello, "127.0.0.1", 0).stop()


async def test_crash_while_starting_is_raised(monkeypatch):
    async def crash(*_args, **_kwargs):
        raise ZeroDivisionError

    server = HttpServer(hello, "127.0.0.1", 0)
    monkeypatch.setattr(server, "startup", crash)
    with pytest.raises(ZeroDivisionError):
        await server.start()
    server._serving = None
    await server.stop()


async def test_oversized_head_is_refused(listening):
    head = b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEADER_BYTES + 1)
    reader, _ = await talk(await listening(), head)
    assert b" 400 " in await reader.readline()
    assert await closed_by_server(reader)


@pytest.mark.parametrize("piece", [1_000, 65_536])
async def test_head_with_too_many_lines_is_refused_before_it_is_parsed(listening, piece):
    head = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADER_LINES + 1) + b"\r\n"
    reader, writer = await talk(await listening(), head[:piece])
    writer.write(head[piece:])
    assert b" 400 " in await reader.readline()
    assert await closed_by_server(reader)


async def test_lines_of_a_body_and_of_another_request_are_not_counted(listening):
    body = b"\n" * 4 * MAX_HEADER_LINES
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
    request = head + b"a:\r\n" * (MAX_HEADER_LINES - 10) + b"\r\n" + body
    reader, writer = await talk(await listening(), request)
    assert b" 200 " in await reader.readline()
    writer.write(request)
    assert b" 200 " in await reader.readuntil(b" 200 ")


TOO_MANY_LINES = b"a:\r\n" * (MAX_HEADER_LINES + 2) + b"\r\n"


async def test_second_request_with_too_many_lines_ends_the_connection(listening):
    second = b"GET / HTTP/1.1\r\n" + TOO_MANY_LINES
    reader, _ = await talk(await listening(), REQUEST + second)
    assert b" 200 " in await reader.readline()
    assert b"Too many header lines" in await reader.read()


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def length(scope, receive, send):
    """Answer with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body")
    await PlainTextResponse(f"{size} bytes")(scope, receive, send)


async def test_trailer_with_too_many_lines_is_refused(listening):
    reader, _ = await talk(await listening(length), CHUNKED + b"0\r\n" + TOO_MANY_LINES)
    assert b" 400 " in await reader.readline()
    assert await closed_by_server(reader)


async def test_request_with_too_many_lines_after_an_ignored_body_is_refused(listening):
    reader, writer = await talk(await listening(), CHUNKED)
    assert b" 200 " in await reader.readuntil(b"hello")
    writer.write(b"0\r\n\r\nGET / HTTP/1.1\r\n" + TOO_MANY_LINES)
    assert b" 400 " in await reader.readline()
    assert await closed_by_server(reader)


async def test_maximum_number_of_lines_is_accepted_in_a_trailer_and_after_an_empty_one(listening):
    lines = b"a:\r\n" * (MAX_HEADER_LINES - 1)
    next_head = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n"
    bodies = b"0\r\n" + lines + b"\r\n" + CHUNKED + b"0\r\n\r\n"
    reader, _ = await talk(await listening(length), CHUNKED + bodies + next_head)
    for _ in range(3):
        assert b" 200 " in await reader.readuntil(b"0 bytes")


SMALL_CHUNK = b"1\r\nx\r\n"


def take_one_step_per_iteration(server):
    server.server_state.queue = FairQueue(map(float, count()).__next__)


async def test_body_in_small_chunks_is_handled_over_several_iterations(listening):
    parts = []

    async def reads(scope, receive, send):
        async def receive_and_note():
            message = await receive()
            parts.append(len(message.get("body", b"")))
            return message

        await length(scope, receive_and_note, send)

    size = 10 * EVENTS_PER_STEP
    address = await listening(reads)
    take_one_step_per_iteration(listening.server)
    reader, _ = await talk(address, CHUNKED + SMALL_CHUNK * size + b"0\r\n\r\n" + REQUEST)
    await reader.readuntil(b"%d bytes" % size)
    assert max(parts) <= EVENTS_PER_STEP
    await reader.readuntil(b"0 bytes")  # bytes after it are the next request


async def test_connections_share_the_work_of_an_iteration(listening, monkeypatch):
    address = await listening(length)
    take_one_step_per_iteration(listening.server)
    iteration = 0
    steps = []
    handle = web_server.BoundedProtocol._handle_some

    def handle_and_note(self):
        steps.append(iteration)
        handle(self)

    monkeypatch.setattr(web_server.BoundedProtocol, "_handle_some", handle_and_note)
    size = 3 * EVENTS_PER_STEP
    peers = [await talk(address, b"") for _ in range(10)]
    for _, writer in peers:
        writer.write(CHUNKED + SMALL_CHUNK * size + b"0\r\n\r\n")
    answers = [asyncio.ensure_future(reader.readuntil(b"%d bytes" % size)) for reader, _ in peers]
    while not all(answer.done() for answer in answers):
        await asyncio.sleep(0)
        iteration += 1
    assert len(steps) > 3 * len(peers)
    assert max(Counter(steps).values()) <= 2  # the counter moves in the middle of an iteration


@pytest.fixture
def handled(monkeypatch):
    """The connections that handled events; while others wait, they must not read or start reading."""
    found = asyncio.Queue()
    receive = web_server.BoundedProtocol.data_received
    handle = web_server.BoundedProtocol._handle_some
    resume = web_server._BoundedFlow.resume_reading

    def receive_in_time(self, data):
        assert not self.flow.events_wait
        receive(self, data)

    def resume_in_time(self):
        resume(self)
        assert not self.events_wait or not self._transport.is_reading()

    def handle_and_tell(self):
        handle(self)
        found.put_nowait(self)

    monkeypatch.setattr(web_server.BoundedProtocol, "data_received", receive_in_time)
    monkeypatch.setattr(web_server.BoundedProtocol, "_handle_some", handle_and_tell)
    monkeypatch.setattr(web_server._BoundedFlow, "resume_reading", resume_in_time)
    return found


@pytest.mark.parametrize("app", [hello, length])
async def test_nothing_is_read_while_received_chunks_wait(listening, handled, lost, app):
    reader, writer = await talk(await listening(app), CHUNKED + SMALL_CHUNK * 1_000)
    while not (await handled.get()).flow.events_wait:
        pass
    for _ in range(4):
        writer.write(SMALL_CHUNK * 500)
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n" + REQUEST)
    for _ in range(2):
        assert b" 200 " in await reader.readuntil(b"hello" if app is hello else b" bytes")
    assert not lost


@pytest.mark.parametrize("while_chunks_wait", [True, False])
async def test_reading_resumes_when_requested_and_all_chunks_are_handled(
    listening, handled, lost, while_chunks_wait
):
    may_go_on = asyncio.Event()

    async def reads_late(scope, receive, send):
        await may_go_on.wait()
        await length(scope, receive, send)

    count = 8 * HIGH_WATER_LIMIT // 100
    body = (b"64\r\n" + bytes(100) + b"\r\n") * count
    reader, _ = await talk(await listening(reads_late), CHUNKED + body + b"0\r\n\r\n")
    flow = (connection := await handled.get()).flow
    while not flow.read_paused or flow.events_wait is not while_chunks_wait:
        await handled.get()
    assert not connection.transport.is_reading()
    may_go_on.set()
    await reader.readuntil(b"%d bytes" % (100 * count))
    assert not lost


async def test_connection_may_be_lost_while_received_chunks_wait(listening, handled, lost):
    await talk(await listening(length), CHUNKED + SMALL_CHUNK * 1_000)
    while not (connection := await handled.get()).flow.events_wait:
        pass
    connection.transport.abort()
    left = len(connection.conn.received)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(connection.conn.received) == left > 0
    assert not lost


BODY_TO_COME = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"


@pytest.mark.parametrize("said", [b"", b"GET / HT", BODY_TO_COME], ids=["nothing", "head", "body"])
async def test_oldest_connection_waiting_for_its_peer_is_closed_beyond_the_bound(
    listening, monkeypatch, said
):
    async def reads(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await hello(scope, receive, send)

    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 2)
    address = await listening(reads)
    silent = await talk(address, said)
    used = await talk(address)
    assert b" 200 " in await used[0].readline()
    newcomer = await talk(address)
    assert b" 200 " in await newcomer[0].readline()
    assert await closed_by_server(silent[0])
    used[1].write(REQUEST)
    assert (await used[0].readuntil(b"hello")).count(b"hello") == 1


class Busy:
    """A queue in which every step waits."""

    def __init__(self):
        self.steps = asyncio.Queue()

    def begin(self):
        return False

    def submit(self, _peer, step):
        self.steps.put_nowait(step)


async def test_a_connection_whose_request_waits_for_its_turn_makes_no_room(listening, monkeypatch):
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 1)
    address = await listening()
    queue = listening.server.server_state.queue = Busy()
    reader, _ = await talk(address)
    step = await queue.steps.get()
    refused, _ = await talk(address, b"")
    assert await closed_by_server(refused)
    step()
    assert b" 200 " in await reader.readline()


@UNREAD
async def test_connection_with_an_unread_answer_is_closed_beyond_the_bound(listening, monkeypatch):
    paused = asyncio.Event()
    pause = web_server.BoundedProtocol.pause_writing

    def pause_and_tell(self):
        pause(self)
        paused.set()

    async def long(scope, receive, send):
        body = bytes(32_000_000) if scope["path"] == "/long" else b"hello"
        await PlainTextResponse(body)(scope, receive, send)

    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(web_server.BoundedProtocol, "pause_writing", pause_and_tell)
    address = await listening(long)
    await talk(address, REQUEST.replace(b"/ ", b"/long "))
    await paused.wait()
    reader, _ = await talk(address)
    assert b" 200 " in await reader.readline()


async def test_connection_with_a_pending_answer_is_kept_beyond_the_bound(listening, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 1)
    address = await listening(slow)
    reader, _ = await talk(address)
    await slow.began.wait()
    refused, _ = await talk(address)
    assert await closed_by_server(refused)
    slow.may_go_on.set()
    assert b" 200 " in await reader.readline()


async def test_slow_sender_is_closed_at_its_deadline(listening, monkeypatch):
    monkeypatch.setattr(web_server, "CONNECTION_LIFE_S", 0.01)
    reader, _ = await talk(await listening(), b"GET / HT")
    assert await closed_by_server(reader)


@pytest.fixture
def connections(monkeypatch):
    """The connections of servers; a test calls ``_expire``, because a short deadline may pass before the request."""
    found, made = [], web_server.BoundedProtocol.connection_made

    def noted(self, transport):
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(web_server.BoundedProtocol, "connection_made", noted)
    return found


async def test_answer_being_read_may_finish_after_the_deadline(listening, connections, monkeypatch):
    monkeypatch.setattr(web_server, "CLOSING_GRACE_S", 60.0)
    slow = Slow()
    reader, _ = await talk(await listening(slow))
    await slow.began.wait()
    connections[0]._expire()
    slow.may_go_on.set()
    answer = await reader.read()
    assert b" 200 " in answer
    assert b"hello" in answer


async def test_request_at_the_deadline_is_answered_and_told_that_it_is_the_last(
    listening, connections
):
    reader, writer = await talk(await listening())
    assert b"connection: close" not in await reader.readuntil(b"hello")
    connections[0]._expire()
    writer.write(REQUEST)
    answer = await reader.read()
    assert b" 200 " in answer
    assert answer.lower().count(b"connection: close") == 1


async def test_answer_that_is_never_read_is_cut_off(listening, monkeypatch):
    cancelled = asyncio.Event()

    async def endless(_scope, receive, _send):
        while (await receive())["type"] != "http.disconnect":
            pass
        cancelled.set()

    monkeypatch.setattr(web_server, "CONNECTION_LIFE_S", 0.01)
    monkeypatch.setattr(web_server, "CLOSING_GRACE_S", 0.01)
    reader, _ = await talk(await listening(endless))
    assert await closed_by_server(reader)
    await cancelled.wait()


@pytest.fixture
async def lost():
    """The exceptions that reach the handler of the event loop."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context))
    yield found
    asyncio.get_running_loop().set_exception_handler(None)


@pytest.mark.parametrize("answer", [b"hello", b"data: 1\n\n"], ids=["whole", "streaming"])
async def test_garbage_after_an_early_answer_ends_the_connection(listening, lost, caplog, answer):
    reader, writer = await talk(await listening(hello if answer == b"hello" else events), CHUNKED)
    await reader.readuntil(answer)
    writer.write(b"zz\r\n\r\n")
    assert b"HTTP/1.1" not in await reader.read()
    assert not lost
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_garbage_with_its_request_is_refused(listening, lost, caplog):
    reader, _ = await talk(await listening(), CHUNKED + b"zz\r\n\r\n")
    assert b" 400 " in await reader.readline()
    assert b"HTTP/1.1" not in await reader.read()
    assert not lost
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def events(scope, receive, send):
    """Send a stream that ends when its reader disconnects."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_event_stream_outlives_the_deadline_of_its_connection(listening, connections):
    reader, _ = await talk(await listening(events))
    await reader.readuntil(b"data: 1\n\n")
    for _ in range(3):
        connections[0]._expire()
    assert not connections[0].transport.is_closing()


async def test_event_stream_ends_at_its_own_deadline(listening, connections, monkeypatch):
    monkeypatch.setattr(web_server, "STREAM_LIFE_S", 0.0)
    monkeypatch.setattr(web_server, "CLOSING_GRACE_S", 0.01)
    reader, _ = await talk(await listening(events))
    await reader.readuntil(b"data: 1\n\n")
    connections[0]._expire()
    assert await closed_by_server(reader)


@UNREAD
async def test_unread_event_stream_is_cut_off(listening, connections, monkeypatch):
    monkeypatch.setattr(web_server, "CLOSING_GRACE_S", 0.01)
    cut_off = asyncio.Event()

    async def many_events(scope, receive, send):
        leaving = asyncio.create_task(events(scope, receive, send))
        while not leaving.done():
            body = b"data: 1\n\n" * 10_000
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        cut_off.set()

    await talk(await listening(many_events))
    while not (connections and connections[0].flow.write_paused):  # noqa: ASYNC110 -- of a real socket
        await asyncio.sleep(0)
    connections[0]._expire()
    await cut_off.wait()


async def test_server_at_a_path_removes_it_when_stopped(tmp_path):
    path = tmp_path / "http.sock"
    server = HttpServer.at(hello, path)
    assert await server.start() == str(path)
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(REQUEST)
    assert b" 200 " in await reader.readline()
    writer.close()
    await server.stop()
    assert not path.exists()


async def test_unusable_path_is_a_start_up_error_that_names_it(tmp_path):
    path = tmp_path / "none" / "http.sock"
    with pytest.raises(StartupError, match=f"cannot listen at {path}: No such file"):
        await HttpServer.at(hello, path).start()


async def scheme(scope, receive, send):
    await PlainTextResponse(scope["scheme"])(scope, receive, send)


async def test_application_receives_the_scheme(listening):
    address = await listening(scheme)
    reader, _ = await talk(address)
    assert await reader.readuntil(b"\r\n\r\nhttp" + b"s" * (address.tls is not None))


@OVER_TLS
async def test_tls_negotiates_http_1_without_a_client_certificate(listening):
    _, writer = await talk(await listening())
    tls = writer.get_extra_info("ssl_object")
    assert tls.selected_alpn_protocol() == "http/1.1"
    assert tls.version() == "TLSv1.3"


@OVER_TLS
async def test_changed_certificate_is_used_at_the_next_handshake(listening, files, ca, caplog):
    address = await listening()

    async def shown():
        reader, writer = await talk(address)
        assert b" 200 " in await reader.readline()
        writer.close()
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    first = await shown()
    assert await shown() == first
    write(files, ca)
    second = await shown()
    assert second != first
    files.key.write_text("no key")
    assert await shown() == second
    assert "HTTP_TLS: TLS_KEY: " in caplog.text
    assert "the old certificate stays in service" in caplog.text


def test_unusable_files_are_a_start_up_error(files):
    files.key.unlink()
    with pytest.raises(StartupError, match="TLS_KEY: cannot read"):
        web_context(files)
    assert web_context(None) is None


@OVER_TLS
async def test_plaintext_on_the_tls_port_is_answered_with_an_explanation(listening):
    reader, _ = await talk((await listening())._replace(tls=None))
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"This port speaks TLS only." in answer


@OVER_TLS
async def test_stalled_handshakes_make_room_and_end_with_the_server(listening, monkeypatch):
    monkeypatch.setattr(web_server, "MAX_PLACES", 2)
    address = await listening()
    begun = (b"", b"\x16\x03\x01")
    silent = [await talk(address._replace(tls=None), octets) for octets in begun]
    for _ in range(3):
        reader, writer = await talk(address)
        assert b" 200 " in await reader.readline()
        writer.close()
    late = await talk(address._replace(tls=None), b"")
    await listening.server.stop()
    for reader, _ in (*silent, late):
        assert await closed_by_server(reader)


@OVER_TLS
async def test_slow_handshake_is_ended(listening, monkeypatch):
    monkeypatch.setattr(web_server, "DATE_S", 0.0)
    monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", 0.0)
    reader, _ = await talk((await listening())._replace(tls=None), b"\x16")
    assert await closed_by_server(reader)


@pytest.fixture
def path(tmp_path):
    deep = tmp_path / ("d" * 200)
    deep.mkdir()
    return deep / "http.sock"


def connected_to(path):
    with socket.socket(socket.AF_UNIX) as client, short_name(path) as name:
        return client.connect_ex(name) == 0


def test_path_of_any_length_is_bound_for_its_owner_only(path):
    with listening_at(path):
        assert connected_to(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not connected_to(path)


def test_socket_of_a_dead_process_is_replaced(path):
    listening_at(path).close()
    assert path.is_socket()
    with listening_at(path):
        assert connected_to(path)
