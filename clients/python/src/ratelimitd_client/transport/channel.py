"""The asyncio client's replacement for gRPC's channel: unary calls over the client's own HTTP/2. See ADR 0040.

Keeps a connection to each address of a name from the first call on, and uses them in turn. An address that is down is
skipped and retried; one whose calls all time out is set aside for a while. For what it does not support, see
:func:`open_native_channel`.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, Final

import grpc

from ratelimitd_client.fail_open import (
    CHECK,
    EXTEND,
    HOLD,
    MAX_ANSWER_BYTES,
    MAX_HOLD_ANSWER_BYTES,
    SETTLE,
)
from ratelimitd_client.transport import h2_call
from ratelimitd_client.transport.grpc_channel import MAX_MESSAGE_BYTES, Metadata
from ratelimitd_client.transport.link import Link, NodeCall
from ratelimitd_client.transport.targets import Address, Target, parse
from ratelimitd_client.transport.tls import Tls, open_context, reason_of

CONNECT_S: Final = 1.0
"""Time limit of an attempt to connect, until the node's SETTINGS came."""

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 0.5
"""Bounds of the pause between attempts: a node that comes back is found within a second."""

BACKOFF_JITTER: Final = 0.2

LOOKUP_INTERVAL_S: Final = 30.0
"""How long the addresses of a name are kept while its connections live."""

LOOKUP_PAUSE_S: Final = 1.0
"""Pause between look-ups of a name when one was lost."""

RESTART_S: Final = 1.0
"""Pause before the cancelled keeper task is replaced. A loop that ends cancels every task, and would destroy a new one
while it is pending."""

MAX_TRIES: Final = 2
"""How often a call is sent that no server has begun to process."""

_MAX_ANSWER_BYTES: Final = {
    CHECK: MAX_ANSWER_BYTES,
    HOLD: MAX_HOLD_ANSWER_BYTES,
    SETTLE: MAX_HOLD_ANSWER_BYTES,
    EXTEND: MAX_HOLD_ANSWER_BYTES,
}
"""Limit of an answer by method, where it is below that of a message."""

TIMER_ROUNDING_S: Final = 0.000_5
"""How much too early a timer of an event loop may fire: its resolution is 1 ms."""


def open_native_channel(
    target: str, tls: Tls | None, tls_failed: Callable[[str], None] = lambda _: None
) -> NativeChannel | None:
    """Return a channel that connects with its first call, or ``None`` where gRPC's is needed.

    That is so for targets that :func:`parse` does not know, and for TLS with the roots that gRPC ships.
    ``tls_failed(reason)`` is called when TLS fails; it must not raise.
    """
    parsed = parse(target)
    if parsed is None or (tls is not None and tls.ca is None):
        return None
    return NativeChannel(parsed, tls, tls_failed)


class _Node:
    """An address, and the connection to it."""

    __slots__ = ("address", "is_failing", "keeper", "link")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.link: Link | None = None
        self.is_failing = False
        """The last attempt to connect failed."""
        self.keeper: asyncio.Task[None]


