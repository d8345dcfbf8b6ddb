"""A million assignments: memory and look-up vs. a dict, loading vs. the bare driver, one edit, event-loop delays."""

import asyncio
import sqlite3
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from bench.report import Row
from bench.rules import CHANGES, lived
from bench.turns import idle_control
from ratelimitd.observe.metrics import resident_bytes
from ratelimitd.rules.assignments import Assignment, Assignments
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.sql.store import SqlRuleStore

ASSIGNED = 1_000_000
LOOKED_UP = 1_000


def measure() -> list[Row]:
    """Run it once."""
    rows = _in_memory()
    with tempfile.TemporaryDirectory() as directory, idle_control() as control:
        more, turns = asyncio.run(_from_store(Path(directory)))
    idle = ("idle process, longest gap", control["longest_ms"])
    return [
        *rows,
        *more,
        *(Row(f"{what}: longest turn", longest, "ms", *idle) for what, longest in turns.items()),
    ]


def _identifier(number: int) -> bytes:
    """Return an identifier of 38 characters, as in the buckets of :mod:`bench.memory`."""
    return b"tenant-%031d" % number


def _in_memory() -> list[Row]:
    before = resident_bytes()
    assignments = Assignments()
    for number in range(ASSIGNED):
        assignments.put("user", _identifier(number), "pro", 0)
    each = (resident_bytes() - before) / ASSIGNED
    plain: dict[bytes, int] = {}
    before = resident_bytes()
    for number in range(ASSIGNED):
        plain[_identifier(number)] = 0
    plain_each = (resident_bytes() - before) / ASSIGNED
    known = [_identifier(number) for number in range(0, ASSIGNED, ASSIGNED // LOOKED_UP)]
    unknown = [identifier + b"x" for identifier in known]
    look_up = assignments.plan_of

    def find(identifiers: list[bytes]) -> None:
        for identifier in identifiers:
            look_up("user", identifier, 1)

    def find_plain(identifiers: list[bytes]) -> None:
        for identifier in identifiers:
            plain.get(identifier)

    plain_us = _each_us(find_plain, known)
    rows = [
        Row("memory of one, 38 characters", each, "bytes", "a dict of bytes", plain_each),
        Row(
            "look-up of one that is assigned",
            _each_us(find, known),
            "µs",
            "a dict",
            plain_us,
        ),
        Row(
            "look-up of one that is not",
            _each_us(find, unknown),
            "µs",
            "a dict",
            plain_us,
        ),
    ]
    assignments = Assignments()
    longest_us = 0.0
    for number in range(ASSIGNED):
        identifier = _identifier(number)
        started = time.perf_counter()
        assignments.put("user", identifier, "pro", 0)
        longest_us = max(longest_us, (time.perf_counter() - started) * 1e6)
    return [*rows, Row("longest of a million insertions", longest_us / 1_000, "ms")]


def _each_us(look_up: Callable[[list[bytes]], None], identifiers: list[bytes]) -> float:
    def all_of_them() -> None:
        look_up(identifiers)

    return min(timeit.repeat(all_of_them, number=5, repeat=50)) / 5 / len(identifiers) * 1e6


async def _from_store(directory: Path) -> tuple[list[Row], dict[str, float]]:
    life = await lived(directory, _fill, _change, kept="copy")
    assert len(life.feed.assignments) == len(life.without_store.assignments) == ASSIGNED + CHANGES
    bare_s = _bare_load_s(directory / "rules.db")
    edit = "one edit until it is in force"
    rows = [
        Row("load", life.load_s, "s", "SELECT in the bare driver", bare_s),
        Row(f"{edit}, median", sorted(life.change_ms)[CHANGES // 2], "ms"),
        Row(f"{edit}, worst of 20", max(life.change_ms), "ms"),
        Row("last good copy, written", life.save_s, "s"),
        Row("last good copy, read", life.read_s, "s"),
    ]
    return rows, life.longest_ms


async def _change(store: SqlRuleStore, feed: RuleFeed, number: int) -> float:
    identifier = _identifier(ASSIGNED + number)
    started = time.perf_counter()
    await store.assignments.assign_all([Assignment("user", identifier, "blocked")], "bench")
    await feed.notify()
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert feed.assignments.plan_of("user", identifier, 1) == ("blocked", 0)
    return elapsed_ms


def _fill(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executemany(
        "INSERT INTO assignments VALUES ('user', ?, 'pro', 0, '', 1)",
        ((_identifier(number),) for number in range(ASSIGNED)),
    )
    connection.execute("UPDATE rule_revision SET revision = 1, assignments = ?", (ASSIGNED,))
    connection.commit()
    connection.close()


def _bare_load_s(path: Path) -> float:
    connection = sqlite3.connect(path)
    started = time.perf_counter()
    for _ in connection.execute(
        "SELECT identifier_type, identifier, plan, expire_time FROM assignments"
    ):
        pass
    elapsed_s = time.perf_counter() - started
    connection.close()
    return elapsed_s
