"""All workers of a parent together: started, kept, asked and stopped as one node. Never knows how one is started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final

from ratelimitd.background import Background
from ratelimitd.observe.metrics import Definition, Point
from ratelimitd.observe.process import STARTED_AT_S, resident_bytes
from ratelimitd.web.pages import Points, Readiness
from ratelimitd.workers.keeper import Keeper
from ratelimitd.workers.merging import merged
from ratelimitd.workers.messages import Report

ANSWERING: Final = Definition(
    "rate_limiter_workers",
    "gauge",
    "Worker processes that answered this scrape; the gauges are theirs.",
    lambda _: (),
)
RESTARTS: Final = Definition(
    "rate_limiter_worker_restarts_total",
    "counter",
    "Worker processes that ended and were started again, by the worker's number.",
    lambda _: (),
    "worker",
)
DEFINITIONS: Final = (ANSWERING, RESTARTS)
"""The metrics of a parent, beside those of its workers."""

TOGETHER_S: Final = 5.0
"""How long workers wait for each other before they listen: one that hangs at its start keeps nobody from serving."""


class Crew:
    """The workers, by their number."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._background = Background({})
        self._draining = False

    async def start(self) -> None:
        """Start every worker at once; from then on each is kept.

        None listens before all can, or after a while: callers that wait for the port would all come to the first that
        does.

        Raises:
            StartupError: one cannot start; stop the others.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOGETHER_S):
                await asyncio.gather(*(keeper.prepare() for keeper in self._keepers))
        await asyncio.gather(*(self._start(*each) for each in enumerate(self._keepers)))

    async def _start(self, number: int, keeper: Keeper) -> None:
        await keeper.start()
        if self._draining:  # another could not start meanwhile
            return
        name = f"worker {number}"
        self._background.start(name, partial(keeper.keep, name))

    async def stop(self, timeout_s: float) -> str:
        """Let every worker drain; kill those that take longer. Returns what did not end well, empty when all did."""
        self._draining = True
        await self._background.stop()
        stopping = [asyncio.create_task(keeper.stop()) for keeper in self._keepers]
        _, overdue = await asyncio.wait(stopping, timeout=timeout_s)
        if overdue:
            self.kill()
        reasons = await asyncio.gather(*stopping)
        return "; ".join(
            f"worker {number}: {reason}" for number, reason in enumerate(reasons) if reason
        )

    def kill(self) -> None:
        """End every process at once."""
        for keeper in self._keepers:
            keeper.kill()

    async def readiness(self) -> Readiness:
        """Ready while one worker is; says which are not, and why."""
        if self._draining:
            return Readiness(ready=False, reason="draining")
        answers = await asyncio.gather(*(keeper.readiness() for keeper in self._keepers))
        lacking = ", ".join(
            f"worker {number} ({answer.reason})"
            for number, answer in enumerate(answers)
            if not answer.ready
        )
        if not any(answer.ready for answer in answers):
            return Readiness(ready=False, reason=lacking)
        return Readiness(ready=True, reason=f"all but {lacking}" if lacking else "")

    async def points(self) -> Points:
        """The metrics of all workers as those of one node, and the parent's own."""
        answers = await asyncio.gather(*(keeper.report() for keeper in self._keepers))
        now = [answer for answer in answers if answer is not None]
        restarts = [
            Point(keeper.restarts_total, str(number)) for number, keeper in enumerate(self._keepers)
        ]
        return [
            *merged([keeper.tally.report() for keeper in self._keepers], [_parent(), *now]),
            (ANSWERING, [Point(len(now))]),
            (RESTARTS, restarts),
        ]


def _parent() -> Report:
    """What the parent adds to the gauges of its workers."""
    return {
        "rate_limiter_memory_usage_bytes": {"": resident_bytes()},
        "process_start_time_seconds": {"": STARTED_AT_S},
    }
