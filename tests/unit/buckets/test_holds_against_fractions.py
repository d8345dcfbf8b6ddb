"""Holds on a node's own buckets match exact fractions, whatever happens between a hold and its settle."""

import asyncio
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from ratelimitd.algorithms import DECIDE, concurrency, sliding_window
from ratelimitd.buckets import held
from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.errors import CheckInvalidError, HoldEndedError, HoldSettledError
from ratelimitd.ledger.holds import Hold
from ratelimitd.ledger.replay import NEVER
from ratelimitd.model import US_PER_S, Algorithm, Enforcement, Limit
from ratelimitd.testing import ManualClock
from tests.own_hold_model import HoldModel

SECRET = b"k" * 32
KEYS = BucketKeys(SECRET)
STEPS = 40
NUMBERS = [bytes([number]) * 16 for number in range(12)]
ERRORS = (CheckInvalidError, HoldEndedError, HoldSettledError)


class World:
    """A node's buckets and holds beside their fraction model."""

    def __init__(self, rng, met, directory):
        self.rng, self.met, self.directory = rng, met, directory
        self.clock, self.model = ManualClock(), HoldModel()
        # A bucket is dropped when it is full under its limit; with a burst it may not be full under the next limit.
        self.drops = directory is not None or rng.random() < 0.3
        self.limits = {bytes([place]): self.random_limit() for place in range(rng.randint(1, 4))}
        self.snapshot = None
        self.start()

    def start(self):
        self.table = BucketTable(1_000)
        self.holds = OwnHolds(self.table, KEYS, self.clock.now_us)
        if self.directory is not None:
            self.snapshot = SnapshotLog.open(self.directory, self.table, SECRET, self.clock)

    def random_limit(self):
        rng = self.rng
        algorithm = rng.choice(list(Algorithm))
        window_seconds = rng.choice([1, 5, 7, 60])
        number = rng.choice([1, 3, 10, 100])
        limit = Limit(limit=number, window_seconds=window_seconds, algorithm=algorithm)
        if rng.random() < 0.2:
            limit = replace(limit, enforcement=Enforcement.OBSERVE)
        return self.with_burst(limit)

    def with_burst(self, limit):
        if limit.algorithm is not Algorithm.TOKEN_BUCKET or self.drops or self.rng.random() < 0.6:
            return replace(limit, burst=0)
        return replace(limit, burst=self.rng.choice([1, 2, limit.limit, 3 * limit.limit]))

    # Steps.

    def step(self):
        often = {
            self.check: 30,
            self.hold: 25,
            self.settle: 25,
            self.wait: 15,
            self.extend: 5,
            self.edit: 3,
            self.reset: 2,
            self.sweep: 5 if self.drops else 0,
            self.restart: 2 if self.snapshot is not None else 0,
        }
        [one] = self.rng.choices(list(often), list(often.values()))
        self.what = one.__name__
        return one()

    def wait(self):
        rng = self.rng
        self.clock.advance(
            us=rng.choice([1, 1_000, 10**6, rng.randrange(10**6), rng.randrange(9 * 10**6)])
        )
        if rng.random() < 0.02:
            self.clock.advance(seconds=rng.choice([60, 61, 100]))

    def now(self):
        """Return the time of a check in µs and in seconds; callers lag."""
        lag_us = self.rng.choice([0, 0, 0, 1, self.rng.randrange(3 * 10**6)])
        now_us = self.clock.now_us() - lag_us
        return now_us, Fraction(now_us, US_PER_S)

    @property
    def clock_s(self):
        return Fraction(self.clock.now_us(), US_PER_S)

    def charges(self):
        keys = self.rng.sample(list(self.limits), self.rng.randint(1, len(self.limits)))
        return [(key, self.limits[key]) for key in keys]

    def cost(self, charges):
        most = min(limit.capacity for _, limit in charges)
        return self.rng.choice([1, 1, self.rng.randint(1, most), most, most + 1])

    def check(self):
        charges = self.charges()
        cost, (now_us, now) = self.cost(charges), self.now()
        expected = self.model.check(charges, cost, now, self.clock_s)
        if len(charges) == 1 and self.rng.random() < 0.7:
            [(key, limit)] = charges
            got = [self.table.apply(key, limit, DECIDE[limit.algorithm], now_us, cost)]
        else:
            got = self.table.apply_each(bound(charges), now_us, [cost] * len(charges))
        self.compare(got, expected, charges)

    def hold(self):
        charges, number = self.charges(), self.rng.choice(NUMBERS)
        cost, (now_us, now) = self.cost(charges), self.now()
        ttl = self.rng.choice([1, 3, 10, 60])
        known = self.model.held.get(number)
        digest = b"a" * 8 if known is None else self.rng.choice([known.digest] * 3 + [b"b" * 8])
        hold = Hold(number, digest, bound(charges), now_us, cost, ttl * US_PER_S)
        expected = outcome_of(
            lambda: self.model.hold(number, digest, charges, cost, ttl, now, self.clock_s)
        )
        got = outcome_of(lambda: at_once(self.holds.hold(hold)))
        if isinstance(expected, type):
            assert got is expected
            self.met[
                "hold of another check" if digest != known.digest else "hold that is over"
            ] += 1
            return
        answers, end = expected
        is_known = self.model.held.get(number) is known is not None
        if is_known:
            assert [*got.names] == [KEYS.stored(name) for name in known.recorded]
            charges = [(name, self.limits[name]) for name in known.recorded]
        self.compare(got.outcomes, answers, charges)
        assert got.expire_us == end * US_PER_S
        self.met["repeated hold" if is_known else "hold" if end else "denied hold"] += 1
        self.met["hold on slots"] += bool(end) and any(
            limit.algorithm is Algorithm.CONCURRENCY for _, limit in charges
        )

    def settle(self):
        number = self.rng.choice([*self.model.held] or NUMBERS)
        known = self.model.held.get(number)
        cost = known.cost if known else 1
        actual = self.rng.choice([0, cost, self.rng.randint(0, cost), cost + 1, 3 * cost])
        if known is not None and known.actual is not None and self.rng.random() < 0.7:
            actual = known.actual
        limits = {KEYS.stored(name): self.limits[name] for name in known.recorded} if known else {}
        expected = outcome_of(lambda: self.model.settle(number, actual, self.clock_s))
        now_us = self.clock.now_us()
        got = outcome_of(lambda: at_once(self.holds.settle(number, limits, actual, now_us)))
        if isinstance(expected, type):
            assert got is expected
            self.met[expected.__name__] += 1
            return
        assert (got.known, got.is_first) == expected
        if got.is_first:
            self.met["settle of less" if actual < cost else "settle of more"] += actual != cost
            for name, outcome in zip(known.recorded, got.outcomes, strict=True):
                if name in known.charged and outcome is not None:
                    there = self.model.there(name, self.limits[name], self.clock_s, self.clock_s)
                    assert named(outcome) == there
                    self.met["told of a settle"] += 1
        self.met["repeated settle"] += got.known and not got.is_first

    def extend(self):
        number, ttl = self.rng.choice([*self.model.held] or NUMBERS), self.rng.choice([1, 5, 60])
        expected = outcome_of(lambda: self.model.extend(number, ttl, self.clock_s))
        now_us = self.clock.now_us()
        got = outcome_of(lambda: at_once(self.holds.extend(number, [], ttl * US_PER_S, now_us)))
        if isinstance(expected, Fraction):
            assert got == expected * US_PER_S
            self.met["extend"] += 1
        else:
            assert got is expected

    def edit(self):
        key, limit = self.rng.choice(list(self.limits.items()))
        number = self.rng.choice([1, 2, limit.limit, self.rng.randint(1, 2 * limit.limit)])
        self.limits[key] = self.with_burst(replace(limit, limit=number))
        self.met["edit"] += any(bucket.holds() for bucket in self.model.buckets.values())

    def reset(self):
        key = self.rng.choice(list(self.limits))
        value = self.table.remove(key)
        self.met["reset with holds"] += isinstance(value, held.HeldBucket) and len(value) > 0
        if value is not None and self.rng.random() < 0.3:
            self.table.put_back(key, value)
            self.met["failed reset"] += 1
            return
        self.model.reset(key)
        if self.snapshot is not None:
            asyncio.run(self.snapshot.reset([key]))

    def sweep(self):
        self.table.sweep(self.clock.now_us(), 4)

    def restart(self):
        asyncio.run(self.snapshot.drain())
        self.start()
        self.met["restart with holds"] += self.holds.in_flight > 0

    # Comparisons.

    def look(self):
        """Compare every bucket with the model."""
        now_us = self.clock.now_us()
        for key, limit in self.limits.items():
            for cost in (1, limit.capacity):
                charge = (key, limit, DECIDE[limit.algorithm])
                got = self.table.peek(*charge, now_us, cost)
                expected = self.model.judge(key, limit, cost, self.clock_s, self.clock_s)
                self.compare([got], [expected], [(key, limit)])
            bucket = self.model.buckets.get(key)
            if bucket is not None and bucket.charges:
                self.met["debt"] += bucket.spent(self.clock_s, limit) > limit.capacity
        # The numbers of holds in flight match, except for those that have just ended.
        open_holds = sum(
            one.actual is None and one.end > self.clock_s for one in self.model.held.values()
        )
        assert open_holds <= self.holds.in_flight

    def compare(self, got, expected, charges):
        for one, answer, (_, limit) in zip(got, expected, charges, strict=True):
            assert (one and comparable(named(one), limit)) == (answer and comparable(answer, limit)), (
                self.what, limit, one, answer
            )  # fmt: skip


