"""Batches concurrent checks into one RPC, transparently. See ADR 0038.

An RPC costs many times what a check in a batch does. Sends nothing itself: the session passes it a function for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Final

from ratelimitd_client.check import MAX_BATCH
from ratelimitd_client.decision import Decision

MAX_IN_FLIGHT: Final = 2
"""Calls in flight beyond which checks are held back. Two keep both sides busy: one travels while the node works on the
other."""

MAX_WAIT_S: Final = 0.001
"""Longest time that a check is held back, so that a call that hangs does not hold up those behind it."""

Answer = Callable[[Sequence[Decision]], None]
"""Takes the decisions on a batch."""

Send = Callable[[Sequence[bytes], float, Answer], object]
"""Sends up to ``MAX_BATCH`` encoded checks with a deadline in seconds, and calls ``Answer`` once. Never raises."""


class Batcher:
    """Gathers the checks of one event loop.

    With ``linger_s`` 0, a batch is sent at the end of the event-loop iteration in which its first check came. While
    ``MAX_IN_FLIGHT`` calls are in flight, it is sent when one of them is answered, or after ``MAX_WAIT_S``. A check
    that finds nothing in flight is sent at once if the check before it was alone until it was answered.

    Otherwise a batch is sent ``linger_s`` after its first check. The wait counts against the deadline and takes no more
    than half of it. Checks with different deadlines are sent in different batches.
    """

    def __init__(self, send: Send, *, linger_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._linger_s = linger_s
        self._loop = loop
        self._no_context = Context()
        """An empty context: a batch belongs to many requests."""
        self._queues: dict[float, _Queue] = {}
        self._in_flight = 0
        self._is_alone = False
        """One check has come since nothing was in flight."""
        self._idle: asyncio.Event | None = None

    def add(self, request: bytes, timeout_s: float) -> asyncio.Future[Decision]:
        """Return the future of a check's decision. A check whose future is cancelled in time is not sent."""
        decision: asyncio.Future[Decision] = self._loop.create_future()
        if self._in_flight or self._queues:
            self._is_alone = False
        else:
            was_alone, self._is_alone = self._is_alone, True
            if was_alone and not self._linger_s:
                self._begin([request], [decision], timeout_s)
                # A call that failed at once, because no node is connected, does not make the check alone: the breaker
                # counts calls, so the checks of one iteration must not fail one by one.
                self._is_alone = self._in_flight > 0
                return decision
        queue = self._queues.get(timeout_s) or self._open_queue(timeout_s)
        queue.requests.append(request)
        queue.decisions.append(decision)
        return decision

    async def finish(self) -> None:
        """Send what is queued, and wait until every call is answered."""
        for timeout_s in list(self._queues):
            self._flush(timeout_s)
        while self._in_flight:
            idle = self._idle = self._idle or asyncio.Event()
            await idle.wait()

    def _open_queue(self, timeout_s: float) -> _Queue:
        timer: asyncio.Handle
        if not self._linger_s and self._in_flight < MAX_IN_FLIGHT:
            timer = self._loop.call_soon(self._flush, timeout_s, context=self._no_context)
        else:
            pause_s = min(self._linger_s or MAX_WAIT_S, timeout_s / 2)
            timer = self._loop.call_later(pause_s, self._flush, timeout_s, context=self._no_context)
        queue = self._queues[timeout_s] = _Queue(self._loop.time(), timer)
        return queue

    def _flush(self, timeout_s: float) -> None:
        queue = self._queues.pop(timeout_s)
        queue.timer.cancel()
        waiting = [
            (request, decision)
            for request, decision in zip(queue.requests, queue.decisions, strict=True)
            if not decision.done()
        ]
        left_s = max(0.0, timeout_s - (self._loop.time() - queue.since_s))
        for start in range(0, len(waiting), MAX_BATCH):
            requests, decisions = zip(*waiting[start : start + MAX_BATCH], strict=True)
            self._begin(requests, decisions, left_s)

    def _begin(
        self,
        requests: Sequence[bytes],
        waiting: Sequence[asyncio.Future[Decision]],
        timeout_s: float,
    ) -> None:
        self._in_flight += 1
        self._send(requests, timeout_s, partial(self._answered, waiting))

    def _answered(
        self, waiting: Sequence[asyncio.Future[Decision]], decisions: Sequence[Decision]
    ) -> None:
        for future, decision in zip(waiting, decisions, strict=True):
            if not future.done():  # the caller may have been cancelled
                future.set_result(decision)
        self._in_flight -= 1
        if self._queues and not self._linger_s:
            # After the callers that were answered now, which may send their next check.
            self._loop.call_soon(self._flush_next, context=self._no_context)
        if self._idle is not None and not self._in_flight:
            self._idle.set()
            self._idle = None

    def _flush_next(self) -> None:
        if self._queues and self._in_flight < MAX_IN_FLIGHT:
            self._flush(next(iter(self._queues)))  # the oldest


class _Queue:
    """Checks with one deadline that are not sent yet, and the future of each."""

    __slots__ = ("decisions", "requests", "since_s", "timer")

    def __init__(self, since_s: float, timer: asyncio.Handle) -> None:
        self.since_s = since_s
        self.timer = timer
        """Flushes the queue, unless an answer does so first."""
        self.requests: list[bytes] = []
        self.decisions: list[asyncio.Future[Decision]] = []
