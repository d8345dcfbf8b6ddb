import asyncio
import errno
import fcntl
import shutil
import threading
from unittest.mock import Mock
from zlib import crc32

import pytest

from ratelimitd.backtest import recorder as module
from ratelimitd.backtest.recorder import (
    BLOCK_CHECKS,
    CHECKS_PER_ITERATION,
    FILE_S,
    MAX_KINDS,
)
from ratelimitd.backtest.replay import Trace
from ratelimitd.backtest.trace import Kind, TraceReader
from ratelimitd.buckets.appender import Appender
from ratelimitd.errors import StartupError
from ratelimitd.model import Algorithm, Check, Rule
from ratelimitd.services.bulk_checks import BulkChecks
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.backtest.conftest import CHECK

ORDERS = Rule("a", "/orders", "user", limit=2, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)


async def test_checks_are_recorded_with_their_time_cost_and_verdict(record):
    at = record(ORDERS)
    now_us = at.clock.now_us()
    at.ask()
    at.clock.advance(seconds=1)
    at.limiter.check(CHECK._replace(cost=2))
    at.limiter.check(CHECK._replace(peek=True, max_wait_ms=5, timestamp=1_700_000_000))
    at.limiter.check(CHECK._replace(endpoint="/unruled"))
    trace = await at.trace()
    assert trace.kinds == [
        Kind(("user",), "/orders"),
        Kind(("user",), "/orders", peek=True, max_wait_ms=5),
        Kind(("user",), "/unruled"),
    ]
    [identity] = {check[1] for check in trace}
    assert [*trace] == [
        (now_us, identity, 1, 0, 1, ()),
        (now_us + 1_000_000, identity, 2, 0, 0, ()),
        (1_700_000_000_000_000, identity, 1, 1, 1, ()),
        (now_us + 1_000_000, identity, 1, 2, 1, ()),
    ]
    assert at.stats.recorded == {"written": 4, "lost": 0}


async def test_further_identities_and_plans_are_recorded(record):
    at = record(ORDERS)
    at.assignments.put("tenant", b"acme", "gold", 0)
    at.limiter.check(CHECK._replace(also=(("tenant", b"acme"), ("ip", b"10.0.0.1"))))
    at.limiter.check(CHECK._replace(also=(("ip", b"10.0.0.1"),)))
    at.limiter.check(Check(b"acme", "tenant", "/orders"))
    trace = await at.trace()
    assert trace.kinds == [
        Kind(("user", "tenant", "ip"), "/orders", plans=("", "gold", "")),
        Kind(("user", "ip"), "/orders"),
        Kind(("tenant",), "/orders", plans=("gold",)),
    ]
    first, second, third = trace
    assert first[1] == second[1]
    assert first[5] == (third[1], second[5][0])


async def test_no_identifier_is_in_a_trace(record):
    at = record(ORDERS)
    identifiers = [b"alice@example.org", b"10.1.2.3", b"sk-live-1234567890", b"acme-inc"]
    for identifier in identifiers:
        also = (("tenant", b"acme-inc"),)
        at.limiter.check(Check(identifier, "user", "/orders", also=also))
        at.limiter.check(Check(identifier, "api_key", "/orders"))
    await at.recorder.drain()
    content = b"".join(path.read_bytes() for path in at.directory.iterdir())
    names = " ".join(path.name for path in at.directory.iterdir()).encode()
    for identifier in identifiers:
        assert identifier not in content
        assert identifier.hex().encode() not in content + names


async def test_digests_depend_on_the_trace_and_the_secret(tmp_path, record):
    found = []
    for directory, secret in (("a", b"k" * 32), ("b", b"k" * 32), ("b", b"l" * 32)):
        at = type(record())(tmp_path / directory, ORDERS, secret=secret)
        at.ask()
        found.append({check[1] for check in await at.trace()})
    assert len(found[0] | found[1] | found[2]) == 3
    assert len(found[2]) == 2


async def test_every_check_of_a_share_of_the_identities_is_recorded(record):
    at = record(ORDERS, share=0.25)
    users = [b"user-%d" % number for number in range(400)]
    for user in users * 2:
        at.limiter.check(Check(user, "user", "/orders"))
    trace = await at.trace()
    assert 60 < trace.identities < 140
    assert trace.checks == 2 * trace.identities
    assert trace.share == 0.25


