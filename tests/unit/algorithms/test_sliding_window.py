import random
from array import array
from functools import partial

import pytest

from ratelimitd.algorithms import sliding_window
from ratelimitd.algorithms.sliding_window import MAX_RUNS, MAX_SUM
from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    Algorithm,
    Reason,
)
from tests.outcomes import Outcome, named, rule_of, runs_of

decide = named(sliding_window.decide)
rule = partial(rule_of, Algorithm.SLIDING_WINDOW)

T_S = 1_700_006_400
T = T_S * 1_000_000
SECOND = 1_000_000


def spend(a_rule, at_us, cost, state=None):
    outcome = decide(state, a_rule, at_us, cost)
    assert outcome.allowed
    return outcome.state


def log(*runs, base=0):
    """Return the state of runs (time, count) with running sums from ``base`` on."""
    sums = [base]
    for _, count in runs:
        sums.append(sums[-1] + count)
    return array("q", [at_us for at_us, _ in runs] + sums).tobytes()


def test_a_log_starts_empty():
    assert decide(None, rule(10, 60), T, 3) == Outcome(
        allowed=True,
        remaining=7,
        reset_time=T_S + 60,
        retry_after=0,
        reason=Reason.WITHIN_LIMIT,
        state=log((T, 3)),
    )


def test_checks_at_one_time_are_one_run():
    state = spend(rule(10, 60), T, 2)
    state = spend(rule(10, 60), T, 3, state)
    state = spend(rule(10, 60), T + 1, 1, state)
    assert state == log((T, 5), (T + 1, 1))


def test_an_entry_leaves_exactly_one_window_later_and_not_a_microsecond_earlier():
    state = spend(rule(1, 60), T, 1)
    assert not decide(state, rule(1, 60), T + 60 * SECOND - 1, 1).allowed
    assert spend(rule(1, 60), T + 60 * SECOND, 1, state) == log((T + 60 * SECOND, 1))


def test_there_is_no_burst_at_a_boundary():
    state = spend(rule(10, 60), T - 1, 10)
    assert not decide(state, rule(10, 60), T, 1).allowed
    assert not decide(state, rule(10, 60), T + 59 * SECOND, 1).allowed


def test_a_denied_check_changes_nothing_even_when_entries_have_expired():
    state = log((T, 1), (T + SECOND, 9))
    outcome = decide(state, rule(9, 60), T + 60 * SECOND, 1)
    assert not outcome.allowed
    assert outcome.state is state


def test_an_accepted_check_drops_expired_entries():
    state = log((T, 1), (T + SECOND, 2), (T + 2 * SECOND, 3))
    after = spend(rule(10, 60), T + 61 * SECOND, 4, state)
    assert runs_of(after) == [(T + 2 * SECOND, 3), (T + 61 * SECOND, 4)]


def test_a_denied_check_waits_for_its_own_cost():
    state = log((T, 2), (T + 10 * SECOND, 3), (T + 20 * SECOND, 5))
    now_us = T + 30 * SECOND
    for cost, waits_s in ((1, 30), (2, 30), (3, 40), (5, 40), (6, 50), (10, 50)):
        outcome = decide(state, rule(10, 60), now_us, cost)
        assert outcome[:5] == (False, 0, T_S + 80, waits_s, Reason.LIMIT_EXCEEDED)
        assert not decide(state, rule(10, 60), now_us + waits_s * SECOND - 1, cost).allowed
        assert decide(state, rule(10, 60), now_us + waits_s * SECOND, cost).allowed


@pytest.mark.parametrize("gone", range(10))
def test_the_retry_delay_depends_only_on_entries_in_the_window(gone):
    state = log(*((T + number * SECOND, 1) for number in range(10)), base=7)
    now_us = T + (60 + gone) * SECOND - 1
    for cost in range(gone + 1, 11):
        waited = decide(state, rule(10, 60), now_us, cost)
        assert not waited.allowed
        assert waited.retry_after == cost - gone
        assert decide(state, rule(10, 60), now_us + waited.retry_after * SECOND, cost).allowed


