"""How long 100,000 rules take to load, how long one edit takes to be in force, and how long the event loop waits."""

import asyncio
import gc
import sqlite3
import tempfile
import time
import uuid
from pathlib import Path

from bench.report import Row
from bench.turns import Turns, idle_control
from ratelimitd.clock import SystemClock
from ratelimitd.node import jobs
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.migrations import upgrade
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleChanges

RULES = 100_000
CHANGES = 20
BARE = "UPDATE in the bare driver, mean"


def measure() -> list[Row]:
    """Run it once, beside the same work in the bare driver."""
    with tempfile.TemporaryDirectory() as directory, idle_control() as control:
        rows, turns = asyncio.run(_measure(Path(directory)))
    idle = ("idle process, longest gap", control["longest_ms"])
    return rows + [
        Row(f"{what}: longest turn", longest_ms, "ms", *idle) for what, longest_ms in turns.items()
    ]


async def _measure(directory: Path) -> tuple[list[Row], dict[str, float]]:
    url = f"sqlite:///{directory}/rules.db"
    await upgrade(url)
    _fill(directory / "rules.db")
    store = SqlRuleStore(open_database(url), clock=SystemClock())
    feed = _feed(store, directory)
    turns = Turns()
    jobs.tidy()  # as the process of a node does before its start
    try:
        async with turns.measured():
            started = time.perf_counter()
            await feed.start()
            load_s = time.perf_counter() - started
        load_turn_ms = turns.longest_ms
        started = time.perf_counter()
        gc.collect()
        collection_ms = (time.perf_counter() - started) * 1000
        assert feed.book is not None
        assert len(feed.book) == RULES
        async with turns.measured():
            change_ms = [await _change(store, feed, number) for number in range(CHANGES)]
        change_turn_ms = turns.longest_ms
        async with turns.measured():
            started = time.perf_counter()
            await feed.close()
            save_s = time.perf_counter() - started
        save_turn_ms = turns.longest_ms
        away = SqlRuleStore(open_database(f"sqlite:///{directory}/absent.db"), clock=SystemClock())
        without_store = _feed(away, directory)
        async with turns.measured():
            started = time.perf_counter()
            await without_store.start()
            read_s = time.perf_counter() - started
        await away.close()
        assert without_store.book is not None
    finally:
        await store.close()
    bare_load_s, bare_change_ms = _bare_driver(directory / "rules.db")
    rows = [
        Row("load", load_s, "s", "SELECT in the bare driver", bare_load_s),
        Row(
            "one edit until it is in force, median",
            sorted(change_ms)[CHANGES // 2],
            "ms",
            BARE,
            bare_change_ms,
        ),
        Row(
            "one edit until it is in force, worst of 20", max(change_ms), "ms", BARE, bare_change_ms
        ),
        Row("last good book, written", save_s, "s"),
        Row("last good book, read", read_s, "s"),
        Row("a full collection once the book is in force", collection_ms, "ms"),
    ]
    return rows, {
        "load": load_turn_ms,
        "edit": change_turn_ms,
        "writing the last good book": save_turn_ms,
        "reading the last good book (at start only)": turns.longest_ms,
    }


def _feed(store: SqlRuleStore, directory: Path) -> RuleFeed:
    """The feed as a node has it."""
    last_good = LastGoodBook(directory)
    return RuleFeed(
        store, on_book=lambda _book: None, last_good=last_good, whole_load=jobs.whole_load
    )


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
        "INSERT INTO rules VALUES (?, ?, 'user', 100, 60, 'token_bucket', 1, 1, '2026-01-01', '2026-01-01', NULL)",
        ((str(uuid.UUID(int=n)), f"/v1/customers/{n}/orders") for n in range(RULES)),
    )
    connection.execute("UPDATE rule_revision SET revision = 1")
    connection.commit()
    connection.close()


def _bare_driver(path: Path) -> tuple[float, float]:
    """Seconds to read all rows, and ms to commit one change, with nothing but sqlite3."""
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
