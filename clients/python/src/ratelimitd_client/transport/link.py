"""One connection to one node, on the event loop: does its I/O and its keepalive. It never reconnects."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

from ratelimitd_client.transport.grpc_channel import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from ratelimitd_client.transport.h2_call import Call
from ratelimitd_client.transport.h2_connection import Connection
from ratelimitd_client.transport.payloads import PeerError
from ratelimitd_wire.breaker import FAILURE_THRESHOLD

KEEPALIVE_S: Final = KEEPALIVE_MS / 1_000
KEEPALIVE_TIMEOUT_S: Final = KEEPALIVE_TIMEOUT_MS / 1_000

CLOSE_S: Final = 0.2
"""How long a closing connection may take to send what is left."""

MAX_TIMEOUTS: Final = FAILURE_THRESHOLD
"""Calls in a row that time out before a connection is set aside: its node may still answer pings, and nothing else."""

FIRST_ASIDE_S: Final = 1.0
MAX_ASIDE_S: Final = 30.0
"""Bounds of that pause, which doubles until a call is answered: each return may cost a few checks their answers."""


class NodeCall(Call):
    """A call of a channel, whichever of its nodes answers it.

    Attributes:
        head: header block without the deadline.
        ended_by_link: called by the link when the call has ended; raises nothing.
        done: called by the channel with the final outcome.
        ends_s: deadline, by the clock of the loop.
        tries: how often the call was sent.
        link: the connection that carries it.
    """

    __slots__ = ("done", "ended_by_link", "ends_s", "head", "link", "tries")

    def __init__(
        self,
        head: bytes,
        message: bytes,
        max_answer_bytes: int,
        *,
        ended_by_link: Callable[[NodeCall], None],
        done: Callable[[NodeCall], None],
    ) -> None:
        super().__init__(head, message, max_answer_bytes)
        self.head: bytes = head
        self.ended_by_link: Callable[[NodeCall], None] = ended_by_link
        self.done: Callable[[NodeCall], None] = done
        self.ends_s: float = 0.0
        self.tries: int = 0
        self.link: Link | None = None


class Link(asyncio.Protocol):
    """A connection.

    Args:
        loop: the event loop that it belongs to.
        changed: called when :attr:`is_usable` may have changed, or a pause aside is over.

    Attributes:
        ready: done when the node's SETTINGS came; fails if the connection is lost before.
        over: done when no further calls are accepted.
        lost: done when the connection is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._connection: Connection[NodeCall] = Connection()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeouts = 0
        """Calls in a row that timed out, each sent after the one before it had."""
        self._answers = 0
        self._newest_id = 0
        self._newest_place = 0
        """Answers, the newest stream and the newest place in line, when a timeout was last counted."""
        self._aside: asyncio.TimerHandle | None = None
        self._aside_s = FIRST_ASIDE_S
        self.ready: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    @property
    def is_usable(self) -> bool:
        """Whether a call can be sent now: the node answered, accepts calls, and reads."""
        return self.ready.done() and not self.over.done() and not self._is_paused

    @property
    def is_aside(self) -> bool:
        """Whether calls are to use other connections, if there are any."""
        return self._aside is not None

    @property
    def has_answered(self) -> bool:
        """Whether a call was answered."""
        return self._connection.answers > 0

    @property
    def is_idle(self) -> bool:
        """Whether no call is in flight."""
        return self._connection.is_idle

    def ask(self, call: NodeCall) -> None:
        """Send a call. It ends after this returns."""
        call.link = self
        self._connection.begin(call)
        self._write()
        if self._connection.is_draining:
            self._settle()

    def cancel(self, call: NodeCall) -> None:
        """Cancel a call."""
        self._connection.cancel(call)
        self._write()
        self._settle()

    def time_out(self, call: NodeCall) -> bool:
        """Count a call that times out; return whether it sets the connection aside for a while.

        Calls that were in flight together count as one: the node or this process may have paused. So does a call whose
        caller leaves before it ends. An answer resets the count; answers are looked for here only, since most calls
        have one. After the pause, one timeout is enough.
        """
        connection = self._connection
        if connection.answers != self._answers:
            self._answers = connection.answers
            self._timeouts = 0
            self._aside_s = FIRST_ASIDE_S
        # Where the node allows no streams, or too few, the call may still be in line.
        newest = self._newest_id if call.stream_id else self._newest_place
        if (call.stream_id or call.place) <= newest:
            return False
        self._newest_id = connection.newest_id
        self._newest_place = connection.places
        self._timeouts += 1
        if self._timeouts < MAX_TIMEOUTS or self.is_aside:
            return False
        self._aside = self._loop.call_later(self._aside_s, self._return)
        self._aside_s = min(2 * self._aside_s, MAX_ASIDE_S)
        return True

    def ignore_answer(self) -> None:
        """Discount an answer that came too late: it does not reset the count of timeouts."""
        self._answers += 1

    def take_back(self) -> None:
        """End the pause aside."""
        if self._aside is not None:
            self._aside.cancel()
            self._aside = None

    def leave(self) -> None:
        """Accept no further calls, and close when those in flight have ended."""
        self._connection.is_draining = True
        self._settle()

    def abort(self) -> None:
        """Close at once, also a connection that is still being established."""
        if self._transport is None:
            self.connection_lost(None)
        else:
            self._transport.abort()
            # Where create_connection was cancelled, uvloop has closed the transport and does not report it.
            self._loop.call_soon(self.connection_lost, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and start the keepalive."""
        if self.lost.done():
            cast("asyncio.Transport", transport).abort()
            return
        self._transport = cast("asyncio.Transport", transport)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self.abort()
            return
        self._write()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._keep_alive)

    def data_received(self, data: bytes) -> None:
        """Process received octets."""
        connection = self._connection
        try:
            ended = connection.receive(data)
        except PeerError as error:
            ended = connection.give_up(error)
            self._write()
            if not self.ready.done():
                self._fail(ConnectionError(str(error)))
            self.abort()
        else:
            self._write()
        if not self.ready.done() and connection.is_ready:
            self.ready.set_result(None)
        # Before callers are answered: if this connection is over, they send their next call elsewhere.
        if connection.is_draining:
            self._settle()
        for call in ended:
            call.ended_by_link(call)

    def eof_received(self) -> None:
        """Let the transport close itself: the node sends nothing more."""

    def pause_writing(self) -> None:
        """Accept no calls while the node does not read."""
        self._is_paused = True
        self._changed()

    def resume_writing(self) -> None:
        """Accept calls again."""
        self._is_paused = False
        self._changed()

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls in flight; may be called again."""
        if self.lost.done():
            return
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self.take_back()
        ended = self._connection.lose()
        if not self.ready.done():
            # The node's TLS may refuse the client after it has accepted the node.
            if not isinstance(error, ssl.SSLError):
                error = ConnectionError("the connection was lost")
            self._fail(error)
        self.lost.set_result(None)
        self._settle()
        for call in ended:
            call.ended_by_link(call)

    def _return(self) -> None:
        self.take_back()
        self._changed()

    def _fail(self, error: Exception) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # marks it as retrieved: there may be no waiter

    def _write(self) -> None:
        octets = self._connection.octets_to_send()
        # A closing transport would log what it cannot send; connection_lost ends the calls.
        if octets and self._transport is not None and not self._transport.is_closing():
            self._transport.write(octets)

    def _settle(self) -> None:
        """If the connection is draining, report it as over, and close it when it is idle."""
        if not self._connection.is_draining:
            return
        if not self.over.done():
            self.over.set_result(None)
            self._changed()
        transport = self._transport
        if self._connection.is_idle and transport is not None and not transport.is_closing():
            transport.close()
            self._loop.call_later(CLOSE_S, transport.abort)

    def _keep_alive(self) -> None:
        self._connection.ping()
        self._write()
        self._timer = self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._check_ping)

    def _check_ping(self) -> None:
        """Close the connection if the ping was not answered."""
        if self._connection.awaits_ping:
            self.abort()
        else:
            pause_s = KEEPALIVE_S - KEEPALIVE_TIMEOUT_S
            self._timer = self._loop.call_later(pause_s, self._keep_alive)
