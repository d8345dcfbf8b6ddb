"""The adapter's small parts; the server as a whole is tested through real channels in tests/rpc."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import grpc
import grpc.aio
import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.rpc import grpcio_server
from ratelimitd.rpc.grpcio_server import GrpcioCall, GrpcioServer
from ratelimitd.rpc.interface import Methods, StatusCode, TransportLimits
from ratelimitd.rpc.tls import GRPCIO_KEYS, CertificateSource, TlsFiles
from tests.certificates import KEYS, self_signed
from tests.http2_peer import END_HEADERS, END_STREAM, GREETING, POST, Peer


class Context:
    """The part of grpc's context that a call reads."""

    def __init__(self, peer="", metadata=(), names=None, remaining_s=None):
        self._peer, self._metadata, self._names = peer, metadata, names or {}
        self._remaining_s = remaining_s

    def peer(self):
        return self._peer

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return self._names

    def time_remaining(self):
        return self._remaining_s


def test_percent_encoded_brackets_of_ipv6_are_decoded():
    assert GrpcioCall("/s/m", Context("ipv6:%5B::1%5D:5000")).peer == "ipv6:[::1]:5000"


def test_the_first_value_of_a_text_key_is_the_metadata():
    call = GrpcioCall("/s/m", Context(metadata=(("a", "1"), ("a", "2"), ("b-bin", b"\x00"))))
    assert [call.metadata(key) for key in ("a", "b-bin", "c")] == ["1", None, None]
    assert GrpcioCall("/s/m", Context(metadata=None)).metadata("a") is None


def test_names_come_only_from_the_certificate():
    metadata = (("x509_subject_alternative_name", "forged"),)
    names = {
        "x509_subject_alternative_name": [
            b"2001:db8::1", b"a.example", b"other types of SAN", b"::ffff:10.0.0.1", b"\xff",
        ],
        "peer_dns": [b"a.example"],
        "peer_uri": [b"\xff"],
        "peer_ip": [b"2001:db8::1", b"::ffff:10.0.0.1"],
    }  # fmt: skip
    call = GrpcioCall("/s/m", Context(metadata=metadata, names=names))
    mapped = str(ip_address("::ffff:10.0.0.1"))
    assert call.peer_sans == ("2001:db8::1", "a.example", mapped, "\ufffd")
    assert GrpcioCall("/s/m", Context(metadata=metadata)).peer_sans == ()


def test_the_remaining_time_is_that_of_grpc():
    assert GrpcioCall("/s/m", Context(remaining_s=1.5)).time_remaining_s() == 1.5


def test_the_default_limits_allow_a_ping_every_ten_seconds():
    options = dict(grpcio_server._options(TransportLimits(), reuse_port=False))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.max_receive_message_length"] == 4 * 1024 * 1024


async def test_a_late_call_never_reaches_its_handler():
    called = []

    class LateContext(Context):
        async def abort(self, code, details, trailers):
            raise grpc.aio.AbortError(code, details, trailers)

    stats = CheckStats()
    server = GrpcioServer(
        Methods(unary={"/s/m": lambda data, _call: called.append(data) or b""}),
        listen="127.0.0.1:0",
        stats=stats,
    )
    behaviour = server._handlers()["/s/m"].unary_unary
    with pytest.raises(grpc.aio.AbortError) as caught:
        await behaviour(b"", LateContext(remaining_s=0.0))
    assert caught.value.args[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert called == []
    assert stats.errors_by_transport == {"deadline_exceeded": 1}


async def test_a_port_taken_between_probe_and_bind_is_one_clear_error(monkeypatch):
    async def free(_listen):
        return None

    monkeypatch.setattr(grpcio_server, "demand_free", free)
    server = GrpcioServer(Methods(), listen="192.0.2.1:9090", stats=CheckStats())
    with pytest.raises(StartupError, match=r"^LISTEN: cannot listen on 192\.0\.2\.1:9090$"):
        await server.start()


def accepts(certificate):
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(certificate.key, certificate.cert)])
    try:
        server.add_secure_port("127.0.0.1:0", credentials)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("kind", sorted({*KEYS} - {"RSA of 1024 bits"}))
def test_the_kinds_of_keys_that_are_refused_are_those_that_grpc_refuses(kind, tmp_path):
    certificate = self_signed(kind)
    files = TlsFiles(tmp_path / "cert", tmp_path / "key")
    files.cert.write_bytes(certificate.cert)
    files.key.write_bytes(certificate.key)
    assert accepts(certificate) is (kind in GRPCIO_KEYS)
    if kind in GRPCIO_KEYS:
        source = CertificateSource(files, pytest.fail, is_grpcio=True)
        assert source.current().chain == certificate.cert
    else:
        with pytest.raises(StartupError, match=r"^TLS_CERT: .* has a kind of key that this"):
            CertificateSource(files, pytest.fail, is_grpcio=True)


