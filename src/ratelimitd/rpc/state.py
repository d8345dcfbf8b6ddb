"""State that the connections of one native server share: methods, limits, and counts of open calls and held bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.interface import (
    LARGE_BYTES,
    Methods,
    RpcError,
    StatusCode,
    TransportError,
    TransportLimits,
)
from ratelimitd.rpc.messages import Encoding, MessageReader, Part, message_of
from ratelimitd.rpc.routing import HttpFallback, NativeCall, Route, routes_of

MAX_UNREAD_MESSAGES: Final = 1_000
"""Per stream. An empty message takes 5 octets of the stream's window and 50 times as much memory."""

_TOO_MANY_MESSAGES: Final = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many messages of the stream are unread"
)


class OpenCall:
    """One call, from its head to the end of its answer.

    Attributes:
        plan: the route.
        call: the argument of its handler.
        reader: cuts the request into messages.
        part: the message of a unary request, once it is complete.
        held_bytes: bytes of the request that count against the bounds.
        messages: the messages for a bidi handler; ``None`` for other calls.
        task: runs the handler; ``None`` before.
        headers_sent: the answer has begun.
        room: set when the stream can be written again after a message had to wait.
        began_s: arrival of the head.
    """

    __slots__ = (
        "began_s",
        "call",
        "headers_sent",
        "held_bytes",
        "messages",
        "part",
        "plan",
        "reader",
        "room",
        "task",
    )

    def __init__(
        self, plan: Route, call: NativeCall, max_message_bytes: int, began_s: float = 0.0
    ) -> None:
        self.began_s = began_s
        self.plan = plan
        self.call = call
        self.reader = MessageReader(max_message_bytes)
        self.part: Part | None = None
        self.held_bytes = 0
        self.messages: MessageStream | None = None
        self.task: asyncio.Task[None] | None = None
        self.headers_sent = False
        self.room = asyncio.Event()

    def take(self, data: bytes) -> None:
        """Add bytes to the one message of a call.

        Raises:
            RpcError: there is more than one message, or it is too large.
        """
        for part in self.reader.feed(data):
            if self.part is not None:
                raise RpcError(StatusCode.INTERNAL, "the call has more than one message")
            self.part = part

    def whole(self) -> Part:
        """Return the one message of a request that has ended.

        Raises:
            RpcError: it is missing or incomplete.
        """
        if self.part is None or self.reader.unfinished_bytes:
            raise RpcError(StatusCode.INTERNAL, "the call ended before its message did")
        return self.part

    @property
    def is_large(self) -> bool:
        """Whether the one message of the call may take long to read and to answer."""
        part = self.part
        return part is not None and (part.compressed or len(part.content) > LARGE_BYTES)

    def cut_off(self) -> RpcError | None:
        """Return the error of a request that ended within a message; ``None`` if it did not."""
        if not self.reader.unfinished_bytes:
            return None
        return RpcError(StatusCode.INTERNAL, "the call ended within a message")

    def cancel(self) -> None:
        """Cancel the handler in the next iteration.

        A task that is cancelled before its first step never runs the ``finally`` of its coroutine. That step is already
        scheduled and runs first.
        """
        if self.task is not None:
            self.task.get_loop().call_soon(self.task.cancel)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the request that are held for this call."""
        part_bytes = 0 if self.part is None else len(self.part.content)
        stream_bytes = 0 if self.messages is None else self.messages.waiting_bytes
        return self.reader.unfinished_bytes + part_bytes + stream_bytes


class _UnreadMessage(NamedTuple):
    part: Part
    flow_bytes: int


class MessageStream:
    """The messages of a stream as its handler reads them; an asynchronous iterator.

    Unread messages are not acknowledged, so a faster peer has to wait. Messages are inflated when they are read:
    inflating a whole window would take gigabytes. ``admit`` is awaited before each message: a handler that never waits
    would otherwise answer a whole window in one event-loop iteration. ``read`` is called after each message.

    Attributes:
        waiting_bytes: size of the unread messages. Most of a large one is acknowledged while it arrives.
    """

    __slots__ = (
        "_admit",
        "_arrived",
        "_end",
        "_parts",
        "_read",
        "acknowledge",
        "encoding",
        "max_message_bytes",
        "waiting_bytes",
    )

    def __init__(
        self,
        encoding: Encoding,
        max_message_bytes: int,
        acknowledge: Callable[[int], None],
        admit: Callable[[], Awaitable[None]],
        *,
        read: Callable[[], object] = lambda: None,
    ) -> None:
        self.encoding = encoding
        self.max_message_bytes = max_message_bytes
        self.acknowledge = acknowledge
        self._admit = admit
        self._read = read
        self.waiting_bytes = 0
        self._parts: deque[_UnreadMessage] = deque()
        self._arrived = asyncio.Event()
        self._end: Exception | None = None

    def put(self, part: Part, flow_bytes: int) -> None:
        """Add a message, and the octets to acknowledge once it has been read.

        Raises:
            RpcError: too many messages are unread.
        """
        if len(self._parts) >= MAX_UNREAD_MESSAGES:
            raise _TOO_MANY_MESSAGES
        self._parts.append(_UnreadMessage(part, flow_bytes))
        self.waiting_bytes += len(part.content)
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Whether no more messages will be added."""
        return self._end is not None

    def end(self, error: RpcError | None = None) -> None:
        """End the stream; ``error`` is raised after the messages before it. Later calls have no effect."""
        if self._end is None:
            self._end = error or StopAsyncIteration()
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._parts:
            if self._end is not None:
                raise self._end
            self._arrived.clear()
            await self._arrived.wait()
        await self._admit()
        part, flow_bytes = self._parts.popleft()
        self.waiting_bytes -= len(part.content)
        self._read()
        if flow_bytes:
            self.acknowledge(flow_bytes)
        return message_of(part, self.encoding, self.max_message_bytes)


ITERATION_S: Final = 0.002
"""Bounds expensive calls, such as small messages that inflate to large ones; the limits on frames and octets keep
common calls within it."""

LATE_S: Final = 0.1
"""Input that waited longer is checked against its deadline; few deadlines are shorter."""


class TimeBudget:
    """Time budget of one connection per event-loop iteration. Common calls do not read the clock; expensive ones do.

    Attributes:
        began_s: start of the iteration, a reading of ``monotonic_s``.
        came_s: arrival of the input, from which deadlines count. Earlier than ``began_s`` for input left over from an
            earlier iteration.
        expensive: work that takes many times as long as a common call was done since the clock was last read.
    """

    __slots__ = ("_monotonic_s", "began_s", "came_s", "expensive")

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.began_s = self.came_s = 0.0
        self.expensive = False

    def begin(self, now_s: float, came_s: float) -> None:
        """Begin an iteration."""
        self.began_s = now_s
        self.came_s = came_s

    @property
    def is_late(self) -> bool:
        """Whether the input has waited so long that deadlines may have passed."""
        return self.began_s - self.came_s > LATE_S

    def is_over(self) -> bool:
        """Whether the budget is used up; called after expensive work."""
        self.expensive = False
        return self._monotonic_s() - self.began_s > ITERATION_S


EVERY_S: Final = 0.005
MOST_AT_ONCE: Final = 8
"""A gate with a clock admits one waiter for each 5 ms of the last iteration, at most 8. A TLS handshake takes about
1 ms, so handshakes get about a fifth of the time."""