async def test_bulk_checks_are_recorded_once_each(record):
    at = record(ORDERS)
    at.assignments.put("user", b"free", "unlimited", 0)
    bulk = BulkChecks(at.limiter, at.stats, lambda: 0.0)
    asked = [("a", "/orders"), ("a", "/orders"), ("a", "/orders"), ("free", "/orders"), ("a", "/x")]
    answers = bulk.answer_calls(
        [
            pb.RateLimitRequest(
                identifier=who, identifier_type="user", endpoint=endpoint, tokens_requested=1
            ).SerializeToString()
            for who, endpoint in asked
        ]
    )
    allowed = [one and pb.RateLimitResponse.FromString(one).allowed for one in answers]
    assert allowed == [True, True, False, True, True]
    trace = await at.trace()
    assert [check[4] for check in trace] == [1, 1, 0, 1, 1]
    assert [trace.kinds[check[3]].plans for check in trace] == [(), (), (), ("unlimited",), ()]


async def test_bulk_checks_without_an_answer_are_not_recorded(record):
    at = record(ORDERS)
    bulk = BulkChecks(at.limiter, at.stats, lambda: 0.0)
    message = pb.RateLimitRequest(
        identifier="a", identifier_type="user", endpoint="/orders"
    ).SerializeToString()
    questions = bulk.read([message])
    at.limiter.charge = lambda *_: None
    assert BulkChecks.answer(bulk, questions) == [None]
    at.recorder.record = pytest.fail
    await at.recorder.drain()
    assert at.files == []


async def test_a_recorder_with_share_0_is_not_called(record):
    at = record(ORDERS, share=0.0)
    at.recorder.record = pytest.fail
    at.ask()
    await at.recorder.drain()
    assert at.files == []


async def test_without_rules_nothing_is_recorded(record):
    at = record()
    assert at.limiter.check(CHECK).allowed
    await at.recorder.drain()
    assert at.files == []


async def test_a_block_has_a_bounded_number_of_endpoints(record):
    at = record(ORDERS)
    for number in range(3 * MAX_KINDS):
        at.limiter.check(Check(b"a", "user", f"/{number}"))
    await at.recorder.drain()
    [path] = at.directory.glob("*.trace")
    with path.open("rb") as file:
        blocks = [*TraceReader(file, path.name).blocks()]
    assert [len(block.kinds) for block in blocks] == [MAX_KINDS] * 3


async def test_a_file_is_complete_when_its_period_ends(record):
    at = record(ORDERS)
    for number in range(BLOCK_CHECKS):
        at.limiter.check(Check(b"%d" % number, "user", "/orders"))
    await at.recorder.step()
    assert [name[-5:] for name in at.files] == [".part"]
    at.clock.advance(seconds=FILE_S - 1)
    at.ask()
    await at.recorder.step()
    assert [name[-5:] for name in at.files] == [".part"]
    at.clock.advance(seconds=1)
    await at.recorder.step()
    assert [name[-6:] for name in at.files] == [".trace"]
    assert Trace(at.directory).checks == BLOCK_CHECKS + 1


async def test_a_partial_block_is_written_when_its_period_ends(record):
    at = record(ORDERS)
    at.ask()
    await at.recorder.step()
    at.clock.advance(seconds=FILE_S)
    at.ask()
    await at.recorder.step()
    assert [name[-6:] for name in at.files] == [".trace"]


async def test_holds_are_counted(record):
    at = record(ORDERS)
    at.ask(BLOCK_CHECKS)
    await at.recorder.step()
    at.stats.holds["made"] += 3
    assert (await at.trace()).holds == 3


async def test_the_oldest_files_are_removed_when_the_directory_is_full(record, monkeypatch):
    monkeypatch.setattr(module, "FILES", 4)
    at = record(ORDERS, max_bytes=4 * 100_000)
    (at.directory / "notes.txt").write_text("kept")
    foreign = at.directory / f"{0:016d}-{0:016x}.part"
    foreign.write_bytes(bytes(50_000))
    fresh = at.directory / f"{at.clock.now_us():016d}-{0:016x}.part"
    fresh.write_bytes(b"")
    after_power_failure = at.directory / f"{1:016d}-{0:016x}.part"
    after_power_failure.write_bytes(b"")
    year_us = 365 * 86_400 * 1_000_000
    ahead = [
        at.directory / f"{at.clock.now_us() + year_us:016d}-{0:016x}{end}"
        for end in (".trace", ".part")
    ]
    for path in ahead:
        path.write_bytes(bytes(50_000))
    for number in range(8):
        at.clock.advance(seconds=1)
        for who in range(BLOCK_CHECKS):
            at.limiter.check(Check(b"%d" % who, "user", f"/{number}"))
        await at.recorder.step()
        await at.recorder.step()
    await at.recorder.drain()
    sizes = [path.stat().st_size for path in at.directory.glob("*.trace")]
    assert sum(sizes) <= 400_000
    assert [kind.endpoint for kind in Trace(at.directory).kinds] == ["/5", "/6", "/7"]
    assert not any(path.exists() for path in (foreign, after_power_failure, *ahead))
    assert fresh.exists()
    assert (at.directory / "notes.txt").exists()


