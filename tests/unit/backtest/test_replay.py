import gc
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ratelimitd.backtest import replay, report
from ratelimitd.backtest.recorder import FILE_S
from ratelimitd.backtest.replay import Replayer, Trace
from ratelimitd.backtest.report import Retries, backtest
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import TraceInvalidError
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import (
    Algorithm,
    Calendar,
    Check,
    Enforcement,
    Limit,
    Period,
    Plan,
    Reason,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

FIXED, BUCKET, LOG = Algorithm.FIXED_WINDOW, Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW


def rule(tokens, endpoint="/orders", kind="user", algorithm=FIXED, **more):
    return Rule(
        f"{endpoint} {kind}",
        endpoint,
        kind,
        limit=tokens,
        algorithm=algorithm,
        **{"window_seconds": 60, **more},
    )


EVERYTHING = [
    rule(9, algorithm=BUCKET, burst=20, plans=(Plan("gold", (rule(40),)),)),
    rule(25, "/search", algorithm=LOG),
    rule(
        60,
        "*",
        more=(
            Limit(limit=4, window_seconds=1, algorithm=BUCKET, name="second"),
            Limit(
                limit=2,
                window_seconds=60,
                algorithm=LOG,
                name="candidate",
                enforcement=Enforcement.OBSERVE,
            ),
            Limit(
                limit=90,
                window_seconds=86_400,
                algorithm=FIXED,
                name="day",
                calendar=Calendar(Period.DAY, "Europe/Berlin"),
            ),
        ),
    ),
    rule(300, "**", "tenant", BUCKET),
    rule(40, "/search", "tenant+user"),
    rule(2_000, "*", "all", LOG, window_seconds=1),
]


def random_checks(count, seed=7):
    """Return checks of every kind, at times of callers whose clocks differ."""
    chosen = random.Random(seed)
    now_us = 1_700_006_399_000_000
    for _ in range(count):
        now_us += chosen.randrange(200_000)
        yield Check(
            b"user-%d" % min(int(chosen.paretovariate(0.7)), 50),
            "user",
            chosen.choice(["/orders", "/search", "/other"]),
            chosen.choice([1, 1, 1, 2, 30]),
            now_us - chosen.choice([0, 0, 0, 900_000]),
            peek=chosen.random() < 0.1,
            also=(("tenant", b"t-%d" % chosen.randrange(3)),) if chosen.random() < 0.5 else (),
            max_wait_ms=chosen.choice([0, 0, 2_000]),
        )


async def recorded(at, checks):
    decisions = []
    for number, check in enumerate(checks):
        decisions.append(at.limiter.check(check))
        if not number % 100:
            await at.recorder.step()
    await at.recorder.drain()
    return decisions


@pytest.mark.parametrize(
    "count",
    [4_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
async def test_a_replay_decides_like_a_live_node_with_callers_time(record, count):
    at = record(*EVERYTHING, max_bytes=1 << 30)
    at.assignments.put("user", b"user-1", "gold", 0)
    at.assignments.put("user", b"user-2", "unlimited", 0)
    at.assignments.put("user", b"user-3", "blocked", 0)
    decisions = await recorded(at, random_checks(count))
    trace = Trace(at.directory)
    replayer = Replayer(trace, EVERYTHING)
    assert len({decision.reason for decision in decisions}) == 4
    for check, live in zip(trace, decisions, strict=True):
        judged = replayer.judge(check)
        deciding = replayer.limit_of(check, judged)
        assert judged[0] == live.allowed == check[4]
        assert judged[3:5] == live[3:5] or live.reason is Reason.BLOCKED
        assert deciding[0] == live.rule
        assert deciding[2] == live.plan


async def test_a_replay_with_other_rules_decides_like_a_live_node_with_them(record):
    at = record(rule(5, "*"))
    checks = [*random_checks(3_000)]
    await recorded(at, checks)
    trace = Trace(at.directory)
    replayer = Replayer(trace, EVERYTHING)
    live = Limiter(
        buckets=BucketTable(100_000, callers_time=True),
        clock=ManualClock(),
        stats=CheckStats(),
        timestamps="caller",
        keys=BucketKeys(b"another secret, of 32 bytes, yes"),
        assignments=Assignments(),
    )
    live.replace_book(RuleBook.of(EVERYTHING, 1))
    for check, recorded_check in zip(checks, trace, strict=True):
        assert replayer.judge(recorded_check)[:5] == live.check(check)[:5]


async def traced(record, *checks, limit=2):
    """Record checks, each as (identifier, seconds after the previous one)."""
    at = record(rule(limit))
    for identifier, after_s in checks:
        at.clock.advance(seconds=after_s)
        at.limiter.check(Check(identifier, "user", "/orders"))
    return await at.trace()


async def test_a_report_compares_new_denials_with_recorded_ones(record):
    trace = await traced(record, *[(b"a", 1)] * 4, (b"b", 1), (b"a", 60), limit=3)
    report = backtest(trace, [rule(1)])
    assert (report.checks, report.identities) == (6, 2)
    assert (report.first_us, report.last_us) == (trace.first_us, trace.first_us + 64_000_000)
    assert trace.first_us == next(iter(trace))[0]
    assert (report.denied_before, report.denied) == (1, 3)
    assert (report.newly_denied, report.newly_allowed) == (2, 0)
    assert (report.identities_denied_before, report.identities_denied) == (1, 1)
    [named] = report.named
    assert (named.identifier_type, named.denied_before, named.denied) == ("user", 1, 3)
    assert named.longest_s == 63
    assert report.pauses_s == (63, 63, 63)
    assert report.endpoints == [("/orders", "user", 6, 1, 3)]
    [limit] = report.limits
    assert limit[3:] == (3, 2, 1, 4)
    assert sum(now for _, now in report.bins) == 3
    assert sum(before for before, _ in report.bins) == 1


async def test_a_report_counts_newly_allowed_checks(record):
    trace = await traced(record, *[(b"a", 1)] * 4, limit=1)
    report = backtest(trace, [rule(3)])
    assert (report.newly_denied, report.newly_allowed) == (0, 2)
    assert (report.denied_before, report.denied) == (3, 1)
    assert report.pauses_s == (0, 0, 0)


async def test_an_allowed_check_ends_a_pause_even_if_it_was_denied_before(record):
    trace = await traced(record, (b"a", 1), (b"a", 1), (b"a", 4), limit=1)
    bucket = rule(12, algorithm=BUCKET, burst=1)
    report = backtest(trace, [bucket])
    assert (report.denied, report.newly_allowed, report.pauses_s[2]) == (1, 1, 4)


async def test_without_rules_nothing_is_denied(record):
    report = backtest(await traced(record, *[(b"a", 1)] * 4), [])
    assert (report.denied, report.limits, report.named) == (0, [], [])


async def test_a_denial_by_a_blocked_plan_counts_for_no_limit(record):
    at = record(rule(5))
    at.assignments.put("user", b"a", "blocked", 0)
    at.limiter.check(Check(b"a", "user", "/orders"))
    report = backtest(await at.trace(), [rule(5)])
    assert (report.denied, report.limits) == (1, [])


async def test_peeks_are_judged_but_not_counted(record):
    at = record(rule(1))
    for peek in (False, True, True):
        at.limiter.check(Check(b"a", "user", "/orders", peek=peek))
    report = backtest(await at.trace(), [rule(1)])
    assert (report.checks, report.denied, report.endpoints[0].checks) == (1, 0, 1)


async def test_immediate_retries_use_freed_tokens(record):
    trace = await traced(record, (b"a", 1), (b"a", 0.9), (b"b", 9), (b"b", 9))
    rules = [rule(1, window_seconds=1, algorithm=BUCKET)]
    report = backtest(trace, rules, Retries.IMMEDIATE)
    assert (report.denied, report.retried, report.allowed_later) == (1, 1, 1)
    assert report.pauses_s == (0.1, 0.1, 0.1)


async def test_backoff_retries_wait_for_the_retry_delay(record):
    trace = await traced(record, (b"a", 1), (b"a", 0), (b"a", 0), (b"b", 100))
    rules = [rule(1, window_seconds=10, algorithm=BUCKET)]
    report = backtest(trace, rules, Retries.BACKOFF)
    # Both get a retry delay of 10 s; the second finds the token used, and retries again.
    assert (report.denied, report.retried, report.allowed_later) == (2, 3, 2)


async def test_retries_are_bounded(record):
    trace = await traced(record, (b"a", 1), (b"a", 0), (b"b", 9))
    report = backtest(trace, [rule(1)], Retries.IMMEDIATE)
    assert (report.denied, report.retried, report.allowed_later) == (1, 3, 0)


async def test_retries_after_the_last_check_are_replayed(record):
    """With callers' time the last check may not have the latest time."""
    at = record(rule(1))
    now_s = at.clock.now_us() // 1_000_000
    for identifier, after_s in ((b"b", 2), (b"a", 1), (b"a", 1)):
        at.limiter.check(Check(identifier, "user", "/orders", timestamp=now_s + after_s))
    report = backtest(await at.trace(), [rule(1)], Retries.IMMEDIATE)
    assert (report.denied, report.retried, report.allowed_later) == (1, 3, 0)


async def test_no_pause_is_negative(record):
    """With callers' time the check that ends a pause may have an earlier time than the denial."""
    at = record(rule(3))
    now_s = at.clock.now_us() // 1_000_000
    for cost, after_s in ((2, 2), (2, 2), (1, 1)):
        at.limiter.check(Check(b"a", "user", "/orders", cost, now_s + after_s))
    report = backtest(await at.trace(), [rule(3)])
    assert (report.denied, report.pauses_s, report.named[0].longest_s) == (1, (0, 0, 0), 0)


async def test_a_calendar_limit_has_no_sparing_limit(record):
    trace = await traced(record, (b"a", 1), (b"a", 1))
    day = rule(1, window_seconds=86_400, calendar=Calendar(Period.DAY, "UTC"))
    [limit] = backtest(trace, [day]).limits
    assert (limit.denied, limit.sparing) == (1, 0)


async def test_the_sparing_limit_of_a_product_is_for_the_combination(record):
    at = record(rule(100))
    for tenant in (b"t", b"t", b"u"):
        at.limiter.check(Check(b"a", "user", "/orders", also=(("tenant", tenant),)))
    limits = backtest(await at.trace(), [rule(1, kind="tenant+user"), rule(1, "**", "all")]).limits
    assert [(one.identities, one.sparing) for one in limits] == [(2, 2), (1, 3)]


async def test_a_very_long_trace_has_no_sparing_limits(record, monkeypatch):
    trace = await traced(record, (b"a", 1), (b"a", 1))
    monkeypatch.setattr(report, "MAX_DEMANDED", 1)
    assert [one.sparing for one in backtest(trace, [rule(1)]).limits] == [0]


async def test_evicted_buckets_are_counted(record, monkeypatch):
    monkeypatch.setattr(replay, "MAX_BUCKETS", 2)
    trace = await traced(record, *[(b"%d" % number, 1) for number in range(9)])
    assert backtest(trace, [rule(1)]).evicted > 0


async def test_an_error_of_the_limiter_ends_the_replay(record):
    trace = await traced(record, (b"a", 1))
    broken = replace(rule(1), more=(Limit(limit=1, window_seconds=60, algorithm=LOG, name="x"),))
    replayer = Replayer(trace, [broken])
    replayer.table.charge_each = None
    with pytest.raises(TypeError):
        replayer.judge(next(iter(trace)))


async def test_files_of_several_processes_are_merged_by_time(record):
    first, second = record(rule(5)), record(rule(5))
    second.clock.advance(us=500_000)
    for _ in range(3):
        for at in (first, second):
            at.limiter.check(Check(b"a", "user", "/orders"))
            at.clock.advance(seconds=1)
    await first.recorder.drain()
    await second.recorder.drain()
    trace = Trace(first.directory)
    times = [check[0] for check in trace]
    assert len(times) == 6
    assert times == sorted(times)
    assert trace.identities == 1


async def test_unfinished_files_are_skipped_and_counted(record):
    at = record(rule(5))
    at.limiter.check(Check(b"a", "user", "/orders"))
    await at.recorder.step()
    at.clock.advance(seconds=FILE_S)
    await at.recorder.step()
    (at.directory / "0-0.part").write_bytes(b"")
    trace = Trace(at.directory)
    assert (trace.checks, trace.unfinished) == (1, 1)
    assert backtest(trace, []).unfinished == 1


async def test_a_single_file_is_a_trace(record):
    at = record(rule(5))
    at.limiter.check(Check(b"a", "user", "/orders"))
    await at.recorder.drain()
    [path] = at.directory.glob("*.trace")
    assert Trace(path).checks == 1


async def in_two_files(at):
    """Record two files; the second begins with a check of a caller whose clock is slow."""
    now_us = at.clock.now_us()
    for begin_us in (now_us, now_us - 1):
        for number in range(3):
            check = Check(b"a", "user", "/orders", 1, begin_us + number * 10_000_000)
            at.limiter.check(check)
        await at.recorder.step()
        at.clock.advance(seconds=FILE_S)
        await at.recorder.step()
    return sorted(at.directory.glob("*.trace"))


async def test_the_order_of_the_files_does_not_matter(record):
    at = record(rule(5))
    first, second = await in_two_files(at)
    in_order = [*Trace(at.directory)]
    assert [check[0] - in_order[0][0] for check in in_order[2:4]] == [20_000_000, -1]
    assert [*Trace(second, first)] == in_order


async def test_files_that_the_recorder_removes_meanwhile_are_replayed_or_skipped(
    record, monkeypatch
):
    at = record(rule(5))
    first, second = await in_two_files(at)
    trace = Trace(at.directory)
    first.unlink()
    assert len([*trace]) == len([*trace]) == trace.checks == 6
    monkeypatch.setattr(replay.Path, "glob", lambda *_: [first, second])
    assert Trace(at.directory).checks == 3
    with pytest.raises(FileNotFoundError):
        Trace(first)


def is_open(file):
    inode = file.stat().st_ino
    return any(fd.exists() and fd.stat().st_ino == inode for fd in Path("/proc/self/fd").iterdir())


async def test_the_oldest_files_stay_open_until_the_trace_is_released(record, monkeypatch):
    monkeypatch.setattr(replay, "MAX_OPEN", 1)
    at = record(rule(5))
    first, second = await in_two_files(at)
    trace = Trace(at.directory)
    assert (is_open(first), is_open(second)) == (True, False)
    assert len([*trace]) == 6
    assert (is_open(first), is_open(second)) == (True, False)
    del trace
    gc.collect()
    assert not is_open(first)


async def test_a_renamed_file_is_ordered_by_its_first_check(record):
    at = record(rule(5))
    for _ in range(2):
        at.limiter.check(Check(b"a", "user", "/orders"))
        await at.recorder.step()
        at.clock.advance(seconds=FILE_S)
        await at.recorder.step()
    in_order = [*Trace(at.directory)]
    first, second = sorted(at.directory.glob("*.trace"))
    first.rename(at.directory / "monday.trace")
    second.rename(at.directory / "friday.trace")
    assert [*Trace(at.directory)] == in_order


async def test_a_file_named_twice_is_read_once(record, tmp_path):
    at = record(rule(5))
    first, _ = await in_two_files(at)
    (at.directory / "0-0.part").write_bytes(b"")
    link = tmp_path / "link"
    link.symlink_to(at.directory)
    for paths in ((at.directory, first), (at.directory, link), (first, at.directory)):
        trace = Trace(*paths)
        assert (trace.checks, len([*trace]), trace.unfinished) == (6, 6, 1)
    assert Trace(first, first).checks == 3
    other_name = tmp_path / "other.trace"
    other_name.hardlink_to(first)
    assert Trace(first, other_name).checks == 3


async def test_files_of_different_traces_are_refused(record, tmp_path):
    for directory in ("a", "b"):
        at = type(record())(tmp_path / directory, rule(5))
        at.limiter.check(Check(b"a", "user", "/orders"))
        await at.recorder.drain()
    [path] = (tmp_path / "b").glob("*.trace")
    shutil.copy(path, tmp_path / "a" / "z.trace")
    with pytest.raises(TraceInvalidError, match=r"z.trace belongs to another trace than the files"):
        Trace(tmp_path / "a")


async def test_a_broken_file_is_reported_before_the_replay(record):
    at = record(rule(5))
    at.limiter.check(Check(b"a", "user", "/orders"))
    await at.recorder.drain()
    [path] = at.directory.glob("*.trace")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceInvalidError, match=r"\.trace is truncated: the block at byte "):
        Trace(at.directory)


def test_a_directory_without_complete_files_is_refused(tmp_path):
    with pytest.raises(TraceInvalidError, match="has no complete trace file"):
        Trace(tmp_path)
