"""Servers that are no rate limiter: what a client meets when something else, or nothing, answers at its address."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from ratelimitd_client.sessions import HEALTH
from ratelimitd_client.transport import payloads
from tests import http2_peer as peer


def hang(connection: socket.socket) -> None:
    """Say nothing until the peer leaves."""
    while connection.recv(65_536):
        pass


def garbage(connection: socket.socket) -> None:
    """Answer whatever comes with bytes that are no HTTP/2."""
    while connection.recv(65_536):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(range(256)) * 16)


def reset(connection: socket.socket) -> None:
    """Read something and break off with RST."""
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def half_a_frame(connection: socket.socket) -> None:
    """Open HTTP/2 properly, then begin a frame that never ends."""
    connection.sendall(b"\0\0\0\4\0\0\0\0\0" + b"\0\x40\0\0\0\0\0\0\1")
    hang(connection)


def nothing_that_ends_well(connection: socket.socket) -> None:
    """End each call with the status OK, and without a message."""
    block = payloads.encode_block(
        [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]
    )
    with connection.makefile("rb") as octets:
        octets.read(len(peer.PREFACE))
        connection.sendall(peer.frame(peer.SETTINGS, 0, 0))
        while head := octets.read(9):
            octets.read(int.from_bytes(head[:3], "big"))
            if head[3] == peer.HEADERS:
                stream_id = int.from_bytes(head[5:], "big")
                flags = peer.END_HEADERS | peer.END_STREAM
                connection.sendall(peer.frame(peer.HEADERS, flags, stream_id, block))


BEHAVIOURS = [hang, garbage, reset, half_a_frame, nothing_that_ends_well]


@contextmanager
def socket_server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that treats each connection so; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the peer was faster
            behave(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def never_answering(left_s: list[float]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """For ``bytes_server``: notes how long each caller waits yet, and leaves it waiting."""

    def handle(_request: bytes, context: grpc.ServicerContext) -> bytes:
        left_s.append(context.time_remaining())
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait()
        return b""

    return handle


class _Answers(grpc.GenericRpcHandler):
    def __init__(self, answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, call_details):
        # Without health checks, as a node that was reached and does nothing but what the test wants.
        return None if call_details.method == HEALTH else self._handler


@contextmanager
def bytes_server(answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[str]:
    """A gRPC server that answers each call with bytes of the test's choice; yields its address."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_Answers(answer),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()
