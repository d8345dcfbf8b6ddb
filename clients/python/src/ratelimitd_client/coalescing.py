"""Checks that are asked together travel together, in one call; nobody who asks notices.

A call of gRPC costs many times what a check in a batch does. Never sends anything itself: it is given what asks. See
ADR 0038.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ratelimitd_client.check import MAX_BATCH
from ratelimitd_client.decision import Decision

MAX_UNDER_WAY: Final = 2
"""Calls under way with which another one waits: one that travels while the node works on the other keeps both busy."""

MAX_WAIT_S: Final = 0.001
"""How long it waits at most: a call that hangs must not hold up those behind it."""

Ask = Callable[[Sequence[bytes], float], Awaitable[list[Decision]]]
"""Asks up to ``MAX_BATCH`` encoded checks within so many seconds. Raises nothing, and has a decision for each."""


class _Queue:
    """Checks with one deadline that wait to leave, and who waits for each."""

    __slots__ = ("decisions", "leaving", "requests", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.requests: list[bytes] = []
        self.decisions: list[asyncio.Future[Decision]] = []
        self.leaving: asyncio.Handle | None = None
        """What lets it leave, if nothing does so before."""


class Coalescer:
    """Gathers the checks of one event loop.

    With ``linger_s`` 0 a batch leaves at the end of the turn in which its first check came; while ``MAX_UNDER_WAY``
    others are under way, when one of these is answered, or after ``MAX_WAIT_S``. Else it leaves ``linger_s`` after its
    first check. The pause counts against the deadline and takes no more than half of it. Checks with different
    deadlines travel apart.
    """

    __slots__ = ("_ask", "_linger_s", "_loop", "_queues", "_tasks")

    def __init__(self, ask: Ask, *, linger_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._linger_s = linger_s
        self._loop = loop
        self._queues: dict[float, _Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request: bytes, timeout_s: float) -> asyncio.Future[Decision]:
        """The decision to come. A check whose future is cancelled before its batch leaves is not sent."""
        decision: asyncio.Future[Decision] = self._loop.create_future()
        queue = self._queues.get(timeout_s) or self._begin(timeout_s)
        queue.requests.append(request)
        queue.decisions.append(decision)
        return decision

    async def finish(self) -> None:
        """Send what waits, and wait until all is answered."""
        for timeout_s in list(self._queues):
            self._leave(timeout_s)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, timeout_s: float) -> _Queue:
        queue = self._queues[timeout_s] = _Queue(self._loop.time())
        if not self._linger_s and len(self._tasks) < MAX_UNDER_WAY:
            queue.leaving = self._loop.call_soon(self._leave, timeout_s)
        else:
            pause_s = min(self._linger_s or MAX_WAIT_S, timeout_s / 2)
            queue.leaving = self._loop.call_later(pause_s, self._leave, timeout_s)
        return queue

    def _leave(self, timeout_s: float) -> None:
        queue = self._queues.pop(timeout_s)
        if queue.leaving is not None:
            queue.leaving.cancel()
        waiting = [
            (request, decision)
            for request, decision in zip(queue.requests, queue.decisions, strict=True)
            if not decision.done()
        ]
        left_s = max(0.0, timeout_s - (self._loop.time() - queue.since_s))
        for start in range(0, len(waiting), MAX_BATCH):
            task = self._loop.create_task(self._travel(waiting[start : start + MAX_BATCH], left_s))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _travel(
        self, waiting: Sequence[tuple[bytes, asyncio.Future[Decision]]], timeout_s: float
    ) -> None:
        decisions = await self._ask([request for request, _ in waiting], timeout_s)
        for (_, future), decision in zip(waiting, decisions, strict=True):
            if not future.done():  # its caller may have left meanwhile
                future.set_result(decision)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._queues and not self._linger_s and len(self._tasks) < MAX_UNDER_WAY:
            self._leave(next(iter(self._queues)))  # the one that waits longest
