"""What ends the accept loop of grpc.aio must not end the node: the server is opened again on its port."""

import asyncio

import grpc
import grpc.aio

from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.rpc import grpcio_server
from ratelimitd.rpc.grpcio_server import GrpcioServer, RevivedServer
from ratelimitd.rpc.interface import Methods

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_HEADERS_AND_STREAM = 4, 1, 5


def frame(kind, flags, stream_id, payload=b""):
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


def literal(name, value):
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_of(path):
    head = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"node",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    block = b"".join(literal(name, value) for name, value in head.items())
    return PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS_AND_STREAM, 1, block)


class AttackedStats(CheckStats):
    def __init__(self):
        super().__init__()
        self.ended = asyncio.Event()

    def transport_error(self, cause):
        super().transport_error(cause)
        self.ended.set()


async def test_a_path_that_is_no_utf8_costs_connections_but_not_the_server():
    stats, lost = AttackedStats(), []
    # Both the loop's task and grpc's own shutdown of it end with the error, and nobody waits for either.
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    server = GrpcioServer(
        Methods(unary={"/s/m": lambda data, _call: data}), listen="127.0.0.1:0", stats=stats
    )
    address = await server.start()
    host, port = address.split(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(call_of(b"/\xff"))
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            await stats.ended.wait()
            stats.ended.clear()
            call = channel.unary_unary("/s/m")
            assert await call(b"check", wait_for_ready=True) == b"check"
        writer.close()
    assert stats.errors_by_transport == {"unexpected": 3}
    await server.stop(0)


async def test_a_server_that_cannot_get_its_port_yet_tries_until_it_is_stopped(monkeypatch):
    tried = asyncio.Event()

    async def taken(_listen):
        tried.set()
        raise StartupError

    monkeypatch.setattr(grpcio_server, "REOPEN_PAUSE_S", 0)
    server = RevivedServer(grpc.aio.server, lambda: None, lambda: None)
    monkeypatch.setattr(server, "open", taken)
    async with asyncio.timeout(20):
        reopening = asyncio.create_task(server._reopen("127.0.0.1:1"))
        await tried.wait()
        tried.clear()
        await tried.wait()
        await server.stop(0)
        await reopening


async def test_an_end_that_was_asked_for_is_no_loss():
    lost = []
    server = RevivedServer(grpc.aio.server, lambda: None, lambda: lost.append(1))
    await server.open("127.0.0.1:0")
    await server.stop_accepting()
    await server.stop(0)
    assert lost == []
