"""Checks that wait for the shared state: answers, batches and deadlines."""

import asyncio

import pytest

from ratelimitd.cluster.pending import (
    Bucket,
    Deadlines,
    PendingCheck,
    Requested,
    granted,
    refused,
)
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.model import COST_EXCEEDS_LIMIT, LIMIT_EXCEEDED, WITHIN_LIMIT
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import (
    MS,
    NO_TAG,
    SECOND,
    ManualTimers,
    limited,
    name_of,
    state,
)

NOW_US = 1_700_006_400 * SECOND
END_S = 1_700_006_400 + 3_600
RULE = limited(10)


def waiting(cost=1, **options):
    """A check that waits."""
    answer = asyncio.get_running_loop().create_future()
    return PendingCheck(RULE, NOW_US, cost, peek=False, answer=answer, **options)


@pytest.fixture
def bucket():
    return Bucket(b"a", name_of(b"a"), NO_TAG, RULE, state(5, NOW_US, limit=10))


async def test_a_check_is_answered_once():
    one = waiting()
    error = StoreUnavailableError("no answer")
    one.resolve(error)
    one.resolve(StoreUnavailableError("again"))
    assert one.answer.result() is error


async def test_a_check_whose_caller_left_is_not_answered():
    one = waiting()
    one.answer.cancel()
    one.resolve(StoreUnavailableError("no answer"))
    one.fail(ValueError("defect"))
    assert one.answer.cancelled()


async def test_an_unexpected_error_is_raised_in_the_caller():
    one = waiting()
    one.fail(ValueError("defect"))
    with pytest.raises(ValueError, match="defect"):
        await one.answer


@pytest.mark.parametrize(
    ("spent", "later", "left", "retry_after"),
    [(4, 0, 6, 0), (10, 3, 3, 0), (10, 0, 0, 3_600)],
    ids=["alone", "before others", "of the last token"],
)
def test_a_grant_reports_remaining_tokens_reset_and_delay(spent, later, left, retry_after):
    view = LocalView(RULE, state(spent, NOW_US, limit=10))
    expected = True, left, END_S, retry_after, WITHIN_LIMIT
    assert granted(view, NOW_US, later)[:5] == expected


def test_a_grant_under_the_largest_limit_is_correct():
    view = LocalView(limited(2**31 - 1), state(0, NOW_US, limit=2**31 - 1))
    assert granted(view, NOW_US, 0)[:2] == (True, 2**31 - 1)


def test_a_denial_uses_the_current_view_and_stays_one_if_tokens_suffice_by_now():
    view = LocalView(RULE, state(8, NOW_US, limit=10))
    assert refused(view, NOW_US, 3)[:5] == (False, 2, END_S, 3_600, LIMIT_EXCEEDED)
    assert refused(view, NOW_US, 11)[4] is COST_EXCEEDS_LIMIT
    assert refused(view, NOW_US, 2)[:5] == (False, 2, END_S, 1, LIMIT_EXCEEDED)


# Checks in a batch


async def test_a_check_waits_for_a_batch_and_gets_its_result(bucket):
    asked, first, second, third = Requested(), waiting(2), waiting(4), waiting(1)
    assert (asked.are_waiting, asked.are_taken) == (False, False)
    for one in (first, second, third):
        asked.wait(bucket, one)
    assert (asked.are_waiting, asked.are_taken, bucket.view.asked_tokens) == (True, False, 7)
    asked.take(bucket)
    bucket.view.freeze()
    assert (asked.are_waiting, asked.are_taken) == (False, True)
    bucket.view.acknowledge(state(8, NOW_US + 1, limit=10))
    asked.decide(bucket, (True, False, True))
    assert first.answer.result()[:2] == (True, 3)  # before the third, that is
    assert second.answer.result()[:2] == (False, 2)
    assert third.answer.result()[:2] == (True, 2)
    assert not asked.are_taken


def test_a_bucket_without_waiting_checks_takes_and_decides_nothing(bucket):
    asked = Requested()
    asked.take(bucket)
    asked.decide(bucket, ())
    assert not asked.are_taken


async def test_a_check_can_be_withdrawn_until_a_batch_takes_it(bucket):
    asked, first, second = Requested(), waiting(), waiting()
    asked.wait(bucket, first)
    asked.wait(bucket, second)
    asked.withdraw(bucket, first)
    assert (bucket.view.asked_tokens, asked.are_waiting) == (1, True)
    asked.withdraw(bucket, second)
    assert (bucket.view.asked_tokens, asked.are_waiting) == (0, False)
    asked.withdraw(bucket, second)
    asked.wait(bucket, first)
    asked.take(bucket)
    asked.withdraw(bucket, first)
    assert (bucket.view.asked_tokens, asked.are_taken) == (1, True)


