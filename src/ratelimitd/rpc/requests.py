"""Calls whose requests arrive in pieces, are large, or are streams: from the head to the start of the handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar, Final

from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import (
    CompleteRequest,
    DataReceived,
    Event,
    HeadTooLarge,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from ratelimitd.http2.headers import RequestHead
from ratelimitd.rpc.interface import RpcError, StatusCode, TransportError
from ratelimitd.rpc.messages import PREFIX_BYTES, message_of
from ratelimitd.rpc.responses import ResponseWriter
from ratelimitd.rpc.routing import NativeCall, Route, Router
from ratelimitd.rpc.state import CallTable, MessageStream, OpenCall, ServerState, TimeBudget

CANCELLED = RpcError(StatusCode.CANCELLED, "the call was cancelled")


async def run_unary(
    writer: ResponseWriter, stream_id: int, open_call: OpenCall, answer: Awaitable[bytes]
) -> None:
    """Await a unary handler and send its answer."""
    error: RpcError | None = None
    message = b""
    try:
        message = await answer
    except asyncio.CancelledError:
        error = CANCELLED
    except Exception as raised:  # noqa: BLE001 -- any error ends only this call
        error = writer.shared.status_of(raised)
    finally:
        writer.leave_place()
    if not writer.is_open(stream_id, open_call):
        return
    if error is None:
        writer.answer(stream_id, message)
    else:
        writer.fail(stream_id, error)


async def run_stream(
    writer: ResponseWriter, stream_id: int, open_call: OpenCall, answers: AsyncIterator[bytes]
) -> None:
    """Send the messages of a streaming handler as fast as the peer reads."""
    error: RpcError | None = None
    try:
        async for message in answers:
            if not writer.send(stream_id, open_call, message):
                await open_call.room.wait()
            # A peer that does not read is detected when the answers are written, in a later event-loop iteration.
            await writer.shared.stream_gate.passed()
    except asyncio.CancelledError:
        error = CANCELLED
    except Exception as raised:  # noqa: BLE001 -- as above
        error = writer.shared.status_of(raised)
    finally:
        writer.shared.streams_in_progress -= 1
        await _close(answers)
    if not writer.is_open(stream_id, open_call):
        return
    if error is None:
        writer.finish(stream_id)
    else:
        writer.fail(stream_id, error)


async def _close(answers: AsyncIterator[bytes]) -> None:
    """Run the ``finally`` of an unfinished generator now, not when it is collected."""
    close = getattr(answers, "aclose", None)
    if close is not None:
        await close()


TOO_MANY_CALLS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
_TOO_MANY_STREAMS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
_LATE: Final = RpcError(StatusCode.DEADLINE_EXCEEDED, "the deadline had passed on arrival")


class Invoker:
    """Starts the handlers of one connection."""

    __slots__ = ("_answers", "_budget", "_shared", "_table")

    def __init__(
        self, shared: ServerState, table: CallTable, answers: ResponseWriter, budget: TimeBudget
    ) -> None:
        self._shared = shared
        self._table = table
        self._answers = answers
        self._budget = budget

    def unary(self, stream_id: int, plan: Route, call: NativeCall, message: bytes) -> None:
        """Call a unary handler; answer now, or when its awaitable is done."""
        shared = self._shared
        if call.deadline_s is not None and shared.monotonic_s() >= call.deadline_s:
            self._answers.fail(stream_id, _LATE)
            return
        try:
            answer = plan.unary(message, call)  # type: ignore[misc]  # checked by the callers
        except Exception as error:  # noqa: BLE001 -- any error ends only this call
            self._answers.fail(stream_id, shared.status_of(error))
            return
        if isinstance(answer, bytes):
            self._answers.answer(stream_id, answer)
            return
        table = self._table
        if not table.take_place():
            if isinstance(answer, Coroutine):
                answer.close()
            shared.count(TransportError.TOO_MANY_CALLS)
            self._answers.fail(stream_id, TOO_MANY_CALLS)
            return
        open_call = table.open.get(stream_id)
        if open_call is None:
            open_call = table.enter(stream_id, plan, call, self._budget.came_s)
        open_call.task = shared.start(run_unary(self._answers, stream_id, open_call, answer))

    def stream(
        self,
        stream_id: int,
        open_call: OpenCall,
        handler: Callable[[NativeCall], AsyncIterator[bytes]],
    ) -> None:
        """Run a streaming handler."""
        shared, call = self._shared, open_call.call
        if shared.streams_in_progress >= shared.limits.max_streams:
            shared.count(TransportError.TOO_MANY_STREAMS)
            self._answers.fail(stream_id, _TOO_MANY_STREAMS)
        elif call.deadline_s is not None and shared.monotonic_s() >= call.deadline_s:
            self._answers.fail(stream_id, _LATE)
        else:
            shared.streams_in_progress += 1
            answers = handler(call)
            open_call.task = shared.start(run_stream(self._answers, stream_id, open_call, answers))


_HEAD_TOO_LARGE: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "the metadata are too large")
_TOO_MANY_BYTES: Final = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many bytes of unfinished requests"
)


class RequestAssembler:
    """Assembles the requests of one connection from events."""

    __slots__ = ("_answers", "_budget", "_reader", "_shared", "_starter", "_table")

    def __init__(
        self,
        shared: ServerState,
        reader: Router,
        *,
        table: CallTable,
        answers: ResponseWriter,
        starter: Invoker,
        budget: TimeBudget,
    ) -> None:
        self._shared = shared
        self._reader = reader
        self._table = table
        self._answers = answers
        self._starter = starter
        self._budget = budget

    def handle(self, event: Event) -> None:
        """Handle an event that concerns a call."""
        self._EVENTS.get(type(event), _ignore)(self, event)

    def take(self, request: CompleteRequest) -> None:
        """Handle a complete request as if it had arrived in pieces."""
        stream_id, head, body = request
        self._begin(stream_id, head)
        self._data(DataReceived(stream_id, body, 0, ended=True))

    def _received(self, event: RequestReceived) -> None:
        self._begin(event.stream_id, event.head)
        if event.ended:
            self._ended(event.stream_id)

    def _begin(self, stream_id: int, head: RequestHead) -> None:
        budget, answers = self._budget, self._answers
        budget.expensive = True
        plan = self._reader.read(head)
        if not self._table.has_room:
            self._shared.count(TransportError.TOO_MANY_CALLS)
            answers.fail(stream_id, TOO_MANY_CALLS)
            return
        if plan.plain is not None:
            self._table.enter_plain(stream_id, plan.plain, budget.came_s)
            return
        if plan.refusal is not None:
            self._shared.count(plan.refusal.cause)
            answers.fail(stream_id, plan.refusal.error, plan.refusal.fields)
            return
        call = self._reader.call(plan, head, budget.came_s)
        open_call = self._table.enter(stream_id, plan, call, budget.came_s)
        if plan.bidi_stream is not None:
            messages = open_call.messages = self._message_stream(stream_id, open_call)
            self._starter.stream(stream_id, open_call, partial(plan.bidi_stream, messages))

    def _message_stream(self, stream_id: int, open_call: OpenCall) -> MessageStream:
        return MessageStream(
            open_call.plan.encoding,
            self._shared.limits.max_message_bytes,
            partial(self._answers.acknowledge, stream_id),
            self._shared.stream_gate.passed,
            read=partial(self._has_read, stream_id, open_call),
        )

    def _has_read(self, stream_id: int, open_call: OpenCall) -> None:
        """Uncount a message that its handler has read."""
        if self._table.open.get(stream_id) is open_call:
            self._table.may_hold(open_call)

    def _data(self, event: DataReceived) -> None:
        stream_id, data, flow_bytes, ended = event
        answers = self._answers
        open_call = self._table.open.get(stream_id)
        if open_call is None:
            answers.acknowledge(stream_id, flow_bytes)
        elif open_call.messages is not None:
            self._queue_messages(open_call.messages, open_call, data, flow_bytes)
        else:
            answers.acknowledge(stream_id, flow_bytes)
            try:
                open_call.take(data)
            except RpcError as error:
                answers.refuse(stream_id, error)
                return
        if open_call is not None and not self._table.may_hold(open_call):
            answers.refuse(stream_id, _TOO_MANY_BYTES)
        elif ended:
            self._ended(stream_id)

    def _queue_messages(
        self, messages: MessageStream, open_call: OpenCall, data: bytes, flow_bytes: int
    ) -> None:
        """Queue messages for the handler of a stream, which opens the window by reading them."""
        if messages.ended:
            messages.acknowledge(flow_bytes)
            return
        try:
            for part in open_call.reader.feed(data):
                part_bytes = min(flow_bytes, len(part.content) + PREFIX_BYTES)
                messages.put(part, part_bytes)
                flow_bytes -= part_bytes
        except RpcError as error:
            self._shared.count(TransportError.BAD_REQUEST)
            messages.end(error)
        messages.acknowledge(flow_bytes)

    def _trailers(self, event: TrailersReceived) -> None:
        self._ended(event.stream_id)

    def _ended(self, stream_id: int) -> None:
        """Start the handler of a call with one message."""
        open_call = self._table.open.get(stream_id)
        if open_call is None:
            self._answers.answer_plainly(stream_id)
            return
        plan, messages = open_call.plan, open_call.messages
        if messages is not None:
            messages.end(open_call.cut_off())
            return
        if open_call.is_large and plan.server_stream is None:
            step = partial(self._start_queued, stream_id, open_call)
            self._shared.queue.submit(open_call.call.peer, step)
        else:
            self._budget.expensive = True
            self._start(stream_id, open_call)

    def _start_queued(self, stream_id: int, open_call: OpenCall) -> None:
        if self._table.open.get(stream_id) is open_call:  # else it was cancelled, or late
            self._start(stream_id, open_call)

    def _start(self, stream_id: int, open_call: OpenCall) -> None:
        plan = open_call.plan
        try:
            limit = self._shared.limits.max_message_bytes
            message = message_of(open_call.whole(), plan.encoding, limit)
        except RpcError as error:
            self._answers.refuse(stream_id, error)
            return
        if plan.server_stream is not None:
            self._starter.stream(stream_id, open_call, partial(plan.server_stream, message))
        else:
            self._starter.unary(stream_id, plan, open_call.call, message)

    def _reset(self, event: StreamReset) -> None:
        self._table.leave_plain(event.stream_id)
        open_call = self._table.leave(event.stream_id)
        if event.cause is not Cause.PEER_RESET:
            self._shared.stats.transport_error(event.cause)
        elif open_call is not None:
            self._shared.count(TransportError.CANCELLED)
        if open_call is not None:
            open_call.cancel()

    def _window_opened(self, event: WindowOpened) -> None:
        open_call = self._table.open.get(event.stream_id)
        if open_call is not None:
            open_call.room.set()

    def _head_too_large(self, event: HeadTooLarge) -> None:
        self._answers.refuse(event.stream_id, _HEAD_TOO_LARGE)

    _EVENTS: ClassVar[Mapping[type, Callable[[RequestAssembler, Any], None]]] = {
        RequestReceived: _received,
        DataReceived: _data,
        TrailersReceived: _trailers,
        StreamReset: _reset,
        WindowOpened: _window_opened,
        HeadTooLarge: _head_too_large,
    }
    """Handlers by kind of event; other kinds concern the connection only."""


def _ignore(_calls: RequestAssembler, _event: Event) -> None:
    """Ignore an event that concerns no call."""
