"""The calls of one connection: requests of HTTP/2 to handlers, and what these answer back to HTTP/2.

A unary handler that answers at once costs no task, no timer and no lock; nothing about such a call is kept. Calls that
take longer are in a table until they are answered. Never touches a socket: the owner feeds events and writes octets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from ratelimitd.http2.connection import Connection
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
from ratelimitd.http2.heads import RequestHead
from ratelimitd.rpc.call_head import CallPlan, CallReader, NativeCall, Peer
from ratelimitd.rpc.framing import PREFIX_BYTES, PREFIXES, framed, message_of, only_message
from ratelimitd.rpc.interface import BulkHandler, RpcError, StatusCode, TransportError
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.rpc.open_call import OpenCall, Questions
from ratelimitd.rpc.plain_answers import PlainAnswer
from ratelimitd.rpc.running_calls import run_stream, run_unary
from ratelimitd.rpc.status_blocks import (
    HEADERS,
    OK_TRAILERS,
    OK_TRAILERS_ONLY,
    UNARY_ANSWER,
    Fields,
    trailers,
    trailers_only,
)

MS_PER_S: Final = 1_000.0

TURN_S: Final = 0.002
"""How long one connection is worked for while others wait. Bounds on frames and octets keep common calls within it;
this one is for the dear ones, such as a small message that inflates to a large one."""

_DEAR_BYTES: Final = 2_048
"""A request as large as that is one to look at the clock after."""

_LATE: Final = RpcError(StatusCode.DEADLINE_EXCEEDED, "the deadline had passed on arrival")
_EXCEEDED: Final = RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_HEAD_TOO_LARGE: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "the metadata are too large")
_TOO_MANY_CALLS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
_TOO_MANY_STREAMS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
_TOO_SLOW: Final = RpcError(
    StatusCode.DEADLINE_EXCEEDED, "the rest of the request did not come in time"
)
_TOO_MANY_BYTES: Final = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many bytes of unfinished requests"
)


class _Run:
    """Calls that came together, one behind the other, for one bulk handler."""

    __slots__ = ("handler", "messages", "requests")

    def __init__(self, handler: BulkHandler | None) -> None:
        self.handler = handler
        self.requests: list[CompleteRequest] = []
        self.messages: list[bytes] = []


_NOBODY: Final = _Run(None)
"""The run before the first."""


class ConnectionCalls:
    """The calls of one connection.

    ``wake`` is called when there may be something to send; within :meth:`handle` that is no news.

    Attributes:
        open: calls that are not answered yet, by stream.
        blocked: the peer does not read; streams wait until :meth:`unblock`.
    """

    __slots__ = (
        "_connection",
        "_dear",
        "_limits",
        "_now_s",
        "_plain",
        "_reader",
        "_request_bytes",
        "_unusual",
        "_wake",
        "blocked",
        "open",
        "shared",
    )

    def __init__(
        self, shared: SharedCalls, connection: Connection, peer: Peer, wake: Callable[[], None]
    ) -> None:
        self.shared = shared
        self.open: dict[int, OpenCall] = {}
        self.blocked = False
        self._connection = connection
        self._wake = wake
        self._limits = shared.limits
        self._reader = CallReader(shared.routes, peer, shared.monotonic_s)
        self._request_bytes = 0
        self._dear = False
        self._now_s = 0.0
        self._plain: dict[int, tuple[PlainAnswer, float]] = {}
        self._unusual: deque[CompleteRequest] = deque()

    # What the peer does

    def handle(self, events: Iterator[Event], now_s: float) -> bool:
        """Act on events; ``now_s`` is when they came. False: the time of a turn is used up, and some are left."""
        self._now_s = now_s
        run = _NOBODY
        for event in events:
            if type(event) is tuple:
                request: CompleteRequest = event  # type: ignore[assignment]  # mypy cannot tell; cast() costs 40 ns
                head, body = request[1], request[2]
                plan: CallPlan | None = head.note  # type: ignore[assignment]  # nobody else keeps notes with heads
                timeout_s = None
                if plan is None:
                    plan, timeout_s = self._reader.read(head)
                if plan.bulk is not None and body[:PREFIX_BYTES] == PREFIXES.get(len(body)):
                    if plan.bulk is not run.handler:
                        self._answer_run(run)
                        run = _Run(plan.bulk)
                    run.requests.append(request)
                    run.messages.append(body[PREFIX_BYTES:])
                    continue
                self._whole(request, plan, timeout_s)
            else:
                self._EVENTS.get(type(event), _ignore)(self, event)
            if self._dear and self._turn_is_over():
                self._answer_run(run)
                return False
        self._answer_run(run)
        return self._answer_unusual()

    def _turn_is_over(self) -> bool:
        """Whether the time of a turn is used up; to be asked after something dear."""
        self._dear = False
        return self.shared.monotonic_s() - self._now_s > TURN_S

    def _answer_run(self, run: _Run) -> None:
        """Answer the calls that came together, and keep those that are for the method's own handler."""
        if run.handler is None:
            return
        requests = run.requests
        answers: Sequence[bytes | None]
        if self.shared.unary_in_progress < self._limits.max_concurrent_rpcs:
            answers = run.handler(run.messages)
        else:
            answers = [None] * len(requests)
        stream_ids = [request[0] for request in requests]
        self._connection.send_unaries(stream_ids, UNARY_ANSWER, answers)
        if None in answers:
            pairs = zip(requests, answers, strict=True)
            self._unusual.extend(request for request, answer in pairs if answer is None)

    def _answer_unusual(self) -> bool:
        """Answer the calls that no bulk handler has; false: the time of a turn is used up, and some are left."""
        unusual = self._unusual
        while unusual:
            request = unusual.popleft()
            self._whole(request, *self._reader.read(request[1]))
            if self._dear and self._turn_is_over():
                return not unusual
        return True

    def _received(self, event: RequestReceived) -> None:
        self._begin(event.stream_id, event.head, self._now_s)
        if event.ended:
            self._request_ended(event.stream_id)

    def _trailers(self, event: TrailersReceived) -> None:
        self._request_ended(event.stream_id)

    def _window_opened(self, event: WindowOpened) -> None:
        if event.stream_id in self.open:
            self.open[event.stream_id].room.set()

    def _head_too_large(self, event: HeadTooLarge) -> None:
        self._refuse(event.stream_id, _HEAD_TOO_LARGE)

    def _whole(self, request: CompleteRequest, plan: CallPlan, timeout_s: float | None) -> None:
        """A request that came in one piece."""
        stream_id, head, body = request
        message = only_message(body)
        if message is None or plan.unary is None:
            self._begin(stream_id, head, self._now_s)
            self._data(DataReceived(stream_id, body, 0, ended=True))
            return
        call = plan.call
        timeout_s = plan.timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None or call is None:
            deadline_s = None if timeout_s is None else self._now_s + timeout_s
            call = self._reader.call(plan, head, deadline_s)
        if len(body) > _DEAR_BYTES:
            self._dear = True
        self._unary(stream_id, plan, call, message)

    def _unary(self, stream_id: int, plan: CallPlan, call: NativeCall, message: bytes) -> None:
        """Call a unary handler, and answer if it does at once."""
        shared = self.shared
        if shared.unary_in_progress >= self._limits.max_concurrent_rpcs:
            shared.count(TransportError.TOO_MANY_CALLS)
            self.fail(stream_id, _TOO_MANY_CALLS)
            return
        if call.deadline_s is not None and shared.monotonic_s() >= call.deadline_s:
            self.fail(stream_id, _LATE)
            return
        try:
            answer = plan.unary(message, call)  # type: ignore[misc]  # who calls this has looked
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is the end of this call alone
            self.fail(stream_id, shared.status_of(error))
            return
        if isinstance(answer, bytes):
            self.answer(stream_id, answer)
            return
        open_call = self.open.get(stream_id) or self._enter(stream_id, plan, call)
        shared.unary_in_progress += 1
        open_call.task = shared.start(run_unary(self, stream_id, open_call, answer))

    def _begin(self, stream_id: int, head: RequestHead, now_s: float) -> None:
        """A request that does not come in one piece, or cannot be answered in one."""
        self._dear = True
        plan, timeout_s = self._reader.read(head)
        if self.shared.open_requests >= self._limits.max_open_requests:
            self.shared.count(TransportError.TOO_MANY_CALLS)
            self.fail(stream_id, _TOO_MANY_CALLS)
            return
        if plan.plain is not None:
            self._plain[stream_id] = plan.plain, now_s
            self.shared.open_requests += 1
            return
        if plan.refusal is not None:
            self.shared.count(plan.refusal.cause)
            self.fail(stream_id, plan.refusal.error, plan.refusal.fields)
            return
        deadline_s = None if timeout_s is None else now_s + timeout_s
        open_call = self._enter(stream_id, plan, self._reader.call(plan, head, deadline_s))
        if plan.bidi_stream is not None:
            acknowledge = partial(self._acknowledge, stream_id)
            limit = self._limits.max_message_bytes
            open_call.questions = Questions(
                plan.encoding, limit, acknowledge, self.shared.turnstile.passed
            )
            self._stream(stream_id, open_call, partial(plan.bidi_stream, open_call.questions))

    def _data(self, event: DataReceived) -> None:
        stream_id, data, flow_bytes, ended = event
        open_call = self.open.get(stream_id)
        if open_call is None:
            self._acknowledge(stream_id, flow_bytes)
            if ended:
                self._request_ended(stream_id)
            return
        questions = open_call.questions
        if questions is not None:
            self._ask(questions, open_call, data, flow_bytes)
        else:
            self._acknowledge(stream_id, flow_bytes)
            try:
                open_call.take(data)
            except RpcError as error:
                self._refuse(stream_id, error)
                return
        if not self._may_hold(open_call):
            self._refuse(stream_id, _TOO_MANY_BYTES)
            return
        if ended:
            self._request_ended(stream_id)

    def _ask(self, questions: Questions, open_call: OpenCall, data: bytes, flow_bytes: int) -> None:
        """Hand messages to the handler of a stream. What it has read of them opens the window again."""
        if questions.ended:
            questions.acknowledge(flow_bytes)
            return
        try:
            for part in open_call.reader.feed(data):
                part_bytes = min(flow_bytes, len(part.content) + PREFIX_BYTES)
                questions.put(part, part_bytes)
                flow_bytes -= part_bytes
        except RpcError as error:
            self.shared.count(TransportError.BAD_REQUEST)
            questions.end(error)
        questions.acknowledge(flow_bytes)

    def _request_ended(self, stream_id: int) -> None:
        open_call = self.open.get(stream_id)
        if open_call is None:
            self._answer_plainly(stream_id)
            return
        plan, questions = open_call.plan, open_call.questions
        if questions is not None:
            questions.end(open_call.cut_off())
            return
        self._dear = True
        try:
            message = message_of(open_call.whole(), plan.encoding, self._limits.max_message_bytes)
        except RpcError as error:
            self._refuse(stream_id, error)
            return
        if plan.server_stream is not None:
            self._stream(stream_id, open_call, partial(plan.server_stream, message))
        else:
            self._unary(stream_id, plan, open_call.call, message)

    def _stream(
        self,
        stream_id: int,
        open_call: OpenCall,
        handler: Callable[[NativeCall], AsyncIterator[bytes]],
    ) -> None:
        """Run a handler that answers with a stream."""
        shared, call = self.shared, open_call.call
        if shared.streams_in_progress >= self._limits.max_streams:
            shared.count(TransportError.TOO_MANY_STREAMS)
            self.fail(stream_id, _TOO_MANY_STREAMS)
        elif call.deadline_s is not None and shared.monotonic_s() >= call.deadline_s:
            self.fail(stream_id, _LATE)
        else:
            shared.streams_in_progress += 1
            answers = handler(call)
            open_call.task = shared.start(run_stream(self, stream_id, open_call, answers))

    def _reset(self, event: StreamReset) -> None:
        self._pop_plain(event.stream_id)
        open_call = self._leave(event.stream_id)
        if event.cause is not Cause.PEER_RESET:
            self.shared.stats.transport_error(event.cause)
        elif open_call is not None:
            self.shared.count(TransportError.CANCELLED)
        if open_call is not None:
            open_call.cancel()

    def _refuse(self, stream_id: int, error: RpcError) -> None:
        self.shared.count(TransportError.BAD_REQUEST)
        self.fail(stream_id, error)

    def _answer_plainly(self, stream_id: int) -> None:
        """Answer a request that is not of gRPC; only now that it has ended, for whom that is not gRPC expects it so."""
        plain = self._pop_plain(stream_id)
        if plain is None:
            return
        self.shared.count(TransportError.BAD_REQUEST)
        self._connection.send_headers(stream_id, plain.head_block, ended=not plain.body)
        if plain.body:
            self._connection.send_data(stream_id, plain.body, ended=True)

    # What a call does; see running_calls.Calls

    def is_open(self, stream_id: int, open_call: OpenCall) -> bool:
        """Whether the call is not answered yet."""
        return self.open.get(stream_id) is open_call

    def answer(self, stream_id: int, message: bytes) -> None:
        """End a unary call well."""
        if stream_id in self.open:
            self._leave(stream_id)
            self._wake()
        limit = self._limits.max_message_bytes
        if len(message) > limit:
            text = f"SERVER: Sent message larger than max ({len(message)} vs. {limit})"
            self.fail(stream_id, RpcError(StatusCode.RESOURCE_EXHAUSTED, text))
            return
        self._connection.send_unary(stream_id, UNARY_ANSWER, message)

    def send(self, stream_id: int, open_call: OpenCall, message: bytes) -> bool:
        """Send one message of a stream; false: ``open_call.room`` says when it is on its way."""
        if not open_call.headers_sent:
            open_call.headers_sent = True
            self._connection.send_headers(stream_id, HEADERS)
        sent = self._connection.send_data(stream_id, framed(message)) and not self.blocked
        if not sent:
            open_call.room.clear()
        self._wake()
        return sent

    def finish(self, stream_id: int) -> None:
        """End a stream well."""
        open_call = self._leave(stream_id)
        if open_call is not None and open_call.headers_sent:
            self._connection.send_trailers(stream_id, OK_TRAILERS)
        else:
            self._connection.send_headers(stream_id, OK_TRAILERS_ONLY, ended=True)
        self._wake()

    def fail(self, stream_id: int, error: RpcError, fields: Fields = ()) -> None:
        """End a call with a status, and whatever still runs for it."""
        self._dear = True  # 15 µs: a slice of 256 of them would be twice its time
        open_call = self._leave(stream_id)
        if error.code is StatusCode.DEADLINE_EXCEEDED:
            self.shared.count(TransportError.DEADLINE_EXCEEDED)
        if open_call is not None and open_call.headers_sent:
            self._connection.send_trailers(stream_id, trailers(error))
        else:
            self._connection.send_headers(stream_id, trailers_only(error, fields), ended=True)
        if open_call is not None:
            open_call.cancel()
        self._wake()

    # What the clock and the server do

    def expire(self, now_s: float) -> None:
        """End the calls whose deadline has passed."""
        for stream_id, open_call in list(self.open.items()):
            deadline_s = open_call.call.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self.fail(stream_id, _EXCEEDED)

    def look(self, now_s: float) -> None:
        """End the requests whose rest has not come in time; to be called about once a second."""
        began_s = now_s - self._limits.request_timeout_ms / MS_PER_S
        for stream_id, open_call in list(self.open.items()):
            if open_call.task is None and open_call.began_s <= began_s:
                self.shared.count(TransportError.SLOW_REQUEST)
                self.fail(stream_id, _TOO_SLOW)
        for stream_id, (_, since_s) in list(self._plain.items()):
            if since_s <= began_s:
                self.shared.count(TransportError.SLOW_REQUEST)
                self._answer_plainly(stream_id)

    def end_streams(self, error: RpcError) -> None:
        """End the calls that would not end by themselves."""
        for stream_id, open_call in list(self.open.items()):
            if open_call.plan.unary is None:
                self.fail(stream_id, error)

    def end_all(self, error: RpcError) -> None:
        """End every call."""
        for stream_id in list(self.open):
            self.fail(stream_id, error)

    def unblock(self) -> None:
        """The peer reads again."""
        self.blocked = False
        for open_call in self.open.values():
            open_call.room.set()

    def lose_all(self) -> None:
        """The connection is gone: nobody waits for any of the answers."""
        for stream_id, open_call in list(self.open.items()):
            self._leave(stream_id)
            self.shared.count(TransportError.CANCELLED)
            open_call.cancel()
        for stream_id in list(self._plain):
            self._pop_plain(stream_id)
        self._unusual.clear()

    # The tables of open requests

    def _pop_plain(self, stream_id: int) -> PlainAnswer | None:
        if stream_id not in self._plain:
            return None
        self.shared.open_requests -= 1
        return self._plain.pop(stream_id)[0]

    def _enter(self, stream_id: int, plan: CallPlan, call: NativeCall) -> OpenCall:
        limit = self._limits.max_message_bytes
        open_call = self.open[stream_id] = OpenCall(plan, call, limit, self._now_s)
        self.shared.open_requests += 1
        return open_call

    def _leave(self, stream_id: int) -> OpenCall | None:
        open_call = self.open.pop(stream_id, None)
        if open_call is not None:
            self.shared.open_requests -= 1
            self._request_bytes -= open_call.held_bytes
            self.shared.request_bytes -= open_call.held_bytes
        return open_call

    def _may_hold(self, open_call: OpenCall) -> bool:
        """Count what a call makes us hold; false when with it, it is too much."""
        more = open_call.waiting_bytes - open_call.held_bytes
        open_call.held_bytes += more
        self._request_bytes += more
        self.shared.request_bytes += more
        return (
            self._request_bytes <= self._limits.max_request_bytes_per_connection
            and self.shared.request_bytes <= self._limits.max_request_bytes
        )

    def _acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        if flow_bytes:
            self._connection.acknowledge(stream_id, flow_bytes)
            self._wake()

    _EVENTS: ClassVar[Mapping[type, Callable[[ConnectionCalls, Any], None]]] = {
        RequestReceived: _received,
        DataReceived: _data,
        TrailersReceived: _trailers,
        StreamReset: _reset,
        WindowOpened: _window_opened,
        HeadTooLarge: _head_too_large,
    }
    """What to do for each kind; the others are the connection's business."""


def _ignore(_calls: ConnectionCalls, _event: Event) -> None:
    """Nothing that concerns a call."""
