"""One node's side of a bucket."""

from dataclasses import replace

import pytest

from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.local_view import LEAST_PENDING_RUNS, MAX_REFUNDS, LocalView, TightView
from ratelimitd.ledger.shared_state import Ask, SharedState, Update
from ratelimitd.model import Algorithm
from tests.ledger_model import settle
from tests.outcomes import rule_of

NOW = 1_700_000_000_000_000
S = 1_000_000
RULE = replace(rule_of(Algorithm.FIXED_WINDOW, 100), revision=1)
FIVE = (NOW, 5)


def shared(count=0, *, generation=0, rule=RULE, at_us=NOW):
    state = (count, at_us) if count else None
    return SharedState(generation, rule.revision, rule.limit, state, rule.burst)


def view(count=0, **options):
    return LocalView(RULE, shared(count, **options))


def spend(view, times, terms=FIVE):
    """Return how many of ``times`` checks the view allowed; the others are neither asked nor decided."""
    return sum(
        outcome is not None and outcome[0]
        for outcome in (view.check(*terms, 1) for _ in range(times))
    )


@pytest.mark.parametrize(
    ("count", "members", "share"),
    [(0, 5, 10), (49, 5, 5), (50, 5, 2), (91, 5, 0), (0, 1, 50), (0, 100, 0), (96, 1, 1)],
)
def test_a_share_of_the_remaining_tokens_is_decided_locally(count, members, share):
    assert spend(view(count), 100, (NOW, members)) == share


@pytest.mark.parametrize(
    ("count", "members", "share"),
    [(0, 5, 1), (0, 1, 9), (49, 1, 9), (80, 1, 5), (91, 1, 2), (0, 10, 0), (99, 1, 1)],
)
def test_a_tight_share_is_at_most_nine_per_cent_of_the_limit(count, members, share):
    assert spend(TightView(RULE, shared(count)), 100, (NOW, members)) == share


def test_a_share_of_the_limit_is_decided_locally_even_near_the_limit():
    rule = replace(RULE, limit=1_000)
    assert spend(LocalView(rule, shared(998, rule=rule)), 100) == 2


def test_a_bucket_missing_in_the_store_is_full():
    assert spend(LocalView(RULE, None), 100) == 10


def test_a_denial_by_the_view_needs_no_answer_of_the_store():
    outcome = view(100).check(*FIVE, 1)
    assert outcome is not None
    assert not outcome[0]


def test_without_an_answer_the_view_decides_up_to_the_limit():
    alone = view(90)
    assert sum(alone.check_alone(NOW, 1)[0] for _ in range(20)) == 10
    assert alone.unsent.tokens == 10


def test_asks_are_in_the_next_batch_and_count_towards_the_share():
    asking = view()
    assert asking.ask(NOW, 3) == Ask(NOW, 3)
    assert spend(asking, 100) == 7
    update = asking.freeze()
    assert (update.runs, update.asks) == (((NOW, 7),), (Ask(NOW, 3),))
    assert spend(asking, 100) == 0
    asking.acknowledge(shared(10))
    assert spend(asking, 100) == 9


def test_no_more_checks_wait_than_tokens_remain():
    asking = view(90)
    for _ in range(6):
        asking.ask(NOW, 1)
    assert asking.check(*FIVE, 4) is None
    asking.ask(NOW, 4)
    state = asking._state
    outcome = asking.check(*FIVE, 1)
    assert outcome is not None
    assert (outcome[0], outcome[5]) == (False, state)


def test_after_a_refused_ask_other_nodes_are_assumed_to_ask_for_as_much():
    asking = view(90)
    asking.ask(NOW, 2)
    asking.record_grants((True, False))
    assert asking.check(NOW, 5, 1) is not None  # 5 × 2 use all tokens
    assert asking.check(NOW, 4, 2) is None
    asking.record_grants((True, True))
    assert asking.check(NOW, 5, 8) is None


