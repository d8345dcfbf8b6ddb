"""Connections from accept to their protocol, over real sockets, in both event loops."""

import asyncio
import contextlib
import errno
import socket
import ssl
import struct

import pytest
import trustme

from ratelimitd.rpc import acceptor as accepting
from ratelimitd.rpc.acceptor import HANDSHAKE_TIMEOUT_S, Acceptor, answer_to, listening_sockets
from tests.http2_peer import GOAWAY, PREFACE, frames_of
from tests.native_caller import until


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


class Made(asyncio.Protocol):
    def __init__(self, bench):
        self.bench = bench

    def connection_made(self, transport):
        self.transport = transport
        self.bench.made.append(self)

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, _error):
        self.bench.acceptor.leave(self)


class Bench:
    """An acceptor, a manual clock, and blocking peers."""

    def __init__(self, tls=None, max_connections=3, **options):
        self.now_s = 100.0
        self.made = []
        self.counted = []
        self.peers = []
        self.acceptor = Acceptor(
            lambda: Made(self),
            lambda cause: self.counted.append(str(cause)),
            lambda: self.now_s,
            max_connections=max_connections,
            tls=tls,
            **options,
        )

    async def __aenter__(self):
        [listening] = await listening_sockets("127.0.0.1:0")
        self.listening = listening
        self.address = listening.getsockname()
        self.acceptor.listen(listening)
        return self

    async def __aexit__(self, *_):
        await self.acceptor.close()
        for made in self.made:
            made.transport.abort()
        for peer in self.peers:
            peer.close()
        await until(lambda: not self.acceptor.places)

    def peer(self, octets=b""):
        peer = socket.create_connection(self.address)
        peer.sendall(octets)
        peer.setblocking(False)
        self.peers.append(peer)
        return peer

    @property
    def places(self):
        return len(self.acceptor.places)


async def read_all(peer):
    """Return the octets that a peer reads until its connection is closed, or reset because of unread input."""
    octets = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            while more := await asyncio.get_running_loop().sock_recv(peer, 4_096):
                octets += more
    return octets


def server_context(ca, *, mutual=False):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    if mutual:
        ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_a_connection_counts_until_it_is_lost(running):
    async def scenario():
        async with Bench() as bench:
            peer = bench.peer(b"hello")
            await until(lambda: bench.made)
            assert await asyncio.get_running_loop().sock_recv(peer, 5) == b"hello"
            sock = bench.made[0].transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert bench.places == 1
            peer.close()
            await until(lambda: bench.places == 0)
            assert bench.counted == []

    running(scenario)


def test_silent_peers_of_a_tls_port_count_as_connections_until_their_timeout(running, ca):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            silent = [bench.peer(), bench.peer(b"\x16"), bench.peer(b"\x16\x03\x01\x02\x00")]
            await until(lambda: bench.places == 3)
            one_more = bench.peer()
            assert await read_all(one_more) == b""
            assert bench.counted == ["too_many_connections"]
            bench.now_s += HANDSHAKE_TIMEOUT_S - 0.1
            bench.acceptor.expire(bench.now_s)
            assert bench.places == 3
            bench.now_s += 0.1
            bench.acceptor.expire(bench.now_s)
            bench.acceptor.expire(bench.now_s)
            await until(lambda: bench.places == 0)
            assert [await read_all(peer) for peer in silent[:2]] == [b"", b""]
            assert bench.counted[1:] == ["slow_handshake"] * 3
            assert bench.made == []

    running(scenario)


def test_with_ends_handshakes_a_further_connection_ends_the_oldest_handshake(running, ca):
    async def scenario():
        options = {"max_connections": 2, "ends_handshakes": True}
        async with Bench(server_context(ca), **options) as bench:
            first, second = bench.peer(), bench.peer(b"\x16")
            await until(lambda: bench.places == 2)
            bench.peer()
            assert await read_all(first) == b""
            bench.peer()
            assert await read_all(second) == b""
            assert bench.counted == ["slow_handshake"] * 2
            await until(lambda: bench.places == 2)
        async with Bench(**options) as bench:
            for _ in range(2):
                bench.peer()
            await until(lambda: len(bench.made) == 2)
            assert await read_all(bench.peer()) == b"", "plaintext has no handshake to end"
            assert bench.counted == ["too_many_connections"]

    running(scenario)


def test_a_handshake_becomes_a_connection(running, ca):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            trusting = ssl.create_default_context()
            ca.configure_trust(trusting)
            reader, writer = await asyncio.open_connection(*bench.address, ssl=trusting)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            assert (bench.places, len(bench.made)) == (1, 1)
            writer.close()
            await until(lambda: bench.places == 0)
            assert bench.counted == []

    running(scenario)


@pytest.mark.parametrize(
    "octets", [b"\x16 but no TLS behind it", b"\x16\x03\x01\x00\x04\xff\0\0\0"]
)
def test_a_handshake_that_fails_is_counted(running, ca, octets):
    async def scenario():
        async with Bench(server_context(ca, mutual=True)) as bench:
            bench.peer(octets)
            await until(lambda: bench.counted and not bench.places)
            assert bench.counted == ["tls_handshake"]

    running(scenario)


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ([b"GET / HT", b"TP/1.1\r\nHost: x\r\n\r\n"], b"HTTP/1.1 400 "),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"], b"\0\0\x1c\7"),
        ([b"SSH-2.0-OpenSSH"], b""),
    ],
)
def test_plaintext_on_a_tls_port_is_answered_then_closed(running, ca, said, begins):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            peer = bench.peer()
            for octets in said:
                await asyncio.get_running_loop().sock_sendall(peer, octets)
            answer = await read_all(peer)
            assert answer.startswith(begins)
            assert bool(answer) == bool(begins)
            peer.close()
            await until(lambda: not bench.places)
            assert bench.counted == ["plaintext"]

    running(scenario)