async def test_unfinished_files_of_killed_processes_are_removed_before_whole_ones(
    record, monkeypatch
):
    monkeypatch.setattr(module, "FILES", 4)
    max_bytes = 4 * 200_000
    at = record(ORDERS, max_bytes=max_bytes)
    for number in range(3):
        at.clock.advance(seconds=1)
        at.limiter.check(CHECK._replace(endpoint=f"/{number}"))
        await fill(at)
        await fill(at)
    await at.recorder.drain()
    whole = at.files
    for second in range(6):
        killed = record(ORDERS, max_bytes=max_bytes)
        killed.clock.advance(seconds=10 + second)
        await fill(killed)
        killed.kill()
    assert [name for name in at.files if name.endswith(".trace")] == whole
    assert at.size <= max_bytes


async def test_a_file_that_another_process_writes_is_not_removed(record, monkeypatch):
    monkeypatch.setattr(module, "FILES", 2)
    writer, other = (record(ORDERS, max_bytes=100_000) for _ in range(2))
    other.clock.advance(seconds=10 * FILE_S)
    writer.recorder._file_bytes = 1 << 20
    await fill(writer)
    await fill(other)
    assert (await writer.trace()).checks == 2 * BLOCK_CHECKS


@pytest.mark.parametrize(("seconds", "files"), [(1, 2), (10 * FILE_S, 1)])
async def test_without_locks_a_recent_file_counts_as_written(record, monkeypatch, seconds, files):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no locks")))
    monkeypatch.setattr(module, "FILES", 2)
    writer, other = (record(ORDERS, max_bytes=100_000) for _ in range(2))
    other.clock.advance(seconds=seconds)
    writer.recorder._file_bytes = 1 << 20
    await fill(writer)
    await fill(other)
    assert len(writer.files) == files


async def test_the_files_of_another_user_do_not_end_the_recording(record, monkeypatch):
    at = record(ORDERS)
    (at.directory / f"{0:016d}-{0:016x}.part").write_bytes(b"")
    monkeypatch.setattr(module, "_is_written", Mock(side_effect=PermissionError))
    at.ask()
    assert (await at.trace()).checks == 1


async def test_many_workers_keep_the_bound_and_most_of_it_is_readable(record, monkeypatch):
    monkeypatch.setattr(module, "FILES", 4)
    monkeypatch.setattr(module, "BLOCK_CHECKS", 100)
    max_bytes = 4 * 20 * 5_000
    workers = [record(ORDERS, max_bytes=max_bytes, workers=20) for _ in range(20)]
    for _ in range(12):
        for at in workers:
            at.clock.advance(seconds=1)
            at.ask(100)
        await asyncio.gather(*[at.recorder.step() for at in workers])
        assert workers[0].size <= max_bytes
    assert Trace(workers[0].directory).checks > 12_000


async def test_room_is_left_for_files_that_workers_begin_at_the_same_time(record, monkeypatch):
    monkeypatch.setattr(module, "FILES", 4)
    monkeypatch.setattr(module, "BLOCK_CHECKS", 100)
    at = record(ORDERS, max_bytes=4 * 5 * 5_000, workers=5)
    for _ in range(50):
        at.clock.advance(seconds=1)
        at.ask(100)
        await at.recorder.step()
    assert 60_000 < at.size <= 4 * 5 * 5_000 - 4 * 5_000


async def test_noted_checks_are_bounded_and_lost_ones_are_counted(record, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 10)
    at = record(ORDERS)
    at.ask(25)
    trace = await at.trace()
    assert (trace.checks, trace.lost) == (10, 15)
    assert at.stats.recorded == {"written": 10, "lost": 15}


async def test_a_step_over_many_checks_yields_to_the_event_loop(record):
    at = record(ORDERS)
    at.ask(2 * CHECKS_PER_ITERATION)
    turns = []
    task = asyncio.create_task(at.recorder.step())
    while not task.done():
        turns.append(1)
        await asyncio.sleep(0)
    assert len(turns) >= 3


async def test_a_cancelled_step_loses_nothing(record):
    at = record(ORDERS)
    at.ask(3 * CHECKS_PER_ITERATION)
    task = asyncio.create_task(at.recorder.step())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await at.trace()).checks == 3 * CHECKS_PER_ITERATION


class Disk:
    """A disk that rejects blocks of checks while it is full."""

    def __init__(self, monkeypatch):
        self.full = False
        append = Appender.append

        def appended(appender, data, *, durable=False):
            if self.full and len(data) > 1_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            append(appender, data, durable=durable)

        monkeypatch.setattr(Appender, "append", appended)


