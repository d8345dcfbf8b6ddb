"""From a server's address to a connection that has said who we are, with one class of error for each way to fail."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ratelimitd.errors import StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.sharedstate.connection import Connection
from ratelimitd.sharedstate.login import Greeting, Refused, ask, hand_over, log_in
from ratelimitd.sharedstate.replies import login_error_of
from ratelimitd.sharedstate.url import Server

CONNECT_S: Final = 1.0
"""For everything from the first packet to the end of the greeting, TLS included. No check waits for it."""

KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""Seconds of quiet before the first question, seconds between questions, and how many remain unanswered."""

_Connection = TypeVar("_Connection", bound=Connection)


async def connect(
    server: Server,
    greeting: Greeting,
    tls: ssl.SSLContext | None,
    make: Callable[[], _Connection],
    *,
    within_s: float = CONNECT_S,
) -> _Connection:
    """A connection of ``make`` to ``server``, greeted.

    Raises:
        StoreMisconfiguredError: a certificate, a password, a permission or the database is wrong.
        StoreUnavailableError: the server cannot be reached, or cannot serve now.
    """
    try:
        async with asyncio.timeout(within_s):
            connection = await _open(server, tls, make)
            try:
                await log_in(connection, greeting)
            except BaseException:
                connection.drop(StoreUnavailableError("the greeting has failed"))
                raise
            return connection
    except TimeoutError:
        message = f"no connection within {within_s:g} s"
        raise StoreUnavailableError(message) from None
    except ssl.SSLError as error:
        message = f"TLS has failed: {error.reason or 'the server does not speak it'}"
        raise StoreMisconfiguredError(message) from None
    except OSError as error:
        message = f"no connection: {cause_of(error)}"
        raise StoreUnavailableError(message) from None


async def ask_once(
    server: Server,
    greeting: Greeting,
    tls: ssl.SSLContext | None,
    *command: bytes | str,
    within_s: float = CONNECT_S,
) -> Any:
    """The reply to one command, on a connection that is made for it; raises as :func:`connect`."""
    connection = await connect(
        server,
        greeting,
        tls,
        lambda: Connection(hand_over, lambda _error: None, timeout_s=within_s),
        within_s=within_s,
    )
    try:
        return await ask(connection, *command)
    except Refused as refused:
        raise login_error_of(str(refused)) from None
    finally:
        connection.drop(StoreUnavailableError("asked"))


def cause_of(error: OSError) -> str:
    """Why, in the system's words. The error's own text may name addresses, many of them."""
    if isinstance(error, socket.gaierror):
        return "the name of the host is not known"
    return os.strerror(error.errno) if error.errno else "several addresses were tried in vain"


async def _open(
    server: Server, tls: ssl.SSLContext | None, make: Callable[[], _Connection]
) -> _Connection:
    loop = asyncio.get_running_loop()
    if server.is_path:
        return (await loop.create_unix_connection(make, server.host))[1]
    transport, connection = await loop.create_connection(make, server.host, server.port, ssl=tls)
    keep_alive(transport.get_extra_info("socket"))
    return connection


def keep_alive(peer: socket.socket) -> None:
    """Have the system notice within half a minute that the other side is gone, where nothing is sent that would."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
