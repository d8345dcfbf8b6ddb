"""A parent's server and those of its workers, in this process with real sockets between them."""

import asyncio
import gc
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ratelimitd.buckets.state_dir import LOCK_NAME
from ratelimitd.web import worker_proxy
from ratelimitd.web.pages.sessions import Sessions
from ratelimitd.web.server import HttpServer, listening_at
from ratelimitd.web.worker_proxy import PEER_HEADER, PassingOn, from_parent


class Worker:
    """A worker that records its requests and answers as instructed."""

    def __init__(self, name):
        self.name = name
        self.left = asyncio.Event()
        self.app = from_parent(
            Starlette(
                routes=[
                    Route("/asked", self.asked),
                    Route("/login", self.login, methods=["GET", "POST"]),
                    Route("/echo", self.echo, methods=["POST"]),
                    Route("/early", self.early, methods=["POST"]),
                    Route("/events", self.events),
                    Route("/empty", self.empty),
                ]
            )
        )

    async def asked(self, request: Request):
        headers = {name: text for name, text in request.headers.items() if name != "user-agent"}
        return Response(
            f"{self.name} {request.client} {request.url.query} {sorted(headers)}",
            headers={"X-Kept": "1", "Keep-Alive": "no"},
        )

    async def login(self, request: Request):
        return PlainTextResponse(f"{self.name} {request.url.query}")

    async def echo(self, request: Request):
        return Response(await request.body(), 201)

    async def early(self, _request):
        return PlainTextResponse("too large", 413)

    async def empty(self, _request):
        return Response(status_code=204)

    async def events(self, request: Request):
        async def endless():
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0)
            finally:
                self.left.set()

        return StreamingResponse(endless(), media_type="text/event-stream")


@pytest.fixture
async def parent(tmp_path):
    """An HTTP side whose workers the test starts: its address, and ``start``."""

    class Parent:
        sockets = [tmp_path / f"{name}.sock" for name in ("a", "b")]  # noqa: RUF012
        servers = []  # noqa: RUF012
        hanging = set()  # noqa: RUF012

        async def answers(self, number):
            return number not in self.hanging

        async def start(self, name, app=None):
            worker = Worker(name)
            server = HttpServer.at(app or worker.app, tmp_path / f"{name}.sock")
            assert await server.start() == str(tmp_path / f"{name}.sock")
            self.servers.append(server)
            return worker

    found = Parent()
    found.sessions = Sessions("the-admin-token", time.time)
    proxy = PassingOn(found.sockets, found.answers, found.sessions.opened_by)
    server = HttpServer(proxy, "127.0.0.1", 0)
    found.servers = [server]
    found.url = f"http://{await server.start()}"
    async with httpx.AsyncClient(base_url=found.url) as http:
        found.http = http
        yield found
    for each in found.servers:
        await each.stop()


async def talk(parent, request):
    """Send these bytes; return everything received until the connection ends."""
    reader, writer = await asyncio.open_connection(*parent.url.removeprefix("http://").split(":"))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_request_and_answer_are_forwarded_with_the_peer(parent):
    await parent.start("a")
    answer = await parent.http.get("/asked?x=1&y=%20", headers={"X-Mine": "1"})
    name, _, rest = answer.text.partition(" ")
    assert name == "a"
    assert "host='127.0.0.1', port=" in rest
    assert "x=1&y=%20" in rest
    assert "'x-mine'" in rest
    assert "x-ratelimitd-peer" not in rest
    assert answer.headers["x-kept"] == "1"
    assert "keep-alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1


async def test_hanging_worker_is_skipped_although_its_socket_accepts(parent):
    await parent.start("a")
    await parent.start("b")
    asked = [(await parent.http.get("/asked")).text[0] for _ in range(2)]
    assert asked in (["a", "a"], ["b", "b"])
    parent.hanging = {"ab".index(asked[0])}
    assert (await parent.http.get("/asked")).text[0] == ({"a", "b"} - {asked[0]}).pop()
    parent.hanging = {0, 1}
    assert (await parent.http.get("/asked")).status_code == 503


async def test_the_code_of_a_login_link_is_forwarded_once(parent):
    """Only the parent knows that a link was used: the worker that opened it may have been replaced."""
    for name in ("a", "b"):
        await parent.start(name)
    link = {"code": parent.sessions.link_code(parent.url.removeprefix("http://"))}
    for method in ("HEAD", "POST"):
        await parent.http.request(method, "/login", params=link)
    answers = [
        (await parent.http.get("/login", params=params)).text
        for params in ({"next": "x"}, {"code": "wrong"}, link, link)
    ]
    assert answers == ["a next=x", "a code=", f"a code={link['code']}", "a code="]
    parent.hanging = {0}
    assert (await parent.http.get("/login", params=link)).text == "b code="


