"""Holds on a node's own buckets: bounds, dropped holds, and invalid data in files."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import count, islice

import pytest

from ratelimitd.algorithms import DECIDE, token_bucket
from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.algorithms.several import wait_ms
from ratelimitd.buckets import snapshot, snapshot_format
from ratelimitd.buckets.appender import Appender
from ratelimitd.buckets.holds import STEP, OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.errors import HoldEndedError, HoldsFullError
from ratelimitd.ledger.holds import Hold
from ratelimitd.model import US_PER_S, Algorithm, Calendar, Enforcement, Limit, Period
from ratelimitd.testing import ManualClock

HOLD, BUCKET = snapshot_format.HOLDS, snapshot_format.APART
TOKENS = Limit(limit=10, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET)
MANY = Limit(limit=1_000_000, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET)
SLOTS = Limit(limit=3, window_seconds=600, algorithm=Algorithm.CONCURRENCY)


class Scene:
    def __init__(self, **bounds):
        self.clock, self.keys = ManualClock(), BucketKeys(b"k" * 32)
        self.table = BucketTable(100)
        self.holds = OwnHolds(self.table, self.keys, self.clock.now_us, **bounds)
        self.others = count(1_000)

    async def hold(self, number, key=b"a", limit=TOKENS, *, cost=1, ttl_s=60):
        charges = [(key, limit, DECIDE[limit.algorithm])]
        number = number.to_bytes(16, "big")
        now_us = self.clock.now_us()
        return await self.holds.hold(
            Hold(number, b"digest", charges, now_us, cost, ttl_s * US_PER_S)
        )

    async def settle(self, number, actual, key=b"a"):
        limits, now_us = {self.keys.stored(key): None}, self.clock.now_us()
        return await self.holds.settle(number.to_bytes(16, "big"), limits, actual, now_us)

    async def drop(self):
        """Settle enough other holds that the settled ones are dropped."""
        for number in islice(self.others, self.holds._max_holds):
            await self.hold(number, b"other", MANY)
            await self.settle(number, 1, b"other")

    def written(self):
        """Return the changes since the last call, as a restart reads them."""
        return {(kind, name): value for kind, name, value in self.holds.changes(100)}

    def opened(self, directory):
        """Return the snapshot log of its buckets."""
        return SnapshotLog.open(directory, self.table, b"k" * 32, self.clock)

    def check(self, key=b"a", limit=TOKENS, cost=1, decide=None):
        decide = decide or DECIDE[limit.algorithm]
        return self.table.apply(key, limit, decide, self.clock.now_us(), cost)


async def test_holds_of_a_bucket_and_of_a_node_are_bounded():
    scene = Scene(max_holds=3, max_per_bucket=2)
    await scene.hold(1)
    await scene.hold(2)
    with pytest.raises(HoldsFullError, match="2 holds in flight for one identity"):
        await scene.hold(3)
    await scene.hold(3, b"b")
    with pytest.raises(HoldsFullError, match="the node has 3 holds"):
        await scene.hold(4, b"c")
    await scene.settle(1, 1)
    await scene.hold(4, b"c")


async def test_ended_holds_are_kept_up_to_the_maximum_in_flight():
    scene = Scene(max_holds=2)
    for number in range(1, 5):
        await scene.hold(number)
        await scene.settle(number, 1)
    assert [(await scene.settle(number, 1)).known for number in range(1, 5)] == [
        False, False, True, True,
    ]  # fmt: skip


async def test_debts_are_bounded_and_dropped_when_they_are_paid():
    scene = Scene(max_holds=2)
    for number in range(1, 5):
        key = bytes((number,))
        await scene.hold(number, key)
        await scene.settle(number, 25, key)
    assert len(scene.holds) == 2
    scene.table.sweep(scene.clock.now_us(), 1)
    assert len(scene.holds) == 2
    scene.clock.advance(seconds=400)
    scene.table.sweep(scene.clock.now_us(), 1)
    assert len(scene.holds) == 0


async def test_many_holds_end_in_steps():
    scene = Scene()
    for number in range(1, STEP + 50):
        await scene.hold(number, str(number).encode())
    scene.clock.advance(seconds=70)
    scene.table.sweep(scene.clock.now_us(), 1)
    assert scene.holds.in_flight == 49
    scene.table.sweep(scene.clock.now_us(), 1)
    assert scene.holds.in_flight == 0


async def test_a_check_that_proceeds_later_is_charged_on_a_bucket_with_a_hold():
    scene = Scene()
    await scene.hold(1, cost=8)
    ahead = partial(token_bucket.decide_ahead, ahead_us=30 * US_PER_S)
    assert scene.check(cost=7, decide=ahead)[0]
    await scene.settle(1, 0)
    scene.clock.advance(seconds=30)
    assert scene.check(cost=3)[0]
    assert not scene.check(cost=1)[0]


async def test_a_settle_behind_checks_that_wait_gives_back_what_was_not_used():
    scene = Scene()
    await scene.hold(1, cost=10)
    for number in range(1, 13):  # the last ones wait for more than a full bucket
        ahead = partial(token_bucket.decide_ahead, ahead_us=number * 6 * US_PER_S)
        assert scene.check(decide=ahead)[0]
    settled = await scene.settle(1, 8)
    assert [one[1] for one in settled.outcomes] == [2]
    assert scene.check(cost=2)[0]
    assert not scene.check()[0]


async def test_an_observing_limit_in_debt_causes_no_wait_and_is_charged_once_it_is_paid():
    scene = Scene()
    observing = replace(TOKENS, limit=20, burst=10, enforcement=Enforcement.OBSERVE)
    await scene.hold(1, limit=observing)
    await scene.settle(1, 13)  # 3 more than the capacity
    await scene.hold(2, b"b", cost=10)
    decide = token_bucket.decide
    for seconds, expected in ((0, [True, False]), (18, [True, True])):
        scene.clock.advance(seconds=seconds)
        now_us = scene.clock.now_us()
        charges = [(b"b", TOKENS, decide), (b"a", observing, decide)]
        waits_ms = wait_ms(scene.table.states(charges), now_us, 4, 60_000)
        assert waits_ms == 24_000 - seconds * 1_000
        later = partial(token_bucket.decide_ahead, ahead_us=waits_ms * 1_000)
        charges = [(key, limit, later) for key, limit, _ in charges]
        outcomes = scene.table.peek_each(charges, now_us, [4, 4])
        assert [one[0] for one in outcomes] == expected


async def test_changes_that_could_not_be_written_are_returned_again():
    scene = Scene()
    await scene.hold(1)
    await scene.hold(2, b"s", SLOTS)
    changes = scene.holds.changes(100)
    assert {(kind, name) for kind, name, _ in changes} == {
        (HOLD, (1).to_bytes(16, "big")),
        (HOLD, (2).to_bytes(16, "big")),
        (BUCKET, scene.keys.stored(b"a")),
        (BUCKET, scene.keys.stored(b"s")),
    }
    assert scene.holds.changes(100) == []
    gone = (BUCKET, b"gone", b"")
    scene.holds.change_again([*changes, gone])
    assert len(scene.holds.changes(100)) == 4


HELD = (HOLD, (1).to_bytes(16, "big"))


def fails(*_args, **_how):
    raise OSError(28, "No space left on device")


async def writes_nothing(log, patched):
    """Leave everything to the end."""


async def writes_a_pass(log, patched):
    """Write a complete pass."""
    await log.write_pass()
    assert not log.errors_total


async def writes_a_base(log, patched):
    """Replace the files in which the hold is in flight."""
    patched.setattr(snapshot, "MIN_LOG_BYTES", 0)
    patched.setattr(snapshot, "LOG_PER_BASE", 0)
    await log.write_pass()
    assert not log.errors_total


async def fails_to_write_a_pass(log, patched):
    """Write no hold."""
    patched.setattr(log, "_append", fails)
    await log.write_pass()
    assert log.errors_total


async def fails_to_write_a_base(log, patched):
    """Write a log whose base fails at the end, so that the earlier log still counts."""
    patched.setattr(snapshot, "MIN_LOG_BYTES", 0)
    patched.setattr(snapshot, "LOG_PER_BASE", 0)
    patched.setattr(Appender, "publish", fails)
    await log.write_pass()
    assert log.errors_total


@pytest.mark.parametrize("limit", [TOKENS, SLOTS], ids=["tokens", "slots"])
@pytest.mark.parametrize(
    "write",
    [
        writes_nothing,
        writes_a_pass,
        writes_a_base,
        fails_to_write_a_pass,
        fails_to_write_a_base,
    ],
)
async def test_a_settled_hold_that_was_dropped_unwritten_is_not_in_flight_after_a_restart(
    tmp_path, monkeypatch, write, limit
):
    scene = Scene(max_holds=2)
    log = scene.opened(tmp_path)
    await scene.hold(1, b"a", limit)
    await log.write_pass()
    await scene.settle(1, 0)
    await scene.drop()
    with monkeypatch.context() as patched:
        await write(log, patched)
    await log.drain()
    other = Scene()
    log = other.opened(tmp_path)
    assert other.holds.in_flight == 0
    assert not (await other.settle(1, 0)).known
    assert (await other.hold(1, b"a", limit)).is_first
    assert other.check(b"a", limit)[1] == limit.limit - 1 - (limit is TOKENS)
    await log.drain()


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_dropped_hold_is_written_after_a_failed_write(is_dropped):
    scene = Scene(max_holds=2)
    await scene.hold(1)
    scene.written()
    await scene.settle(1, 1)
    settled = scene.holds.changes(100)
    if is_dropped:
        await scene.drop()
    scene.holds.change_again(settled)
    await scene.drop()
    changes = scene.holds.changes(100)
    assert (*HELD, b"") in changes
    scene.holds.change_again(changes)
    assert scene.written()[HELD] == b""


async def test_a_dropped_hold_is_written_although_another_had_its_number():
    scene = Scene(max_holds=2)
    await scene.hold(1)
    scene.written()
    for _ in range(2):
        await scene.settle(1, 1)
        await scene.drop()
        await scene.hold(1)
    await scene.settle(1, 1)
    await scene.drop()
    assert scene.written()[HELD] == b""


async def test_a_hold_that_was_dropped_before_it_was_ever_written_leaves_no_trace():
    scene = Scene(max_holds=2)
    for number in range(1, 100):
        await scene.hold(number, limit=MANY)
        await scene.settle(number, 1)
    assert scene.holds.unwritten == 2


async def test_large_buckets_are_written_in_steps():
    scene = Scene()
    for number in range(1, 40):
        await scene.hold(number, bytes((number % 4,)), TOKENS)
    while scene.holds.unwritten:
        changes = scene.holds.changes(100, 600)
        assert changes
        assert sum(len(value) for _, _, value in changes[:-1]) < 600


async def test_invalid_holds_and_buckets_in_a_file_are_skipped():
    scene = Scene()
    await scene.hold(1, cost=4)
    changes = scene.written()
    [bucket] = [json.loads(value) for (kind, _), value in changes.items() if kind == BUCKET]
    names = iter(bytes((number,)) * 16 for number in range(1, 100))
    bad = [b"", b"{", b"[]", b"5", json.dumps(bucket | {"state": "00"}).encode()]
    bad += [json.dumps(bucket | {"changes": [[1, 1], [0, 0], [None, None]]}).encode()]
    bad += [json.dumps({"limit": bucket["limit"]}).encode(), b"[" * 100_000]
    bad += [json.dumps(bucket | {"state": state}).encode() for state in ([1], [1, "x"], 5)]
    bad += [
        json.dumps(bucket | {"limit": limit}).encode()
        for limit in ([0, 60, "token_bucket", 9], [10, 2**31, "token_bucket", 0], [1, 1, "none", 0])
    ]
    bad += [json.dumps(bucket | {"full_after_s": full_s}).encode() for full_s in (0, 2**31, "5")]
    bad += [json.dumps(bucket | {"limit": [10, 60, "sliding_window", 0], "state": "00"}).encode()]
    [hold] = [json.loads(value) for (kind, _), value in changes.items() if kind == HOLD]
    bad += [json.dumps([hold[0], end_us, *hold[2:]]).encode() for end_us in (math.inf, "x", None)]
    bad += [json.dumps(bucket | {"state": [math.inf, 1]}).encode()]
    broken = {(kind, next(names)): value for kind in (HOLD, BUCKET) for value in bad}
    other = Scene()
    other.holds.restore(broken | changes)
    assert (other.holds.in_flight, len(other.holds)) == (1, 1)
    assert other.check()[1] == 5
    assert (await other.settle(1, 0)).known


@pytest.fixture
async def after_a_hold(tmp_path):
    """Return the directory of a stopped node with one hold in flight, of all tokens."""
    scene = Scene()
    log = scene.opened(tmp_path)
    await scene.hold(1, cost=10)
    await log.drain()
    return tmp_path


@pytest.mark.parametrize("is_written", [False, True])
async def test_debts_do_not_displace_a_bucket_unused_since_a_restart(after_a_hold, is_written):
    scene = Scene(max_holds=1)
    log = scene.opened(after_a_hold)
    await scene.settle(1, 9)
    for number, key in ((2, b"b"), (3, b"c")):
        await scene.hold(number, key)
        await scene.settle(number, 25, key)
    if is_written:
        await log.write_pass()
        await scene.hold(4, b"d")
        await log.write_pass()
    assert len(scene.table) > 0
    assert scene.check(cost=2)[:2] == (False, 1)
    await log.drain()


async def test_a_bucket_without_a_key_is_written_again_after_a_failed_write(
    after_a_hold, monkeypatch
):
    scene = Scene()
    log = scene.opened(after_a_hold)
    await log.write_pass()
    await scene.settle(1, 4)

    append = log._append

    async def fails(data, **how):
        if data[:1] == snapshot_format.STATES:
            raise OSError(28, "No space left on device")
        await append(data, **how)

    with monkeypatch.context() as full:
        full.setattr(log, "_append", fails)
        await log.write_pass()
    assert log.errors_total == 1
    await log.write_pass()
    await log.drain()
    again = Scene()
    log = again.opened(after_a_hold)
    assert (len(again.holds), again.check()[1]) == (0, 5)
    await log.drain()


async def test_a_full_table_evicts_for_a_bucket_without_a_key(after_a_hold):
    scene = Scene()
    log = scene.opened(after_a_hold)
    for number in range(100):
        scene.check(b"%d" % number)
    await scene.settle(1, 4)
    assert len(scene.table) <= 100
    assert scene.table.evicted_total
    assert scene.check()[1] == 5
    await log.drain()


async def restarted(scene):
    """Return another node, restored from this one's changes."""
    scene.holds.change_all()
    other = Scene()
    other.clock.advance(us=scene.clock.now_us() - other.clock.now_us())
    other.holds.restore(scene.written())
    return other


