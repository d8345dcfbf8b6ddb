"""One connection to one node, on the event loop: moves octets, keeps the connection alive, tells who waits.

What the octets mean is the business of :mod:`ratelimitd_client.http2`. Never connects itself, and never connects again.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, cast

from ratelimitd_client.channel import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from ratelimitd_client.http2.call import Call
from ratelimitd_client.http2.connection import Connection
from ratelimitd_client.http2.errors import PeerError

KEEPALIVE_S: Final = KEEPALIVE_MS / 1_000
KEEPALIVE_TIMEOUT_S: Final = KEEPALIVE_TIMEOUT_MS / 1_000

GOODBYE_S: Final = 0.2
"""How long what is still to be sent may take when a connection is closed."""


class AskedCall(Call):
    """A call, and the connection that carries it."""

    __slots__ = ("link",)

    def __init__(self, block: bytes, message: bytes, max_answer_bytes: int) -> None:
        super().__init__(block, message, max_answer_bytes)
        self.link: Link | None = None

    @abstractmethod
    def tell(self) -> None:
        """Do what is to be done when it has ended; raises nothing."""


class Link(asyncio.Protocol):
    """A connection.

    Args:
        loop: the loop that it belongs to.
        changed: called whenever :attr:`is_usable` may be another.

    Attributes:
        ready: done when the node has said its settings; the connection being lost before that is its exception.
        over: done when it takes no further calls.
        lost: done when it is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._connection: Connection[AskedCall] = Connection()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.ready: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    @property
    def is_usable(self) -> bool:
        """Whether a call may be made now: the node lives, takes more, and reads what it is sent."""
        return self.ready.done() and not self.over.done() and not self._is_paused

    @property
    def is_made(self) -> bool:
        """Whether there ever was a connection."""
        return self._transport is not None

    @property
    def has_answered(self) -> bool:
        """Whether it ever was of use."""
        return self._connection.answers > 0

    def ask(self, call: AskedCall) -> None:
        """Send a call. It is told when it has ended, and never before this returns."""
        call.link = self
        self._connection.begin(call)
        self._write()
        if self._connection.is_draining:
            self._settle()

    def cancel(self, call: AskedCall) -> None:
        """Give up a call."""
        self._connection.cancel(call)
        self._write()
        self._settle()

    def leave(self) -> None:
        """Take no further calls, and close when those under way have ended."""
        self._connection.is_draining = True
        self._settle()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: begin to speak."""
        self._transport = cast("asyncio.Transport", transport)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self.abort()
            return
        self._write()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._keep_alive)

    def data_received(self, data: bytes) -> None:
        """Octets came."""
        connection = self._connection
        try:
            ended = connection.receive(data)
        except PeerError as error:
            ended = connection.give_up(error)
            self._write()
            self.abort()
        else:
            self._write()
        if not self.ready.done() and connection.is_ready:
            self.ready.set_result(None)
        # Before those are told who will ask again: elsewhere, if this connection is over.
        if connection.is_draining:
            self._settle()
        for call in ended:
            call.tell()

    def eof_received(self) -> None:
        """The node will say no more: the transport closes itself."""

    def pause_writing(self) -> None:
        """The node does not read: what is asked now would only gather here."""
        self._is_paused = True
        self._changed()

    def resume_writing(self) -> None:
        """It reads again."""
        self._is_paused = False
        self._changed()

    def connection_lost(self, _error: Exception | None) -> None:
        """Closed, by whomever: end what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        ended = self._connection.lose()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("the connection was lost"))
            self.ready.exception()  # possibly without a waiter
        self.lost.set_result(None)
        self._settle()
        for call in ended:
            call.tell()

    def _write(self) -> None:
        octets = self._connection.octets_to_send()
        # A transport that is closing would log what cannot be sent; its waiters are told in a moment.
        if octets and self._transport is not None and not self._transport.is_closing():
            self._transport.write(octets)

    def _settle(self) -> None:
        """See whether the connection is over, and whether it may be closed."""
        if not self._connection.is_draining:
            return
        if not self.over.done():
            self.over.set_result(None)
            self._changed()
        transport = self._transport
        if self._connection.is_idle and transport is not None and not transport.is_closing():
            transport.close()
            self._loop.call_later(GOODBYE_S, transport.abort)

    def _keep_alive(self) -> None:
        self._connection.ping()
        self._write()
        self._timer = self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._judge)

    def _judge(self) -> None:
        """Close the connection of a node that does not answer a ping."""
        if self._connection.awaits_ping:
            self.abort()
        else:
            pause_s = KEEPALIVE_S - KEEPALIVE_TIMEOUT_S
            self._timer = self._loop.call_later(pause_s, self._keep_alive)
