"""A node killed at any point loses no answered reset, and no spend from before its last visit.

Checks, resets, passes and the writes of both threads are interleaved at random. Every few steps the state directory is
copied as a kill would leave it, restored, and compared with the history of the buckets. Queues stand for the threads:
their jobs run in order, but at random times; and some writes fail.
"""

import asyncio
import errno
import os
import random
import shutil
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

import pytest

from ratelimitd.buckets import snapshot, snapshot_format, table
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import restore
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.snapshot_format import unpack
from ratelimitd.buckets.table import SHARD_ENTRIES, BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import INT32_MAX, Algorithm, Check, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

USER = IdentifierType.USER
SECRET = b"k" * 32
KEYS = BucketKeys(SECRET)
# No bucket expires, and every spend moves its latest time, so no bucket has the same state twice unless it is fresh.
RULES = [
    Rule(
        "1",
        "/fixed",
        USER,
        limit=INT32_MAX,
        window_seconds=INT32_MAX,
        algorithm=Algorithm.FIXED_WINDOW,
    ),
    Rule(
        "2",
        "/log",
        USER,
        limit=INT32_MAX,
        window_seconds=INT32_MAX,
        algorithm=Algorithm.SLIDING_WINDOW,
    ),
]
PLACES = {
    name + KEYS.scope(rule, rule.endpoint): (name, rule.endpoint)
    for name in (b"%d" % number for number in range(10))
    for rule in RULES
}
"""Bucket key → (identifier, endpoint)."""

REAL_PWRITE = os.pwrite


class Thread:
    """An executor of one thread, which runs a job when the test calls :meth:`run_one`."""

    def __init__(self):
        self.jobs = deque()

    def submit(self, job, *args):
        future: Future[Any] = Future()
        self.jobs.append((future, job, args))
        return future

    def run_one(self):
        if not self.jobs:
            return
        future, job, args = self.jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job(*args))
            except OSError as error:
                future.set_exception(error)

    def shutdown(self):
        assert not self.jobs