def test_the_last_token_reports_the_time_of_the_next_one():
    state = log((T, 2), (T + 10 * SECOND, 3))
    outcome = decide(state, rule(10, 60), T + 30 * SECOND, 5)
    assert outcome[:5] == (True, 0, T_S + 90, 30, Reason.WITHIN_LIMIT)
    assert decide(None, rule(10, 60), T, 10).retry_after == 60


def test_when_all_entries_have_expired_the_next_token_comes_from_the_new_one():
    state = log((T, 2))
    assert decide(state, rule(2, 60), T + 90 * SECOND, 2)[:4] == (True, 0, T_S + 150, 60)


@pytest.mark.parametrize(
    ("runs", "oldest_s"),
    [(((T, 0),), 30), (((T, 0), (T + 10 * SECOND, 1)), 10), (((T - 40 * SECOND, 1), (T, 0)), 30)],
)
def test_the_retry_delay_ignores_a_run_without_tokens(runs, oldest_s):
    now_us = T + 30 * SECOND
    taken = decide(log(*runs, base=7), rule(2, 60), now_us, 2 - (oldest_s == 10))
    assert taken[:2] == (True, 0)
    assert taken.retry_after == oldest_s + 60 - 30
    waited_us = now_us + taken.retry_after * SECOND
    assert not decide(taken.state, rule(2, 60), waited_us - 1, 1).allowed
    assert decide(taken.state, rule(2, 60), waited_us, 1).allowed


@pytest.mark.parametrize(
    "runs",
    [((T, 2), (T + SECOND, 0)), ((T - SECOND, 1), (T, 1), (T + SECOND, 0), (T + 2 * SECOND, 0))],
)
def test_the_reset_time_of_a_denial_ignores_later_runs_without_tokens(runs):
    denied = decide(log(*runs, base=7), rule(2, 60), T + 30 * SECOND, 1)
    assert denied[:3] == (False, 0, T_S + 60)


def test_a_cost_above_the_limit_never_passes_and_gets_the_window_as_retry_delay():
    above, state = Reason.COST_EXCEEDS_LIMIT, log((T, 8))
    assert decide(None, rule(10, 60), T + 1, 11) == (False, 10, T_S + 1, 60, above, None)
    assert decide(state, rule(10, 60), T, 11) == (False, 2, T_S + 60, 60, above, state)
    later_us = T + 70 * SECOND
    assert decide(state, rule(10, 60), later_us, 11) == (False, 10, T_S + 70, 60, above, state)


def test_a_late_check_is_entered_at_the_latest_time():
    state = spend(rule(3, 60), T, 1)
    state = spend(rule(3, 60), T - 100 * SECOND, 1, state)
    assert state == log((T, 2))
    outcome = decide(state, rule(2, 60), T - 100 * SECOND, 1)
    assert outcome[:5] == (False, 0, T_S + 60, 160, Reason.LIMIT_EXCEEDED)


def test_a_raised_limit_keeps_the_spends():
    state = spend(rule(10, 60), T, 10)
    assert decide(state, rule(15, 60), T, 5)[:2] == (True, 0)


def test_a_lowered_limit_applies_at_once_and_denies_no_longer_than_its_window():
    state = log((T, 20), (T + SECOND, 20), (T + 2 * SECOND, 20))
    outcome = decide(state, rule(30, 60), T + 3 * SECOND, 1)
    assert outcome[:5] == (False, 0, T_S + 62, 58, Reason.LIMIT_EXCEEDED)
    assert not decide(state, rule(30, 60), T + 61 * SECOND - 1, 1).allowed
    assert decide(state, rule(30, 60), T + 61 * SECOND, 10).allowed
    assert decide(state, rule(30, 60), T + 62 * SECOND, 30).allowed


def test_delays_are_clamped_to_the_contracts_int32():
    a_rule = rule(1, INT32_MAX)
    state = spend(a_rule, T, 1)
    assert decide(state, a_rule, T - 10 * SECOND, 1).retry_after == INT32_MAX
    state = log((T, 1))
    assert decide(state, rule(2, INT32_MAX), T - 10 * SECOND, 1).retry_after == INT32_MAX


