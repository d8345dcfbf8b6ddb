"""The asyncio client's own way to nodes, in the place of gRPC's channel: calls with one question and one answer.

Keeps a connection to each address of a name, from the first call on, and asks them in turn. One that is down is passed
over and tried again. What it cannot do is left to gRPC, see :func:`open_native_channel` and ADR 0040.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, NamedTuple

import grpc

from ratelimitd_client.channel import MAX_MESSAGE_BYTES, Metadata, Tls
from ratelimitd_client.exchange import CHECK, MAX_ANSWER_BYTES
from ratelimitd_client.http2 import heads
from ratelimitd_client.link import AskedCall, Link
from ratelimitd_client.targets import Address, Target, parse
from ratelimitd_client.tls_context import open_context

CONNECT_S: Final = 1.0
"""How long an attempt to connect may take, until the node has said its settings."""

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 0.5
"""Between two attempts: a node that comes back is found within a second."""

BACKOFF_JITTER: Final = 0.2

LOOKUP_INTERVAL_S: Final = 30.0
"""How long the addresses of a name are good while all goes well."""

LOOKUP_PAUSE_S: Final = 1.0
"""Between two look-ups of a name when it does not."""

RESTART_S: Final = 1.0
"""How long what keeps the connections stays ended, once somebody has cancelled it. A loop that ends cancels all there
is, and would be left with what was begun anew meanwhile."""

MAX_TRIES: Final = 2
"""Of a call that no server has begun to work on."""

TIMER_ROUNDING_S: Final = 0.000_5
"""So much too early a timer of an event loop may be: they count milliseconds."""

Method = Callable[..., Awaitable[bytes]]


class CallError(Exception):
    """A call ended without an answer. What gRPC's error says: a status, and a text that may be the node's."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(code.name)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """Its text."""
        return self._details


def open_native_channel(target: str, tls: Tls | None) -> NativeChannel | None:
    """Return a channel that connects with its first call, or ``None`` if it takes gRPC.

    That is so for names that :mod:`ratelimitd_client.targets` does not know, and for TLS with the roots of gRPC.
    """
    parsed = parse(target)
    if parsed is None or (tls is not None and tls.ca is None):
        return None
    return NativeChannel(parsed, tls)


class _Node:
    """An address, and how it is with the connection to it."""

    __slots__ = ("address", "is_failing", "keeper", "link")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.link: Link | None = None
        self.is_failing = False
        """The last attempt to connect failed."""
        self.keeper: asyncio.Task[None] | None = None


class _Method(NamedTuple):
    """What all calls of a method have in common."""

    head: bytes
    """The header block, but for the deadline."""
    max_answer_bytes: int


class NodeCall(AskedCall):
    """A call of a channel, whichever of its nodes will answer it.

    Attributes:
        done: called with it when it has ended.
        ends_s: its deadline, by the clock of the loop.
        tries: how often it was sent.
    """

    __slots__ = ("_channel", "done", "ends_s", "method", "tries")

    def __init__(
        self,
        channel: NativeChannel,
        method: _Method,
        question: bytes,
        done: Callable[[NodeCall], None],
    ) -> None:
        super().__init__(method.head, question, method.max_answer_bytes)
        self._channel = channel
        self.method: _Method = method
        self.done: Callable[[NodeCall], None] = done
        self.ends_s: float = 0.0
        self.tries: int = 0

    def tell(self) -> None:
        """Hear from its connection that it has ended."""
        self._channel.ended(self)


class NativeChannel:
    """Connections to the nodes behind a name, for the event loop that is running."""

    def __init__(self, target: Target, tls: Tls | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._scheme = "http" if tls is None else "https"
        self._nodes: dict[Address, _Node] = {}
        self._ready: list[Link] = []
        self._turn = 0
        self._links: set[Link] = set()
        self._is_unknown = False
        """The last look-up of the name failed."""
        self._lookup_due = asyncio.Event()
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._keeper: asyncio.Task[None] | None = None
        self._restart_s = 0.0
        """When another may follow a keeper that was cancelled."""
        self._is_closed = False
        self._methods: dict[tuple[str, Metadata], _Method] = {}
        self._calls: dict[NodeCall, None] = {}
        """All that have not ended."""
        self._waiting: dict[NodeCall, None] = {}
        """Those of them that wait for a connection."""
        self._no_context = Context()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at_s = math.inf

    def unary_unary(self, path: str) -> Method:
        """The method of a path: ``await method(question, timeout=seconds, metadata=…)`` gives the answer's octets.

        It raises ``CallError``, and nothing else.
        """
        return partial(self._call, path)

    async def channel_ready(self) -> None:
        """Wait until a node is connected, or the channel is closed."""
        self._start()
        while not (self._ready or self._is_closed):
            await self._change()

    async def close(self) -> None:
        """Let the calls that are under way end, and close all connections."""
        self._is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._changed()  # as it does itself, if it ever began
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
        question: bytes,
        done: Callable[[NodeCall], None],
        *,
        timeout_s: float,
        metadata: Metadata,
    ) -> NodeCall:
        """Ask. ``done(call)`` is called once, when it has ended; that may be before this returns."""
        method = self._methods.get((path, metadata)) or self._method(path, metadata)
        call = NodeCall(self, method, question, done)
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
        """Drop a call silently; it may have ended."""
        self._calls.pop(call, None)
        self._waiting.pop(call, None)
        if call.link is not None:
            call.link.cancel(call)

    def ended(self, call: NodeCall) -> None:
        """A connection is done with a call."""
        if call not in self._calls:  # it could not be sent, and who asked knows that
            return
        if call.unprocessed and call.tries < MAX_TRIES:
            left_s = call.ends_s - self._loop.time()
            if left_s > 0:
                self._send(call, left_s)
                return
        self._tell(call)

    async def _call(
        self,
        path: str,
        question: bytes,
        *,
        timeout: float,  # noqa: ASYNC109 - as gRPC's own calls have it
        metadata: Metadata,
    ) -> bytes:
        end = self._loop.create_future()

        def done(_: NodeCall) -> None:
            if not end.done():
                end.set_result(None)

        call = self.begin(path, question, done, timeout_s=timeout, metadata=metadata)
        try:
            await end
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        if call.answer is None:
            raise CallError(call.code, call.details)
        return call.answer

    def _send(self, call: NodeCall, left_s: float) -> None:
        """Send a call, or keep it until there is a connection."""
        link = self._next()
        if link is not None:
            if call.tries:
                call.restart()
            call.tries += 1
            call.block = call.method.head + heads.deadline(heads.milliseconds(left_s))
            call.link = link
            link.ask(call)
        elif self._is_closed or self._is_hopeless():
            self._end(call, grpc.StatusCode.UNAVAILABLE, "no node can be reached")
        else:
            self._waiting[call] = None

    def _end(self, call: NodeCall, code: grpc.StatusCode, details: str = "") -> None:
        """End a call that its connection, if it has one, knows nothing of any more."""
        call.fail(code, details)
        self._tell(call)

    def _tell(self, call: NodeCall) -> None:
        """Report the end of a call. If that raises, the calls behind it must still be answered."""
        self._calls.pop(call, None)
        try:
            call.done(call)
        except Exception as error:  # noqa: BLE001 - see above
            context = {"message": "what was to be done with an answer failed", "exception": error}
            self._loop.call_exception_handler(context)

    def _expire_at(self, ends_s: float) -> None:
        """See then whether deadlines have passed: one timer for all calls, which few of them live to see."""
        if self._timer is not None:
            self._timer.cancel()
        self._expires_at_s = ends_s
        self._timer = self._loop.call_at(ends_s, self._expire, context=self._no_context)

    def _expire(self) -> None:
        """End the calls whose deadlines have passed."""
        self._expires_at_s = math.inf
        now_s = self._loop.time() + TIMER_ROUNDING_S
        due = [call for call in self._calls if call.ends_s <= now_s]
        for call in due:  # all of them first: leaving a connection may send those who wait
            self._waiting.pop(call, None)
        # The last ones first: a stream that becomes free is the next one's in line, which would be sent for nothing.
        for call in reversed(due):
            self.cancel(call)
        for call in due:
            call.fail(grpc.StatusCode.DEADLINE_EXCEEDED)
            self._tell(call)
        next_s = min((call.ends_s for call in self._calls), default=math.inf)
        if next_s < self._expires_at_s:
            self._expire_at(next_s)

    def _next(self) -> Link | None:
        """The connection whose turn it is."""
        ready = self._ready
        if not ready:
            return None
        self._turn += 1
        return ready[self._turn % len(ready)]

    def _is_hopeless(self) -> bool:
        """Whether all that was tried last failed."""
        if not self._nodes:
            return self._is_unknown
        return all(node.is_failing for node in self._nodes.values())

    async def _change(self) -> None:
        """Wait until it is another with a connection."""
        waiter = self._loop.create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    def _changed(self) -> None:
        links = [node.link for node in self._nodes.values()]
        self._ready = [link for link in links if link is not None and link.is_usable]
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            try:
                self._send(call, call.ends_s - self._loop.time())
            except Exception:  # noqa: BLE001 - the calls behind it must go on
                self._end(call, grpc.StatusCode.INTERNAL, "it cannot be sent")

    def _method(self, path: str, metadata: Metadata) -> _Method:
        head = heads.question(path, self._target.authority, self._scheme, metadata)
        max_answer_bytes = MAX_ANSWER_BYTES if path == CHECK else MAX_MESSAGE_BYTES
        method = self._methods[path, metadata] = _Method(head, max_answer_bytes)
        return method

    def _start(self) -> None:
        if self._keeper is not None and not self._keeper.done():
            return
        # One that has ended was cancelled by somebody who cancelled whatever there was, and this loop may go on.
        if not self._is_closed and self._loop.time() >= self._restart_s:
            self._is_unknown = False
            self._keeper = self._apart(self._keep_nodes())

    def _apart(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives the request that began it, and keeps nothing of it: no context variables."""
        return self._loop.create_task(work, context=Context())

    async def _keep_nodes(self) -> None:
        """Know the addresses of the name, and keep a connection to each."""
        try:
            while True:
                await self._look_up()
                self._changed()
                if self._target.fixed:
                    await self._loop.create_future()  # they never change
                if not self._is_unknown:
                    await _wait(self._lookup_due, LOOKUP_INTERVAL_S)
                await asyncio.sleep(LOOKUP_PAUSE_S)
                self._lookup_due.clear()
        finally:
            for node in self._nodes.values():
                if node.keeper is not None:
                    node.keeper.cancel()
            self._nodes.clear()
            self._is_unknown = True  # no need to wait for one that is found
            self._restart_s = self._loop.time() + RESTART_S
            if not (self._is_closed or self._loop.is_closed()):
                for link in self._links:
                    link.abort()
            self._changed()

    async def _look_up(self) -> None:
        try:
            addresses = await self._target.addresses(self._loop)
        except Exception:  # noqa: BLE001 - whatever it is, the name is looked up again
            self._is_unknown = True
            return
        self._is_unknown = False
        for address in set(self._nodes) - set(addresses):
            node = self._nodes.pop(address)
            if node.keeper is not None:
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
                if link.has_answered:
                    backoff_s = FIRST_BACKOFF_S
                    continue
            self._lookup_due.set()
            jitter = random.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER)  # noqa: S311 - no secret
            await asyncio.sleep(backoff_s * jitter)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self, address: Address) -> Link | None:
        """Return a connection whose node has said its settings, or ``None`` for whatever reason there is none."""
        link = Link(self._loop, self._changed)
        self._links.add(link)
        link.lost.add_done_callback(lambda _: self._links.discard(link))
        try:
            with suppress(Exception):  # whatever keeps it from connecting, it is tried again
                async with asyncio.timeout(CONNECT_S):
                    await self._open(address, link)
                    # Shielded: cancelled, when time is over, it would be done, and the connection look ready.
                    await asyncio.shield(link.ready)
        except asyncio.CancelledError:
            self._give_up(link)
            raise
        # The node may have said its settings in the very turn in which time was over.
        if link.is_usable:
            return link
        self._give_up(link)
        return None

    def _give_up(self, link: Link) -> None:
        """Close an unused connection."""
        link.abort()
        if not link.is_made:
            self._links.discard(link)

    async def _open(self, address: Address, link: Link) -> None:
        if self._context is None and self._tls is not None:
            self._context = open_context(self._tls)
        context = self._context
        name = None if context is None else self._target.server_name
        if address.path:
            await self._loop.create_unix_connection(
                lambda: link, address.path, ssl=context, server_hostname=name
            )
        else:
            await self._loop.create_connection(
                lambda: link, address.host, address.port, ssl=context, server_hostname=name
            )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, for so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
