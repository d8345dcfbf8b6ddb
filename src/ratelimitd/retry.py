"""Exponential backoff with jitter, and the supervision of background jobs."""

from __future__ import annotations

import asyncio
import logging
import random as random_source
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final


class Backoff:
    """The pauses between the attempts of one operation: doubled from ``first_s`` up to ``longest_s``.

    Tests inject ``random`` (0 to 1).
    """

    __slots__ = ("_first_s", "_longest_s", "_pause_s", "_random")

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s
        self._random = random

    def next_s(self) -> float:
        """Return the next pause in seconds, shortened at random by up to a half."""
        pause_s = self._pause_s
        self._pause_s = min(self._longest_s, 2 * pause_s)
        return pause_s * (1 - self._random() / 2)

    def reset(self) -> None:
        """Reset the pause to ``first_s`` after a success."""
        self._pause_s = self._first_s


FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
"""Pause before a restart: doubled after each crash, at most half a minute, shortened at random by up to a half."""

LONG_RUN_S: Final = 60.0
"""A job that ran this long before a crash restarts after the first pause."""

_log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[None]]
Sleep = Callable[[float], Awaitable[None]]


async def cancel_all(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended; drops their results and errors, and skips ``None``."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


class Background:
    """The background jobs of a node.

    ``restarts`` maps the name of each job to the number of its crashes. Tests inject ``sleep`` (seconds), ``time_s``
    (monotonic seconds) and ``random_share`` (0 to 1).
    """

    def __init__(
        self,
        restarts: MutableMapping[str, int],
        *,
        sleep: Sleep = asyncio.sleep,
        time_s: Callable[[], float] | None = None,
        random_share: Callable[[], float] = random_source.random,
    ) -> None:
        self._restarts = restarts
        self._sleep = sleep
        self._time_s = time_s or asyncio.get_running_loop().time
        self._random_share = random_share
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, job: Job) -> None:
        """Run ``job`` until it returns or :meth:`stop` is called; restart it when it raises."""
        self._restarts.setdefault(name, 0)
        task = asyncio.create_task(self._supervise(name, job), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def every(self, period_s: float, name: str, tick: Callable[[], Awaitable[None] | None]) -> None:
        """Call ``tick`` repeatedly, with a pause of ``period_s`` seconds before each call."""

        async def loop() -> None:
            while True:
                await self._sleep(period_s)
                pending = tick()
                if pending is not None:
                    await pending

        self.start(name, loop)

    async def stop(self) -> None:
        """Cancel every job and wait until they have ended."""
        await cancel_all(*self._tasks)

    async def _supervise(self, name: str, job: Job) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._random_share)
        while True:
            started_s = self._time_s()
            try:
                await job()
            except Exception:  # noqa: BLE001 - whatever it is, the job must run again
                self._restarts[name] += 1
                if self._time_s() - started_s >= LONG_RUN_S:
                    backoff.reset()
                pause_s = backoff.next_s()
                _log.exception("background job %s crashed, again in %.1f s", name, pause_s)
                await self._sleep(pause_s)
            else:
                return
