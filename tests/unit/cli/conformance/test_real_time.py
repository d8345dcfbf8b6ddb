"""Which cases can run on a server's clock, and the due times of their checks."""

import random

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cli.conformance.cases import Answer, cases, left_out, timetable

S = 1_000_000
LONGEST_US = 30 * S
TOLERANCE_US = 20_000
NOW_US = 1_795_000_000_123_456


def named(start):
    return next(case for case in cases() if case.name.startswith(start))


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("a late timestamp never reorders", "its time goes back"),
        ("a day", "it takes longer"),
        ("the largest limit and cost", "it depends on moments"),
        ("limit 1 allows one", ""),
    ],
)
def test_case_is_left_out_with_the_reason(start, why):
    assert left_out(named(start), LONGEST_US, TOLERANCE_US) == why


def test_duration_of_a_case_includes_the_wait_for_its_window():
    case = named("windows are aligned")
    took_us = case.steps[-1].at_us - case.steps[0].at_us
    assert left_out(case, took_us + 7 * S, TOLERANCE_US) == ""
    assert left_out(case, took_us + 7 * S - 1, TOLERANCE_US) == "it takes longer"


def test_first_check_is_due_at_the_next_equal_place_in_a_window():
    case = named("windows are aligned")
    first = timetable(case, NOW_US, TOLERANCE_US)[0]
    assert NOW_US <= first.at_us < NOW_US + 7 * S
    assert first.at_us % (7 * S) == case.steps[0].at_us % (7 * S)
    assert first.expected.reset_time - first.at_us // S == 6


def test_further_checks_are_due_a_tolerance_later_each_and_uncertain_denials_are_omitted():
    case = named("refill lands exactly on the microsecond")
    start_us = case.steps[0].at_us + 5 * S
    due = timetable(case, start_us, TOLERANCE_US)
    assert [(check.at_us - start_us, check.cost) for check in due] == [
        (0, 10),
        (100_000 + TOLERANCE_US, 1),
        (200_000 + 2 * TOLERANCE_US, 1),
    ]
    assert all(check.expected.allowed for check in due)
    assert due[0].expected == case.steps[0].expected.later(5)


@pytest.mark.parametrize(
    "case", [case for case in cases() if not left_out(case, LONGEST_US, TOLERANCE_US)], ids=str
)
def test_correct_server_passes_with_any_arrivals_within_the_tolerance(case):
    chance = random.Random(case.name)
    decide, rule = DECIDE[case.algorithm], case.rule("/")
    checks = timetable(case, NOW_US, TOLERANCE_US)
    for _ in range(50):
        state = None
        for due in checks:
            at_us = due.at_us + chance.choice([0, TOLERANCE_US, chance.randint(0, TOLERANCE_US)])
            *told, reason, state = decide(state, rule, at_us, due.cost)
            got = Answer(*told, reason.name, rule.limit, rule.window_seconds)
            assert due.expected.differences(got, tolerance_s=1) == []