async def test_the_bucket_of_a_calendar_window_expires_soon_after_it_even_after_restarts():
    scene = Scene()
    calendar = Calendar(Period.DAY, "UTC")
    daily = Limit(
        limit=10, window_seconds=86_400, algorithm=Algorithm.FIXED_WINDOW, calendar=calendar
    )
    limit = in_force(daily, window_at(calendar, scene.clock.now_us()))
    await scene.hold(1, limit=limit, cost=9, ttl_s=5)
    await scene.hold(2, b"debt", limit, cost=9, ttl_s=5)
    await scene.settle(2, 15, b"debt")
    other = await restarted(await restarted(scene))
    other.clock.advance(seconds=2 * 86_400)
    for _ in range(3):
        other.table.sweep(other.clock.now_us(), 1)
    assert len(other.holds) == 0


async def test_a_bucket_and_a_hold_of_an_earlier_release_without_their_new_times_are_restored():
    scene = Scene()
    await scene.hold(1, cost=4)
    changes = {which: json.loads(value) for which, value in scene.written().items()}
    for value in changes.values():
        if isinstance(value, dict):
            del value["full_after_s"]
        else:
            del value[6:]  # when the hold was made
    other = Scene()
    other.holds.restore({which: json.dumps(value).encode() for which, value in changes.items()})
    assert other.check()[1] == 5


