"""Calls whose requests come in pieces, and those whose messages are a stream: from the head to the end of the request.

Never answers: that is for the handler, or for ``call_answers`` when something is wrong with a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from ratelimitd.http2.heads import RequestHead
from ratelimitd.rpc.call_answers import CallAnswers
from ratelimitd.rpc.call_head import CallReader
from ratelimitd.rpc.call_table import CallTable
from ratelimitd.rpc.framing import PREFIX_BYTES, message_of
from ratelimitd.rpc.interface import RpcError, StatusCode, TransportError
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.rpc.open_call import OpenCall, Questions
from ratelimitd.rpc.starting_calls import TOO_MANY_CALLS, CallStarter
from ratelimitd.rpc.turns import Turn

_HEAD_TOO_LARGE: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "the metadata are too large")
_TOO_MANY_BYTES: Final = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many bytes of unfinished requests"
)


class ArrivingCalls:
    """The calls of one connection as their requests arrive."""

    __slots__ = ("_answers", "_reader", "_shared", "_starter", "_table", "_turn")

    def __init__(
        self,
        shared: SharedCalls,
        reader: CallReader,
        *,
        table: CallTable,
        answers: CallAnswers,
        starter: CallStarter,
        turn: Turn,
    ) -> None:
        self._shared = shared
        self._reader = reader
        self._table = table
        self._answers = answers
        self._starter = starter
        self._turn = turn

    def handle(self, event: Event) -> None:
        """Act on what the peer did, unless it is the connection's business alone."""
        self._EVENTS.get(type(event), _ignore)(self, event)

    def take(self, request: CompleteRequest) -> None:
        """Take a request that came in one piece as if it had come in several."""
        stream_id, head, body = request
        self._begin(stream_id, head)
        self._data(DataReceived(stream_id, body, 0, ended=True))

    def _received(self, event: RequestReceived) -> None:
        self._begin(event.stream_id, event.head)
        if event.ended:
            self._ended(event.stream_id)

    def _begin(self, stream_id: int, head: RequestHead) -> None:
        turn, answers = self._turn, self._answers
        turn.dear = True
        plan = self._reader.read(head)
        if not self._table.has_room:
            self._shared.count(TransportError.TOO_MANY_CALLS)
            answers.fail(stream_id, TOO_MANY_CALLS)
            return
        if plan.plain is not None:
            self._table.enter_plain(stream_id, plan.plain, turn.came_s)
            return
        if plan.refusal is not None:
            self._shared.count(plan.refusal.cause)
            answers.fail(stream_id, plan.refusal.error, plan.refusal.fields)
            return
        call = self._reader.call(plan, head, turn.came_s)
        open_call = self._table.enter(stream_id, plan, call, turn.came_s)
        if plan.bidi_stream is not None:
            questions = open_call.questions = self._questions(stream_id, open_call)
            self._starter.stream(stream_id, open_call, partial(plan.bidi_stream, questions))

    def _questions(self, stream_id: int, open_call: OpenCall) -> Questions:
        return Questions(
            open_call.plan.encoding,
            self._shared.limits.max_message_bytes,
            partial(self._answers.acknowledge, stream_id),
            self._shared.turnstile.passed,
            read=partial(self._has_read, stream_id, open_call),
        )

    def _has_read(self, stream_id: int, open_call: OpenCall) -> None:
        """A handler has read a message: it is held no more."""
        if self._table.open.get(stream_id) is open_call:
            self._table.may_hold(open_call)

    def _data(self, event: DataReceived) -> None:
        stream_id, data, flow_bytes, ended = event
        answers = self._answers
        open_call = self._table.open.get(stream_id)
        if open_call is None:
            answers.acknowledge(stream_id, flow_bytes)
        elif open_call.questions is not None:
            self._ask(open_call.questions, open_call, data, flow_bytes)
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
            self._shared.count(TransportError.BAD_REQUEST)
            questions.end(error)
        questions.acknowledge(flow_bytes)

    def _trailers(self, event: TrailersReceived) -> None:
        self._ended(event.stream_id)

    def _ended(self, stream_id: int) -> None:
        """The request has ended: the handler of a call with one message can begin."""
        open_call = self._table.open.get(stream_id)
        if open_call is None:
            self._answers.answer_plainly(stream_id)
            return
        plan, questions = open_call.plan, open_call.questions
        if questions is not None:
            questions.end(open_call.cut_off())
            return
        self._turn.dear = True
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

    _EVENTS: ClassVar[Mapping[type, Callable[[ArrivingCalls, Any], None]]] = {
        RequestReceived: _received,
        DataReceived: _data,
        TrailersReceived: _trailers,
        StreamReset: _reset,
        WindowOpened: _window_opened,
        HeadTooLarge: _head_too_large,
    }
    """What to do for each kind; the others are the connection's business."""


def _ignore(_calls: ArrivingCalls, _event: Event) -> None:
    """Nothing that concerns a call."""
