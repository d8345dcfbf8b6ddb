"""The effect of an update on a bucket in the store."""

from dataclasses import replace
from random import Random

import pytest

from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.shared_state import (
    YEAR_2025_S,
    Ask,
    SharedState,
    StoreCheck,
    Update,
    generation_at,
    has_plenty,
    overdrawn,
    overdrawn_by_edit,
    standing,
)
from ratelimitd.model import Algorithm
from tests.ledger_model import first_check, reset, settle
from tests.outcomes import rule_of

NOW = 1_700_000_000_000_000
RULE = replace(rule_of(Algorithm.FIXED_WINDOW), revision=3)
LOWER = replace(RULE, limit=4, revision=4)


def stored(count=0, *, generation=0, rule=RULE):
    return SharedState(generation, rule.revision, rule.limit, (count, NOW) if count else None)


def after(before, *runs, generation=0, rule=RULE, asks=()):
    return settle(before, Update(rule, generation, runs, asks))


def spent(rule, tokens, before=None, at_us=NOW):
    """Return a bucket after a spend."""
    return after(before, *[(at_us, tokens)] if tokens else [], rule=rule).shared


def test_the_first_update_creates_the_bucket():
    assert after(None, (NOW, 3)).shared == stored(3)
    assert after(None, generation=2).shared == stored(generation=2)


def test_spends_are_charged_beyond_the_limit():
    assert after(stored(8), (NOW, 7)).shared == stored(15)


def test_asks_are_decided_after_the_spends_and_never_beyond_the_limit():
    asks = (Ask(NOW, 1), Ask(NOW, 2), Ask(NOW, 1))
    settled = after(stored(5), (NOW, 3), asks=asks)
    assert settled.grants == (True, False, True)
    assert settled.shared == stored(10)
    assert after(stored(12), asks=asks).shared == stored(12)


def test_spends_before_a_reset_are_dropped_and_asks_are_decided():
    settled = after(stored(generation=1), (NOW, 9), generation=0, asks=(Ask(NOW, 1),))
    assert settled.shared == stored(1, generation=1)
    assert settled.grants == (True,)


def test_spends_of_a_newer_generation_start_a_fresh_bucket():
    assert after(stored(9), (NOW, 2), generation=1).shared == stored(2, generation=1)


def test_a_newer_rule_is_applied_once_and_owes_at_most_one_capacity():
    assert after(stored(9), rule=LOWER).shared == stored(4, rule=LOWER)
    assert after(stored(9), (NOW, 2), rule=LOWER).shared == stored(6, rule=LOWER)


def test_an_edit_of_another_rule_forgives_and_cuts_nothing():
    newer = replace(RULE, revision=9)
    assert after(stored(15), rule=newer).shared == stored(15, rule=newer)
    assert after(stored(8, rule=newer), (NOW, 7)).shared == stored(15, rule=newer)


def test_spends_under_an_older_rule_fill_at_most_the_new_limit():
    assert after(stored(1, rule=LOWER), (NOW, 2)).shared == stored(3, rule=LOWER)
    assert after(stored(1, rule=LOWER), (NOW, 9)).shared == stored(4, rule=LOWER)
    assert after(stored(6, rule=LOWER), (NOW, 9)).shared == stored(6, rule=LOWER)


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_spends_under_an_older_rule_fill_at_most_the_limit_of_any_algorithm(algorithm):
    lower = replace(LOWER, algorithm=algorithm)
    account = ACCOUNTS[algorithm]
    before = SharedState(0, lower.revision, lower.limit, account.charged(None, lower, [(NOW, 1)]))
    older = replace(RULE, algorithm=algorithm)
    shared = settle(before, Update(older, 0, ((NOW, 2), (NOW + 1, 9)))).shared
    assert account.used(shared.state, lower, NOW + 1) == 4


def test_spends_without_a_generation_are_charged_to_the_stored_bucket():
    assert after(stored(3, generation=2), (NOW, 4), generation=None).shared == stored(
        7, generation=2
    )
    assert after(None, (NOW, 4), generation=None).shared == stored(4)


def first_result(before, cost=1, *, rule=RULE, peek=False):
    return first_check(before, StoreCheck(b"", rule, NOW, cost, peek))


def test_a_first_check_is_charged_if_it_is_allowed():
    outcome, shared = first_result(stored(4), 5)
    assert (outcome[:2], outcome[5], shared) == ((True, 1), None, stored(9))
    outcome, shared = first_result(stored(4), 7)
    assert (outcome[0], shared) == (False, stored(4))
    outcome, shared = first_result(None, 3, peek=True)
    assert (outcome[:2], shared) == ((True, 7), stored())


def test_a_first_check_is_judged_by_the_newer_of_two_rules():
    outcome, shared = first_result(stored(7), 1, rule=LOWER)
    assert (outcome[0], shared) == (False, stored(4, rule=LOWER))
    outcome, shared = first_result(stored(2, rule=LOWER), 2)
    assert (outcome[:2], shared) == ((True, 0), stored(4, rule=LOWER))