async def test_peer_header_of_a_client_is_removed(parent):
    await parent.start("a")
    answer = await parent.http.get("/asked", headers={"X-Ratelimitd-Peer": "10.0.0.1 1"})
    assert "127.0.0.1" in answer.text
    assert "10.0.0.1" not in answer.text


async def test_bodies_of_known_and_unknown_length_are_forwarded(parent):
    async def pieces():
        for _ in range(3):
            yield b"x" * 100_000

    await parent.start("a")
    answer = await parent.http.post("/echo", content=b"body")
    assert (answer.status_code, answer.content) == (201, b"body")
    assert len((await parent.http.post("/echo", content=pieces())).content) == 300_000


async def test_chunked_body_ignores_a_content_length(parent):
    await parent.start("a")
    answer = await talk(
        parent,
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    )
    assert answer.endswith(b"\r\n\r\nbody")


async def test_http_1_0_request_needs_no_host(parent):
    await parent.start("a")
    answer = await talk(parent, b"GET /asked?x HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"'host'" in answer


def test_caller_without_an_address_is_forwarded_without_one():
    scope = {"method": "GET", "raw_path": b"/", "query_string": b"", "headers": [(b"host", b"n")]}
    names = [name for name, _ in worker_proxy._request({**scope, "client": None}).headers]
    assert names == [b"host"]


async def test_answers_without_a_body_have_none(parent):
    await parent.start("a")
    answer = await parent.http.head("/asked")
    assert (answer.status_code, answer.content) == (200, b"")
    assert (await parent.http.get("/empty")).status_code == 204


async def test_answer_may_come_before_the_whole_request_was_read(parent):
    await parent.start("a")
    answer = await parent.http.post("/early", content=b"x" * 3_000_000)
    assert (answer.status_code, answer.text) == (413, "too large")


async def test_answer_is_not_lost_if_the_body_is_sent_after_it(tmp_path):
    answered = threading.Event()

    def answer(sock):
        connection, _ = sock.accept()
        with connection:
            head = connection.recv(65_536).lower()
            connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 5\r\n\r\nlogin")
            if b"connection: close" in head:
                connection.close()
            answered.set()
            while connection.fileno() != -1 and connection.recv(65_536):
                pass

    async def body():
        answered.wait()  # meanwhile the parent reads nothing
        yield b"{}"

    async def answers(_number):
        return True

    path = tmp_path / "a.sock"
    proxy = httpx.ASGITransport(PassingOn([path], answers, lambda *_: False))
    with listening_at(path) as sock:
        worker = asyncio.create_task(asyncio.to_thread(answer, sock))
        async with httpx.AsyncClient(transport=proxy, base_url="http://localhost") as http:
            found = await http.post("/", content=body())
        await worker
    assert (found.status_code, found.text) == (401, "login")


async def test_caller_stays_with_one_live_worker(parent):
    await parent.start("a")
    await parent.start("b")
    names = {(await parent.http.get("/asked")).text[0] for _ in range(4)}
    assert len(names) == 1
    [theirs] = [server for server in parent.servers[1:] if f"/{min(names)}." in str(server._path)]
    await theirs.stop()
    assert (await parent.http.get("/asked")).text[0] in {"a", "b"} - names


async def test_missing_worker_is_reported(parent, caplog):
    for _ in range(2):
        answer = await parent.http.get("/asked")
        assert (answer.status_code, answer.text) == (503, "no worker answers at the moment\n")
    (line,) = caplog.messages
    assert "STATE_DIR was emptied" in line


async def test_worker_that_ends_is_not_reported_as_missing(parent, tmp_path, caplog):
    for name in ("a", "b"):
        await parent.start(name)
        await parent.servers[-1].stop()
    (tmp_path / LOCK_NAME).touch()
    assert (await parent.http.get("/asked")).status_code == 503
    assert not caplog.messages


async def test_worker_that_refuses_the_connection_is_skipped(parent, monkeypatch):
    async def never(_name):
        await asyncio.Event().wait()

    await parent.start("a")
    monkeypatch.setattr(worker_proxy, "CONNECT_TIMEOUT_S", 0.001)
    monkeypatch.setattr(asyncio, "open_unix_connection", never)
    assert (await parent.http.get("/asked")).status_code == 503


async def test_hanging_worker_is_reported(parent, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_proxy, "ANSWER_TIMEOUT_S", 0.001)
    with listening_at(tmp_path / "a.sock"):
        answer = await parent.http.get("/asked")
    assert (answer.status_code, answer.text) == (504, "the worker does not answer\n")


async def test_upload_may_take_longer_than_an_answer(parent, monkeypatch):
    await parent.start("a")
    monkeypatch.setattr(worker_proxy, "ANSWER_TIMEOUT_S", 0.05)

    async def body():
        yield b"first "
        await asyncio.sleep(0.1)
        monkeypatch.setattr(worker_proxy, "ANSWER_TIMEOUT_S", 60.0)
        yield b"last"

    answer = await parent.http.post("/echo", content=body())
    assert (answer.status_code, answer.text) == (201, "first last")


async def test_worker_that_stops_reading_is_reported(parent, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_proxy, "ANSWER_TIMEOUT_S", 0.05)
    with listening_at(tmp_path / "a.sock"):
        answer = await parent.http.post("/echo", content=bytes(4_000_000))
    assert (answer.status_code, answer.text) == (504, "the worker does not answer\n")


async def test_answer_that_has_begun_may_take_longer(parent, monkeypatch):
    worker = await parent.start("a")
    monkeypatch.setattr(worker_proxy, "ANSWER_TIMEOUT_S", 0.4)
    loop = asyncio.get_running_loop()
    async with parent.http.stream("GET", "/events") as answer:
        pieces, until_s = answer.aiter_bytes(9), loop.time() + 0.5
        while loop.time() < until_s:
            assert await anext(pieces) == b"data: 1\n\n"
    await worker.left.wait()


async def test_stream_is_forwarded_as_it_arrives_and_ends_with_its_reader(parent):
    worker = await parent.start("a")
    async with parent.http.stream("GET", "/events") as answer:
        assert await anext(answer.aiter_bytes(9)) == b"data: 1\n\n"
    await worker.left.wait()


class TestWorkerThatEnds:
    """During an answer, or before it."""

    @pytest.fixture
    async def serve(self, parent, tmp_path):
        servers = []

        async def serve(answer):
            async def talk(reader, writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                writer.close()

            sock = listening_at(tmp_path / "a.sock")
            servers.append(await asyncio.start_unix_server(talk, sock=sock))

        yield serve
        for server in servers:
            server.close()
        gc.collect()

    @pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", b"no HTTP\r\n\r\n"])
    async def test_end_before_the_answer_is_reported(self, parent, serve, said):
        await serve(said)
        answer = await parent.http.get("/asked")
        assert (answer.status_code, answer.text) == (
            502,
            "the worker ended before it had answered\n",
        )

    async def test_end_during_the_answer_ends_the_connection(self, parent, serve):
        await serve(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        with pytest.raises(httpx.RemoteProtocolError):
            await parent.http.get("/asked")

    async def test_answer_to_connect_is_complete_without_a_length(self, parent, serve):
        await serve(b"HTTP/1.1 200 OK\r\n\r\n")
        request = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await talk(parent, request)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await parent.http.get("/asked")).status_code == 200

    async def test_interim_response_is_not_the_answer(self, parent, serve):
        await serve(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert (await parent.http.get("/asked")).text == "ok"


@pytest.mark.parametrize(
    ("given", "client"),
    [
        (b"192.0.2.1 50000", ("192.0.2.1", 50_000)),
        (b"2001:db8::1 50000", ("2001:db8::1", 50_000)),
        (b"", None),
        (b"192.0.2.1", None),
        (b"192.0.2.1 x", None),
        (b"\xff 1", ("\ufffd", 1)),
    ],
)
async def test_peer_is_the_one_that_the_parent_names(given, client):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    headers = [(b"host", b"node"), (PEER_HEADER, given)]
    scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers}
    for scheme in ("http", "https"):
        await from_parent(app, scheme)(scope, None, None)
    expected = {"type": "http", "client": client, "headers": [(b"host", b"node")]}
    assert seen == [{**expected, "scheme": scheme} for scheme in ("http", "https")]


async def test_request_without_a_peer_header_has_no_client():
    async def app(scope, receive, send):
        assert scope["client"] is None

    await from_parent(app)({"type": "http", "client": ("127.0.0.1", 1), "headers": []}, None, None)