def test_an_ask_is_not_earlier_than_the_latest_spend():
    asking = view(at_us=NOW + S, count=1)
    assert asking.ask(NOW, 1) == Ask(NOW + S, 1)


def test_an_ask_can_be_withdrawn_until_it_is_in_a_batch():
    asking = view()
    first, second = asking.ask(NOW, 1), asking.ask(NOW, 1)
    assert asking.withdraw(first)
    assert not asking.withdraw(first)
    assert asking.freeze().asks == (second,)
    assert not asking.withdraw(second)


def test_a_batch_is_due_when_the_share_is_used_up_or_a_check_waits():
    due = view()
    assert not due.is_due(*FIVE)
    for number in range(10):
        assert not due.is_due(*FIVE), number
        spend(due, 1)
    assert due.is_due(*FIVE)
    asking = view()
    asking.ask(NOW, 1)
    assert asking.is_due(*FIVE)


def test_spends_in_flight_count_until_they_are_acknowledged():
    own = view()
    spend(own, 10)
    own.freeze()
    assert own.check_alone(NOW, 91)[0] is False
    own.acknowledge(shared(10))
    assert own.in_flight_tokens == 0
    assert own.check_alone(NOW, 91)[0] is False
    assert own.check_alone(NOW, 90)[0] is True


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_check_in_flight_that_was_decided_alone_is_counted_once(is_abandoned):
    one = view()
    ask = one.ask(NOW, 4)
    one.freeze()
    if is_abandoned:
        one.abandon()
    assert one.check_alone(NOW, 4)[0]
    one.was_decided_alone(ask)
    assert (one.unsent.tokens, one.asked_tokens, one.asked_in_flight) == (4, 0, 0)


def test_an_abandoned_batch_leaves_no_spends_or_asks():
    one = LocalView(RULE, None)
    one.check_alone(NOW, 4)
    one.ask(NOW, 2)
    one.freeze()
    one.check_alone(NOW, 1)
    one.ask(NOW, 3)
    assert one.abandon() == 4
    assert (one.in_flight_tokens, one.unsent.tokens, one.asked_tokens) == (0, 1, 3)
    assert one.peek(NOW, 1)[1] == 100 - 1 - 1
    assert (one.base, one.generation) == (None, None)


def test_the_later_of_two_states_is_the_base():
    own = view(10)
    own.adopt(shared(30))
    own.adopt(shared(20))
    assert own.base == shared(30)
    own.adopt(shared(5, at_us=NOW + 10 * S))
    assert own.base == shared(5, at_us=NOW + 10 * S)


def test_a_reset_drops_earlier_spends():
    own = view(40)
    spend(own, 4)
    own.freeze()
    own.check_alone(NOW, 2)
    own.adopt(shared(generation=1))
    assert (own.generation, own.unsent.tokens, own.in_flight_tokens) == (1, 0, 0)
    assert own.forgiven == 6
    assert own.check_alone(NOW, 100)[0]
    assert own.freeze().generation == 1


def test_spends_before_the_first_state_count_for_any_generation():
    own = LocalView(RULE, None)
    own.check_alone(NOW, 5)
    own.adopt(shared(20, generation=3))
    assert (own.generation, own.unsent.tokens, own.forgiven) == (3, 5, 0)
    assert LocalView(RULE, None).freeze().generation is None


def test_an_edit_that_keeps_the_limit_forgives_no_spends_of_several_windows():
    own = view()
    for window in range(3):
        assert own.check_alone(NOW + window * 10 * S, 90)[0]
    own.adopt(shared(rule=replace(RULE, revision=2)))
    assert (own.unsent.tokens, own.forgiven) == (270, 0)


def test_spends_in_flight_that_a_reset_drops_are_forgiven():
    own = view()
    own.check_alone(NOW, 5)
    own.freeze()
    own.acknowledge(shared(generation=1))
    assert (own.in_flight_tokens, own.forgiven) == (0, 5)