def test_a_denied_first_check_updates_the_limit_of_the_bucket_and_a_peek_does_not():
    assert first_result(stored(7), 5, rule=LOWER)[1] == stored(4, rule=LOWER)
    assert first_result(stored(7), 5, rule=LOWER, peek=True)[1] == stored(7)
    other_rule_edited = replace(RULE, revision=LOWER.revision)
    assert first_result(stored(7), 5, rule=other_rule_edited)[1] == stored(7)


def test_a_reset_is_a_full_bucket_of_the_next_generation():
    assert reset(None, RULE) == stored(generation=1)
    assert reset(stored(9, generation=4), LOWER) == stored(generation=5, rule=LOWER)


def test_the_generation_of_a_reset_is_not_repeated_after_a_loss():
    least = generation_at((YEAR_2025_S + 77) * 1_000_000)
    assert least == 77
    assert reset(None, RULE, least).generation == 77
    assert reset(stored(generation=76), RULE, least).generation == 77
    assert reset(stored(generation=77), RULE, least).generation == 78
    assert generation_at(NOW) == 0  # a clock that is years behind


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_bucket_is_overdrawn_by_charges_beyond_its_limit(algorithm):
    rule = replace(RULE, algorithm=algorithm)
    assert [overdrawn(spent(rule, n), rule) for n in (0, 10, 13)] == [0, 0, 3]


LOWER_BY_HALF = replace(RULE, limit=RULE.limit // 2, revision=RULE.revision + 1)


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_only_the_overdraft_of_a_log_is_explained_by_a_lowered_limit(algorithm):
    rule, lower = (replace(each, algorithm=algorithm) for each in (RULE, LOWER_BY_HALF))
    before = spent(rule, 8)
    after = spent(lower, 2, before)
    rightly = 3 if algorithm is Algorithm.SLIDING_WINDOW else 0
    assert overdrawn(after, lower) == 2 + rightly
    assert overdrawn_by_edit(before, after, lower) == rightly
    assert overdrawn_by_edit(after, after, lower) == 0


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_expired_spends_do_not_explain_an_overdraft(algorithm):
    rule, lower = (replace(each, algorithm=algorithm) for each in (RULE, LOWER_BY_HALF))
    before, later_us = spent(rule, 8), NOW + 10 * RULE.window_us
    after = spent(lower, 2, spent(lower, 5, before, later_us), later_us)
    assert overdrawn(after, lower) == 2
    assert overdrawn_by_edit(before, after, lower) == 0


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_bucket_with_plenty_is_not_overdrawn_and_keeps_half_from_then_on(algorithm):
    rule, random, found = replace(RULE, algorithm=algorithm), Random(7), 0
    for _ in range(500):
        runs = sorted(
            (NOW + random.randrange(2 * rule.window_us), random.randint(1, 4)) for _ in range(4)
        )
        shared = settle(None, Update(rule, 0, runs)).shared
        if has_plenty(shared, rule):
            found += 1
            later_us = runs[-1][0] + random.randrange(rule.window_us)
            assert overdrawn(shared, rule) == 0
            assert 2 * ACCOUNTS[algorithm].used(shared.state, rule, later_us) <= rule.limit
    assert found > 50


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_bucket_has_plenty_while_half_of_either_limit_is_left(algorithm):
    rule = replace(RULE, algorithm=algorithm)
    states = [spent(rule, n) for n in (0, 5, 6)]
    assert [has_plenty(shared, rule) for shared in states] == [True, True, False]
    assert not has_plenty(states[1], replace(rule, limit=9))
    assert not has_plenty(states[1]._replace(limit=9), rule)


def test_states_are_ordered_by_generation_rule_time_and_spends():
    states = [
        stored(),
        stored(1),
        stored(2),
        SharedState(0, 3, 10, (1, NOW + 1)),
        stored(1, rule=LOWER),
        stored(generation=1),
    ]
    standings = [standing(state, RULE) for state in states]
    assert standings == sorted(set(standings))


def test_a_bucket_is_overdrawn_beyond_its_burst_and_has_plenty_below_half_of_it():
    rule = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, burst=100)
    states = [spent(rule, n) for n in (50, 51, 103)]
    assert [shared.burst for shared in states] == [100] * 3
    assert [has_plenty(shared, rule) for shared in states] == [True, False, False]
    assert [overdrawn(shared, rule) for shared in states] == [0, 0, 3]
    lower = replace(rule, burst=60, revision=rule.revision + 1)
    after = spent(lower, 20, states[1])
    assert (after.capacity, overdrawn(after, lower)) == (60, 11)
    assert overdrawn_by_edit(states[1], after, lower) == 0
    assert overdrawn_by_edit(states[2], after, lower) == 0
    assert overdrawn_by_edit(after, states[2], rule) == 0