def test_a_plaintext_peer_that_keeps_sending_is_read_for_a_bounded_time(running, ca):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            peer = bench.peer(b"GET / HTTP/1.1\r\n\r\n" + bytes(200_000))
            await until(lambda: bench.counted and not bench.places)
            assert peer.recv(13) == b"HTTP/1.1 400 "

    running(scenario)


@pytest.mark.parametrize("octets", [b"", b"GE"])
def test_a_peer_that_leaves_before_its_protocol_is_known_leaves_nothing_behind(running, ca, octets):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            gone, reset = bench.peer(octets), bench.peer(octets)
            await until(lambda: bench.places == 2)
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.close()
            gone.close()
            await until(lambda: bench.places == 0)
            assert set(bench.counted) <= {"plaintext"}

    running(scenario)


class Failing(socket.socket):
    """A listening socket that fails to accept its next connections."""

    def fail(self, *numbers):
        self.numbers = list(numbers)

    def accept(self):
        if self.numbers:
            raise OSError(self.numbers.pop(0), "no connection")
        return super().accept()


@pytest.mark.parametrize("number", sorted(accepting.NO_ROOM))
def test_accepting_is_retried_after_exhausted_resources(running, monkeypatch, number):
    async def scenario():
        monkeypatch.setattr(accepting, "RETRY_S", 0.001)
        async with Bench() as bench:
            acceptor = bench.acceptor
            with Failing() as full:
                full.fail(number)
                acceptor._accept(full)
                assert bench.counted == ["too_many_connections"]
                acceptor._accept_again(full)  # closed meanwhile, so it is ignored
            asyncio.get_running_loop().remove_reader(bench.listening)
            acceptor._accept_again(bench.listening)
            bench.peer()
            await until(lambda: bench.made)

    running(scenario)


@pytest.mark.parametrize(
    "number", [errno.ECONNABORTED, errno.EPROTO, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EPERM]
)
def test_a_failed_connection_does_not_block_those_behind_it(running, number):
    async def scenario():
        async with Bench() as bench:
            bench.peer()
            with Failing(fileno=bench.listening.dup().detach()) as failing:
                failing.settimeout(0)
                failing.fail(number, number)
                bench.acceptor._accept(failing)
            await until(lambda: bench.made)
            assert bench.counted == []

    running(scenario)


class WokenForNothing(socket.socket):
    """A socket that was reported readable without input."""

    woken = 0

    def recv(self, *how):
        self.woken += 1
        if self.woken < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return super().recv(*how)


def test_a_spurious_wake_up_does_not_count_as_a_lost_peer(running, ca):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            ours, theirs = socket.socketpair()
            with theirs, WokenForNothing(fileno=ours.detach()) as sock:
                sock.settimeout(0)
                theirs.sendall(b"\x16\x03")
                async with asyncio.timeout(20):
                    assert await bench.acceptor._first_octet(sock) == b"\x16"
                assert sock.woken == 3
                assert socket.socket.recv(sock, 2) == b"\x16\x03"

    running(scenario)


def test_a_defect_ends_only_its_connection_and_is_counted(running, monkeypatch):
    async def scenario():
        async with Bench() as bench:
            with monkeypatch.context() as patched:
                patched.setattr(bench.acceptor, "_connect", None)
                assert await read_all(bench.peer()) == b""
            assert (bench.places, bench.counted) == (0, ["unexpected"])
            bench.peer()
            await until(lambda: bench.made)

    running(scenario)


def test_unfinished_connections_are_dropped_when_the_acceptor_closes(running, ca):
    async def scenario():
        async with Bench(server_context(ca)) as bench:
            peer = bench.peer()
            await until(lambda: bench.places == 1)
            await bench.acceptor.close()
            assert bench.places == 0
            assert await read_all(peer) == b""

    running(scenario)


def test_a_connection_accepted_in_the_iteration_of_the_close_is_dropped(running):
    async def scenario():
        async with Bench() as bench:
            peer = bench.peer()
            bench.acceptor._accept(bench.listening)
            assert bench.places == 1
            await bench.acceptor.close()
            assert bench.places == 0
            assert await read_all(peer) == b""

    running(scenario)


def test_http2_in_plaintext_gets_a_goaway_without_settings_so_that_grpc_backs_off():
    [sent] = frames_of(answer_to(PREFACE + b"\x00\x00\x00\x04"))
    assert (sent.type, sent.code) == (GOAWAY, 12)
    assert sent.payload.endswith(b"this port speaks TLS")


def test_http1_gets_an_answer_of_http1():
    answer = answer_to(b"GET / HTTP/1.1\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\nThis port speaks TLS only.\n")


@pytest.mark.parametrize("octets", [b"", b"P", b"PRI * HTTP/2.0\r\n", b"GE", b"DELETE"])
def test_no_answer_is_sent_while_the_protocol_is_unknown(octets):
    assert answer_to(octets) is None
