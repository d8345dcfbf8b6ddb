import socket
import ssl

import pytest
import trustme

from ratelimitd.cluster.redis.connection import Connection, Handshake, hand_over
from ratelimitd.cluster.redis.link import ask_once, cause_of, connect, keep_alive
from ratelimitd.cluster.redis.topology import ClientTls
from ratelimitd.errors import StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.settings.urls import Server, TlsFiles
from tests.chaos_proxy import ChaosProxy
from tests.servers import free_port
from tests.unit.cluster.redis.asking import peer


class Authority:
    """A certificate authority, with a server and the files for its clients."""

    def __init__(self, directory):
        self._ca = trustme.CA()
        self._directory = directory
        self._ca.cert_pem.write_to_path(directory / "ca")
        client = self._ca.issue_cert("node-1")
        client.cert_chain_pems[0].write_to_path(directory / "cert")
        client.private_key_pem.write_to_path(directory / "key")

    def server(self, *names, asks_for_certificate=False):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._ca.issue_cert(*names).configure_cert(context)
        if asks_for_certificate:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, *, certificate=False, check_hostname=True):
        paths = [str(self._directory / name) for name in ("ca", "cert", "key")]
        files = TlsFiles(*paths) if certificate else TlsFiles(paths[0])
        return ClientTls(files._replace(check_hostname=check_hostname))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


def unconnected():
    return Connection(hand_over, lambda _error: None, timeout_s=5)


async def pong(server, tls=None):
    return await ask_once(server, Handshake(), tls, b"PING")


async def test_one_command_can_use_its_own_connection(valkey):
    assert await pong(Server("127.0.0.1", valkey.port)) == b"PONG"
    assert await pong(Server("localhost", valkey.port)) == b"PONG"
    assert await pong(Server(str(valkey.unix_path), 0)) == b"PONG"


async def test_an_error_reply_to_one_command_is_raised(valkey):
    server = Server("127.0.0.1", valkey.port)
    with pytest.raises(StoreMisconfiguredError, match="ERR"):
        await ask_once(server, Handshake(), None, b"CLUSTER", b"SLOTS")


async def test_a_connection_may_be_encrypted_by_both_sides_certificates(valkey, authority):
    tls = authority.server("127.0.0.1", asks_for_certificate=True)
    with ChaosProxy(valkey.port, tls=tls) as proxy:
        server = Server("127.0.0.1", proxy.port)
        assert await pong(server, authority.client(certificate=True)) == b"PONG"
        with pytest.raises(StoreUnavailableError):
            await pong(server, authority.client())


async def test_a_certificate_for_another_name_or_of_another_authority_is_a_misconfiguration(
    valkey, authority, tmp_path
):
    with ChaosProxy(valkey.port, tls=authority.server("elsewhere.example")) as proxy:
        server = Server("127.0.0.1", proxy.port)
        with pytest.raises(StoreMisconfiguredError, match="CERTIFICATE_VERIFY_FAILED"):
            await pong(server, authority.client())
        assert await pong(server, authority.client(check_hostname=False)) == b"PONG"
        with pytest.raises(StoreMisconfiguredError, match="CERTIFICATE_VERIFY_FAILED"):
            await pong(server, Authority(tmp_path).client(check_hostname=False))


async def test_a_server_without_tls_gets_no_plaintext(valkey, authority):
    server = Server("127.0.0.1", valkey.port)
    with pytest.raises(StoreUnavailableError):
        await ask_once(server, Handshake(), authority.client(), b"PING", within_s=0.05)


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        (Server("127.0.0.1", 0), "no connection: Connection refused"),
        (Server("/absent/valkey.sock", 0), "no connection: No such file or directory"),
        (Server("no-such-host.invalid", 6379), "no connection: the host name cannot be resolved"),
    ],
)
async def test_an_unreachable_server_is_unavailable_with_the_cause(server, cause):
    with pytest.raises(StoreUnavailableError) as away:
        await pong(server._replace(port=server.port or free_port()))
    assert str(away.value) == cause


async def test_a_server_without_a_handshake_reply_times_out():
    async with peer(handshake=False) as port:
        with pytest.raises(StoreUnavailableError, match=r"no connection within 0\.01 s"):
            await connect(Server("127.0.0.1", port), Handshake(), None, unconnected, within_s=0.01)


def test_several_addresses_that_fail_have_no_single_cause():
    assert (
        cause_of(OSError("Multiple exceptions")) == "none of the host's addresses could be reached"
    )
    assert cause_of(socket.gaierror(-2, "x")) == "the host name cannot be resolved"


def test_keepalive_is_enabled(monkeypatch):
    with socket.socket() as peer:
        keep_alive(peer)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    with socket.socket() as peer:
        keep_alive(peer)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
