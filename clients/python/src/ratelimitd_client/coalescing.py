"""Batches concurrent checks into one RPC, transparently.

A call of gRPC costs many times what a check in a batch does. Never sends anything itself: it is given what asks. See
ADR 0038.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Final

from ratelimitd_client.check import MAX_BATCH
from ratelimitd_client.decision import Decision

MAX_UNDER_WAY: Final = 2
"""Calls under way with which another one waits: one that travels while the node works on the other keeps both busy."""

MAX_WAIT_S: Final = 0.001
"""How long it waits at most: a call that hangs must not hold up those behind it."""

Told = Callable[[Sequence[Decision]], None]

Ask = Callable[[Sequence[bytes], float, Told], None]
"""Asks up to ``MAX_BATCH`` encoded checks within so many seconds, and tells once of a decision for each; raises
nothing."""


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
    others are under way, when one of these is answered, or after ``MAX_WAIT_S``. A check that finds nothing under way
    leaves at once if the one before it was alone until it was answered. Else a batch leaves ``linger_s`` after its
    first check. The pause counts against the deadline and takes no more than half of it. Checks with different
    deadlines travel apart.
    """

    __slots__ = (
        "_ask",
        "_idle",
        "_is_alone",
        "_linger_s",
        "_loop",
        "_no_context",
        "_queues",
        "_under_way",
    )

    def __init__(self, ask: Ask, *, linger_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._linger_s = linger_s
        self._loop = loop
        self._no_context = Context()
        """What is asked is for many requests, and in the context of none."""
        self._queues: dict[float, _Queue] = {}
        self._under_way = 0
        self._is_alone = False
        """Since nothing was under way, one check has come."""
        self._idle: asyncio.Event | None = None

    def add(self, request: bytes, timeout_s: float) -> asyncio.Future[Decision]:
        """The decision to come. A check whose future is cancelled before its batch leaves is not sent."""
        decision: asyncio.Future[Decision] = self._loop.create_future()
        if self._under_way or self._queues:
            self._is_alone = False
        else:
            was_alone, self._is_alone = self._is_alone, True
            if was_alone and not self._linger_s:
                self._send([request], [decision], timeout_s)
                # One that ended at once, since no node can be reached, says nothing about company: those of a turn must
                # not fail one by one, for the breaker counts calls.
                self._is_alone = self._under_way > 0
                return decision
        queue = self._queues.get(timeout_s) or self._begin(timeout_s)
        queue.requests.append(request)
        queue.decisions.append(decision)
        return decision

    async def finish(self) -> None:
        """Send what waits, and wait until all is answered."""
        for timeout_s in list(self._queues):
            self._leave(timeout_s)
        while self._under_way:
            idle = self._idle = self._idle or asyncio.Event()
            await idle.wait()

    def _begin(self, timeout_s: float) -> _Queue:
        queue = self._queues[timeout_s] = _Queue(self._loop.time())
        if not self._linger_s and self._under_way < MAX_UNDER_WAY:
            queue.leaving = self._loop.call_soon(self._leave, timeout_s, context=self._no_context)
        else:
            pause_s = min(self._linger_s or MAX_WAIT_S, timeout_s / 2)
            queue.leaving = self._loop.call_later(
                pause_s, self._leave, timeout_s, context=self._no_context
            )
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
            requests, decisions = zip(*waiting[start : start + MAX_BATCH], strict=True)
            self._send(requests, decisions, left_s)

    def _send(
        self,
        requests: Sequence[bytes],
        waiting: Sequence[asyncio.Future[Decision]],
        timeout_s: float,
    ) -> None:
        self._under_way += 1
        self._ask(requests, timeout_s, partial(self._answered, waiting))

    def _answered(
        self, waiting: Sequence[asyncio.Future[Decision]], decisions: Sequence[Decision]
    ) -> None:
        for future, decision in zip(waiting, decisions, strict=True):
            if not future.done():  # its caller may have left meanwhile
                future.set_result(decision)
        self._under_way -= 1
        if self._queues and not self._linger_s:
            # Behind those who have an answer now, and may ask again.
            self._loop.call_soon(self._go_on, context=self._no_context)
        if self._idle is not None and not self._under_way:
            self._idle.set()
            self._idle = None

    def _go_on(self) -> None:
        """Let those leave who wait for the answer that has come."""
        if self._queues and self._under_way < MAX_UNDER_WAY:
            self._leave(next(iter(self._queues)))  # the one that waits longest