@pytest.mark.parametrize(("charged", "grant"), [(True, True), (False, True), (True, False)])
async def test_a_late_grant_pays_for_the_charge_of_the_view(bucket, charged, grant):
    asked, late = Requested(), waiting()
    asked.wait(bucket, late)
    asked.take(bucket)
    bucket.view.freeze()
    if charged:
        assert bucket.view.check_alone(NOW_US, 1)[0]
    late.charged = charged
    late.resolve(None)
    bucket.view.acknowledge(state(5, NOW_US + 1, limit=10))
    asked.decide(bucket, (grant,))
    assert late.answer.result() is None
    assert bucket.view.unsent.tokens == (charged and not grant)


async def test_the_checks_of_a_dropped_batch_are_forgotten(bucket):
    asked = Requested()
    asked.wait(bucket, waiting())
    asked.take(bucket)
    asked.forget_taken()
    assert not asked.are_taken


# Deadlines


class Scene:
    def __init__(self):
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.given_up, self.refused = [], None
        self.deadlines = Deadlines(self.clock, self.timers, 0.02, self._give_up)

    def _give_up(self, bucket, check):
        if bucket == self.refused:
            raise RuntimeError
        self.given_up.append((bucket, self.clock.monotonic_us() // MS))
        if not check.answer.done():
            check.answer.set_result(None)

    def wait(self, name, within_us=None):
        by = {} if within_us is None else {"answer_by_us": self.clock.monotonic_us() + within_us}
        check = waiting(**by)
        self.deadlines.add(name, check)
        return check.answer


@pytest.fixture
async def scene():
    return Scene()


async def test_a_check_times_out_after_20_ms(scene):
    scene.wait("first")
    scene.timers.run(20 * MS - 1)
    assert scene.given_up == []
    scene.timers.run(1)
    assert scene.given_up == [("first", 20)]


async def test_each_check_has_its_own_20_ms(scene):
    scene.wait("first")
    scene.timers.run(7 * MS)
    scene.wait("second")
    scene.wait("third")
    scene.timers.run(100 * MS)
    assert scene.given_up == [("first", 20), ("second", 27), ("third", 27)]


async def test_a_check_times_out_earlier_for_a_caller_who_waits_less(scene):
    scene.wait("first")
    scene.wait("third", 15 * MS)
    scene.timers.run(2 * MS)
    scene.wait("second", 3 * MS)
    scene.wait("last", 30 * MS)
    scene.wait("at once", -1)
    scene.timers.run(100 * MS)
    assert scene.given_up == [
        ("at once", 2), ("second", 5), ("third", 15), ("first", 20), ("last", 22)
    ]  # fmt: skip


async def test_an_answered_check_does_not_time_out_but_an_abandoned_one_does(scene):
    answered, left, _late = scene.wait("answered"), scene.wait("left"), scene.wait("late")
    answered.set_result(None)
    left.cancel()
    scene.timers.run(100 * MS)
    assert scene.given_up == [("left", 20), ("late", 20)]


async def test_an_answered_check_does_not_delay_those_behind_it(scene):
    answered = scene.wait("answered")
    scene.timers.run(10 * MS)
    scene.wait("late")
    answered.set_result(None)
    scene.timers.run(100 * MS)
    assert scene.given_up == [("late", 30)]


async def test_a_new_check_starts_the_timer_after_all_were_answered(scene):
    scene.wait("first").set_result(None)
    scene.timers.run(100 * MS)
    scene.wait("second")
    scene.timers.run(100 * MS)
    assert scene.given_up == [("second", 120)]


async def test_answered_checks_need_no_timer(scene):
    for _ in range(100):
        scene.wait("quick").set_result(None)
        scene.timers.run(100)
    scene.timers.run(100 * MS)
    assert scene.given_up == []
    assert scene.timers.set_total == 1


async def test_a_failing_timeout_does_not_block_the_others(scene):
    scene.wait("first")
    scene.wait("second")
    scene.refused = "first"
    with pytest.raises(RuntimeError):
        scene.timers.run(20 * MS)
    scene.timers.run()
    assert scene.given_up == [("second", 20)]
    scene.wait("third")
    scene.timers.run(20 * MS)
    assert scene.given_up == [("second", 20), ("third", 40)]