def test_the_extremes_of_time_and_cost_fit():
    a_rule = rule(INT32_MAX, INT32_MAX)
    state = spend(a_rule, 0, INT32_MAX)
    assert not decide(state, a_rule, INT32_MAX * SECOND - 1, 1).allowed
    assert spend(a_rule, MAX_TIME_US, INT32_MAX, state) == log((MAX_TIME_US, INT32_MAX))


def test_sums_are_rebased_before_they_exceed_64_bits():
    near = 2**62 - 5
    state = log((T, 3), (T + 1, 1), base=near)
    after = spend(rule(100, 60), T + 2, 1, state)
    assert after == log((T, 3), (T + 1, 1), (T + 2, 1), base=near)  # 2^62 itself is still kept
    after = spend(rule(100, 60), T + 3, 1, after)
    assert after == log((T, 3), (T + 1, 1), (T + 2, 1), (T + 3, 1))


def test_sums_are_rebased_when_the_last_run_grows():
    state = log((T, 3), base=2**62 - 3)
    assert spend(rule(100, 60), T, 1, state) == log((T, 4))


def test_a_log_of_the_maximum_of_runs_is_not_merged_when_its_sums_are_rebased():
    runs = [(T + number, 1) for number in range(MAX_RUNS)]
    state = log(*runs, base=2**62 - MAX_RUNS)
    after = spend(rule(2 * MAX_RUNS, 60), T + MAX_RUNS - 1, 1, state)
    assert runs_of(after) == [*runs[:-1], (T + MAX_RUNS - 1, 2)]


def test_answers_do_not_depend_on_the_base_of_the_sums():
    rng = random.Random(1)
    for _ in range(200):
        runs = [(T + number * SECOND, rng.randint(1, 9)) for number in range(rng.randint(1, 9))]
        now_us, cost = T + rng.randint(0, 70) * SECOND, rng.randint(1, 12)
        one, other = (
            decide(log(*runs, base=base), rule(20, 60), now_us, cost) for base in (0, 2**62 - 200)
        )
        assert one[:5] == other[:5]
        if one.allowed:
            assert runs_of(one.state) == runs_of(other.state)


@pytest.mark.parametrize(
    ("max_runs", "merged"),
    [
        # Beyond an even bound the last run has no neighbour.
        (4, [(T + 1, 3), (T + 3, 7), (T + 4, 5)]),
        (3, [(T + 1, 3), (T + 3, 7)]),
    ],
)
def test_beyond_the_bound_every_two_neighbours_merge_at_the_later_time(
    monkeypatch, max_runs, merged
):
    monkeypatch.setattr(sliding_window, "MAX_RUNS", max_runs)
    a_rule, state = rule(100, 60), None
    for number in range(max_runs):
        state = spend(a_rule, T + number, number + 1, state)
    assert len(runs_of(state)) == max_runs
    assert runs_of(spend(a_rule, T + max_runs, max_runs + 1, state)) == merged