async def fill(at, further=0):
    at.ask(BLOCK_CHECKS + further)
    await at.recorder.step()


async def test_a_disk_error_loses_checks_and_is_logged_once(record, monkeypatch, caplog):
    at = record(ORDERS)
    disk = Disk(monkeypatch)
    disk.full = True
    await fill(at)
    await fill(at)  # no write is attempted
    assert at.files == []
    at.clock.advance(seconds=60)
    await fill(at)
    assert at.stats.recorded == {"written": 0, "lost": 3 * BLOCK_CHECKS}
    assert [one.getMessage() for one in caplog.records] == [
        f"checks cannot be recorded in {at.directory}: No space left on device"
    ]
    disk.full = False
    at.clock.advance(seconds=60)
    await fill(at)
    trace = await at.trace()
    assert (trace.checks, trace.lost) == (BLOCK_CHECKS, 3 * BLOCK_CHECKS)


async def test_a_disk_error_loses_the_file_with_its_checks_and_its_count_of_lost_ones(
    record, monkeypatch
):
    at = record(ORDERS)
    disk = Disk(monkeypatch)
    monkeypatch.setattr(module, "MAX_QUEUED", BLOCK_CHECKS)
    await fill(at)
    await fill(at, further=10)
    await fill(at)
    assert at.stats.recorded == {"written": 0, "lost": 10}
    disk.full = True
    await fill(at)
    assert at.files == []
    lost = 4 * BLOCK_CHECKS + 10
    assert at.stats.recorded == {"written": 0, "lost": lost}
    disk.full = False
    at.clock.advance(seconds=60)
    await fill(at)
    await at.recorder.drain()
    assert at.stats.recorded == {"written": BLOCK_CHECKS, "lost": lost}
    trace = Trace(at.directory)
    assert (trace.checks, trace.lost) == (BLOCK_CHECKS, lost)


async def test_a_directory_removed_while_recording_loses_the_checks_of_the_file(record):
    at = record(ORDERS)
    at.ask(BLOCK_CHECKS)
    await at.recorder.step()
    shutil.rmtree(at.directory)
    at.ask()
    await at.recorder.drain()
    assert at.stats.recorded == {"written": 0, "lost": BLOCK_CHECKS + 1}


async def test_a_file_that_ends_while_the_step_is_cancelled_is_counted(record, monkeypatch):
    at = record(ORDERS)
    at.ask()
    await at.recorder.step()
    at.clock.advance(seconds=FILE_S)
    begun, may_end = threading.Event(), threading.Event()
    publish = Appender.publish

    def published(self, name):
        begun.set()
        assert may_end.wait(30)
        publish(self, name)

    monkeypatch.setattr(Appender, "publish", published)
    task = asyncio.create_task(at.recorder.step())
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    may_end.set()
    assert (await at.trace()).checks == 1
    assert at.stats.recorded == {"written": 1, "lost": 0}


async def test_a_file_that_cannot_be_ended_is_discarded(record, monkeypatch):
    at = record(ORDERS)
    at.ask()

    def publish(_self, _name):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Appender, "publish", publish)
    await at.recorder.drain()
    assert at.files == []
    assert at.stats.recorded == {"written": 0, "lost": 1}


async def test_a_missing_directory_loses_checks(record):
    at = record(ORDERS)
    shutil.rmtree(at.directory)
    at.ask()
    await at.recorder.drain()
    assert at.stats.recorded == {"written": 0, "lost": 1}


async def test_recording_continues_until_it_is_cancelled(record, monkeypatch):
    monkeypatch.setattr(module, "STEP_S", 0)
    at = record(ORDERS)
    task = asyncio.create_task(at.recorder.run())
    at.ask()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not at.recorder._queued
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await at.trace()).checks == 1


def test_the_error_names_an_unusable_directory(tmp_path, record):
    (tmp_path / "trace").write_text("")
    with pytest.raises(StartupError, match=r"RECORD_DIR: .*trace cannot be used: Not a directory"):
        record()


def test_the_error_names_an_invalid_trace_id_file(record):
    at = record()
    (at.directory / "trace-id").write_bytes(b"?")
    with pytest.raises(StartupError, match=r"RECORD_DIR: .*trace-id was not written by a node"):
        record()


def test_processes_that_start_together_have_one_trace(record, tmp_path):
    directory = tmp_path / "trace"
    first = record()
    path = directory / "trace-id"
    number = path.read_bytes()
    module._make_trace(path)
    assert path.read_bytes() == number
    assert [one.name for one in directory.iterdir()] == ["trace-id"]
    assert first.recorder.seed == crc32(number)
    assert path.stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0