def named(outcome):
    return (*outcome[:4], outcome[4].name)


def comparable(answer, limit):
    """Return the comparable part of an answer.

    A check that takes the last token of a log may get the retry delay of a run without tokens. If no slot is in use,
    the answer is as of the time of the check or of that of the node.
    """
    if limit.algorithm is Algorithm.CONCURRENCY and answer[1] == limit.limit:
        return (*answer[:2], 0, *answer[3:])
    if limit.algorithm is Algorithm.SLIDING_WINDOW and answer[0] and answer[3]:
        return (*answer[:3], 1, answer[4])
    return answer


def bound(charges):
    return [(key, limit, DECIDE[limit.algorithm]) for key, limit in charges]


def outcome_of(call):
    try:
        return call()
    except ERRORS as error:
        return type(error)


def at_once(coroutine):
    """Run a coroutine that never waits, as on a node's own buckets."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError


def live(seed, met, directory=None):
    world = World(random.Random(seed), met, directory)
    for _ in range(STEPS):
        world.step()
        world.look()
    if world.snapshot is not None:
        world.restart()
        world.look()
        asyncio.run(world.snapshot.drain())


CASES = {
    "hold", "denied hold", "repeated hold", "hold of another check", "hold that is over", "hold on slots",
    "settle of less", "settle of more", "repeated settle", "told of a settle", "HoldEndedError", "HoldSettledError",
    "extend", "edit", "reset with holds", "failed reset", "debt",
}  # fmt: skip


@pytest.fixture
def _fast_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda _fd: None)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 100),
        *(pytest.param(first, 400, marks=pytest.mark.deep) for first in range(100, 2_100, 400)),
    ],
)
def test_sequences_of_holds_checks_and_edits_match_the_fraction_model(first, count):
    met = live_all(range(first, first + count))
    assert {case for case in CASES if met[case] < 5} == set(), met


@pytest.mark.deep
@pytest.mark.usefixtures("_fast_disk")
def test_hold_sequences_match_the_fraction_model_across_restarts(tmp_path):
    assert live_over_restarts(tmp_path, range(10_000, 10_150)) > 50


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("_fast_disk")
def test_200_000_sequences_match_the_fraction_model(tmp_path):
    sequences = int(os.environ.get("SIMULATION_SEEDS", "200000"))
    met = live_all(range(100_000, 100_000 + sequences))
    live_over_restarts(tmp_path, range(100_000, 100_000 + sequences // 40))
    assert min(met[case] for case in CASES) >= sequences // 100, met


def live_all(seeds):
    met = Counter()
    for seed in seeds:
        live(seed, met)
    return met


def live_over_restarts(tmp_path, seeds):
    met = Counter()
    for seed in seeds:
        directory = tmp_path / str(seed)
        directory.mkdir()
        live(seed, met, directory)
        shutil.rmtree(directory)
    return met["restart with holds"]


def settled_by_what_is_lacking_now(bucket, number, more):
    """Give back even tokens that have been refilled since."""
    if number in bucket.numbers():
        bucket._replay.remove(number, 0)
        bucket._level = max(0, bucket._level + more * held._unit(bucket.limit))
        bucket._replay = bucket._replay or None


def settled_for_the_latest(bucket, number, more):
    """Remove tokens from the log that were charged after the hold."""
    at_us = bucket._at_us.pop(number, None)
    if at_us is not None and more < 0:
        bucket._log, _ = sliding_window.removed(bucket._log, 2**62, -more)
    elif at_us is not None and more > 0:
        bucket._log = sliding_window.entered(bucket._log, bucket.limit, [(at_us, more)])


TWINS = {
    "a level without its past": (held.LevelBucket, "settle", settled_by_what_is_lacking_now),
    "the latest of a log": (held.LogBucket, "settle", settled_for_the_latest),
    "an edit caps nothing that is replayed": (held.LevelBucket, "_most", lambda _, __: NEVER),
    "slots of the time of a check": (held.SlotsBucket, "_decide", staticmethod(concurrency.decide)),
    "a slot that is not freed": (held.SlotsBucket, "settle", lambda *_: None),
    "a bucket in debt is given back": (
        held.LevelBucket,
        "fits_table",
        property(lambda one: not len(one)),
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("twin", TWINS)
def test_wrong_variants_are_detected(twin, monkeypatch):
    monkeypatch.setattr(*TWINS[twin])
    with pytest.raises(AssertionError):
        live_all(range(2_000))
