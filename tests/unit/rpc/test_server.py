"""The server around the connections: listening, timer and stop. tests/rpc tests it with real clients."""

import asyncio
import socket
import ssl

import pytest
import trustme

from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.rpc import server as native_server
from ratelimitd.rpc.interface import Methods, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.server import LINGER_S, NativeConnection, NativeServer
from ratelimitd.rpc.tls import CertificateSource, TlsFiles, logged_and_counted
from tests.http2_peer import (
    DATA,
    END_STREAM,
    GREETING,
    HEADERS,
    PREFACE,
    Peer,
    frame,
    frames_of,
    ping,
    settings,
    window_update,
)
from tests.native_caller import until

LARGE = 3_000_000


class Serving:
    """A started server with a manual clock, and raw connections to it."""

    def __init__(self, **limits):
        async def wait(_data, _call):
            await asyncio.Event().wait()

        self.now_s = 100.0
        self.stats = CheckStats()
        methods = Methods(
            {"/": lambda data, _call: data, "/wait": wait, "/large": lambda *_: bytes(LARGE)}
        )
        self.server = NativeServer(
            methods,
            listen="127.0.0.1:0",
            stats=self.stats,
            limits=TransportLimits(**limits),
            monotonic_s=lambda: self.now_s,
        )
        self.writers = []

    async def __aenter__(self):
        self.address = await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0)
        for writer in self.writers:
            writer.close()

    async def connected(self, octets=GREETING):
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        writer.write(octets)
        return reader


def call(path, **fields):
    named = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"}  # fmt: skip
    head = Peer(greeting=b"").head(1, [*named.items(), *fields.items()])
    return GREETING + head + frame(0, 1, 1, framed(b"hi"))


async def next_headers(reader):
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == HEADERS:
            return payload


async def test_a_peer_that_keeps_sending_can_read_a_large_answer():
    """Closing the socket with unread input would reset the connection."""
    loop = asyncio.get_running_loop()
    async with Serving() as serving:
        host, _, port = serving.address.rpartition(":")
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
            peer.setblocking(False)
            await loop.sock_connect(peer, (host, int(port)))
            wide = settings(s4=2**31 - 1) + window_update(0, 2**30)
            request = call("/large").removeprefix(GREETING)
            await loop.sock_sendall(peer, PREFACE + wide + request)
            read = await loop.sock_recv(peer, 1_000)
            stopping = asyncio.create_task(serving.server.stop(30))
            while part := await loop.sock_recv(peer, 65_536):
                read += part
                await loop.sock_sendall(peer, ping(bytes(8)))
        await stopping
    answered = [sent for sent in frames_of(read) if sent.stream_id == 1]
    assert sum(len(sent.payload) for sent in answered if sent.type == DATA) == LARGE + 5
    assert answered[-1].flags & END_STREAM


@pytest.mark.parametrize("iterations", range(8))
def test_a_connection_that_comes_while_the_server_stops_does_not_keep_it_from_ending(
    running, iterations
):
    async def scenario():
        async with Serving() as serving:
            host, _, port = serving.address.rpartition(":")
            with socket.create_connection((host, int(port))):
                for _ in range(iterations):
                    await asyncio.sleep(0)
                await asyncio.wait_for(serving.server.stop(0), 10)
                assert serving.server.in_progress.connections == 0

    running(scenario)


async def test_connections_beyond_the_bound_are_dropped_and_counted():
    async with Serving(max_connections=1) as serving:
        first = await serving.connected(call("/"))
        await next_headers(first)
        second = await serving.connected()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await second.readexactly(1)
        assert serving.stats.errors_by_transport == {"too_many_connections": 1}


async def test_the_timer_ends_calls_whose_deadline_has_passed(monkeypatch):
    monkeypatch.setattr(native_server, "TICK_S", 0.001)
    async with Serving() as serving:
        reader = await serving.connected(call("/wait", **{"grpc-timeout": "5S"}))
        await until(lambda: serving.server.shared.unary_in_progress)
        serving.now_s += 5
        await next_headers(reader)
        await until(lambda: not serving.server.shared.unary_in_progress)
        assert serving.stats.errors_by_transport == {"deadline_exceeded": 1}