class NativeChannel:
    """Connections to the nodes behind a name, on the running event loop."""

    def __init__(self, target: Target, tls: Tls | None, tls_failed: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls_failed = tls_failed
        self._target = target
        self._tls = tls
        self._tls_read: Tls | None = None
        self._context: ssl.SSLContext | None = None
        """That of ``_tls_read``, the material when it was last read."""
        self._scheme = "http" if tls is None else "https"
        self._nodes: dict[Address, _Node] = {}
        self._ready: list[Link] = []
        self._turn = 0
        self._links: set[Link] = set()
        self._is_unknown = False
        """The last look-up of the name failed."""
        self._lookup_due = asyncio.Event()
        self._failure = "no attempt has failed"
        """Why the last attempt to connect failed."""
        self._settled = asyncio.Event()
        """A node is connected, or the channel is closed."""
        self._keeper: asyncio.Task[None] | None = None
        self._restart_s = 0.0
        """When a cancelled keeper may be replaced."""
        self._is_closed = False
        self._methods: dict[tuple[str, Metadata], tuple[bytes, int]] = {}
        """What the calls of a method share: the header block without the deadline, and the limit of an answer."""
        self._calls: dict[NodeCall, None] = {}
        """Calls that have not ended."""
        self._waiting: dict[NodeCall, None] = {}
        """Calls among them that wait for a connection."""
        self._no_context = Context()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at_s = math.inf

    async def channel_ready(self) -> None:
        """Wait until a node is connected, or the channel is closed."""
        self._start()
        await self._settled.wait()

    async def close(self) -> None:
        """Close all connections, after the calls in flight have ended."""
        self._is_closed = True
        self._settled.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._changed()  # the keeper does so only if it was started
        lost = [link.lost for link in self._links]
        for link in list(self._links):
            link.leave()
        if lost:
            await asyncio.wait(lost)
        if self._timer is not None:
            self._timer.cancel()

    def begin(
        self,
        path: str,
        message: bytes,
        done: Callable[[NodeCall], None],
        *,
        timeout_s: float,
        metadata: Metadata,
    ) -> NodeCall:
        """Start a call. ``done(call)`` is called once, when it has ended, possibly before this returns."""
        head, max_answer_bytes = self._methods.get((path, metadata)) or self._method(path, metadata)
        call = NodeCall(head, message, max_answer_bytes, ended_by_link=self._ended, done=done)
        call.ends_s = ends_s = self._loop.time() + timeout_s
        self._calls[call] = None
        if timeout_s <= 0:
            self._end(call, grpc.StatusCode.DEADLINE_EXCEEDED)
            return call
        self._start()
        if ends_s < self._expires_at_s:
            self._expire_at(ends_s)
        try:
            self._send(call, timeout_s)
        except Exception:
            self._calls.pop(call, None)
            raise
        return call

    def cancel(self, call: NodeCall) -> None:
        """Cancel a call without calling ``done``; it may have ended."""
        self._calls.pop(call, None)
        self._waiting.pop(call, None)
        if call.link is not None:
            call.link.cancel(call)

    def leave(self, call: NodeCall, *, is_overdue: bool) -> None:
        """Await no more than a late answer to a call whose caller has left: a call that was not sent ends.

        ``is_overdue``: the caller left at its deadline, which counts as a timeout; the deadline of the call is later.
        """
        if call not in self._calls:
            return
        call.ended_by_link = self._ended_late
        if call in self._waiting or not call.stream_id:
            self.cancel(call)
            self._end(call, grpc.StatusCode.DEADLINE_EXCEEDED)
        if is_overdue and call.link is not None and call.link.time_out(call):
            self._changed()

    def _ended(self, call: NodeCall) -> None:
        """Finish a call that its connection has ended, or send it again."""
        if call not in self._calls:  # sending it raised, and the caller has the error
            return
        if call.unprocessed and call.tries < MAX_TRIES:
            left_s = call.ends_s - self._loop.time()
            if left_s > 0:
                self._send(call, left_s)
                return
        self._finish(call)

    def _ended_late(self, call: NodeCall) -> None:
        """Finish a call whose caller has left. It is not sent again, and its answer does not reset what is counted."""
        if call.link is not None:
            call.link.ignore_answer()
        self._finish(call)

    def _send(self, call: NodeCall, left_s: float) -> None:
        """Send a call, or queue it until there is a connection."""
        ready = self._ready
        if ready:
            self._turn += 1
            link = ready[self._turn % len(ready)]  # round robin
            if call.tries:
                call.restart()
            call.tries += 1
            call.block = call.head + h2_call.timeout_field(h2_call.milliseconds(left_s))
            link.ask(call)
        elif self._is_closed or self._is_hopeless():
            details = f"no node can be reached: {self._failure}"
            self._end(call, grpc.StatusCode.UNAVAILABLE, details)
        else:
            self._waiting[call] = None

    def _end(self, call: NodeCall, code: grpc.StatusCode, details: str = "") -> None:
        """End a call that no connection carries."""
        call.fail(code, details)
        self._finish(call)

    def _finish(self, call: NodeCall) -> None:
        """Call ``done``. If it raises, the calls behind this one must still be answered."""
        self._calls.pop(call, None)
        try:
            call.done(call)
        except Exception as error:  # noqa: BLE001 - see above
            context = {"message": "the callback of a call failed", "exception": error}
            self._loop.call_exception_handler(context)

    def _expire_at(self, ends_s: float) -> None:
        """Set the timer for deadlines: one for all calls, since few of them reach theirs."""
        if self._timer is not None:
            self._timer.cancel()
        self._expires_at_s = ends_s
        self._timer = self._loop.call_at(ends_s, self._expire, context=self._no_context)

    def _expire(self) -> None:
        """End the calls whose deadlines have passed."""
        self._expires_at_s = math.inf
        now_s = self._loop.time() + TIMER_ROUNDING_S
        due = [call for call in self._calls if call.ends_s <= now_s]
        for call in due:  # before any is cancelled: freeing a stream may send waiting calls
            self._waiting.pop(call, None)
        # In reverse: a freed stream goes to the next call in line, which would be sent in vain.
        is_changed = False
        for call in reversed(due):
            if call.link is not None and call.link.time_out(call):
                is_changed = True
            self.cancel(call)
        if is_changed:  # before callers are answered: they send their next call elsewhere
            self._changed()
        for call in due:
            call.fail(grpc.StatusCode.DEADLINE_EXCEEDED)
            self._finish(call)
        next_s = min((call.ends_s for call in self._calls), default=math.inf)
        if next_s < self._expires_at_s:
            self._expire_at(next_s)

    def _is_hopeless(self) -> bool:
        """Whether the last attempt failed for every address, or the last look-up did."""
        nodes = self._nodes.values()
        return all(node.is_failing for node in nodes) if nodes else self._is_unknown

    def _changed(self) -> None:
        """Update the connections to use, and send waiting calls."""
        links = [node.link for node in self._nodes.values()]
        usable = [link for link in links if link is not None and link.is_usable]
        self._ready = [link for link in usable if not link.is_aside]
        if not self._ready:  # those set aside are better than none
            for link in usable:
                link.take_back()
            self._ready = usable
        if self._ready or self._is_closed:
            self._settled.set()
        else:
            self._settled.clear()
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            try:
                self._send(call, call.ends_s - self._loop.time())
            except Exception:  # noqa: BLE001 - the calls behind it must go on
                self._end(call, grpc.StatusCode.INTERNAL, "the call could not be sent")

    def _method(self, path: str, metadata: Metadata) -> tuple[bytes, int]:
        head = h2_call.request_block(path, self._target.authority, self._scheme, metadata)
        method = head, _MAX_ANSWER_BYTES.get(path, MAX_MESSAGE_BYTES)
        self._methods[path, metadata] = method
        return method

    def _start(self) -> None:
        if self._keeper is not None and not self._keeper.done():
            return
        # A keeper ends only when it is cancelled, such as by code that cancels all tasks of a loop that goes on.
        if not self._is_closed and self._loop.time() >= self._restart_s:
            self._is_unknown = False
            self._keeper = self._apart(self._keep_nodes())

    def _apart(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task without the context variables of the request that causes it."""
        return self._loop.create_task(work, context=Context())

    async def _keep_nodes(self) -> None:
        """Look up the addresses of the name, and keep a connection to each."""
        try:
            while True:
                await self._look_up()
                self._changed()
                if self._target.fixed:
                    await self._loop.create_future()  # they never change
                if not self._is_unknown:
                    # Not wait_for, which can lose a cancellation in Python 3.11.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOKUP_INTERVAL_S):
                            await self._lookup_due.wait()
                await asyncio.sleep(LOOKUP_PAUSE_S)
                self._lookup_due.clear()
        finally:
            # A loop that was closed without cancelling its tasks takes no more calls.
            if not self._loop.is_closed():
                for node in self._nodes.values():
                    node.keeper.cancel()
                self._nodes.clear()
                self._is_unknown = True  # calls fail at once, until the next keeper
                self._restart_s = self._loop.time() + RESTART_S
                if not self._is_closed:
                    for link in self._links:
                        link.abort()
                self._changed()

    async def _look_up(self) -> None:
        """Update the addresses of the name."""
        try:
            addresses = await self._target.addresses(self._loop)
        except Exception:  # noqa: BLE001 - the name is looked up again
            self._is_unknown = True
            self._failure = "the name is unknown"
            return
        self._is_unknown = False
        for address in set(self._nodes) - set(addresses):
            node = self._nodes.pop(address)
            node.keeper.cancel()
            if node.link is not None:
                node.link.leave()
        for address in addresses:
            if address not in self._nodes:
                node = self._nodes[address] = _Node(address)
                node.keeper = self._apart(self._keep(node))

    async def _keep(self, node: _Node) -> None:
        """Keep a connection to one node."""
        backoff_s = FIRST_BACKOFF_S
        unfinished: Link | None = None  # the connection before, if it was over before its calls
        while True:
            link = await self._connect(node.address)
            node.is_failing = link is None
            node.link = link
            self._changed()
            if link is not None:
                await link.over
                node.link = None
                self._changed()
                self._lookup_due.set()
                # After its GOAWAY a node may still answer. Assume so, unless it left the last such calls unanswered.
                ends_well = not link.is_idle and (unfinished is None or unfinished.has_answered)
                unfinished = None if link.is_idle else link
                if link.has_answered or ends_well:
                    backoff_s = FIRST_BACKOFF_S
                    continue
            self._lookup_due.set()
            jitter = random.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER)  # noqa: S311 - no secret
            await asyncio.sleep(backoff_s * jitter)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self, address: Address) -> Link | None:
        """Return a connection whose node sent its SETTINGS, or ``None`` if that failed."""
        link = Link(self._loop, self._changed)
        self._links.add(link)
        link.lost.add_done_callback(lambda _: self._links.discard(link))
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._open(address, link)
                # Awaited itself, a timeout would cancel it, and the connection would look ready. Shielded, its failure
                # after a cancellation would be logged since Python 3.14.
                await asyncio.wait([link.ready])
                link.ready.result()
        except asyncio.CancelledError:
            link.abort()
            raise
        except Exception as error:  # noqa: BLE001 - the caller retries
            self._failure = str(error) or type(error).__name__
            if isinstance(error, ssl.SSLError):
                self._tls_failed(reason_of(error))
        # SETTINGS may have come in the same event-loop iteration as the timeout.
        if link.is_usable:
            return link
        link.abort()
        return None

    async def _open(self, address: Address, link: Link) -> None:
        if self._tls is not None:
            read = self._tls.read()
            if read is not self._tls_read:
                self._tls_read, self._context = read, open_context(read)
        name = None if self._context is None else self._target.server_name
        options: Any = {"ssl": self._context, "server_hostname": name}
        if address.path:
            await self._loop.create_unix_connection(lambda: link, address.path, **options)
        else:
            host, port = address.host, address.port
            await self._loop.create_connection(lambda: link, host, port, **options)
