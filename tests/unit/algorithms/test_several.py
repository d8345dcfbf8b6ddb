from dataclasses import replace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import decide_all, deciding, passes, wait_ms
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import MAX_TIME_US, Algorithm, Enforcement, Limit, Reason

NOW_US = 1_700_006_400_000_000
NOW_S = NOW_US // 10**6
MINUTE = Limit(limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
HOUR = replace(MINUTE, limit=10, window_seconds=3_600)


def decided(*given, cost=1):
    buckets = [(state, limit, DECIDE[limit.algorithm]) for state, limit in given]
    return decide_all(buckets, NOW_US, [cost] * len(buckets))


def test_a_check_that_every_limit_allows_charges_all():
    outcomes = decided((None, MINUTE), ((4, NOW_US), HOUR), cost=2)
    assert passes([MINUTE, HOUR], outcomes)
    assert [(outcome[1], outcome[5]) for outcome in outcomes] == [
        (1, (2, NOW_US)),
        (4, (6, NOW_US)),
    ]


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_if_one_limit_denies_the_others_report_their_tokens_and_are_not_charged(algorithm):
    spare = replace(HOUR, algorithm=algorithm)
    [(_, _, _, _, _, state)] = decided((None, spare), cost=4)
    allows, denies = decided((state, spare), ((2, NOW_US), MINUTE), cost=2)
    assert not passes([spare, MINUTE], [allows, denies])
    assert allows[:2] == (True, 6)
    assert allows[3:5] == (0, Reason.WITHIN_LIMIT)
    assert allows[5] is state
    assert denies[:2] == (False, 1)
    assert denies[4] is Reason.LIMIT_EXCEEDED


def test_an_unused_bucket_stays_unused():
    allows, _ = decided((None, HOUR), ((3, NOW_US), MINUTE))
    assert allows == (True, 10, NOW_S + 3_600, 0, Reason.WITHIN_LIMIT, None)


def outcome(*, allowed, remaining=0, retry_after=0):
    return (allowed, remaining, NOW_S, retry_after, Reason.WITHIN_LIMIT, None)


@pytest.mark.parametrize(
    ("outcomes", "first"),
    [
        ([outcome(allowed=True, remaining=1), outcome(allowed=True, remaining=3)], 1),
        ([outcome(allowed=True, remaining=1), outcome(allowed=True, remaining=4)], 0),
        ([outcome(allowed=True, remaining=0), outcome(allowed=True, remaining=0)], 0),
        ([outcome(allowed=True, remaining=0), outcome(allowed=False, retry_after=1)], 1),
        ([outcome(allowed=False, retry_after=1), outcome(allowed=True, remaining=0)], 0),
        ([outcome(allowed=False, retry_after=9), outcome(allowed=False, retry_after=10)], 1),
        ([outcome(allowed=False, retry_after=9), outcome(allowed=False, retry_after=9)], 0),
    ],
)
def test_the_longest_retry_delay_or_the_smallest_remaining_part_decides(outcomes, first):
    assert deciding([MINUTE, HOUR], outcomes) == first
    assert passes([MINUTE, HOUR], outcomes) == all(found[0] for found in outcomes)


class TestObserving:
    OBSERVED = replace(MINUTE, enforcement=Enforcement.OBSERVE)

    def test_a_denial_of_an_observing_limit_denies_nothing_and_charges_the_others(self):
        observed, hour = decided(((3, NOW_US), self.OBSERVED), (None, HOUR))
        assert (observed[:2], observed[5]) == ((False, 0), (3, NOW_US))
        assert (hour[:2], hour[5]) == ((True, 9), (1, NOW_US))
        assert passes([self.OBSERVED, HOUR], [observed, hour])
        assert deciding([self.OBSERVED, HOUR], [observed, hour]) == 1

    def test_an_observing_limit_is_not_charged_if_an_enforced_limit_denies(self):
        observed, hour = decided(((1, NOW_US), self.OBSERVED), ((10, NOW_US), HOUR))
        assert (observed[:2], observed[5]) == ((True, 2), (1, NOW_US))
        assert not hour[0]
        assert not passes([self.OBSERVED, HOUR], [observed, hour])

    def test_an_observing_limit_decides_if_no_limit_is_enforced(self):
        more = replace(HOUR, enforcement=Enforcement.OBSERVE)
        outcomes = decided(((2, NOW_US), more), ((3, NOW_US), self.OBSERVED))
        assert passes([more, self.OBSERVED], outcomes)
        assert deciding([more, self.OBSERVED], outcomes) == 1

    def test_of_observing_limits_alone_the_smallest_remaining_part_decides_as_of_any_allowed_check(
        self,
    ):
        more = replace(HOUR, enforcement=Enforcement.OBSERVE)
        outcomes = decided((None, self.OBSERVED), ((5, NOW_US), more), cost=4)
        assert [found[:2] for found in outcomes] == [(False, 3), (True, 1)]
        assert deciding([self.OBSERVED, more], outcomes) == 1


def test_the_remaining_part_is_relative_to_the_burst():
    steady = Limit(limit=3, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET)
    bursting = replace(steady, burst=30)
    outcomes = [outcome(allowed=True, remaining=2), outcome(allowed=True, remaining=15)]
    assert deciding([steady, bursting], outcomes) == 1
    assert deciding([steady, steady], outcomes) == 0
    assert deciding([steady, steady, bursting], [*outcomes, outcomes[0]]) == 2
    assert deciding([steady, bursting, steady], [*outcomes, outcomes[0]]) == 1


class TestWaiting:
    SECOND = Limit(limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=1)
    MINUTE = replace(SECOND, window_seconds=60, name="minute")
    USED_UP = (SECOND.window_us, NOW_US)
    MINUTE_USED_UP = (MINUTE.window_us, NOW_US)

    def wait(self, *given, cost=1, now_us=NOW_US, most_ms=60_000):
        buckets = [(state, limit, DECIDE[limit.algorithm]) for state, limit in given]
        return wait_ms(buckets, now_us, cost, most_ms)

    def test_the_wait_is_that_of_the_slowest_bucket(self):
        second, minute = (self.USED_UP, self.SECOND), (self.MINUTE_USED_UP, self.MINUTE)
        assert self.wait(second) == 100
        assert self.wait(second, minute) == self.wait(minute, second) == 6_000
        assert self.wait((None, self.SECOND), (None, self.MINUTE)) == 0

    def test_a_wait_is_rounded_up_and_never_longer_than_allowed(self):
        spent = (self.SECOND.window_us, NOW_US - 999)
        assert self.wait((spent, self.SECOND)) == 100
        assert self.wait((spent, self.SECOND), most_ms=100) == 100
        assert self.wait((spent, self.SECOND), most_ms=99) == 0

    def test_a_cost_that_never_passes_does_not_wait(self):
        assert self.wait((self.USED_UP, self.SECOND), cost=2) == 0

    def test_windows_do_not_wait_and_observing_limits_cause_no_wait(self):
        assert self.wait((self.USED_UP, self.SECOND), (None, HOUR)) == 0
        observed = replace(self.MINUTE, enforcement=Enforcement.OBSERVE)
        assert self.wait((self.USED_UP, self.SECOND), (self.MINUTE_USED_UP, observed)) == 100
        observed = replace(HOUR, enforcement=Enforcement.OBSERVE)
        assert self.wait((self.USED_UP, self.SECOND), (None, observed)) == 100

    def test_no_wait_ends_after_the_latest_supported_time(self):
        spent = (self.SECOND.window_us, MAX_TIME_US)
        assert self.wait((spent, self.SECOND), now_us=MAX_TIME_US) == 0