def test_after_an_outage_refilled_spends_are_not_settled():
    bucket = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, limit=10)
    own = LocalView(bucket, None)
    own.check_alone(NOW, 4)
    own.freeze()
    for second in range(30):
        assert own.check_alone(NOW + second * S, 1)[0]
    assert own.unsent.tokens == 30
    own.forgive_outage(NOW + 29 * S)
    assert own.in_flight_tokens == 4
    assert own.unsent.tokens + own.forgiven == 30
    assert own.unsent.tokens <= 1


def test_after_an_outage_spends_not_refilled_are_settled_in_full():
    one = view(10)
    one.check_alone(NOW, 5)
    one.forgive_outage(NOW)
    assert (one.forgiven, one.unsent.tokens) == (0, 5)


def test_a_late_grant_replaces_the_charge_of_the_view():
    own = view()
    own.check_alone(NOW, 5)
    own.pay(3)
    assert (own.unsent.tokens, own.forgiven) == (2, 0)
    own.pay(3)
    assert (own.unsent.tokens, own.forgiven) == (0, -1)


def test_only_the_last_window_of_an_outage_is_settled():
    own = LocalView(RULE, None)
    for at_us, cost in ((NOW, 30), (NOW + 10 * S, 40), (NOW + 20 * S, 50)):
        assert own.check_alone(at_us, cost)[0]
    own.forgive_outage(NOW + 21 * S)
    assert own.forgiven == 70
    assert own.freeze().runs == ((NOW + 20 * S, 50),)


