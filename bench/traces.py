"""A recording node vs. the same node without recording, in CPU time per check; and the replay of a million checks."""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.native import EVERYTHING, FEW
from bench.replay import replay
from bench.report import Row
from bench.servers import load_core, node
from ratelimitd.backtest.recorder import TraceRecorder
from ratelimitd.backtest.replay import Trace
from ratelimitd.backtest.report import backtest
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import SystemClock
from ratelimitd.counters import CheckStats
from ratelimitd.model import Algorithm, Check, Rule
from ratelimitd.rules.assignments import Assignments

ROUNDS, SECONDS = 9, 2
CHECKS = 1_000_000
IDENTITIES = 20_000
START_US = 1_700_006_400_000_000


def measure() -> list[Row]:
    """Measure medians of paired rounds, and one replay per algorithm."""
    rows = []
    with tempfile.TemporaryDirectory() as directory, load_core():
        recording = ("--record-dir", f"{directory}/a", *EVERYTHING)
        with node(*EVERYTHING) as plain, node(*recording) as recorded:
            for name in ("one-key", "identifiers", "batch"):
                pairs = [
                    [
                        replay(server, name, FEW, seconds=SECONDS).cpu_us
                        for server in (plain, recorded)
                    ]
                    for _ in range(ROUNDS)
                ]
                ratio = statistics.median(on / off for off, on in pairs)
                off_us = min(off for off, _ in pairs)
                what = f"recording 1 % of identities, {name}; aim at most 1.03"
                rows.append(Row(what, ratio * off_us, "us/check", "not recording", off_us))
        path = Path(directory, "b")
        asyncio.run(_record(path))
        rows += [_replay(path, one) for one in Algorithm if one is not Algorithm.CONCURRENCY]
    return rows


async def _record(path: Path) -> None:
    recorder = TraceRecorder(
        path,
        keys=BucketKeys(bytes(32)),
        assignments=Assignments(),
        clock=SystemClock(),
        stats=CheckStats(),
        share=1.0,
        max_bytes=1 << 30,
    )
    chosen = random.Random(5)
    check = Check(b"", "user", "/orders")
    for number in range(CHECKS):
        who = b"user-%d" % min(int(chosen.paretovariate(0.5)), IDENTITIES)
        recorder.record(who, check, START_US + number * 300, allowed=True)
        if not number % 10_000:
            await recorder.step()
    await recorder.drain()


def _replay(path: Path, algorithm: Algorithm) -> Row:
    rule = Rule("a", "*", "user", limit=100, window_seconds=60, algorithm=algorithm)
    started = time.process_time()
    backtest(Trace(path), [rule])
    taken_s = time.process_time() - started
    return Row(f"backtest of 1,000,000 checks, {algorithm.value}", taken_s, "s", "aim", 5.0)
