"""Checks that are asked in one turn of the event loop travel together, in one call; nobody who asks notices.

A call of gRPC costs many times what a check in a batch does. Never sends anything itself: it is given what asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from ratelimitd_client.check import MAX_BATCH
from ratelimitd_client.decision import Decision
from ratelimiter.v1 import ratelimiter_pb2 as pb

Ask = Callable[[Sequence[pb.RateLimitRequest], float], Awaitable[list[Decision]]]
"""Asks up to ``MAX_BATCH`` checks within so many seconds. Raises nothing, and has a decision for each."""


class _Waiting(NamedTuple):
    request: pb.RateLimitRequest
    decision: asyncio.Future[Decision]


class Coalescer:
    """Gathers the checks of one event loop.

    With ``linger_s`` 0 a batch leaves at the end of the turn in which its first check came, else so much later; the
    pause counts against the deadline. Checks with different deadlines travel apart.
    """

    __slots__ = ("_ask", "_linger_s", "_loop", "_queues", "_tasks")

    def __init__(self, ask: Ask, *, linger_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._linger_s = linger_s
        self._loop = loop
        self._queues: dict[float, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request: pb.RateLimitRequest, timeout_s: float) -> asyncio.Future[Decision]:
        """The decision to come. A check whose future is cancelled before its batch leaves is not sent."""
        waiting = _Waiting(request, self._loop.create_future())
        queue = self._queues.get(timeout_s)
        if queue is not None:
            queue.append(waiting)
            return waiting.decision
        self._queues[timeout_s] = [waiting]
        if self._linger_s:
            self._loop.call_later(self._linger_s, self._leave, timeout_s, self._loop.time())
        else:
            self._loop.call_soon(self._leave, timeout_s, self._loop.time())
        return waiting.decision

    async def finish(self) -> None:
        """Send what waits, and wait until all is answered."""
        for timeout_s in list(self._queues):
            self._leave(timeout_s, self._loop.time())
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _leave(self, timeout_s: float, since_s: float) -> None:
        queue = self._queues.pop(timeout_s, ())
        batch = [waiting for waiting in queue if not waiting.decision.done()]
        left_s = max(0.0, timeout_s - (self._loop.time() - since_s))
        for start in range(0, len(batch), MAX_BATCH):
            task = self._loop.create_task(self._travel(batch[start : start + MAX_BATCH], left_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _travel(self, batch: Sequence[_Waiting], timeout_s: float) -> None:
        decisions = await self._ask([waiting.request for waiting in batch], timeout_s)
        for waiting, decision in zip(batch, decisions, strict=True):
            if not waiting.decision.done():  # its caller may have left meanwhile
                waiting.decision.set_result(decision)
