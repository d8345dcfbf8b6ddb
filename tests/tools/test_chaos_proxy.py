"""The proxy does to connections what its faults say, and nothing else; before a real server and before an echo."""

import contextlib
import socket
import socketserver
import ssl
import threading
import time

import pytest
import trustme

from tests.chaos_proxy import ChaosProxy
from tests.servers import until

WAIT_S = 10.0


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(ConnectionError):
            while octets := self.request.recv(65_536):
                self.server.pieces.append(octets)
                self.request.sendall(octets)
        self.server.ended.set()


@pytest.fixture
def echo():
    """A server that says what it hears, and remembers it piece by piece."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        server.pieces, server.ended = [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo):
    with ChaosProxy(echo.server_address[1]) as running:
        yield running


@pytest.fixture
def caller(proxy):
    with connected(proxy) as one:
        yield one


def connected(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=WAIT_S)


def hear(caller, count):
    heard = b""
    while len(heard) < count:
        octets = caller.recv(count - len(heard))
        assert octets, f"the connection ended after {heard!r}"
        heard += octets
    return heard


def hear_once(proxy):
    with connected(proxy) as caller:
        hear(caller, 1)


def is_silent(caller):
    """Whether nothing comes for a while, which is the one thing that only waiting can show."""
    caller.settimeout(0.1)
    try:
        octets = caller.recv(1)
    except TimeoutError:
        return True
    finally:
        caller.settimeout(WAIT_S)
    assert octets
    return False


def test_without_a_fault_everything_passes_and_an_end_is_an_end(caller, echo, proxy):
    octets = bytes(range(256)) * 4_000
    sender = threading.Thread(target=caller.sendall, args=(octets,))
    sender.start()
    assert hear(caller, len(octets)) == octets
    sender.join()
    caller.shutdown(socket.SHUT_WR)
    assert caller.recv(1) == b""
    assert echo.ended.wait(WAIT_S)
    until(lambda: proxy.connections == 0, "the connection is forgotten")
    assert proxy.accepted == 1


def test_latency_holds_up_each_way_by_itself_and_delays_do_not_add_up(caller, proxy):
    proxy.up.latency_ms, proxy.down.latency_ms = 30, 20
    began_s = time.monotonic()
    for _ in range(10):
        caller.sendall(b"x")
        time.sleep(0.005)
    assert hear(caller, 1) == b"x"
    first_s = time.monotonic() - began_s
    assert hear(caller, 9) == b"x" * 9
    last_s = time.monotonic() - began_s
    assert first_s >= 0.05
    assert last_s < 10 * 0.05  # it would be more, were they brought one after the other


def test_what_is_late_arrives_at_once_when_the_latency_ends(caller, proxy):
    proxy.down.latency_ms = 2_000 * WAIT_S
    caller.sendall(b"late")
    assert is_silent(caller)
    proxy.heal()
    caller.sendall(b"r")
    assert hear(caller, 5) == b"later"


def test_jitter_keeps_the_order(caller, proxy):
    proxy.up.jitter_ms = 5
    octets = bytes(range(100))
    for octet in octets:
        caller.sendall(bytes((octet,)))
    assert hear(caller, 100) == octets


def test_bandwidth_makes_much_slow(caller, proxy):
    proxy.down.bandwidth_bytes_s = 20_000
    began_s = time.monotonic()
    caller.sendall(bytes(2_000))
    hear(caller, 2_000)
    assert time.monotonic() - began_s >= 0.1


def test_slices_arrive_one_by_one(caller, echo, proxy):
    proxy.up.slice_bytes = 3
    proxy.up.bandwidth_bytes_s = 300  # 10 ms between them, so that they are not put together again
    caller.sendall(b"0123456789")
    assert hear(caller, 10) == b"0123456789"
    assert len(echo.pieces) > 1
    assert max(map(len, echo.pieces)) <= 9


def test_what_is_held_back_arrives_when_the_partition_heals(caller, proxy):
    proxy.partition()
    caller.sendall(b"late")
    assert is_silent(caller)
    proxy.heal()
    assert hear(caller, 4) == b"late"


def test_what_is_held_back_arrives_even_when_its_sender_has_gone(caller, echo, proxy):
    proxy.up.hold = True
    caller.sendall(b"will")
    caller.close()
    assert not echo.ended.wait(0.1)
    assert echo.pieces == []
    proxy.heal()
    assert echo.ended.wait(WAIT_S)
    assert b"".join(echo.pieces) == b"will"


def test_what_is_dropped_on_the_way_there_never_arrives(caller, echo, proxy):
    proxy.up.drop = True
    caller.sendall(b"lost")
    assert is_silent(caller)
    proxy.heal()
    caller.sendall(b"more")
    with pytest.raises(ConnectionResetError):
        caller.recv(1)
    assert echo.pieces == []


def test_a_reply_is_dropped_after_the_server_has_done_its_work(caller, echo, proxy):
    proxy.down.drop = True
    caller.sendall(b"done")
    assert is_silent(caller)
    assert echo.pieces == [b"done"]


def test_a_dropped_end_leaves_the_other_side_waiting(caller, echo, proxy):
    proxy.up.drop = True
    caller.close()
    assert not echo.ended.wait(0.1)


def test_a_connection_is_cut_after_so_many_bytes_and_the_next_one_is_whole(caller, proxy):
    proxy.down.cut_after_bytes = 6
    caller.sendall(b"1234")
    assert hear(caller, 4) == b"1234"
    caller.sendall(b"5678")
    with pytest.raises(ConnectionResetError):
        hear(caller, 4)
    assert proxy.down.cut_after_bytes is None
    with connected(proxy) as another:
        another.sendall(b"again")
        assert hear(another, 5) == b"again"


def test_reset_ends_connections_at_once_and_new_ones_are_welcome(caller, echo, proxy):
    caller.sendall(b"x")
    hear(caller, 1)
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        caller.recv(1)
    with connected(proxy) as another:
        another.sendall(b"y")
        assert hear(another, 1) == b"y"


def test_refused_callers_come_back_and_others_stay(caller, proxy):
    caller.sendall(b"x")
    hear(caller, 1)
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    caller.sendall(b"y")
    assert hear(caller, 1) == b"y"
    proxy.accept()
    connected(proxy).close()


def test_killed_it_refuses_and_resets(caller, proxy):
    caller.sendall(b"x")
    hear(caller, 1)
    proxy.kill()
    with pytest.raises(ConnectionResetError):
        caller.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)


def test_a_server_that_is_gone_ends_the_connection(proxy, echo):
    echo.shutdown()
    echo.server_close()
    with pytest.raises(ConnectionResetError):  # of the connection, or of the attempt
        hear_once(proxy)


def test_callers_may_speak_tls(echo):
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    caller_side = ssl.create_default_context()
    authority.configure_trust(caller_side)
    with (
        ChaosProxy(echo.server_address[1], tls=server_side) as proxy,
        connected(proxy) as plain,
        caller_side.wrap_socket(plain, server_hostname="127.0.0.1") as caller,
    ):
        assert proxy.url == f"rediss://{proxy.address}"
        caller.sendall(b"secret")
        assert hear(caller, 6) == b"secret"


def test_one_of_several_connections_can_fall_silent_by_what_it_said(proxy, caller):
    with connected(proxy) as other:
        caller.sendall(b"HELLO")
        other.sendall(b"SUBSCRIBE")
        assert (hear(caller, 5), hear(other, 9)) == (b"HELLO", b"SUBSCRIBE")
        proxy.silence(b"SUBSCRIBE")
        for one in (caller, other):
            one.sendall(b"there?")
        assert hear(caller, 6) == b"there?"
        assert is_silent(other)
        proxy.heal()
        assert hear(other, 6) == b"there?"


def test_who_says_it_later_is_not_silent(proxy, caller):
    proxy.silence(b"SUBSCRIBE")
    caller.sendall(b"SUBSCRIBE")
    assert hear(caller, 9) == b"SUBSCRIBE"
