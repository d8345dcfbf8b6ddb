"""Addresses a transport listens on: whether one is free, and how the bound one is written.

Never listens itself.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

from ratelimitd.errors import StartupError

UNIX_PREFIX: Final = "unix:"


async def demand_free(listen: str) -> None:
    """See that nobody else listens there, so that a taken port is one clear line and not a page of a C library's.

    Raises:
        StartupError: the address is taken, not this host's, or not to be resolved; the message names the setting.
    """
    if listen.startswith(UNIX_PREFIX):
        await _demand_silent_socket(listen)
        return
    host, port = split(listen)
    if port == 0:
        return
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                # As a server does it: connections that wait for their end do not keep a port taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as error:
        raise _cannot(listen, error) from None


async def listening_sockets(listen: str, *, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets bound to every address that ``listen`` stands for; with port 0, all to one free port.

    ``[::]`` takes IPv4 too, as it does with grpcio. A socket file that is left over is replaced. With ``reuse_port``
    other processes of the same user that ask for it too may have the port as well.

    Raises:
        StartupError: an address cannot be bound; the message names the setting.
    """
    if listen.startswith(UNIX_PREFIX):
        return [_bound_unix(listen)]
    host, port = split(listen)
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                both = address[0] == "::"
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
            sock.bind((address[0], port, *address[2:]))
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise _cannot(listen, error) from None
    return sockets


def bound_address(listen: str, port: int) -> str:
    """The address of a server that was asked to listen on ``listen`` and got ``port``."""
    if listen.startswith(UNIX_PREFIX):
        return listen
    return f"{listen.rpartition(':')[0]}:{port}"


def split(listen: str) -> tuple[str, int]:
    """Host, without brackets, and port of ``host:port``.

    Raises:
        StartupError: it is no such text.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        message = f"LISTEN: {listen} is not HOST:PORT"
        raise StartupError(message)
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _demand_silent_socket(listen: str) -> None:
    """A socket file that nobody answers on is left over from a node that was killed, and may be replaced."""
    try:
        _, writer = await asyncio.open_unix_connection(listen.removeprefix(UNIX_PREFIX))
    except OSError:
        return
    writer.close()
    message = f"LISTEN: cannot listen on {listen}: another process does"
    raise StartupError(message)


def _bound_unix(listen: str) -> socket.socket:
    path = Path(listen.removeprefix(UNIX_PREFIX))
    if path.is_socket():
        path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise _cannot(listen, error) from None
    return sock


def _cannot(listen: str, error: OSError) -> StartupError:
    return StartupError(f"LISTEN: cannot listen on {listen}: {error.strerror}")
