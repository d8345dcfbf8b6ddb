"""Bytes of RSS per bucket, each algorithm in a separate process; vs. a plain dict of lists."""

import gc
import multiprocessing
import random
from collections.abc import Callable
from typing import Any

from bench.report import Row
from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.observe.metrics import resident_bytes

NOW_US = 1_700_006_400_000_000
BUCKETS = 1_000_000
LOGS = 100_000
LOG_ENTRIES = 45


def measure() -> list[Row]:
    """Measure a million buckets with 38-character identifiers: fresh, after random use, after all were replaced."""
    plain = _in_process(_plain_dict)["fresh"]
    rows = []
    for algorithm in (Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW):
        for when, size in _in_process(_table, algorithm, BUCKETS, 1).items():
            rows.append(Row(f"{algorithm.value}, {when}", size, "bytes", "a dict of lists", plain))
    size = _in_process(_table, Algorithm.SLIDING_WINDOW, LOGS, LOG_ENTRIES)["fresh"]
    rows.append(
        Row(
            f"sliding_window, {LOG_ENTRIES} entries",
            size,
            "bytes",
            "a dict of lists (1 entry)",
            plain,
        )
    )
    return rows


def _in_process(measure_in: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_in, args)


def _identifier(number: int) -> bytes:
    return b"user-%033d" % number


def _plain_dict() -> dict[str, float]:
    gc.freeze()
    before = resident_bytes()
    buckets = {_identifier(number): [float(number), float(number)] for number in range(BUCKETS)}
    return {"fresh": (resident_bytes() - before) / len(buckets)}


def _table(algorithm: Algorithm, buckets: int, checks_each: int) -> dict[str, float]:
    rule = Rule(
        "id",
        "/api/orders",
        IdentifierType.USER,
        limit=1_000,
        window_seconds=60,
        algorithm=algorithm,
    )
    scope, decide = BucketKeys(bytes(32)).scope(rule, rule.endpoint), DECIDE[algorithm]
    table = BucketTable(BUCKETS)
    gc.collect()
    gc.freeze()
    before = resident_bytes()

    def check(number: int, at_us: int) -> None:
        table.apply(_identifier(number) + scope, rule, decide, NOW_US + at_us, 1)

    def size() -> float:
        return (resident_bytes() - before) / len(table)

    for number in range(buckets):
        for entry in range(checks_each):
            check(number, number + entry * 1_000)
    sizes = {"fresh": size()}
    if checks_each == 1:
        for number in range(buckets):
            table.tick += not number % 50_000
            check(random.randrange(buckets), buckets + number)
        sizes["after a million random checks"] = size()
        for number in range(buckets):
            table.tick += not number % 50_000
            check(buckets + number, 2 * buckets + number)
        sizes["after every bucket was evicted once"] = size()
    return sizes