async def test_an_error_of_a_port_with_tls_names_its_certificate_too(monkeypatch, tmp_path):
    certificate = self_signed("P-256")
    files = TlsFiles(tmp_path / "cert", tmp_path / "key")
    files.cert.write_bytes(certificate.cert)
    files.key.write_bytes(certificate.key)

    async def free(_listen):
        return None

    monkeypatch.setattr(grpcio_server, "demand_free", free)
    source = CertificateSource(files, pytest.fail, is_grpcio=True)
    server = GrpcioServer(Methods(), listen="192.0.2.1:9090", stats=CheckStats(), tls=source)
    with pytest.raises(StartupError, match=r"^LISTEN, TLS_CERT or TLS_KEY: cannot listen on 192"):
        await server.start()


async def test_a_port_is_shared_with_another_server_that_shares_it():
    assert dict(grpcio_server._options(TransportLimits(), reuse_port=True))["grpc.so_reuseport"]
    first = GrpcioServer(Methods(), listen="127.0.0.1:0", stats=CheckStats(), reuse_port=True)
    address = await first.start()
    second = GrpcioServer(Methods(), listen=address, stats=CheckStats(), reuse_port=True)
    assert await second.start() == address
    for server in (first, second):
        await server.stop(0)


async def test_a_server_that_never_started_stops_at_once():
    server = GrpcioServer(Methods(), listen="127.0.0.1:0", stats=CheckStats())
    async with asyncio.timeout(1):
        await server.stop_accepting()
        await server.stop(10)


async def test_calls_in_progress_are_reported_until_they_end():
    begun, done = asyncio.Event(), asyncio.Event()

    async def wait(data, _call):
        begun.set()
        await done.wait()
        return data

    server = GrpcioServer(Methods({"/s/wait": wait}), listen="127.0.0.1:0", stats=CheckStats())
    address = await server.start()
    async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/s/wait")(b"")
        await begun.wait()
        assert server.in_progress == (1, 0, None, None)
        done.set()
        await call
        assert server.in_progress == (0, 0, None, None)
    await server.stop(0)


class AttackedStats(CheckStats):
    def __init__(self):
        super().__init__()
        self.ended = asyncio.Event()

    def transport_error(self, cause):
        super().transport_error(cause)
        self.ended.set()


async def test_a_path_with_invalid_utf8_costs_connections_but_not_the_server():
    stats, lost = AttackedStats(), []
    # The loop's task and grpc's own shutdown both end with the error, and neither is awaited.
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    server = GrpcioServer(
        Methods(unary={"/s/m": lambda data, _call: data}), listen="127.0.0.1:0", stats=stats
    )
    address = await server.start()
    host, port = address.split(":")
    fields = [(name, b"/\xff" if name == ":path" else value) for name, value in POST]
    attack = GREETING + Peer(greeting=b"").head(1, fields, END_HEADERS | END_STREAM)
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(attack)
        async with asyncio.timeout(20), grpc.aio.insecure_channel(address) as channel:
            await stats.ended.wait()
            stats.ended.clear()
            call = channel.unary_unary("/s/m")
            assert await call(b"check", wait_for_ready=True) == b"check"
        writer.close()
    assert stats.errors_by_transport == {"unexpected": 3}
    await server.stop(0)


async def test_a_server_without_its_port_retries_until_it_is_stopped(monkeypatch):
    tried = asyncio.Event()

    async def taken(_listen):
        tried.set()
        raise StartupError

    monkeypatch.setattr(grpcio_server, "REOPEN_PAUSE_S", 0)
    server = GrpcioServer(Methods(), listen="127.0.0.1:1", stats=CheckStats())
    monkeypatch.setattr(server, "_open", taken)
    async with asyncio.timeout(20):
        reopening = asyncio.create_task(server._reopen("127.0.0.1:1"))
        await tried.wait()
        tried.clear()
        await tried.wait()
        await server.stop(0)
        await reopening


async def test_a_requested_stop_is_not_counted_as_lost():
    stats = CheckStats()
    server = GrpcioServer(Methods(), listen="127.0.0.1:0", stats=stats)
    await server.start()
    await server.stop_accepting()
    await server.stop(0)
    assert stats.errors_by_transport == {}


def test_status_codes_have_the_names_and_numbers_of_grpc():
    assert {code.name: code.value for code in StatusCode} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }
