import asyncio
import errno
import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets import snapshot, snapshot_format, table
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import log_path
from ratelimitd.buckets.snapshot import (
    BASE_RETRY_US,
    PASS_S,
    STEP_BUCKETS,
    STEP_BYTES,
    WAKES_PER_S,
    SnapshotLog,
)
from ratelimitd.buckets.snapshot_format import unpack
from ratelimitd.buckets.table import SHARD_ENTRIES, BucketTable
from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.model import US_PER_S, Algorithm, IdentifierType, Rule
from ratelimitd.testing import ManualClock

SECRET = b"k" * 32
KEYS, HEADER = BucketKeys(SECRET), snapshot_format.header(SECRET)
RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=1000, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
LOG_RULE = Rule(
    "2",
    "/e",
    IdentifierType.USER,
    limit=1000,
    window_seconds=60,
    algorithm=Algorithm.SLIDING_WINDOW,
)

REAL_PWRITE, REAL_SLEEP = os.pwrite, asyncio.sleep


class Node:
    """A table and its snapshot log, in one run of a node."""

    def __init__(self, directory, clock, *, max_entries=1000, **options):
        self.directory, self.clock = directory, clock
        self.table = BucketTable(max_entries)
        self.snapshot = SnapshotLog.open(directory, self.table, SECRET, clock, **options)

    def use(self, name, cost=1, rule=RULE):
        return self.table.apply(name, rule, DECIDE[rule.algorithm], self.clock.now_us(), cost)

    def spent(self, *names):
        return [
            1000 - self.table.peek(name, RULE, DECIDE[RULE.algorithm], self.clock.now_us(), 1001)[1]
            for name in names
        ]

    def next_second(self):
        self.clock.advance(seconds=1)
        self.table.tick += 1

    async def reset(self, *names):
        for name in names:
            self.table.remove(name)
        await self.snapshot.reset(names)

    def files(self):
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def node_of(tmp_path, clock):
    """Start a node on the common state directory; earlier nodes count as killed."""
    return lambda **options: Node(tmp_path, clock, **options)


def fail(number):
    def call(*_args, **_options):
        raise OSError(number, os.strerror(number))

    return call


class TestRestart:
    async def test_a_clean_stop_keeps_every_bucket(self, node_of, clock):
        node = node_of()
        node.use(b"ada", 5)
        node.use(b"log", 3, LOG_RULE)
        clock.advance(seconds=1)
        node.use(b"log", 4, LOG_RULE)
        await node.snapshot.drain()
        again = node_of()
        assert len(again.table) == 2
        assert again.spent(b"ada", b"bob") == [5, 0]
        log = unpack(again.snapshot._restored.get(b"log"))
        assert log == unpack(node.table.value(b"log"))
        _, remaining, *_ = again.use(b"log", 1, LOG_RULE)
        assert remaining == 992
        await again.snapshot.drain()

    async def test_a_kill_loses_at_most_the_spends_since_the_last_pass(self, node_of):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.write_pass()
        node.use(b"ada", 2)
        assert node_of().spent(b"ada") == [5]

    async def test_an_answered_reset_is_on_disk(self, node_of):
        node = node_of()
        node.use(b"ada", 5)
        node.use(b"bob", 6)
        await node.snapshot.write_pass()
        await node.reset(b"ada")
        assert node_of().spent(b"ada", b"bob") == [0, 6]

    async def test_a_reset_of_a_restored_bucket_survives_a_restart(self, node_of):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.drain()
        await node_of().reset(b"ada")
        assert node_of().spent(b"ada") == [0]

    async def test_spends_after_a_reset_are_kept(self, node_of):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.write_pass()
        await node.reset(b"ada")
        node.use(b"ada", 1)
        await node.snapshot.drain()
        assert node_of().spent(b"ada") == [1]

    async def test_with_callers_time_no_bucket_is_too_old(self, node_of, clock):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.drain()
        clock.advance(seconds=100_000)
        assert len(node_of(callers_time=True).table) == 1
        assert len(node_of().table) == 0

    async def test_many_buckets_and_long_logs_are_written_in_steps(self, node_of, monkeypatch):
        monkeypatch.setattr(snapshot, "STEP_BUCKETS", 7)
        monkeypatch.setattr(snapshot, "STEP_BYTES", 64)
        node = node_of(max_entries=5000)
        for number in range(100):
            node.use(b"%d" % number, number + 1)
            node.use(b"log %d" % number, number + 1, LOG_RULE)
        await node.snapshot.drain()
        again = node_of()
        assert len(again.table) == 200
        assert again.spent(*(b"%d" % number for number in range(100))) == list(range(1, 101))


class TestIterations:
    """The work of one event-loop iteration is bounded, for used and restored buckets."""

    @pytest.fixture
    def encoded(self, monkeypatch):
        """Return the number of buckets and the bytes of logs encoded per event-loop iteration."""
        turns: list[tuple[int, int]] = []
        original = snapshot_format.encode_values

        def encode_values(values):
            values = list(values)
            turns.append(
                (len(values), sum(len(value) for _, value in values if isinstance(value, bytes)))
            )
            return original(values)

        monkeypatch.setattr(snapshot_format, "encode_values", encode_values)
        return turns

    @staticmethod
    def use_logs(node, count, runs):
        """Give the node ``count`` logs of ``runs`` runs, a microsecond apart."""
        for _ in range(runs):
            node.clock.advance(us=1)
            for number in range(count):
                node.use(b"log %d" % number, 1, LOG_RULE)

    async def test_a_visit_of_many_long_logs_takes_many_iterations(self, node_of, encoded):
        node = node_of(max_entries=SHARD_ENTRIES)
        self.use_logs(node, 500, 150)
        await node.snapshot.write_pass()
        assert len(encoded) == pytest.approx(500 * 150 * 16 / STEP_BYTES, abs=1)
        assert max(log_bytes for _, log_bytes in encoded) < STEP_BYTES + 16 * 152

    async def test_many_long_logs_of_a_restored_shard_take_many_iterations(
        self, node_of, encoded, monkeypatch
    ):
        monkeypatch.setattr(table, "RESTORED_SHARDS", 1)
        node = node_of()
        self.use_logs(node, 500, 150)
        for number in range(400):
            node.use(b"state %d" % number)
        await node.snapshot.drain()
        node = node_of()
        encoded.clear()
        await node.snapshot.write_pass()
        assert sum(buckets for buckets, _ in encoded) == 900
        assert max(buckets for buckets, _ in encoded) <= STEP_BUCKETS
        assert max(log_bytes for _, log_bytes in encoded) < STEP_BYTES + 16 * 152
        assert len(node_of().table) == 900


class TestPasses:
    async def test_a_pass_writes_only_buckets_used_since_the_last_one(self, node_of):
        node = node_of()
        for name in (b"ada", b"bob"):
            node.use(name)
        await node.snapshot.write_pass()
        node.next_second()
        await node.snapshot.write_pass()  # a later use in the second of a visit counts
        node.next_second()
        before = node.snapshot.written_bytes_total
        await node.snapshot.write_pass()
        assert node.snapshot.written_bytes_total == before
        node.use(b"ada")
        await node.snapshot.write_pass()
        one_state = len(snapshot_format.encode_values([(b"k" * 16, 1)]))
        assert node.snapshot.written_bytes_total == before + one_state

    async def test_a_use_in_the_second_of_a_visit_is_written_by_the_next(self, node_of):
        node = node_of()
        node.use(b"ada")
        await node.snapshot.write_pass()
        node.use(b"ada")
        await node.snapshot.write_pass()
        assert node_of().spent(b"ada") == [2]

    async def test_a_bucket_reset_while_its_shard_is_written_is_left_out(
        self, node_of, monkeypatch
    ):
        monkeypatch.setattr(snapshot, "STEP_BUCKETS", 1)
        node, names, resets = node_of(max_entries=10), [b"ada", b"bob", b"eve"], []
        for name in names:
            node.use(name, 5)
        original = node.snapshot._append

        async def append(data, **options):
            await original(data, **options)
            if not resets:  # between the first step and the second
                resets.append(asyncio.ensure_future(node.reset(*names)))
                await REAL_SLEEP(0)

        monkeypatch.setattr(node.snapshot, "_append", append)
        await node.snapshot.write_pass()
        await asyncio.gather(*resets)
        again = node_of()
        assert len(again.table) == 0
        assert again.spent(*names) == [0, 0, 0]

    async def test_age_is_the_time_since_the_last_complete_pass(self, node_of, clock):
        node = node_of()
        assert node.snapshot.age_s == 0
        clock.advance(seconds=8)
        assert node.snapshot.age_s == 8
        await node.snapshot.write_pass()
        assert node.snapshot.age_s == 0

    async def test_a_failed_write_is_counted_and_repeated_by_the_next_pass(
        self, node_of, monkeypatch, clock, reports
    ):
        node = node_of()
        node.use(b"ada", 5)
        monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
        clock.advance(seconds=8)
        await node.snapshot.write_pass()
        assert (node.snapshot.errors_total, node.snapshot.age_s) == (1, 8)
        monkeypatch.setattr(os, "pwrite", REAL_PWRITE)
        node.next_second()
        node.use(b"bob", 6)
        await node.snapshot.write_pass()
        assert node.snapshot.errors_total == 1
        again = node_of()
        assert again.spent(b"ada", b"bob") == [5, 6]
        assert [line.partition(":")[0] for line in reports] == [
            "buckets cannot be written",
            "buckets can be written again",
        ]

    async def test_only_the_first_failure_and_the_recovery_are_reported(
        self, node_of, monkeypatch, reports
    ):
        node, failure = node_of(), "buckets cannot be written: No space left on device"
        node.use(b"ada")
        monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
        for _ in range(3):
            await node.snapshot.write_pass()
        assert (node.snapshot.errors_total, reports) == (3, [failure])
        monkeypatch.setattr(os, "pwrite", REAL_PWRITE)
        for _ in range(3):
            await node.snapshot.write_pass()
        assert reports == [failure, "buckets can be written again"]

    async def test_a_reset_that_cannot_be_written_is_refused(self, node_of, monkeypatch):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.write_pass()
        monkeypatch.setattr(os, "fdatasync", fail(errno.EIO))
        with pytest.raises(StoreUnavailableError, match="state directory cannot be written"):
            await node.snapshot.reset([b"ada"])
        assert node_of().spent(b"ada") == [5]


