import math
import random
from fractions import Fraction
from functools import partial

import pytest

from ratelimitd.algorithms import concurrency
from ratelimitd.algorithms.concurrency import Slots
from ratelimitd.model import INT32_MAX, Algorithm, Reason
from tests.outcomes import Outcome, named, rule_of

decide, held = named(concurrency.decide), named(concurrency.held)
rule = partial(rule_of, Algorithm.CONCURRENCY)

T_S = 1_700_006_400
T = T_S * 1_000_000
SECOND = 1_000_000


def slots(**ends):
    """Return slots of the named holds, each with the seconds until its end."""
    state = Slots()
    for name, end_s in ends.items():
        state.take(name.encode(), T + round(end_s * SECOND))
    return state


def test_a_check_reports_the_free_slots_and_takes_none():
    assert decide(None, rule(3), T + 1, 1) == Outcome(
        allowed=True,
        remaining=3,
        reset_time=T_S + 1,
        retry_after=0,
        reason=Reason.WITHIN_LIMIT,
        state=None,
    )
    state = slots(a=5.5, b=9.5)
    expected = Outcome(
        allowed=True,
        remaining=1,
        reset_time=T_S + 10,
        retry_after=0,
        reason=Reason.WITHIN_LIMIT,
        state=state,
    )
    assert decide(state, rule(3), T, 1) == expected
    assert decide(state, rule(3), T, 1) == expected


def test_a_check_without_a_free_slot_waits_for_the_first_end():
    state = slots(a=5.5, b=9.5)
    outcome = decide(state, rule(2), T, 1)
    assert outcome == (False, 0, T_S + 10, 6, Reason.LIMIT_EXCEEDED, state)


@pytest.mark.parametrize("cost", [1, 3, INT32_MAX, INT32_MAX + 1])
def test_the_cost_of_a_check_does_not_matter(cost):
    assert decide(slots(a=5), rule(2), T, cost).allowed
    assert decide(slots(a=5, b=5), rule(2), T, cost).reason is Reason.LIMIT_EXCEEDED
    assert decide(None, rule(2), T, cost).allowed


def test_under_a_lowered_limit_a_check_waits_for_several_ends():
    assert decide(slots(a=1, b=2, c=3, d=4), rule(2), T, 1).retry_after == 3


def test_a_slot_is_in_use_until_its_end():
    state = slots(a=5, b=9)
    assert not decide(state, rule(2), T + 5 * SECOND - 1, 1).allowed
    assert decide(state, rule(2), T + 5 * SECOND, 1).remaining == 1
    assert decide(state, rule(2), T + 9 * SECOND, 1)[:3] == (True, 2, T_S + 9)


def test_a_hold_reports_the_free_slots_after_it():
    assert held(slots(a=5, b=9), rule(3), T)[:4] == (True, 1, T_S + 9, 0)
    assert held(slots(a=5, b=9), rule(2), T)[:4] == (True, 0, T_S + 9, 5)


def test_a_hold_has_one_slot_however_often_it_takes_it():
    state = slots(a=5)
    state.take(b"a", T + 9 * SECOND)
    assert (len(state), b"a" in state) == (1, True)
    assert decide(state, rule(1), T, 1).retry_after == 9


def test_a_slot_is_freed_once():
    state = slots(a=5, b=5, c=5)
    assert state.free(b"b")
    assert not state.free(b"b")
    assert (state.items(), b"b" in state) == (
        [(T + 5 * SECOND, b"a"), (T + 5 * SECOND, b"c")],
        False,
    )


def test_ended_slots_are_freed_together():
    state = slots(a=5, b=6, c=7)
    state.expire(T + 6 * SECOND)
    assert state.items() == [(T + 7 * SECOND, b"c")]
    assert len(state) == 1


def test_the_retry_delay_is_clamped_to_the_contracts_int32():
    state = slots(a=2 * INT32_MAX)
    assert decide(state, rule(1), T, 1).retry_after == INT32_MAX


class Model:
    """The holds with a slot, and their ends, in seconds."""

    def __init__(self):
        self.ends = {}

    def check(self, limit, now_us):
        now = Fraction(now_us, SECOND)
        ends = sorted(end for end in self.ends.values() if end > now)
        free = limit - len(ends)
        reset = math.ceil(max([now, *ends]))
        if free > 0:
            return (True, free, reset, 0)
        waits = [end for end in ends if sum(other > end for other in ends) < limit]
        return (False, 0, reset, math.ceil(min(waits) - now))


def test_random_holds_and_checks_match_a_list_of_ends():
    rng = random.Random(1)
    for _ in range(60):
        state, model, now_us = Slots(), Model(), T
        for _ in range(60):
            now_us += rng.choice([0, 0, 1, rng.randrange(3 * SECOND)])
            number = bytes([rng.randrange(12)])
            step = rng.random()
            if step < 0.5:
                end_us = now_us + rng.choice([SECOND, 2 * SECOND, rng.randrange(9 * SECOND)])
                state.take(number, end_us)
                model.ends[number] = Fraction(end_us, SECOND)
            elif step < 0.7:
                assert state.free(number) == (model.ends.pop(number, None) is not None)
            elif step < 0.8:
                state.expire(now_us)
                now = Fraction(now_us, SECOND)
                model.ends = {one: end for one, end in model.ends.items() if end > now}
            limit = rng.randint(1, 9)
            assert decide(state, rule(limit), now_us, 1)[:4] == model.check(limit, now_us)
            assert (len(state), number in state) == (len(model.ends), number in model.ends)
