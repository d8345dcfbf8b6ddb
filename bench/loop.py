"""The longest turn of the event loop while a million buckets are created, evicted, swept and written to disk."""

import asyncio
import contextlib
import gc
import multiprocessing
import tempfile
from pathlib import Path

from bench.report import Row
from bench.turns import Turns, idle_control
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SystemClock
from ratelimitd.limiter import Limiter
from ratelimitd.model import Algorithm, Check, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.stats import CheckStats

BUCKETS = 1_000_000
CHECKS_PER_TURN = 50
SECRET = bytes(32)


def measure() -> list[Row]:
    """In a process of its own, with the collector set as in a node."""
    with idle_control() as control, multiprocessing.get_context("spawn").Pool(1) as pool:
        figures = pool.apply(_measure)
    rows = []
    for phase, (longest_ms, slow, turns) in figures.items():
        rows.append(
            Row(
                f"{phase}: longest turn",
                longest_ms,
                "ms",
                "idle process, longest gap",
                control["longest_ms"],
            )
        )
        rows.append(
            Row(
                f"{phase}: turns over 2 ms of {turns:,}",
                slow,
                "turns",
                "idle process",
                control["slow"],
            )
        )
    return rows


def _measure() -> dict[str, tuple[float, int, int]]:
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_phases(Path(directory)))


async def _phases(directory: Path) -> dict[str, tuple[float, int, int]]:
    stats, clock = CheckStats(), SystemClock()
    table = BucketTable(BUCKETS, stats)
    limiter = Limiter(
        buckets=table, clock=clock, stats=stats, timestamps="bounded", key_secret=SECRET
    )
    limiter.replace_book(
        RuleBook.of(
            [Rule("id", "/api/orders", IdentifierType.USER, 1_000, 60, Algorithm.TOKEN_BUCKET)], 1
        )
    )
    snapshot = SnapshotLog.open(directory, table, SECRET, clock)
    gc.collect()
    gc.freeze()
    turns, figures = Turns(), {}

    async def phase(name: str, first: int) -> None:
        async with turns.measured():
            await _create(limiter, first)
        figures[name] = (turns.longest_ms, turns.slow, turns.count)

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            table.tick += 1
            table.sweep(clock.now_us(), 30)

    jobs = [asyncio.create_task(snapshot.run()), asyncio.create_task(tick())]
    await phase("creating 1 M buckets, snapshot running", 0)
    await phase("evicting 1 M buckets, snapshot running", BUCKETS)
    async with turns.measured():
        gc.collect()
        await asyncio.sleep(0)
    figures["a full garbage collection over 1 M buckets"] = (
        turns.longest_ms,
        turns.slow,
        turns.count,
    )
    for job in jobs:
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job
    async with turns.measured():
        await snapshot.write_pass()
    figures["one unpaced pass over 1 M buckets"] = (turns.longest_ms, turns.slow, turns.count)
    await snapshot.drain()
    return figures


async def _create(limiter: Limiter, first: int) -> None:
    for start in range(first, first + BUCKETS, CHECKS_PER_TURN):
        for number in range(start, start + CHECKS_PER_TURN):
            limiter.check(Check(b"user-%033d" % number, IdentifierType.USER, "/api/orders"))
        await asyncio.sleep(0)