@pytest.mark.parametrize("limit", [TOKENS, SLOTS], ids=["tokens", "slots"])
async def test_a_hold_of_a_clock_that_was_ahead_ends_as_if_it_were_made_at_the_restart(limit):
    scene, key = Scene(), b"a"
    scene.clock.step(86_400 * US_PER_S)
    await scene.hold(1, key, limit, ttl_s=50)
    scene.clock.step(-86_400 * US_PER_S)
    other, number = await restarted(scene), (1).to_bytes(16, "big")
    now_us = other.clock.now_us()
    assert [*other.holds.open_holds()] == [(number, now_us + 50 * US_PER_S)]
    end_us = await other.holds.extend(number, [], 3_600 * US_PER_S, now_us)
    life_s = limit.window_seconds if limit is SLOTS else 3_600
    assert end_us == now_us + life_s * US_PER_S
    other.clock.advance(seconds=life_s)
    other = await restarted(other)
    with pytest.raises(HoldEndedError):
        await other.settle(1, 0)


async def test_holds_that_ended_long_ago_are_not_restored():
    scene = Scene()
    await scene.hold(1, ttl_s=5)
    changes = scene.written()
    other = Scene()
    other.clock.advance(seconds=1_000)
    other.holds.restore(changes)
    assert other.holds.in_flight == 0


