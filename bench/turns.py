"""The duration of event-loop iterations, and the pauses of an idle machine for comparison."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from bench.report import percentile

SLOW_MS = 2.0


class Turns:
    """Durations of event-loop iterations, measured by a task that is always ready."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.slow = 0
        self.count = 0

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure during the block, starting at zero."""
        self.longest_ms, self.slow, self.count = 0.0, 0, 0
        task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            turn_ms, last = (now - last) * 1000, now
            self.longest_ms = max(self.longest_ms, turn_ms)
            self.slow += turn_ms > SLOW_MS
            self.count += 1


async def timed_s(work: Awaitable[None]) -> float:
    """Return the duration of the work."""
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


@contextmanager
def idle_control() -> Iterator[dict[str, float]]:
    """Run a process that only reads the clock: its gaps are caused by the machine.

    After the block, the dict holds ``longest_ms``, ``slow`` (gaps over 2 ms), and percentiles of the lateness of a 1 ms
    sleep: ``p50_ms``, ``p99_ms``, ``p99.9_ms``.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch_the_clock, args=(theirs,), daemon=True)
    process.start()
    ours.recv()
    result: dict[str, float] = {}
    try:
        yield result
    finally:
        ours.send("stop")
        result.update(ours.recv())
        process.join()


def _watch_the_clock(pipe: Any) -> None:
    pipe.send("ready")
    late_ms = []
    while not pipe.poll():
        started = time.perf_counter()
        time.sleep(0.001)
        late_ms.append((time.perf_counter() - started) * 1000 - 1)
    pipe.send(
        {
            "longest_ms": max(late_ms),
            "slow": sum(late > SLOW_MS for late in late_ms),
            "p50_ms": percentile(late_ms, 0.5),
            "p99_ms": percentile(late_ms, 0.99),
            "p99.9_ms": percentile(late_ms, 0.999),
        }
    )
