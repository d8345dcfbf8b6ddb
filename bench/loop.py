"""The longest event-loop iteration while a million buckets are created, evicted, swept, written and restored.

Also the duration of one pass over all buckets beside a busy loop: a killed node loses at most that much.
"""

import asyncio
import gc
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from bench.report import Row
from bench.turns import Turns, idle_control
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SystemClock
from ratelimitd.counters import CheckStats
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Algorithm, Check, IdentifierType, Rule
from ratelimitd.node.jobs import SAMPLE_S, TICK_S, Upkeep
from ratelimitd.node.supervisor import SWITCH_INTERVAL_S
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import Runtime
from ratelimitd.retry import Background
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook

BUCKETS = 1_000_000
CHECKS_PER_ITERATION = 50
FORGOTTEN_S = 15
"""The guarantee: a killed node loses at most this many seconds."""
SECRET = bytes(32)
RULE = Rule(
    "id",
    "/api/orders",
    IdentifierType.USER,
    limit=1_000,
    window_seconds=3_600,
    algorithm=Algorithm.TOKEN_BUCKET,
)

Figures = dict[str, tuple[float, int, int]]


def measure() -> list[Row]:
    """Measure in a separate process, with the collector tuned as in a node."""
    with idle_control() as control, multiprocessing.get_context("spawn").Pool(1) as pool:
        figures, load_s, pass_s = pool.apply(_measure)
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
    rows.append(Row("reading 1 M buckets at a start", load_s, "s"))
    for what, took_s in zip(("a base", "a look"), pass_s, strict=True):
        name = f"{what} at all buckets beside a loop that is never idle"
        rows.append(Row(name, took_s, "s", "what a kill may cost at most", FORGOTTEN_S))
    return rows


def _measure() -> tuple[Figures, float, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_two_lives(Path(directory)))


class _Node:
    """One run of a node, limited to buckets, with the background jobs of :mod:`ratelimitd.node.node`."""

    def __init__(self, directory: Path) -> None:
        stats, clock = CheckStats(), SystemClock()
        table = BucketTable(BUCKETS)
        started_s = time.perf_counter()
        self.snapshot = SnapshotLog.open(directory, table, SECRET, clock)
        self.load_s = time.perf_counter() - started_s
        self.restored = len(table)
        self.pass_s: list[float] = []
        self.limiter = Limiter(
            buckets=table, clock=clock, stats=stats, timestamps="bounded", keys=BucketKeys(SECRET)
        )
        self.limiter.replace_book(RuleBook.of([RULE], 1))
        upkeep = Upkeep(
            clock=clock,
            table=table,
            assignments=Assignments(),
            health=Health(node_id="bench", stats=stats, clock=clock, rules_revision=lambda: 1),
            runtime=Runtime(),
            loop_time_s=asyncio.get_running_loop().time,
        )
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the supervisor does
        gc.collect()
        gc.freeze()
        self.background = Background({})
        self.background.every(TICK_S, "upkeep", upkeep.tick)
        self.background.every(SAMPLE_S, "sampling", upkeep.sample)
        self.background.start("snapshot", self.snapshot.run)

    async def check(self, first: int, count: int) -> None:
        """Check ``count`` identifiers once each, yielding to the event loop now and then."""
        for start in range(first, first + count, CHECKS_PER_ITERATION):
            for number in range(start, start + CHECKS_PER_ITERATION):
                self.limiter.check(
                    Check(b"user-%033d" % number, RULE.identifier_type, RULE.endpoint)
                )
            await asyncio.sleep(0)

    async def check_until_a_pass_ends(self, first: int, count: int) -> None:
        """Check identifiers until the current pass and its base are complete."""
        age_s = 0.0
        while self.snapshot.age_s >= age_s:
            age_s = self.snapshot.age_s
            await self.check(first, count)
        self.pass_s.append(age_s)


async def _two_lives(directory: Path) -> tuple[Figures, float, list[float]]:
    turns, figures = Turns(), Figures()

    async def phase(name: str, work: Awaitable[None]) -> None:
        async with turns.measured():
            await work
        figures[name] = (turns.longest_ms, turns.slow, turns.count)

    async def collect() -> None:
        gc.collect()
        await asyncio.sleep(0)

    node = _Node(directory)
    await phase("creating 1 M buckets", node.check(0, BUCKETS))
    await phase("evicting 1 M buckets", node.check(BUCKETS, BUCKETS))
    await phase("a full garbage collection over 1 M buckets", collect())
    await node.background.stop()
    await phase("one unpaced pass over 1 M buckets", node.snapshot.write_pass())
    await node.snapshot.drain()
    del node

    node = _Node(directory)
    assert node.restored == BUCKETS
    # Checks of a quarter of them: the others are still pending while the base is written.
    for name in ("the first base after a restart with 1 M buckets", "the look after it"):
        await phase(name, node.check_until_a_pass_ends(BUCKETS, BUCKETS // 4))
    await node.background.stop()
    await node.snapshot.drain()
    return figures, node.load_s, node.pass_s