async def test_a_hold_does_not_own_the_slot_of_an_earlier_hold_of_its_number():
    scene = Scene()
    await scene.hold(1, b"s", SLOTS, ttl_s=5)
    changes = scene.written()
    scene.clock.advance(seconds=1_000)
    await scene.hold(1, b"a", ttl_s=600)
    changes |= scene.written()
    other = Scene()
    other.clock.advance(seconds=1_000)
    other.holds.restore(changes)
    assert other.check(b"s", SLOTS)[1] == SLOTS.limit
    assert (await other.settle(1, 0)).known


async def test_a_slot_without_a_hold_is_freed():
    scene = Scene()
    await scene.hold(1, b"s", SLOTS)
    written = scene.written()
    other = Scene()
    other.holds.restore({which: written[which] for which in written if which[0] == BUCKET})
    assert other.check(b"s", SLOTS)[1] == 3
    assert len(other.holds) == 0


async def test_a_bucket_whose_paid_debt_is_followed_by_a_hold_is_not_forgiven():
    scene = Scene(max_holds=2)
    await scene.hold(1)
    await scene.settle(1, 25)
    scene.clock.advance(seconds=400)
    await scene.hold(2)
    for number, key in ((3, b"b"), (4, b"c")):
        await scene.hold(number, key)
        await scene.settle(number, 25, key)
    await scene.settle(2, 0)
    assert scene.check()[1] == 9