async def test_calls_in_progress_are_reported_until_they_end():
    async with Serving() as serving:
        assert serving.server.in_progress == (0, 0, 0, 0)
        await serving.connected(call("/wait"))
        await until(lambda: serving.server.in_progress == (1, 0, 1, 1))
        serving.writers[0].close()
        await until(lambda: serving.server.in_progress == (0, 0, 0, 0))


async def test_the_timer_checks_a_connection_every_ten_ticks(monkeypatch):
    monkeypatch.setattr(native_server, "TICK_S", 0.001)
    async with Serving() as serving:
        reader = await serving.connected(b"PRI ")
        await until(lambda: serving.server._connections)
        await until(lambda: serving.server._ticks > 10)
        serving.now_s += 21
        rest = await reader.read()
        assert b"slow_preface" in rest
        assert serving.stats.errors_by_transport == {"slow_preface": 1}


async def test_each_tick_checks_a_tenth_of_the_connections(
    monkeypatch,
):
    async with Serving() as serving:
        for _ in range(20):
            await serving.connected()
        await until(lambda: len(serving.server._connections) == 20)
        looked = []
        monkeypatch.setattr(
            NativeConnection, "look", lambda connection, _now_s: looked.append(connection)
        )
        per_tick = []
        for _ in range(10):
            serving.server._timer.cancel()
            before = len(looked)
            serving.server._tick()
            per_tick.append(len(looked) - before)
        assert per_tick == [2] * 10
        assert len(set(looked)) == 20


async def test_a_stop_closes_idle_connections_at_once():
    async with Serving() as serving:
        reader = await serving.connected(call("/"))
        await next_headers(reader)
        serving.now_s += LINGER_S + 1
        async with asyncio.timeout(5):
            await serving.server.stop(3600)
        assert await reader.read() != b""
        assert serving.stats.errors_by_transport == {}


async def test_a_peer_that_does_not_read_does_not_delay_a_stop(monkeypatch):
    monkeypatch.setattr(native_server, "CLOSE_S", 0.01)
    async with Serving() as serving:
        await serving.connected(GREETING)
        await until(lambda: serving.server._connections)
        [connection] = serving.server._connections
        monkeypatch.setattr(connection, "end_calls", lambda _error: None)
        monkeypatch.setattr(connection, "go_away", lambda: None)
        await serving.server.stop(0)
        assert not serving.server._connections


async def test_a_server_that_never_started_stops_at_once():
    async with asyncio.timeout(1):
        await Serving().server.stop_accepting()
        await Serving().server.stop(10)


async def test_a_taken_port_is_one_clear_error():
    async with Serving() as serving:
        second = NativeServer(Methods(), listen=serving.address, stats=CheckStats())
        with pytest.raises(StartupError, match=r"LISTEN: cannot listen on .*: Address already in"):
            await second.start()


async def test_a_port_is_shared_with_another_server_that_shares_it():
    first = NativeServer(Methods(), listen="127.0.0.1:0", stats=CheckStats(), reuse_port=True)
    address = await first.start()
    second = NativeServer(Methods(), listen=address, stats=CheckStats(), reuse_port=True)
    assert await second.start() == address
    for server in (first, second):
        await server.stop(0)


async def test_a_server_listens_on_a_socket_file(tmp_path):
    listen = f"unix:{tmp_path / 's'}"
    server = NativeServer(Methods(), listen=listen, stats=CheckStats())
    assert await server.start() == listen
    _, writer = await asyncio.open_unix_connection(tmp_path / "s")
    await until(lambda: server._connections)
    await server.stop(0)
    writer.close()


async def test_an_unusable_certificate_is_logged_and_counted(tmp_path, caplog):
    certificate = trustme.CA().issue_cert("127.0.0.1")
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    certificate.private_key_pem.write_to_path(files.key)
    certificate.cert_chain_pems[0].write_to_path(files.cert)
    stats = CheckStats()
    source = CertificateSource(files, logged_and_counted(stats.transport_error))
    server = NativeServer(Methods(), listen="127.0.0.1:0", stats=stats, tls=source)
    address = await server.start()
    files.cert.write_text("no certificate")
    port = int(address.rpartition(":")[2])
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    assert stats.errors_by_transport == {"tls_files": 1}
    assert [record.getMessage()[:9] for record in caplog.records] == ["TLS_CERT:"]
    writer.close()
    await server.stop(0)
