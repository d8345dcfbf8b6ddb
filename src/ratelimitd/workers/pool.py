"""The workers of a parent, run as one node: start, restarts, queries and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random as random_source
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from ratelimitd.errors import StartupError
from ratelimitd.observe.metrics import STARTED_AT_S, Point, resident_bytes
from ratelimitd.retry import Background, Backoff, cancel_all
from ratelimitd.web.parts import Points, Readiness
from ratelimitd.workers.child import ChildProcess
from ratelimitd.workers.metrics import ANSWERING, RESTARTS, CounterTotals, forget_unused, merged
from ratelimitd.workers.protocol import Report

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Pause before a restart: doubled each time, up to this, and shortened by up to half at random."""

LONG_LIFE_S: Final = 60.0
"""Lifetime of a process that resets the pause."""

LOOK_S: Final = 5.0
MAX_SILENT_LOOKS: Final = 6
"""A process that does not answer this often in a row, at its start or later, hangs and is killed: the parent answers
probes, and the kernel would keep giving it connections. Counts attempts instead of seconds, so that a suspended machine
resumes with its workers.
"""

_log = logging.getLogger(__name__)

Start = Callable[[Callable[[Report], None]], Awaitable[ChildProcess]]
"""Starts a process that hands its reports to the function."""


class Respawner:
    """Keeps one process running; ``name`` is its name in the log.

    ``sleep``, ``time_s`` (monotonic seconds) and ``random`` (0 to 1) are for tests.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        time_s: Callable[[], float] | None = None,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self.name = name
        self.totals = CounterTotals()
        self.restarts_total = 0
        self.up = asyncio.Event()
        """Its process answers calls."""
        self._start = start
        self._sleep = sleep
        self._time_s = time_s or asyncio.get_running_loop().time
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, random)
        self._process: ChildProcess | None = None
        self._is_ending = False
        """Its process was told to end HTTP, alone."""

    async def prepare(self) -> None:
        """Start a process, and wait until it is ready to listen.

        Raises:
            StartupError: it cannot be started, or ended before; one line says why.
        """
        self._process = await self._start(self.totals.take)
        await self._process.prepared()

    async def start(self) -> ChildProcess:
        """Start a process unless one is prepared, and wait until it answers calls, or is killed because it hangs.

        Raises:
            StartupError: it cannot be started, or ended before; one line says why.
        """
        self._process = process = self._process or await self._start(self.totals.take)
        with self._watched(process) as watching:
            try:
                await process.ready()
                self.up.set()
            except StartupError:
                if not watching.done():
                    raise
        return process

    async def keep(self) -> None:
        """Restart the process whenever it ends."""
        while True:
            since_s = self._time_s()
            reason = await self._one_life()
            if self._time_s() - since_s >= LONG_LIFE_S:
                self._backoff.reset()
            self.restarts_total += 1
            pause_s = self._backoff.next_s()
            _log.error("%s: %s; it is started again in %.1f s", self.name, reason, pause_s)
            await self._sleep(pause_s)

    async def readiness(self) -> Readiness:
        """Return whether this worker should receive checks."""
        if self._process is None or not self.up.is_set():
            return Readiness(ready=False, reason="starting")
        return await self._process.readiness() or Readiness(ready=False, reason="no answer")

    async def answers(self) -> bool:
        """Return whether its process responds in time, and takes requests."""
        if self._process is None or not self.up.is_set():
            return False
        readiness = await self._process.readiness()
        return readiness is not None and not self._is_ending  # it may have begun meanwhile

    async def report(self) -> Report | None:
        """Return the current metrics of its process; ``None`` if there is no answer in time."""
        if self._process is None or not self.up.is_set():
            return None
        return await self._process.report()

    async def calls_ended(self) -> None:
        """Wait until the draining process waits for :meth:`close`, or has ended."""
        if self._process is not None:
            await self._process.calls_ended()

    def close(self) -> None:
        """Let the draining process end HTTP and close its stores."""
        if self._process is not None:
            self._process.close()

    async def stop(self) -> str:
        """Drain the process; return why it failed to end cleanly, or an empty text."""
        if self._process is None:
            return ""
        self._process.terminate()
        status = await self._process.ended()
        # Before it is up, a signal may end it without a drain.
        return self._process.reason if status and self.up.is_set() else ""

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    async def _one_life(self) -> str:
        """Wait for the end of the process, started now if there is none; return why it ended."""
        try:
            process = self._process or await self.start()
            with self._watched(process):
                await process.calls_ended()
                self._is_ending = True
                process.close()
                await process.ended()
            reason = process.reason
        except StartupError as error:
            reason = str(error)
        self._process = None
        self.up.clear()
        self._is_ending = False
        self.totals.process_ended()
        return reason

    @contextlib.contextmanager
    def _watched(self, process: ChildProcess) -> Iterator[asyncio.Task[None]]:
        """Kill the process if it hangs; the task is then done."""
        watching = asyncio.create_task(self._watch(process))
        try:
            yield watching
        finally:
            watching.cancel()

    async def _watch(self, process: ChildProcess) -> None:
        silent = 0
        while silent < MAX_SILENT_LOOKS:
            await self._sleep(LOOK_S)
            silent = 0 if await process.readiness() else silent + 1
        _log.error("%s does not answer, and is killed", self.name)
        process.kill()


TOGETHER_S: Final = 10.0
"""Longest time that workers wait for each other before they listen, in case one hangs at its start."""

STORE: Final = "store"
"""Name of the private Valkey in metrics."""

STORE_STOP_S: Final = 3.0
"""Longest wait for the last disk write of the private Valkey. Settled spends survive a kill: they are in the system's
memory.
"""


class WorkerPool:
    """The workers by number, and their private store, if any."""

    def __init__(self, respawners: Sequence[Respawner], store: Respawner | None = None) -> None:
        self._respawners = respawners
        self._stores = () if store is None else (store,)
        self._background = Background({})
        self._keeping_store = Background({})
        self._draining = False
        self._reading: asyncio.Task[Points] | None = None

    async def start(self) -> None:
        """Start the store, then all workers at once, until one answers calls; each is restarted whenever it ends.

        No worker listens until all can, or ``TOGETHER_S`` have passed: otherwise waiting callers would all connect to
        the first one.

        Raises:
            StartupError: one cannot start; the caller must stop the others.
        """
        for store in self._stores:
            await self._start_store(store)
            if self._draining:
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOGETHER_S):
                await asyncio.gather(*(respawner.prepare() for respawner in self._respawners))
        await asyncio.gather(*map(self._start, self._respawners))
        # Those that hung are started again meanwhile.
        waiting = [asyncio.create_task(respawner.up.wait()) for respawner in self._respawners]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(*waiting)

    async def _start_store(self, store: Respawner) -> None:
        try:
            await store.start()
        except StartupError as error:
            message = f"{store.name}: {error}"
            raise StartupError(message) from error
        if not self._draining:
            self._keeping_store.start(STORE, store.keep)

    async def _start(self, respawner: Respawner) -> None:
        await respawner.start()
        if not self._draining:  # another could not start meanwhile
            self._background.start(respawner.name, respawner.keep)

    async def answers(self, number: int) -> bool:
        """Return whether a worker responds within ``READINESS_TIMEOUT_S``."""
        return await self._respawners[number].answers()

    async def stop(
        self, timeout_s: float, end_http: Callable[[], Awaitable[None]], *, calls_s: float
    ) -> str:
        """Drain all workers; kill those that take longer. Return why they failed to end cleanly, or an empty text.

        ``end_http`` ends the server that forwards requests to workers; called when none has calls left, or after
        ``calls_s``.
        """
        self._draining = True
        await self._background.stop()
        closing = asyncio.create_task(self._close(end_http, calls_s))
        reasons = await _stopped(self._respawners, timeout_s)
        await closing
        # Stopped last: draining workers settle in it.
        await self._keeping_store.stop()
        reasons += await _stopped(self._stores, STORE_STOP_S)
        return "; ".join(reasons)

    async def _close(self, end_http: Callable[[], Awaitable[None]], calls_s: float) -> None:
        # A worker that ended HTTP first would leave requests unanswered, which proxies take for denials. The workers
        # wait for one that hangs no longer than for calls.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(calls_s):
                await asyncio.gather(*(respawner.calls_ended() for respawner in self._respawners))
        await end_http()
        for respawner in self._respawners:
            respawner.close()

    def kill(self) -> None:
        """End every process at once."""
        for respawner in (*self._respawners, *self._stores):
            respawner.kill()

    async def readiness(self) -> Readiness:
        """Return ready while one worker is; names those that are not, and why."""
        if self._draining:
            return Readiness(ready=False, reason="draining")
        answers = await asyncio.gather(*(respawner.readiness() for respawner in self._respawners))
        lacking = ", ".join(
            f"{respawner.name} ({answer.reason})"
            for respawner, answer in zip(self._respawners, answers, strict=True)
            if not answer.ready
        )
        if not any(answer.ready for answer in answers):
            return Readiness(ready=False, reason=lacking)
        return Readiness(ready=True, reason=f"all but {lacking}" if lacking else "")

    async def points(self) -> Points:
        """Return the metrics of all workers as those of one node, and the parent's own.

        Concurrent requests share one answer: a merge takes 10 ms with 1,000 rules, and nothing limits their number.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_points(), name="metrics of workers")
        return await asyncio.shield(self._reading)

    async def _read_points(self) -> Points:
        answers = await asyncio.gather(*(respawner.report() for respawner in self._respawners))
        now = [answer for answer in answers if answer is not None]
        totals = [respawner.totals for respawner in self._respawners]
        forget_unused(totals)
        restarts = [
            Point(respawner.restarts_total, str(number))
            for number, respawner in enumerate(self._respawners)
        ]
        restarts += [Point(store.restarts_total, STORE) for store in self._stores]
        # The parent's share of the workers' gauges.
        parent: Report = {
            "rate_limiter_memory_usage_bytes": {"": resident_bytes()},
            "process_start_time_seconds": {"": STARTED_AT_S},
        }
        return [
            *merged([each.report() for each in totals], [parent, *now]),
            (ANSWERING, [Point(len(now))]),
            (RESTARTS, restarts),
        ]


async def _stopped(respawners: Sequence[Respawner], timeout_s: float) -> list[str]:
    """Stop all, and kill those that take longer; returns why they failed to end cleanly, with the name of each."""
    stopping = [asyncio.create_task(respawner.stop()) for respawner in respawners]
    if not stopping:
        return []
    _, overdue = await asyncio.wait(stopping, timeout=timeout_s)
    if overdue:
        for respawner in respawners:
            respawner.kill()
    reasons = await asyncio.gather(*stopping)
    return [f"{one.name}: {why}" for one, why in zip(respawners, reasons, strict=True) if why]