def test_unsettled_runs_in_an_outage_are_bounded():
    log = replace(RULE, algorithm=Algorithm.SLIDING_WINDOW, limit=10, window_seconds=1)
    own = LocalView(log, None)
    for tenth in range(3 * LEAST_PENDING_RUNS):
        assert own.check_alone(NOW + tenth * S // 10, 1)[0]
        assert len(own.unsent) <= LEAST_PENDING_RUNS
    assert own.unsent.tokens + own.forgiven == 3 * LEAST_PENDING_RUNS
    own.forgive_outage(NOW + 300 * S)
    assert own.unsent.tokens <= 10


def test_a_lower_limit_trims_unsettled_spends():
    own = view()
    own.check_alone(NOW, 50)
    own.edit(replace(RULE, limit=20, revision=2))
    assert (own.unsent.tokens, own.forgiven) == (20, 30)
    assert own.check(*FIVE, 1)[0] is False


def test_a_state_with_a_newer_limit_is_adopted():
    lower = replace(RULE, limit=20, revision=2)
    own = view()
    own.check_alone(NOW, 50)
    own.adopt(shared(20, rule=lower))
    assert (own.rule.limit, own.rule.revision) == (20, 2)
    assert (own.unsent.tokens, own.forgiven) == (20, 30)
    assert own.check(*FIVE, 1)[0] is False


def test_a_view_knows_better_until_the_store_has_its_limit():
    own, lower = view(30), replace(RULE, limit=20, revision=2)
    assert not own.has_newer_limit
    own.edit(lower)
    assert own.has_newer_limit
    assert LocalView(
        lower, shared(30)
    ).has_newer_limit  # made after the edit, of a base that is older
    settled = settle(shared(30), own.freeze()).shared
    assert settled == shared(20, rule=lower)
    own.acknowledge(settled)
    assert not own.has_newer_limit


def test_a_limit_of_another_plan_applies_at_the_same_revision():
    own, lower = view(30), replace(RULE, limit=20)
    own.edit(lower)
    assert own.has_newer_limit
    assert own.check(*FIVE, 1)[0] is False
    settled = settle(shared(30), own.freeze()).shared
    assert settled == shared(20, rule=lower)


def test_a_view_with_an_older_rule_or_no_state_does_not_know_better():
    other_rule_edited = replace(RULE, revision=2)
    assert not LocalView(other_rule_edited, shared(30)).has_newer_limit
    assert not LocalView(RULE, shared(3, rule=replace(RULE, limit=20, revision=2))).has_newer_limit
    assert not LocalView(RULE, None).has_newer_limit


@pytest.mark.parametrize("revision", [1, 2])
def test_an_edit_of_another_rule_changes_only_the_revision(revision):
    own = view(110)
    own.check_alone(NOW + 10 * S, 50)
    state, rule = own._state, replace(RULE, revision=revision)
    own.edit(rule)
    assert own.rule is rule
    assert (own._state, own.unsent.tokens, own.forgiven) == (state, 50, 0)


def test_a_rule_book_older_than_the_adopted_state_has_no_effect():
    told = replace(RULE, limit=20, revision=4)
    own = LocalView(RULE, shared(5, rule=told))
    assert (own.rule.limit, own.rule.revision) == (20, 4)
    own.edit(replace(RULE, limit=50, revision=3))
    assert (own.rule.limit, own.rule.revision) == (20, 4)
    own.edit(replace(RULE, limit=50, revision=4))
    assert own.rule.limit == 50


def test_a_higher_limit_of_a_state_trims_nothing():
    own = view()
    own.check_alone(NOW, 100)
    own.adopt(shared(rule=replace(RULE, limit=120, revision=2)))
    assert (own.unsent.tokens, own.forgiven) == (100, 0)
    assert own.check_alone(NOW, 20)[0]


def test_a_base_of_an_older_rule_owes_at_most_the_new_limit():
    own = view(90)
    own.edit(replace(RULE, limit=20, revision=2))
    assert own.check(*FIVE, 1)[0] is False
    assert own._state == (20, NOW)


def test_a_peek_charges_nothing():
    own = view(95)
    assert own.peek(NOW, 5)[:2] == (True, 0)
    assert own.peek(NOW, 6)[:2] == (False, 5)
    assert own.is_clean


def test_a_view_without_unsettled_changes_is_clean():
    own = view()
    assert own.is_clean
    spend(own, 1)
    assert not own.is_clean
    own.freeze()
    assert not own.is_clean
    own.acknowledge(shared(1))
    assert own.is_clean
    own.ask(NOW, 1)
    assert not own.is_clean
    own.freeze()
    assert not own.is_clean
    own.acknowledge(shared(2))
    assert own.is_clean


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_the_share_is_recomputed_when_the_base_has_refilled(algorithm):
    rule = replace(RULE, algorithm=algorithm)
    base = LocalView(rule, None)
    base.check_alone(NOW, 100)
    (run,) = base.freeze().runs
    own = LocalView(rule, settle(None, Update(rule, 0, (run,))).shared)
    assert spend(own, 1) == 0
    assert spend(own, 100, (NOW + 10 * S, 5)) == 10
    assert own.is_due(NOW + 10 * S, 5)
    assert not own.is_due(NOW + 10 * S, 4)


# Denials that the store would not have made


def denied(own, *checks):
    for at_us, cost in checks:
        assert not own.check_alone(at_us, cost)[0]
    return own


@pytest.mark.parametrize(("left", "false"), [(0, 0), (1, 0), (2, 1), (5, 2), (7, 3), (100, 3)])
def test_a_denial_is_a_false_positive_if_the_next_state_has_room_for_it(left, false):
    newer = replace(RULE, revision=2)
    own = denied(view(100), (NOW, 3), (NOW, 2), (NOW, 4))
    own.adopt(shared(100 - left, rule=newer))
    assert own.false_positives == false
    own.adopt(shared(0, rule=newer, generation=1))
    assert own.false_positives == false


def test_a_denial_due_to_unsettled_spends_is_no_false_positive():
    own = view()
    own.check_alone(NOW, 100)
    denied(own, (NOW, 1)).adopt(shared(at_us=NOW))
    assert own.false_positives == 0


def test_the_denial_of_a_cost_above_the_limit_is_no_false_positive():
    own = denied(view(), (NOW, 101))
    own.adopt(shared(generation=1))
    assert own.false_positives == 0


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_only_tokens_available_at_the_denial_make_it_a_false_positive(algorithm):
    rule = replace(RULE, algorithm=algorithm)

    def state(*runs):
        return settle(None, Update(rule, 0, runs)).shared

    own = denied(LocalView(rule, state((NOW, 100))), (NOW + 1, 1))
    own.adopt(state((NOW, 100), (NOW + 10 * S, 1)))
    assert own.false_positives == 0
    own = denied(LocalView(rule, state((NOW, 100))), (NOW + 1, 1))
    own.adopt(state((NOW, 1), (NOW + S, 1)))
    assert own.false_positives == 1


BURST = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, limit=10, burst=1_000)


