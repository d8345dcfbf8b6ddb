"""The load time of 100,000 rules, the time until one edit is in force, and the delays of the event loop."""

import asyncio
import gc
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from bench.report import Row
from bench.turns import Turns, idle_control, timed_s
from ratelimitd.clock import SystemClock
from ratelimitd.node import jobs
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.migrations import upgrade
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleChanges

T = TypeVar("T")

RULES = 100_000
CHANGES = 20
BARE = "UPDATE in the bare driver, mean"


def measure() -> list[Row]:
    """Measure once, beside the same work in the bare driver."""
    with tempfile.TemporaryDirectory() as directory, idle_control() as control:
        rows, turns = asyncio.run(_measure(Path(directory)))
    idle = ("idle process, longest gap", control["longest_ms"])
    return rows + [
        Row(f"{what}: longest turn", longest_ms, "ms", *idle) for what, longest_ms in turns.items()
    ]


class Life(NamedTuple):
    """Durations of a feed from start to end, those of a second one without the store, and the longest iterations."""

    feed: RuleFeed
    without_store: RuleFeed
    load_s: float
    collection_ms: float
    change_ms: list[float]
    save_s: float
    read_s: float
    longest_ms: dict[str, float]


async def lived(
    directory: Path,
    fill: Callable[[Path], None],
    change: Callable[[SqlRuleStore, RuleFeed, int], Awaitable[float]],
    *,
    kept: str,
) -> Life:
    """Measure a feed of a filled store that changes ``CHANGES`` times; ``kept`` names its content in the report."""
    url = f"sqlite:///{directory}/rules.db"
    await upgrade(url)
    fill(directory / "rules.db")
    turns, longest_ms = Turns(), dict[str, float]()

    async def phase(name: str, work: Awaitable[T]) -> T:
        async with turns.measured():
            result = await work
        longest_ms[name] = turns.longest_ms
        return result

    async def changed() -> list[float]:
        return [await change(store, feed, number) for number in range(CHANGES)]

    store = SqlRuleStore(open_database(url), clock=SystemClock())
    feed = _feed(store, directory)
    jobs.tidy()  # as a node's process does before its start
    load_s = await phase("load", timed_s(feed.start()))
    started = time.perf_counter()
    gc.collect()
    collection_ms = (time.perf_counter() - started) * 1000
    change_ms = await phase("edit", changed())
    save_s = await phase(f"writing the last good {kept}", timed_s(feed.close()))
    await store.close()
    away = SqlRuleStore(open_database(f"sqlite:///{directory}/absent.db"), clock=SystemClock())
    without_store = _feed(away, directory)
    reading = f"reading the last good {kept} (at start only)"
    read_s = await phase(reading, timed_s(without_store.start()))
    await away.close()
    return Life(feed, without_store, load_s, collection_ms, change_ms, save_s, read_s, longest_ms)


def _feed(store: SqlRuleStore, directory: Path) -> RuleFeed:
    """Return a feed as in a node."""
    last_good = LastGoodBook(directory)
    return RuleFeed(
        store, on_book=lambda _book: None, last_good=last_good, whole_load=jobs.whole_load
    )


async def _measure(directory: Path) -> tuple[list[Row], dict[str, float]]:
    life = await lived(directory, _fill, _change, kept="book")
    assert life.feed.book is not None
    assert life.without_store.book is not None
    assert len(life.feed.book) == len(life.without_store.book) == RULES
    bare_load_s, bare_change_ms = _bare_driver(directory / "rules.db")
    edit = "one edit until it is in force"
    rows = [
        Row("load", life.load_s, "s", "SELECT in the bare driver", bare_load_s),
        Row(f"{edit}, median", sorted(life.change_ms)[CHANGES // 2], "ms", BARE, bare_change_ms),
        Row(f"{edit}, worst of 20", max(life.change_ms), "ms", BARE, bare_change_ms),
        Row("last good book, written", life.save_s, "s"),
        Row("last good book, read", life.read_s, "s"),
        Row("a full collection once the book is in force", life.collection_ms, "ms"),
    ]
    return rows, life.longest_ms


async def _change(store: SqlRuleStore, feed: RuleFeed, number: int) -> float:
    assert feed.book is not None
    rule = next(feed.book.rules())
    started = time.perf_counter()
    changed = await store.update(rule.id, RuleChanges(limit=1_000 + number), rule.etag, "bench")
    await feed.notify()
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert feed.book.get(rule.id) == changed
    return elapsed_ms


def _fill(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executemany(
        "INSERT INTO rules VALUES"
        " (?, ?, 'user', 100, 60, 'token_bucket', 1, 1, '2026-01-01', '2026-01-01', NULL, NULL)",
        ((str(uuid.UUID(int=n)), f"/v1/customers/{n}/orders") for n in range(RULES)),
    )
    connection.execute("UPDATE rule_revision SET revision = 1")
    connection.commit()
    connection.close()


def _bare_driver(path: Path) -> tuple[float, float]:
    """Return the seconds to read all rows and the ms to commit one change, with sqlite3 alone."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous=FULL")
    started = time.perf_counter()
    assert len(connection.execute("SELECT * FROM rules").fetchall()) == RULES
    load_s = time.perf_counter() - started
    started = time.perf_counter()
    for number in range(CHANGES):
        connection.execute(
            'UPDATE rules SET "limit" = ? WHERE id = ?', (number + 1, str(uuid.UUID(int=number)))
        )
        connection.commit()
    change_ms = (time.perf_counter() - started) * 1000 / CHANGES
    connection.close()
    return load_s, change_ms
