"""The pure decision, and a whole check in the limiter, in ns; vs. one update of a dict."""

import itertools
import time
from collections.abc import Callable

from bench.report import Row
from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SystemClock
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Algorithm, Check, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook

ROUNDS = 5
CALLS = 100_000
NOW_US = 1_700_006_400_000_000


def measure() -> list[Row]:
    """Measure the best of five rounds each."""
    counts = {b"key": 0}

    def update() -> None:
        counts[b"key"] = counts.get(b"key", 0) + 1

    baseline_ns = _best_ns(update)
    rows = [
        Row(f"{what}, {algorithm.value}", _best_ns(call), "ns", "an update of a dict", baseline_ns)
        for algorithm in ACCOUNTS
        for what, call in (("decide", _decision(algorithm)), ("limiter.check", _check(algorithm)))
    ]
    return sorted(rows, key=lambda row: row.name)


def _decision(algorithm: Algorithm) -> Callable[[], None]:
    rule, decide, state = _rule(algorithm), DECIDE[algorithm], None
    for number in range(45):
        state = decide(state, rule, NOW_US + number * 1_000, 1)[5]
    now_us = itertools.count(NOW_US + 45_000)
    return lambda: decide(state, rule, next(now_us), 1) and None


def embedded(rule: Rule) -> Limiter:
    """Return the limiter of a node with local buckets and one rule."""
    limiter = Limiter(
        buckets=BucketTable(1_000_000),
        clock=SystemClock(),
        stats=CheckStats(),
        timestamps="bounded",
        keys=BucketKeys(bytes(32)),
    )
    limiter.replace_book(RuleBook.of([rule], 1))
    return limiter


def _check(algorithm: Algorithm) -> Callable[[], None]:
    limiter = embedded(_rule(algorithm))
    check = Check(b"user-1", IdentifierType.USER, "/api/orders")
    return lambda: limiter.check(check) and None


def _rule(algorithm: Algorithm) -> Rule:
    # With a limit of 45 a second, the log of a sliding window holds about 45 entries, as the specification estimates.
    return Rule(
        "id", "/api/orders", IdentifierType.USER, limit=45, window_seconds=1, algorithm=algorithm
    )


def _best_ns(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - started)
    return best / CALLS * 1e9