@pytest.mark.parametrize("max_runs", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_merged_log_is_bounded_keeps_its_sum_and_never_admits_more(monkeypatch, max_runs, seed):
    rng, a_rule = random.Random(seed), rule(40, 1)
    now_us, merging, exact = T, None, None
    for _ in range(1000):
        now_us += rng.choice([0, 1, 1000, 10_000, 50_000])
        cost = rng.randint(1, 3)
        monkeypatch.setattr(sliding_window, "MAX_RUNS", max_runs)
        bounded = decide(merging, a_rule, now_us, cost)
        monkeypatch.setattr(sliding_window, "MAX_RUNS", MAX_RUNS)
        if bounded.allowed:
            # The exact log must also have room for each check that the bounded log admits.
            exact = spend(a_rule, now_us, cost, exact)
        merging = bounded.state
        assert len(runs_of(merging)) <= max_runs
        assert bounded.remaining <= decide(exact, a_rule, now_us, 41).remaining


def test_a_log_of_real_size_is_merged_beyond_16384_runs_and_never_before():
    a_rule = rule(INT32_MAX, INT32_MAX)
    state = log(*((T + number, 1) for number in range(MAX_RUNS)))
    assert MAX_RUNS == 16_384
    after = spend(a_rule, T + MAX_RUNS - 1, 1, state)
    assert len(runs_of(after)) == MAX_RUNS
    merged = runs_of(spend(a_rule, T + MAX_RUNS, 1, state))
    assert merged == [(T + 2 * pair + 1, 2) for pair in range(MAX_RUNS // 2)] + [(T + MAX_RUNS, 1)]


def test_a_log_of_real_size_takes_256_kib_at_most():
    a_rule, largest = rule(INT32_MAX, INT32_MAX), 0
    state = log(*((T + number, 1) for number in range(MAX_RUNS - 50)))
    for number in range(MAX_RUNS - 50, MAX_RUNS + 50):
        state = spend(a_rule, T + number, 1, state)
        largest = max(largest, len(state))
    assert largest == (2 * MAX_RUNS + 1) * 8
    assert sum(count for _, count in runs_of(state)) == MAX_RUNS + 50


# Runs inserted regardless of the limit


def test_the_latest_run_and_the_sum_of_all():
    runs = [(T, 2), (T + 1, 1), (T + 5, 7)]
    assert sliding_window.latest(log(*runs, base=5)) == (T + 5, 10)


@pytest.mark.parametrize("seed", range(50))
def test_runs_are_inserted_at_their_times(seed):
    source, a_rule = random.Random(seed), rule(1, 1)
    state, entries = None, {}
    for _ in range(20):
        runs = [
            (T + source.randrange(30) * SECOND // 10, source.randint(1, 3))
            for _ in range(source.randint(1, 3))
        ]
        state = sliding_window.entered(state, a_rule, runs)
        for at_us, tokens in runs:
            entries[at_us] = entries.get(at_us, 0) + tokens
        entries = {at_us: entries[at_us] for at_us in entries if at_us > max(entries) - SECOND}
        assert runs_of(state) == sorted(entries.items())
        for at_us in (T, max(entries), max(entries) + SECOND // 2, max(entries) + SECOND):
            later = sum(entries[entry_us] for entry_us in entries if entry_us > at_us - SECOND)
            assert sliding_window.used(state, a_rule, at_us) == later


@pytest.mark.parametrize("seed", range(50))
def test_many_runs_are_inserted_as_if_one_by_one(seed):
    chance = random.Random(seed)
    a_rule, state = rule(1, 60), None
    for count in (chance.randint(1, 40), chance.randint(17, 200)):
        runs = sorted(
            (T + chance.randint(0, 80_000_000), chance.randint(1, 3)) for _ in range(count)
        )
        one_by_one = state
        for run in runs:
            one_by_one = sliding_window.entered(one_by_one, a_rule, [run])
        state = sliding_window.entered(state, a_rule, runs)
        assert runs_of(state) == runs_of(one_by_one)


def test_the_maximum_of_runs_is_inserted_without_merging():
    runs = [(T + number, 1) for number in range(MAX_RUNS)]
    assert runs_of(sliding_window.entered(None, rule(1, 60), runs)) == runs


def test_runs_inserted_beyond_the_bound_merge_at_the_later_times():
    runs = [(T + number, 1) for number in range(2 * MAX_RUNS + 1)]
    merged = runs_of(sliding_window.entered(None, rule(1, 60), runs))
    assert len(merged) <= MAX_RUNS
    assert sum(tokens for _, tokens in merged) == len(runs)
    assert merged[-1][0] == runs[-1][0]


def test_sums_of_inserted_runs_are_rebased_before_they_exceed_their_cells():
    state = log((T, 1), base=MAX_SUM - 1)
    assert sliding_window.entered(state, rule(1, 60), [(T + 1, 2)]) == log((T, 1), (T + 1, 2))
