"""How long 100,000 rules take to load, how long one edit takes to be in force, and how long the event loop waits."""

import asyncio
import gc
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ratelimitd.clock import SystemClock
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.migrations import upgrade
from ratelimitd.rules.sql import SqlRuleStore
from ratelimitd.rules.store import RuleChanges

RULES = 100_000
CHANGES = 20


class Turns:
    """Measures turns of the event loop: how long a task that is always ready has to wait for its next one."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.slow = 0

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure while the block runs, afresh."""
        self.longest_ms, self.slow = 0.0, 0
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
            self.slow += turn_ms > 2


def measure() -> dict[str, Any]:
    """Run it once; times in the units of the keys."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory)))


async def _measure(directory: Path) -> dict[str, Any]:
    url = f"sqlite:///{directory}/rules.db"
    await upgrade(url)
    _fill(directory / "rules.db")
    store = SqlRuleStore(url, clock=SystemClock())
    last_good = LastGoodBook(directory)
    feed = RuleFeed(store, on_book=lambda _book: None, last_good=last_good)
    turns = Turns()
    gc.freeze()
    gc.disable()  # a node does so until its first book is there; a full collection is no part of a load
    try:
        async with turns.measured():
            started = time.perf_counter()
            await feed.start()
            load_s = time.perf_counter() - started
        load_turn_ms, load_slow = turns.longest_ms, turns.slow
        gc.freeze()
        gc.enable()
        assert feed.book is not None
        assert len(feed.book) == RULES
        async with turns.measured():
            change_ms = [await _change(store, feed, number) for number in range(CHANGES)]
        change_turn_ms = turns.longest_ms
        async with turns.measured():
            started = time.perf_counter()
            await feed.close()
            save_s = time.perf_counter() - started
        save_turn_ms, save_slow = turns.longest_ms, turns.slow
        gc.disable()  # this one, too, happens only before the first book
        started = time.perf_counter()
        async with turns.measured():
            loaded = await last_good.load()
        assert loaded.book is not None
        read_s = time.perf_counter() - started
    finally:
        gc.enable()
        await store.close()
    return {
        "rules": RULES,
        "load_s": round(load_s, 2),
        "load_longest_turn_ms": round(load_turn_ms, 2),
        "load_turns_over_2ms": load_slow,
        "change_median_ms": round(sorted(change_ms)[CHANGES // 2], 1),
        "change_worst_ms": round(max(change_ms), 1),
        "change_longest_turn_ms": round(change_turn_ms, 2),
        "last_good_write_s": round(save_s, 2),
        "last_good_write_longest_turn_ms": round(save_turn_ms, 2),
        "last_good_write_turns_over_2ms": save_slow,
        "last_good_read_s": round(read_s, 2),
        "last_good_read_longest_turn_ms": round(turns.longest_ms, 2),
    }


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
        "INSERT INTO rules VALUES (?, ?, 'user', 100, 60, 'token_bucket', 1, 1, '2026-01-01', '2026-01-01')",
        ((str(uuid.UUID(int=n)), f"/v1/customers/{n}/orders") for n in range(RULES)),
    )
    connection.execute("UPDATE rule_revision SET revision = 1")
    connection.commit()
    connection.close()


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:32} {value}")