async def test_a_bucket_whose_paid_debt_is_followed_by_a_hold_is_not_dropped():
    scene = Scene()
    await scene.hold(1)
    await scene.settle(1, 25)
    await scene.hold(3, b"b")
    await scene.settle(3, 25, b"b")
    scene.clock.advance(seconds=400)
    await scene.hold(2, ttl_s=600)
    scene.table.remove(b"b")
    scene.clock.advance(seconds=300)
    scene.table.sweep(scene.clock.now_us(), 1)
    await scene.settle(2, 100)
    assert scene.check()[:2] == (False, 0)


async def test_changes_after_a_failed_write_are_written_later(tmp_path):
    scene = Scene()
    log = scene.opened(tmp_path)
    await log.write_pass()
    await scene.hold(1)
    for path in tmp_path.iterdir():
        path.unlink()
    await log.drain()
    assert log.errors_total
    assert scene.holds.unwritten


async def test_a_log_made_long_by_holds_does_not_cause_repeated_bases(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "MIN_LOG_BYTES", 1_000)
    scene = Scene()
    log = scene.opened(tmp_path)
    for number in range(1, 50):
        await scene.hold(number, str(number).encode())
    for _ in range(4):
        await log.write_pass()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "buckets-00000002.base", "buckets-00000002.log",
    ]  # fmt: skip
    await log.drain()


async def test_a_pass_ends_although_holds_are_made_during_it(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "STEP_HOLDS", 1)
    scene, numbers = Scene(), iter(range(1, 1_000))
    log = scene.opened(tmp_path)
    append = log._append

    async def busy_append(data, *, durable=False):
        await scene.hold(number := next(numbers), str(number).encode())
        await append(data, durable=durable)

    monkeypatch.setattr(log, "_append", busy_append)
    await scene.hold(number := next(numbers), str(number).encode())
    await log.write_pass()
    assert next(numbers) < 10
    await log.drain()