def test_shares_are_parts_of_the_burst():
    assert spend(LocalView(BURST, None), 1_000) == 100
    assert spend(LocalView(BURST, shared(rule=BURST)), 1_000) == 100
    alone = LocalView(replace(BURST, limit=1_000, burst=5), None)
    assert sum(alone.check_alone(NOW, 1)[0] for _ in range(20)) == 5


@pytest.mark.parametrize("limit", [10, 20])
def test_a_lower_burst_trims_unsettled_spends(limit):
    own = LocalView(BURST, shared(rule=BURST))
    own.check_alone(NOW, 500)
    own.edit(replace(BURST, limit=limit, burst=200, revision=2))
    assert (own.unsent.tokens, own.forgiven, own.has_newer_limit) == (200, 300, True)


def test_a_state_with_a_newer_burst_is_adopted():
    lower = replace(BURST, burst=200, revision=2)
    told = SharedState(0, 2, 10, None, 200)
    own = LocalView(BURST, shared(rule=BURST))
    own.check_alone(NOW, 500)
    own.adopt(told)
    assert (own.rule, own.unsent.tokens, own.forgiven) == (lower, 200, 300)
    higher = LocalView(BURST, None)
    higher.adopt(told._replace(burst=2_000))
    assert (higher.rule.capacity, higher.forgiven) == (2_000, 0)
    without = LocalView(BURST, None)
    without.adopt(told._replace(burst=0))
    assert without.rule.capacity == 10


# Checks on several buckets


def test_reserved_tokens_count_towards_the_share_and_are_not_spent():
    one = view()
    assert [one.reserve(*FIVE, 1)[0] for _ in range(10)] == [True] * 10
    assert one.reserve(*FIVE, 1) is None
    assert one.check(*FIVE, 1) is None
    assert (one.unsent.tokens, one.is_clean) == (0, False)
    one.release(10)
    assert one.is_clean
    assert spend(one, 100) == 10


def test_reserved_tokens_are_spent_after_their_release():
    one = view()
    one.reserve(*FIVE, 3)
    one.release(3)
    assert one.check_alone(NOW, 3)[1] == 97
    assert one.unsent.tokens == 3


def test_a_reservation_is_denied_like_a_check():
    full = view(100)
    assert not full.reserve(*FIVE, 1)[0]
    crowded = view(98)
    crowded.ask(NOW, 2)
    assert not crowded.reserve(*FIVE, 1)[0]


def test_a_reservation_is_kept_when_a_batch_of_asks_is_acknowledged():
    one = view()
    one.ask(NOW, 5)
    one.reserve(*FIVE, 3)
    assert one.freeze().asks == (Ask(NOW, 5),)
    one.acknowledge(shared(5))
    assert (one.asked_tokens, one.reserved) == (3, 3)
    one.release(3)
    assert one.is_clean


def test_a_refund_is_in_the_next_batch():
    one, refund = view(5), Refund(0, 1, NOW, 5, 5, 0)
    one.give_back(refund)
    assert not one.is_clean
    assert one.freeze() == Update(RULE, 0, (), (), (refund,))
    assert one.is_clean
    assert one.freeze().refunds == ()
    assert [one.give_back(refund) for _ in range(MAX_REFUNDS + 1)] == [True] * MAX_REFUNDS + [False]