class TestBase:
    async def two_lives(self, node_of):
        node = node_of()
        node.use(b"ada", 5)
        node.use(b"bob", 6)
        await node.snapshot.drain()
        return node_of()

    async def test_a_first_start_writes_no_base(self, node_of):
        node = node_of()
        await node.snapshot.write_pass()
        assert node.files() == ["buckets-00000001.log"]

    async def test_after_a_restart_the_older_files_become_one_base(self, node_of):
        node = await self.two_lives(node_of)
        node.use(b"eve", 7)
        await node.snapshot.write_pass()
        assert node.files() == ["buckets-00000003.base", "buckets-00000003.log"]
        assert node_of().spent(b"ada", b"bob", b"eve") == [5, 6, 7]

    async def test_the_next_pass_only_appends(self, node_of):
        node = await self.two_lives(node_of)
        await node.snapshot.write_pass()
        node.use(b"ada", 1)
        await node.snapshot.write_pass()
        assert node.files() == ["buckets-00000003.base", "buckets-00000003.log"]
        assert node_of().spent(b"ada", b"bob") == [6, 6]

    async def test_a_log_that_has_outgrown_its_base_is_replaced(self, node_of, monkeypatch):
        monkeypatch.setattr(snapshot, "MIN_LOG_BYTES", 200)
        node = node_of()
        for count in range(1, 30):
            node.use(b"ada", 1)
            await node.snapshot.write_pass()
            logs = [path for path in node.directory.iterdir() if path.suffix == ".log"]
            assert len(logs) == 1
            assert logs[0].stat().st_size <= 400
            assert Node(node.directory, node.clock).spent(b"ada") == [count]
            # Reading does not change these files, but begins a log: remove it.
            max(node.directory.glob("*.log")).unlink()

    async def test_a_log_may_grow_to_three_times_its_base(self, node_of, monkeypatch):
        monkeypatch.setattr(snapshot, "MIN_LOG_BYTES", 0)
        node, outgrown = node_of(), []
        node.use(b"0")
        await node.snapshot.write_pass()
        for number in range(60):
            node.next_second()
            node.use(b"%d" % (number % 20))
            (base,), (log,) = node.directory.glob("*.base"), node.directory.glob("*.log")
            outgrown.append(log.stat().st_size > 3 * base.stat().st_size)
            await node.snapshot.write_pass()
            assert base.exists() == (not outgrown[-1])
        assert 3 <= sum(outgrown) <= 20

    async def test_a_torn_file_is_set_aside_once_the_base_exists(self, node_of, reports):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.write_pass()
        with log_path(node.directory, 1).open("ab") as file:
            file.write(b"half a chunk")
        again = node_of()
        assert reports == ["buckets-00000001.log is torn: its last 12 bytes were ignored"]
        await again.snapshot.write_pass()
        assert again.files() == [
            "buckets-00000001.log.torn",
            "buckets-00000003.base",
            "buckets-00000003.log",
        ]
        assert node_of().spent(b"ada") == [5]

    async def test_a_node_that_is_killed_repeatedly_leaves_few_torn_files(self, node_of):
        for _ in range(8):
            node = node_of()
            node.use(b"ada")
            await node.snapshot.write_pass()
            with max(node.directory.glob("*.log")).open("ab") as file:
                file.write(b"half a chunk")
        assert len(list(node.directory.glob("*.torn"))) == 4
        assert len(node.files()) == 6
        assert node_of().spent(b"ada") == [8]

    async def test_a_restored_bucket_used_while_the_base_is_written_is_not_lost(self, node_of):
        """It has left its old place before that is copied, and its new place has been copied already."""
        node = await self.two_lives(node_of)

        async def pace(step, steps):
            if step == node.table.shard_count:
                node.use(b"ada", 1)

        await node.snapshot.write_pass(pace=pace)
        assert node_of().spent(b"ada", b"bob") == [6, 6]

    async def test_a_reset_while_the_base_is_written_is_kept(self, node_of):
        for reset_at in range(0, 2 * 1 + table.RESTORED_SHARDS, 97):
            node = await self.two_lives(node_of)

            async def pace(step, steps, node=node, reset_at=reset_at):
                if step == reset_at:
                    await node.reset(b"ada")

            await node.snapshot.write_pass(pace=pace)
            assert node_of().spent(b"ada", b"bob") == [0, 6]
            for path in node.directory.iterdir():
                path.unlink()

    async def test_a_base_leaves_no_file_open(self, node_of, monkeypatch, open_files):
        monkeypatch.setattr(snapshot, "MIN_LOG_BYTES", 0)
        monkeypatch.setattr(snapshot, "LOG_PER_BASE", 0)
        node = node_of()
        node.use(b"ada")
        await node.snapshot.write_pass()
        before = open_files()
        for _ in range(5):
            await node.snapshot.write_pass()
        assert open_files() == before
        assert node.files() == ["buckets-00000007.base", "buckets-00000007.log"]

    async def test_a_base_that_does_not_fit_is_retried_a_minute_later(
        self, node_of, monkeypatch, reports, open_files
    ):
        node = await self.two_lives(node_of)
        node.use(b"eve", 7)
        before = open_files()

        def pwrite(fd, data, offset):
            if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".tmp" and offset:
                raise OSError(errno.ENOSPC, "No space left on device")
            return REAL_PWRITE(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        await node.snapshot.write_pass()
        logs = [f"buckets-0000000{number}.log" for number in (1, 2, 3)]
        assert (node.snapshot.errors_total, node.files()) == (1, logs)
        assert open_files() == before

        node.use(b"eve", 1)
        await node.snapshot.write_pass()  # meanwhile passes go on
        assert (node.snapshot.errors_total, node.files()) == (1, logs)
        copy = shutil.copytree(node.directory, node.directory.with_name("copy"))
        assert Node(copy, node.clock).spent(b"ada", b"bob", b"eve") == [5, 6, 8]

        monkeypatch.setattr(os, "pwrite", REAL_PWRITE)
        node.clock.advance(us=BASE_RETRY_US - 1)
        await node.snapshot.write_pass()
        assert node.files() == logs
        assert reports == ["buckets cannot be written: No space left on device"]
        node.clock.advance(us=1)
        await node.snapshot.write_pass()
        assert node.files() == ["buckets-00000004.base", "buckets-00000004.log"]
        assert reports[1:] == ["buckets can be written again"]

    async def test_if_the_next_log_cannot_be_created_the_current_one_stays_in_use(
        self, node_of, monkeypatch, open_files
    ):
        node = await self.two_lives(node_of)
        real_open, before = os.open, open_files()

        def refuse(path, *args, **options):
            if str(path).endswith("3.log"):
                raise OSError(errno.EMFILE, "Too many open files")
            return real_open(path, *args, **options)

        monkeypatch.setattr(os, "open", refuse)
        await node.snapshot.write_pass()
        assert node.snapshot.errors_total == 1
        assert open_files() == before
        assert node.files() == ["buckets-00000001.log", "buckets-00000002.log"]
        node.use(b"eve", 7)
        await node.snapshot.write_pass()  # meanwhile passes go on
        assert node.snapshot.errors_total == 1
        await node.reset(b"ada")
        monkeypatch.undo()
        assert node_of().spent(b"ada", b"bob", b"eve") == [0, 6, 7]


class TestWriter:
    async def test_one_thread_writes_so_appends_stay_in_order(self, node_of, monkeypatch):
        node, threads, released = node_of(), [], threading.Event()
        append = snapshot.Appender.append

        def appended(log, data, *, durable=False):
            threads.append(threading.current_thread().name)
            released.wait(10)
            return append(log, data, durable=durable)

        monkeypatch.setattr(snapshot.Appender, "append", appended)
        resets = [asyncio.ensure_future(node.reset(name)) for name in (b"a", b"b")]
        for _ in range(10):
            await asyncio.sleep(0)  # both are requested before the first is done
        released.set()
        await asyncio.gather(*resets)
        assert len(threads) == 2
        assert len(set(threads)) == 1


class TestDrain:
    async def test_everything_is_on_disk_and_the_file_closed(
        self, node_of, monkeypatch, open_files
    ):
        node = node_of(max_entries=3 * SHARD_ENTRIES)
        before = open_files()
        for number in range(100):
            node.use(b"%d" % number)
        synced, real = [], os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
        await node.snapshot.drain()
        assert len(synced) == 1
        assert open_files() == before - 1
        assert len(node_of().table) == 100

    async def test_removed_files_are_written_again_by_the_next_pass(self, node_of):
        node = node_of()
        await node.snapshot.write_pass()
        for name in ("ada", "bob"):
            node.use(name.encode(), 5)
        await node.snapshot.write_pass()
        for name in node.files():
            (node.directory / name).unlink()
        with pytest.raises(StoreUnavailableError):
            await node.reset(b"bob")
        await node.snapshot.write_pass()
        await node.reset(b"bob")
        assert node.snapshot.errors_total == 0  # of passes
        assert node_of().spent(b"ada", b"bob") == [5, 0]

    async def test_a_removed_directory_is_reported_until_it_exists_again(
        self, tmp_path, clock, reports
    ):
        directory = tmp_path / "state"
        directory.mkdir()
        node = Node(directory, clock)
        node.use(b"ada", 5)
        await node.snapshot.write_pass()
        shutil.rmtree(directory)
        for errors in (1, 2):
            node.next_second()
            node.use(b"ada")
            await node.snapshot.write_pass()
            assert node.snapshot.errors_total == errors
        assert reports == ["buckets cannot be written: No such file or directory"]
        directory.mkdir()
        clock.advance(seconds=BASE_RETRY_US // US_PER_S)
        node.use(b"ada", 7)
        await node.snapshot.write_pass()
        assert reports[1:] == ["buckets can be written again"]
        await node.snapshot.drain()
        assert Node(directory, clock).spent(b"ada") == [7]

    async def test_a_full_disk_does_not_prevent_a_stop(self, node_of, monkeypatch, reports):
        node = node_of()
        node.use(b"ada", 5)
        monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
        monkeypatch.setattr(os, "fdatasync", fail(errno.EIO))
        await node.snapshot.drain()
        assert node.snapshot.errors_total == 2
        assert reports == ["buckets cannot be written: No space left on device"]

    async def test_a_cancelled_pass_is_made_up_by_drain(self, node_of):
        node = node_of(max_entries=3 * SHARD_ENTRIES)
        for number in range(100):
            node.use(b"%d" % number)

        async def stop(step, steps):
            if step == 1:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await node.snapshot.write_pass(pace=stop)
        await node.snapshot.drain()
        assert len(node_of().table) == 100


class TestRhythm:
    @pytest.fixture
    def slept(self, monkeypatch, clock):
        """Return all sleeps, in seconds; each advances the clock, and the tenth pass is the last."""
        slept: list[float] = []

        async def sleep(seconds):
            slept.append(seconds)
            clock.advance(seconds=seconds)
            if clock.monotonic_us() > 10 * PASS_S * 1_000_000:
                raise asyncio.CancelledError
            await REAL_SLEEP(0)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        return slept

    @pytest.mark.parametrize("max_entries", [1, 3_000, 1_000_000])
    @pytest.mark.usefixtures("slept")
    async def test_every_shard_is_visited_every_eight_seconds_even_with_a_base(
        self, node_of, monkeypatch, max_entries
    ):
        node = node_of()
        node.use(b"ada")
        await node.snapshot.drain()
        node = node_of(max_entries=max_entries)
        looks: dict[int, list[float]] = {}
        original = node.snapshot._visit

        async def look(index):
            looks.setdefault(index, [0]).append(node.clock.monotonic_us() / 1_000_000)
            await original(index)

        monkeypatch.setattr(node.snapshot, "_visit", look)
        with pytest.raises(asyncio.CancelledError):
            await node.snapshot.run()
        assert node.files() == ["buckets-00000003.base", "buckets-00000003.log"]
        assert len(looks) == node.table.shard_count
        gaps = [
            later - earlier
            for times in looks.values()
            for earlier, later in itertools.pairwise(times)
        ]
        assert max(gaps) <= PASS_S + 0.1

    async def test_a_pass_wakes_no_more_often_than_documented(self, node_of, slept):
        node = node_of(max_entries=1_000_000)
        with pytest.raises(asyncio.CancelledError):
            await node.snapshot.run()
        assert sum(seconds > 0 for seconds in slept) <= 10 * (PASS_S * WAKES_PER_S + 2)

    async def test_a_base_yields_to_the_event_loop_between_steps(self, node_of, clock, slept):
        node = node_of()
        node.use(b"ada")
        await node.snapshot.drain()
        node = node_of(max_entries=1_000_000)
        with pytest.raises(asyncio.CancelledError):
            await node.snapshot.run()
        steps_of_the_base = 2 * node.table.shard_count + table.RESTORED_SHARDS
        assert len(slept) >= steps_of_the_base + 8 * node.table.shard_count

    async def test_a_late_pass_is_followed_by_the_next_at_once(
        self, node_of, clock, slept, monkeypatch
    ):
        node = node_of()

        async def slow(*, pace):
            clock.advance(seconds=PASS_S + 5)

        monkeypatch.setattr(node.snapshot, "write_pass", slow)
        with pytest.raises(asyncio.CancelledError):
            await node.snapshot.run()
        assert set(slept) == {0}


class TestOpening:
    def test_an_unusable_directory_is_a_startup_error(self, tmp_path, clock):
        path = tmp_path / "file"
        path.write_text("")
        with pytest.raises(StartupError, match="cannot be written: Not a directory"):
            Node(path, clock)

    async def test_under_another_secret_buckets_start_afresh_and_files_are_kept(
        self, node_of, tmp_path, clock, reports
    ):
        node = node_of()
        node.use(b"ada", 5)
        await node.snapshot.drain()
        another = BucketTable(10)
        opened = SnapshotLog.open(tmp_path, another, b"another secret", clock)
        assert (len(another), len(reports)) == (0, 1)
        await opened.write_pass()
        assert "buckets-00000001.log.foreign" in node.files()

    async def test_restored_buckets_are_limited_to_the_bound_of_the_table(self, node_of):
        node = node_of()
        for number in range(100):
            node.use(b"%d" % number)
        await node.snapshot.drain()
        again = node_of(max_entries=10)
        assert len(again.table) == 10
