"""Keeps one worker running: a process that ends without being told to is followed by another, after a pause.

Owns the pauses, and what the worker has counted in all its processes. Never knows of the other workers.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_source
from collections.abc import Awaitable, Callable
from typing import Final

from ratelimitd.backoff import Backoff
from ratelimitd.errors import StartupError
from ratelimitd.web.pages import Readiness
from ratelimitd.workers.messages import Report
from ratelimitd.workers.process import WorkerProcess
from ratelimitd.workers.tally import Tally

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Pause before another process: doubled each time, up to this, and cut by up to half at random."""

LONG_LIFE_S: Final = 60.0
"""After a process that lived that long the pauses begin anew."""

LOOK_S: Final = 5.0
MAX_SILENT_LOOKS: Final = 6
"""A process that gives no answer that often in a row hangs, and is killed: nobody else could tell, since probes are
answered by the parent, and the kernel would go on giving it connections. Looks are counted, not seconds, so that a
machine that stood still for a while finds its workers as they were."""

_log = logging.getLogger(__name__)

Start = Callable[[Callable[[Report], None]], Awaitable[WorkerProcess]]
"""Starts a process that hands its reports to the function."""


class Keeper:
    """One worker. ``sleep``, ``time_s`` (monotonic seconds) and ``random`` (0 to 1) are there for tests."""

    def __init__(
        self,
        start: Start,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        time_s: Callable[[], float] | None = None,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self.tally = Tally()
        self.restarts_total = 0
        self._start = start
        self._sleep = sleep
        self._time_s = time_s or asyncio.get_running_loop().time
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, random)
        self._process: WorkerProcess | None = None
        self._is_up = False

    async def prepare(self) -> None:
        """Start a process, and return when all it lacks is the word to listen.

        Raises:
            StartupError: it cannot be started, or ended before; one line says why.
        """
        self._process = await self._start(self.tally.take)
        await self._process.prepared()

    async def start(self) -> None:
        """Start a process unless one is prepared, and return when it answers calls.

        Raises:
            StartupError: it cannot be started, or ended before; one line says why.
        """
        await self._begin()

    async def keep(self, name: str) -> None:
        """Replace each process that ends, for ever; ``name`` is the worker's in the log."""
        while True:
            since_s = self._time_s()
            reason = await self._one_life(name)
            if self._time_s() - since_s >= LONG_LIFE_S:
                self._backoff.reset()
            self.restarts_total += 1
            pause_s = self._backoff.next_s()
            _log.error("%s: %s; it is started again in %.1f s", name, reason, pause_s)
            await self._sleep(pause_s)

    async def readiness(self) -> Readiness:
        """Whether checks should come to this worker."""
        if self._process is None or not self._is_up:
            return Readiness(ready=False, reason="starting")
        return await self._process.readiness() or Readiness(ready=False, reason="no answer")

    async def report(self) -> Report | None:
        """What its process says of this moment; ``None`` when there is no answer in time."""
        return await self._process.report() if self._process is not None and self._is_up else None

    async def stop(self) -> str:
        """Let the process drain, once nothing keeps it; returns why it did not end well, empty when it did."""
        if self._process is None:
            return ""
        self._process.terminate()
        status = await self._process.ended()
        # A signal before it was up finds nothing to drain, and may end it as it ends any process.
        return self._process.reason if status and self._is_up else ""

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    async def _begin(self) -> WorkerProcess:
        self._process = process = self._process or await self._start(self.tally.take)
        await process.ready()
        self._is_up = True
        return process

    async def _one_life(self, name: str) -> str:
        """Wait for the end of the process, of a new one if there is none; returns why it ended."""
        try:
            process = self._process or await self._begin()
            await self._end_of(process, name)
            reason = process.reason
        except StartupError as error:
            reason = str(error)
        self._process = None
        self._is_up = False
        self.tally.process_ended()
        return reason

    async def _end_of(self, process: WorkerProcess, name: str) -> None:
        watching = asyncio.create_task(self._watch(process, name))
        try:
            await process.ended()
        finally:
            watching.cancel()

    async def _watch(self, process: WorkerProcess, name: str) -> None:
        silent = 0
        while silent < MAX_SILENT_LOOKS:
            await self._sleep(LOOK_S)
            silent = 0 if await process.readiness() else silent + 1
        _log.error("%s does not answer, and is killed", name)
        process.kill()
