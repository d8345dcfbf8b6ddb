"""Calls handlers: within the bounds on what is in progress, and not for a caller who no longer waits.

A unary handler that answers at once costs no task, no timer and no lock, and nothing about its call is kept. What takes
longer is left to :mod:`ratelimitd.rpc.running_calls`. Never reads a request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from ratelimitd.rpc.call_answers import CallAnswers
from ratelimitd.rpc.call_head import CallPlan, NativeCall
from ratelimitd.rpc.call_table import CallTable
from ratelimitd.rpc.interface import RpcError, StatusCode, TransportError
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.rpc.open_call import OpenCall
from ratelimitd.rpc.running_calls import run_stream, run_unary
from ratelimitd.rpc.turns import Turn

TOO_MANY_CALLS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
_TOO_MANY_STREAMS: Final = RpcError(StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
_LATE: Final = RpcError(StatusCode.DEADLINE_EXCEEDED, "the deadline had passed on arrival")


class CallStarter:
    """Starts the calls of one connection whose requests are there."""

    __slots__ = ("_answers", "_shared", "_table", "_turn")

    def __init__(
        self, shared: SharedCalls, table: CallTable, answers: CallAnswers, turn: Turn
    ) -> None:
        self._shared = shared
        self._table = table
        self._answers = answers
        self._turn = turn

    def unary(self, stream_id: int, plan: CallPlan, call: NativeCall, message: bytes) -> None:
        """Call a unary handler, and answer if it does at once."""
        shared = self._shared
        if shared.unary_in_progress >= shared.limits.max_concurrent_rpcs:
            shared.count(TransportError.TOO_MANY_CALLS)
            self._answers.fail(stream_id, TOO_MANY_CALLS)
            return
        if call.deadline_s is not None and shared.monotonic_s() >= call.deadline_s:
            self._answers.fail(stream_id, _LATE)
            return
        try:
            answer = plan.unary(message, call)  # type: ignore[misc]  # who calls this has looked
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is the end of this call alone
            self._answers.fail(stream_id, shared.status_of(error))
            return
        if isinstance(answer, bytes):
            self._answers.answer(stream_id, answer)
            return
        table = self._table
        open_call = table.open.get(stream_id)
        if open_call is None:
            open_call = table.enter(stream_id, plan, call, self._turn.came_s)
        shared.unary_in_progress += 1
        open_call.task = shared.start(run_unary(self._answers, stream_id, open_call, answer))

    def stream(
        self,
        stream_id: int,
        open_call: OpenCall,
        handler: Callable[[NativeCall], AsyncIterator[bytes]],
    ) -> None:
        """Run a handler that answers with a stream."""
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