class World:
    """A state directory, its current node, and the history of its buckets.

    ``history`` of a bucket is its states and their times, in steps of ``now``; a kill must not restore a state from
    before ``floor``.
    """

    def __init__(self, directory, rng, monkeypatch):
        self.directory, self.rng, self.met = directory / "state", rng, Counter()
        self.copy = directory / "copy"
        self.directory.mkdir()
        self.clock, self.now, self.disk_is_full = ManualClock(), 0, False
        self.history = {key: [(0, None)] for key in PLACES}
        self.floor = dict.fromkeys(PLACES, 0)
        monkeypatch.setattr(asyncio, "to_thread", self.in_other_thread)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        # Power failures are not modelled, so no step waits for the disk.
        monkeypatch.setattr(os, "fsync", lambda _fd: None)
        monkeypatch.setattr(os, "fdatasync", lambda _fd: None)
        self.start()

    def start(self):
        """Start a node on the files of the previous one."""
        self.passing: asyncio.Task[None] | None = None
        self.table = BucketTable(3 * SHARD_ENTRIES)
        self.snapshot: Any = SnapshotLog.open(self.directory, self.table, SECRET, self.clock)
        self.snapshot._writer.shutdown()
        self.writer = self.snapshot._writer = Thread()
        self.others = Thread()
        self.limiter = Limiter(
            buckets=self.table,
            clock=self.clock,
            stats=CheckStats(),
            timestamps="server",
            keys=BucketKeys(SECRET),
            journal=self.snapshot,
        )
        self.limiter.replace_book(RuleBook.of(RULES, 1))
        self.tasks: set[asyncio.Task[None]] = set()
        # Resets wait for each other, so the next may remove its bucket before the previous one returns.
        self.removals: dict[bytes, deque[int]] = {key: deque() for key in PLACES}
        self.missed: set[bytes] = set()
        self.now += 1
        for key in PLACES:
            self.history[key], self.floor[key] = [(self.now, self.state(key))], self.now
        self.watch()

    def watch(self):
        """Observe the relevant events: a bucket is removed, a visit begins, a visit is complete."""
        look, remove = self.snapshot._visit, self.table.remove

        async def watched_visit(index):
            self.note()
            began = self.now
            # If a reset fails, the next visit writes the bucket that was removed for it.
            self.missed = {key for key, removals in self.removals.items() if removals}
            await look(index)
            for key in PLACES.keys() - self.missed:
                if hash(key) % self.table.shard_count == index:
                    self.floor[key] = max(self.floor[key], began)
            self.met["look"] += 1
            self.met["look while a base is written"] += self.a_base_is_written()

        def watched_remove(key):
            value = remove(key)
            self.note()
            self.removals[key].append(self.now)
            self.missed.add(key)
            self.met["bucket of before the restart is reset"] += self.table.value(key) is None
            return value

        self.snapshot._visit = watched_visit
        self.table.remove = watched_remove

    def state(self, key):
        value = self.table.value(key) or self.snapshot._restored.get(key)
        return None if value is None else unpack(value)

    def a_base_is_written(self):
        return self.passing is not None and any(self.directory.glob("*.tmp"))

    def note(self):
        self.now += 1
        for key, history in self.history.items():
            if self.state(key) != history[-1][1]:
                history.append((self.now, self.state(key)))

    def possible(self, key):
        """Return the states that a kill may restore: that of the floor and all later ones."""
        history, floor = self.history[key], self.floor[key]
        first = max(index for index, (since, _) in enumerate(history) if since <= floor)
        return [state for _, state in history[first:]]

    # Steps.

    def spend(self):
        self.clock.advance(us=1)
        key = self.rng.choice(list(PLACES))
        self.met["bucket of before the restart is used"] += self.table.value(key) is None and (
            self.state(key) is not None
        )
        name, endpoint = PLACES[key]
        assert self.limiter.check(Check(name, USER, endpoint)).allowed

    def reset(self):
        self.spawn(self._reset(self.rng.choice(list(PLACES))))

    async def _reset(self, key):
        name, endpoint = PLACES[key]
        removals = self.removals[key]
        try:
            await self.limiter.reset(name, USER, endpoint)
        except StoreUnavailableError:
            removals.popleft()
            self.met["reset is refused"] += 1
            return
        self.floor[key] = max(self.floor[key], removals.popleft())
        self.met["reset"] += 1
        self.met["reset while a pass is under way"] += self.passing is not None

    def begin_pass(self):
        if self.passing is None:
            self.passing = self.spawn(self.snapshot.write_pass())

    def wait(self):
        self.clock.advance(seconds=self.rng.choice([1, 30]))
        self.table.tick += 1

    def run_writer(self):
        self.writer.run_one()

    def run_other(self):
        self.others.run_one()

    def fill_or_free_the_disk(self):
        self.disk_is_full = not self.disk_is_full and self.rng.random() < 0.3

    def look_after_a_kill(self):
        """Restore a copy of the current directory, and compare."""
        shutil.copytree(self.directory, self.copy)
        restored = restore(self.copy, KEYS, snapshot_format.header(SECRET), self.clock.now_us())
        for key in PLACES:
            value = restored.buckets.get(key)
            found = None if value is None else unpack(value)
            assert found in self.possible(key), (found, self.history[key], self.floor[key])
        shutil.rmtree(self.copy)
        self.met["kill"] += 1
        self.met["kill while a base is written"] += self.a_base_is_written()

    async def kill(self):
        self.look_after_a_kill()
        await self.end()
        self.disk_is_full = False  # otherwise the node would, correctly, not start
        self.start()

    async def stop(self):
        """Stop cleanly, which keeps every bucket unchanged."""
        self.disk_is_full = False
        await self.finish(self.tasks - {self.passing})  # resets in progress are answered
        await self.end()
        await self.finish({self.spawn(self.snapshot.drain())})
        states = {key: self.state(key) for key in PLACES}
        self.start()
        assert {key: self.state(key) for key in PLACES} == states
        self.met["clean stop"] += 1

    async def finish(self, tasks):
        while not all(task.done() for task in tasks):
            self.writer.run_one()
            await self.settle()

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # Scheduling and the disk.

    def spawn(self, job):
        task = asyncio.ensure_future(job)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def in_other_thread(self, job, *args):
        return await asyncio.wrap_future(self.others.submit(job, *args))

    def pwrite(self, fd, data, offset):
        """Write all; or a part, as if killed in the middle; or a part and then nothing more."""
        if len(data) < 2 or self.rng.random() < 0.8:
            part = bytes(data)
        else:
            part = bytes(data[: self.rng.randrange(1, len(data))])
        if self.disk_is_full and self.rng.random() < 0.5:
            self.met["disk is full"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        written = REAL_PWRITE(fd, part, offset)
        if written < len(data) and not self.copy.exists():
            self.met["kill in the middle of a write"] += 1
            self.look_after_a_kill()
        return written

    async def settle(self):
        for _ in range(8):
            await asyncio.sleep(0)
        self.note()
        if self.passing is not None and self.passing.done():
            self.met["base"] += any(self.directory.glob("*.base"))
            self.passing = None

    async def live(self, steps):
        often = {
            self.spend: 40,
            self.run_writer: 30,
            self.run_other: 20,
            self.look_after_a_kill: 6,
            self.begin_pass: 5,
            self.wait: 5,
            self.reset: 4,
            self.fill_or_free_the_disk: 2,
            self.kill: 0.3,
            self.stop: 0.1,
        }
        for step in self.rng.choices(list(often), list(often.values()), k=steps):
            pending = step()
            if pending is not None:
                await pending
            await self.settle()
        await self.stop()


@pytest.fixture
def _small_steps(monkeypatch):
    """Reach every size bound early, and run the event loop between any two buckets."""
    monkeypatch.setattr(table, "RESTORED_SHARDS", 5)
    monkeypatch.setattr(snapshot, "STEP_BUCKETS", 2)
    monkeypatch.setattr(snapshot, "MIN_LOG_BYTES", 2_000)


async def run(directory, monkeypatch, seeds, steps, *, at_least):
    met: Counter[str] = Counter()
    for seed in seeds:
        (directory / str(seed)).mkdir()
        with monkeypatch.context() as patched:
            world = World(directory / str(seed), random.Random(seed), patched)
            await world.live(steps)
        met += world.met
    assert {case for case in CASES if met[case] < at_least} == set()


CASES = {
    "look",
    "look while a base is written",
    "reset",
    "reset is refused",
    "reset while a pass is under way",
    "bucket of before the restart is used",
    "bucket of before the restart is reset",
    "kill",
    "kill while a base is written",
    "kill in the middle of a write",
    "disk is full",
    "base",
    "clean stop",
}


@pytest.mark.usefixtures("_small_steps")
async def test_no_kill_undoes_a_reset_or_loses_a_visited_spend(tmp_path, monkeypatch):
    await run(tmp_path, monkeypatch, range(5), 1_000, at_least=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_small_steps")
async def test_no_kill_in_many_long_runs_undoes_a_reset_or_loses_a_visited_spend(
    tmp_path, monkeypatch
):
    await run(tmp_path, monkeypatch, range(100, 200), 4_000, at_least=10)