class TickGate:
    """Admits waiters in order, one per event-loop iteration.

    With a clock, ``monotonic_s``, long iterations admit more: a loop whose iterations take 30 ms would admit only 33 a
    second. Only for work that takes less than ``EVERY_S``: longer work would lengthen the iterations further.
    """

    __slots__ = ("_in_line", "_last_s", "_monotonic_s", "_taken")

    def __init__(self, monotonic_s: Callable[[], float] | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._last_s = 0.0
        self._in_line: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Whether a waiter is admitted in the next iteration."""

    async def passed(self) -> None:
        """Wait to be admitted."""
        if self._taken:
            admitted = asyncio.get_running_loop().create_future()
            self._in_line.append(admitted)
            await admitted
            return
        self._schedule()
        await asyncio.sleep(0)

    def _schedule(self) -> None:
        self._taken = True
        if self._monotonic_s is not None:
            self._last_s = self._monotonic_s()
        asyncio.get_running_loop().call_soon(self._let_through)

    def _let_through(self) -> None:
        """Wake the waiters that the next iteration admits."""
        self._taken = False
        for _ in range(self._room()):
            while self._in_line and self._in_line[0].done():  # has left the line
                self._in_line.popleft()
            if not self._in_line:
                break
            self._in_line.popleft().set_result(None)
            self._taken = True
        if self._taken:
            self._schedule()

    def _room(self) -> int:
        if self._monotonic_s is None:
            return 1
        return min(MOST_AT_ONCE, max(1, round((self._monotonic_s() - self._last_s) / EVERY_S)))


class ServerState:
    """State of all calls of one server. ``monotonic_s`` is in seconds."""

    def __init__(
        self,
        methods: Methods,
        limits: TransportLimits,
        stats: CheckStats,
        monotonic_s: Callable[[], float],
        *,
        queue: FairQueue | None = None,
    ) -> None:
        self.routes = routes_of(methods)
        self.limits = limits
        self.stats = stats
        self.monotonic_s = monotonic_s
        self.queue = FairQueue(monotonic_s) if queue is None else queue
        """Runs unary calls with large requests."""
        self.unary_in_progress = 0
        """Unary calls whose handler has not answered at once."""
        self.streams_in_progress = 0
        self.request_bytes = 0
        """Bytes of requests that have not reached a handler."""
        self.open_requests = 0
        """Requests that were not answered at once, including those still arriving."""
        self.connections = 0
        self.unread_bytes = 0
        """Bytes of answers that peers have not taken."""
        self.stream_gate = TickGate()
        """Admits messages of streams, each of which may inflate to the bound on messages."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a handler as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def all_ended(self) -> None:
        """Wait until no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def count(self, cause: TransportError) -> None:
        """Count a call that the transport ended."""
        self.stats.transport_error(cause)

    def status_of(self, error: Exception) -> RpcError:
        """Return the status of a call whose handler raised ``error``."""
        if isinstance(error, RpcError):
            return error
        self.count(TransportError.UNEXPECTED)
        return RpcError(StatusCode.INTERNAL, "unexpected error")


class CallTable:
    """Open requests of a connection by stream; the sums over all connections are in ``shared``.

    Attributes:
        open: calls.
        plain: requests that are not gRPC, as (answer, arrival of the head).
        request_bytes: bytes held for open calls.
    """

    __slots__ = ("_limits", "_places", "_shared", "open", "plain", "request_bytes")

    def __init__(self, shared: ServerState) -> None:
        self._shared = shared
        self._limits = shared.limits
        self.open: dict[int, OpenCall] = {}
        self.plain: dict[int, tuple[HttpFallback, float]] = {}
        self.request_bytes = 0
        self._places = 0
        """Of ``shared.unary_in_progress``, those of this connection."""

    def take_place(self) -> bool:
        """Take a place for a unary call whose handler did not answer at once; false if there is none.

        When all are taken, connections with less than an equal share still get places, up to twice the bound:
        otherwise one caller with many slow calls would block all others.
        """
        shared, places = self._shared, self._limits.max_concurrent_rpcs
        if shared.unary_in_progress >= places:
            share = max(1, places // max(1, shared.connections))
            if self._places >= share or shared.unary_in_progress >= 2 * places:
                return False
        self._places += 1
        shared.unary_in_progress += 1
        return True

    def leave_place(self) -> None:
        """Give back the place of a unary call."""
        self._places -= 1
        self._shared.unary_in_progress -= 1

    @property
    def has_room(self) -> bool:
        """Whether one more request may be open."""
        return self._shared.open_requests < self._limits.max_open_requests

    def enter(self, stream_id: int, plan: Route, call: NativeCall, began_s: float) -> OpenCall:
        """Add a call; ``began_s`` is the arrival of its head."""
        open_call = OpenCall(plan, call, self._limits.max_message_bytes, began_s)
        self.open[stream_id] = open_call
        self._shared.open_requests += 1
        return open_call

    def leave(self, stream_id: int) -> OpenCall | None:
        """Remove a call and its counts; return it, ``None`` if there is none."""
        open_call = self.open.pop(stream_id, None)
        if open_call is not None:
            self._shared.open_requests -= 1
            self.request_bytes -= open_call.held_bytes
            self._shared.request_bytes -= open_call.held_bytes
        return open_call

    def enter_plain(self, stream_id: int, answer: HttpFallback, began_s: float) -> None:
        """Add a request that is not gRPC."""
        self.plain[stream_id] = answer, began_s
        self._shared.open_requests += 1

    def leave_plain(self, stream_id: int) -> HttpFallback | None:
        """Remove a request that is not gRPC; return its answer, ``None`` if there is none."""
        if stream_id not in self.plain:
            return None
        self._shared.open_requests -= 1
        return self.plain.pop(stream_id)[0]

    def leave_all(self) -> list[OpenCall]:
        """Remove all requests; return the calls."""
        for stream_id in list(self.plain):
            self.leave_plain(stream_id)
        open_calls = list(self.open.values())
        for stream_id in list(self.open):
            self.leave(stream_id)
        return open_calls

    def may_hold(self, open_call: OpenCall) -> bool:
        """Count the bytes held for a call; false if they exceed a bound."""
        more_bytes = open_call.waiting_bytes - open_call.held_bytes
        open_call.held_bytes += more_bytes
        self.request_bytes += more_bytes
        self._shared.request_bytes += more_bytes
        return (
            self.request_bytes <= self._limits.max_request_bytes_per_connection
            and self._shared.request_bytes <= self._limits.max_request_bytes
        )

    def expired(self, now_s: float) -> list[int]:
        """Return the calls whose deadline has passed."""
        deadlines = ((stream_id, each.call.deadline_s) for stream_id, each in self.open.items())
        return [
            stream_id
            for stream_id, deadline_s in deadlines
            if deadline_s is not None and deadline_s <= now_s
        ]

    def unfinished(self, began_s: float) -> list[int]:
        """Return the requests that began at ``began_s`` or earlier and have not reached a handler."""
        calls = [
            stream_id
            for stream_id, open_call in self.open.items()
            if open_call.task is None and open_call.began_s <= began_s
        ]
        return calls + [stream_id for stream_id, (_, at_s) in self.plain.items() if at_s <= began_s]

    def streams(self) -> list[int]:
        """Return the calls with streams, which may never end."""
        return [
            stream_id for stream_id, open_call in self.open.items() if open_call.plan.unary is None
        ]
