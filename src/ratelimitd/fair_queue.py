"""Large work in small steps, within one time budget per event-loop iteration for all callers together.

A batch of 1,000 checks is ten steps. If each batch took one step per iteration, a thousand batches in flight would make
an iteration a thousand steps long, and all other callers would wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

BUDGET_S: Final = 0.002
"""Time per event-loop iteration. The step that exceeds it is the last one, so the bound is the budget and one step."""


class FairQueue:
    """Runs steps in turn: by peer address, then by connection of that address, then in the order of their submission.

    A step that ``resumes`` a call goes before the first steps of others on its connection: a call that has begun holds
    more memory than one that waits. ``monotonic_s`` is in seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._peers: dict[str, dict[str, deque[Callable[[], None]]]] = {}
        """Steps by address and connection. The order of the keys is the rotation."""
        self._scheduled = False

    def submit(self, peer: str, step: Callable[[], None], *, resumes: bool = False) -> None:
        """Run ``step``, which must not raise, in a later iteration; ``peer`` is ``ADDRESS:PORT`` of its connection."""
        connections = self._peers.setdefault(peer.rpartition(":")[0], {})
        steps = connections.setdefault(peer, deque())
        (steps.appendleft if resumes else steps.append)(step)
        self._schedule()

    async def run(self, peer: str, step: Callable[[], T], *, resumes: bool = False) -> T:
        """Return the result of ``step``, run in a later iteration, or raise its error; skipped if cancelled before."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if result.done():
                return
            try:
                result.set_result(step())
            except Exception as error:  # noqa: BLE001 - raised where the step is awaited
                result.set_exception(error)

        self.submit(peer, settle, resumes=resumes)
        return await result

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_due)

    def _run_due(self) -> None:
        self._scheduled = False
        began_s = self._monotonic_s()
        while self._peers:
            self._next()()
            if self._monotonic_s() - began_s >= BUDGET_S:
                break
        if self._peers:
            self._schedule()

    def _next(self) -> Callable[[], None]:
        """Take the next step; its connection and its address go to the end of the rotation."""
        address, connections = next(iter(self._peers.items()))
        peer, steps = next(iter(connections.items()))
        del self._peers[address], connections[peer]
        step = steps.popleft()
        if steps:
            connections[peer] = steps
        if connections:
            self._peers[address] = connections
        return step
