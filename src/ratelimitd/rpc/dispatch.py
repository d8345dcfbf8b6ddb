"""The calls of one connection, from HTTP/2 events to handlers and back.

Answers requests that arrive in one piece, as nearly all do; consecutive ones of one method by one call of its bulk
handler. :mod:`ratelimitd.rpc.requests` handles all others. Performs no I/O: the owner feeds events and writes octets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.events import CompleteRequest, Event
from ratelimitd.rpc.interface import LARGE_BYTES, BulkHandler, RpcError, StatusCode, TransportError
from ratelimitd.rpc.keepalive import MS_PER_S
from ratelimitd.rpc.messages import PREFIX_BYTES, PREFIXES, UNARY_ANSWER, only_message
from ratelimitd.rpc.requests import Invoker, RequestAssembler
from ratelimitd.rpc.responses import ResponseWriter
from ratelimitd.rpc.routing import Peer, Route, Router
from ratelimitd.rpc.state import CallTable, OpenCall, ServerState, TimeBudget

_EXCEEDED: Final = RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_TOO_SLOW: Final = RpcError(
    StatusCode.DEADLINE_EXCEEDED, "the rest of the request did not come in time"
)


class _Run:
    """Consecutive calls for one bulk handler."""

    __slots__ = ("handler", "messages", "requests")

    def __init__(self, handler: BulkHandler | None) -> None:
        self.handler = handler
        self.requests: list[CompleteRequest] = []
        self.messages: list[bytes] = []


_NO_RUN: Final = _Run(None)
"""The run before the first."""


class ConnectionCalls:
    """The calls of one connection.

    ``wake`` is called when there may be octets to send. After :meth:`handle` the owner writes in any case.

    Attributes:
        answers: writes the answers of calls.
    """

    __slots__ = (
        "_arriving",
        "_budget",
        "_connection",
        "_limits",
        "_reader",
        "_shared",
        "_starter",
        "_table",
        "_unusual",
        "answers",
    )

    def __init__(
        self, shared: ServerState, connection: Connection, peer: Peer, wake: Callable[[], None]
    ) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._connection = connection
        self._unusual: deque[CompleteRequest] = deque()
        self._budget = budget = TimeBudget(shared.monotonic_s)
        self._table = table = CallTable(shared)
        self._reader = reader = Router(shared.routes, peer, shared.monotonic_s)
        self.answers = answers = ResponseWriter(shared, connection, table, budget=budget, wake=wake)
        self._starter = starter = Invoker(shared, table, answers, budget)
        self._arriving = RequestAssembler(
            shared, reader, table=table, answers=answers, starter=starter, budget=budget
        )

    @property
    def open(self) -> Mapping[int, OpenCall]:
        """Unanswered calls by stream."""
        return self._table.open

    # Input of the peer

    def handle(self, events: Iterator[Event], now_s: float, came_s: float | None = None) -> bool:
        """Handle events that arrived at ``came_s``, by default now; false if the time budget ran out first."""
        budget = self._budget
        budget.begin(now_s, now_s if came_s is None else came_s)
        run = _NO_RUN
        for event in events:
            if type(event) is tuple:
                request: CompleteRequest = event  # type: ignore[assignment]  # mypy cannot tell; cast() costs 40 ns
                head, body = request[1], request[2]
                plan: Route | None = head.owner_data  # type: ignore[assignment]  # only this package sets it
                if plan is None:
                    plan = self._reader.read(head)
                if plan.bulk is not None and body[:PREFIX_BYTES] == PREFIXES.get(len(body)):
                    if plan.bulk is not run.handler:
                        self._answer_run(run)
                        run = _Run(plan.bulk)
                    run.requests.append(request)
                    run.messages.append(body[PREFIX_BYTES:])
                    continue
                self._whole(request, plan)
            else:
                self._arriving.handle(event)
            if budget.expensive and budget.is_over():
                self._answer_run(run)
                return False
        self._answer_run(run)
        return not self._unusual or self._answer_unusual()

    def _answer_run(self, run: _Run) -> None:
        """Answer consecutive calls; queue those that the bulk handler leaves to the unary one."""
        if run.handler is None:
            return
        shared, requests = self._shared, run.requests
        answers: Sequence[bytes | None] = [None] * len(requests)
        if not self._budget.is_late:  # the bulk handler does not check deadlines
            try:
                answers = run.handler(run.messages)
            except Exception:  # noqa: BLE001 -- the unary handler decides each call instead
                shared.count(TransportError.UNEXPECTED)
        send = self._connection.send_unary
        for request, answer in zip(requests, answers, strict=True):
            if answer is None:
                self._unusual.append(request)
            else:
                send(request[0], UNARY_ANSWER, answer)

    def _answer_unusual(self) -> bool:
        """Answer the calls that the bulk handler left; false if the time budget ran out before the last."""
        budget, unusual = self._budget, self._unusual
        while unusual:
            request = unusual.popleft()
            self._whole(request, self._reader.read(request[1]))
            if budget.expensive and budget.is_over():
                return not unusual
        return True

    def _whole(self, request: CompleteRequest, plan: Route) -> None:
        """Handle a request that arrived in one piece."""
        stream_id, head, body = request
        message, is_large = only_message(body), len(body) > LARGE_BYTES
        queue = self._shared.queue
        if message is None or plan.unary is None or (is_large and not queue.begin()):
            self._arriving.take(request)
            return
        call = self._reader.call(plan, head, self._budget.came_s)
        self._starter.unary(stream_id, plan, call, message)
        if is_large:
            queue.end()

    def lose_all(self) -> None:
        """Drop all calls of a closed connection."""
        for open_call in self._table.leave_all():
            self._shared.count(TransportError.CANCELLED)
            open_call.cancel()
        self._unusual.clear()
        self.answers.lose()

    # Timeouts and the end

    def expire(self, now_s: float) -> None:
        """End the calls whose deadline has passed."""
        for stream_id in self._table.expired(now_s):
            self.answers.fail(stream_id, _EXCEEDED)

    def look(self, now_s: float) -> None:
        """End the requests whose rest is overdue; called about once a second."""
        began_s = now_s - self._limits.request_timeout_ms / MS_PER_S
        for stream_id in self._table.unfinished(began_s):
            self._shared.count(TransportError.SLOW_REQUEST)
            if not self.answers.answer_plainly(stream_id, is_counted=True):
                self.answers.fail(stream_id, _TOO_SLOW, is_counted=True)

    def end_streams(self, error: RpcError) -> None:
        """End the calls with streams."""
        for stream_id in self._table.streams():
            self.answers.fail(stream_id, error)

    def end_all(self, error: RpcError) -> None:
        """End every call."""
        for stream_id in list(self._table.open):
            self.answers.fail(stream_id, error)
