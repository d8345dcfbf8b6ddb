"""One node's side of a bucket."""

from dataclasses import replace

import pytest

from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.local_view import LEAST_PENDING_RUNS, LocalView, TightView
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
    """How many of so many checks were allowed on the spot; the others are neither asked nor decided."""
    return sum(
        outcome is not None and outcome[0]
        for outcome in (view.check(*terms, 1) for _ in range(times))
    )


@pytest.mark.parametrize(
    ("count", "members", "share"),
    [(0, 5, 10), (49, 5, 5), (50, 5, 2), (91, 5, 0), (0, 1, 50), (0, 100, 0), (96, 1, 1)],
)
def test_a_share_of_what_is_left_is_decided_on_the_spot(count, members, share):
    assert spend(view(count), 100, (NOW, members)) == share


@pytest.mark.parametrize(
    ("count", "members", "share"),
    [(0, 5, 1), (0, 1, 9), (49, 1, 9), (80, 1, 5), (91, 1, 2), (0, 10, 0), (99, 1, 1)],
)
def test_a_tight_share_is_nine_per_cent_of_the_limit_at_most(count, members, share):
    assert spend(TightView(RULE, shared(count)), 100, (NOW, members)) == share


def test_a_share_of_the_limit_is_decided_on_the_spot_whatever_is_left():
    rule = replace(RULE, limit=1_000)
    assert spend(LocalView(rule, shared(998, rule=rule)), 100) == 2


def test_a_bucket_that_the_store_does_not_have_is_full():
    assert spend(LocalView(RULE, None), 100) == 10


def test_what_the_view_denies_is_denied_at_once():
    outcome = view(100).check(*FIVE, 1)
    assert outcome is not None
    assert not outcome[0]


def test_without_an_answer_the_view_decides_to_the_limit():
    alone = view(90)
    assert sum(alone.check_alone(NOW, 1)[0] for _ in range(20)) == 10
    assert alone.unsent.tokens == 10


def test_asks_go_with_the_next_batch_and_count_for_the_share():
    asking = view()
    assert asking.ask(NOW, 3) == Ask(NOW, 3)
    assert spend(asking, 100) == 7
    update = asking.freeze()
    assert (update.runs, update.asks) == (((NOW, 7),), (Ask(NOW, 3),))
    assert spend(asking, 100) == 0
    asking.acknowledge(shared(10))
    assert spend(asking, 100) == 9


def test_no_more_wait_than_there_is_left_for():
    asking = view(90)
    for _ in range(6):
        asking.ask(NOW, 1)
    assert asking.check(*FIVE, 4) is None
    asking.ask(NOW, 4)
    state = asking._state
    outcome = asking.check(*FIVE, 1)
    assert outcome is not None
    assert (outcome[0], outcome[5]) == (False, state)


def test_where_some_were_refused_other_nodes_are_taken_to_ask_for_as_much():
    asking = view(90)
    asking.ask(NOW, 2)
    asking.note_grants((True, False))
    assert asking.check(NOW, 5, 1) is not None  # 5 × 2 take what there is
    assert asking.check(NOW, 4, 2) is None
    asking.note_grants((True, True))
    assert asking.check(NOW, 5, 8) is None


def test_an_ask_is_not_before_what_was_spent():
    asking = view(at_us=NOW + S, count=1)
    assert asking.ask(NOW, 1) == Ask(NOW + S, 1)


def test_an_ask_can_be_withdrawn_until_a_batch_has_taken_it():
    asking = view()
    first, second = asking.ask(NOW, 1), asking.ask(NOW, 1)
    assert asking.withdraw(first)
    assert not asking.withdraw(first)
    assert asking.freeze().asks == (second,)
    assert not asking.withdraw(second)


def test_a_batch_is_due_when_the_share_is_used_up_or_somebody_waits():
    due = view()
    assert not due.is_due(*FIVE)
    for number in range(10):
        assert not due.is_due(*FIVE), number
        spend(due, 1)
    assert due.is_due(*FIVE)
    asking = view()
    asking.ask(NOW, 1)
    assert asking.is_due(*FIVE)


def test_what_is_in_flight_stays_spent_until_it_is_acknowledged():
    own = view()
    spend(own, 10)
    own.freeze()
    assert own.check_alone(NOW, 91)[0] is False
    own.acknowledge(shared(10))
    assert own.in_flight_tokens == 0
    assert own.check_alone(NOW, 91)[0] is False
    assert own.check_alone(NOW, 90)[0] is True


def test_of_a_batch_that_is_given_up_nothing_stays_spent_or_asked_for():
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


def test_of_two_states_the_later_one_is_the_base():
    own = view(10)
    own.hear(shared(30))
    own.hear(shared(20))
    assert own.base == shared(30)
    own.hear(shared(5, at_us=NOW + 10 * S))
    assert own.base == shared(5, at_us=NOW + 10 * S)


def test_a_reset_forgets_what_was_spent_before():
    own = view(40)
    spend(own, 4)
    own.freeze()
    own.check_alone(NOW, 2)
    own.hear(shared(generation=1))
    assert (own.generation, own.unsent.tokens, own.in_flight_tokens) == (1, 0, 0)
    assert own.forgiven == 6
    assert own.check_alone(NOW, 100)[0]
    assert own.freeze().generation == 1


def test_what_was_allowed_before_the_first_word_belongs_to_whatever_bucket_there_is():
    own = LocalView(RULE, None)
    own.check_alone(NOW, 5)
    own.hear(shared(20, generation=3))
    assert (own.generation, own.unsent.tokens, own.forgiven) == (3, 5, 0)
    assert LocalView(RULE, None).freeze().generation is None


def test_an_edit_that_leaves_the_limit_forgives_nothing_of_several_windows():
    own = view()
    for window in range(3):
        assert own.check_alone(NOW + window * 10 * S, 90)[0]
    own.hear(shared(rule=replace(RULE, revision=2)))
    assert (own.unsent.tokens, own.forgiven) == (270, 0)


def test_what_a_reset_has_dropped_on_its_way_is_forgiven():
    own = view()
    own.check_alone(NOW, 5)
    own.freeze()
    own.acknowledge(shared(generation=1))
    assert (own.in_flight_tokens, own.forgiven) == (0, 5)


def test_after_an_outage_no_more_is_settled_than_the_view_lacks():
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


def test_after_an_outage_what_the_view_still_lacks_is_settled_in_full():
    one = view(10)
    one.check_alone(NOW, 5)
    one.forgive_outage(NOW)
    assert (one.forgiven, one.unsent.tokens) == (0, 5)


def test_a_late_grant_pays_for_what_the_view_charged():
    own = view()
    own.check_alone(NOW, 5)
    own.pay(3)
    assert (own.unsent.tokens, own.forgiven) == (2, 0)
    own.pay(3)
    assert (own.unsent.tokens, own.forgiven) == (0, -1)


def test_of_an_outage_the_last_window_is_what_is_settled():
    own = LocalView(RULE, None)
    for at_us, cost in ((NOW, 30), (NOW + 10 * S, 40), (NOW + 20 * S, 50)):
        assert own.check_alone(at_us, cost)[0]
    own.forgive_outage(NOW + 21 * S)
    assert own.forgiven == 70
    assert own.freeze().runs == ((NOW + 20 * S, 50),)


def test_what_waits_in_an_outage_is_bounded():
    log = replace(RULE, algorithm=Algorithm.SLIDING_WINDOW, limit=10, window_seconds=1)
    own = LocalView(log, None)
    for tenth in range(3 * LEAST_PENDING_RUNS):
        assert own.check_alone(NOW + tenth * S // 10, 1)[0]
        assert len(own.unsent) <= LEAST_PENDING_RUNS
    assert own.unsent.tokens + own.forgiven == 3 * LEAST_PENDING_RUNS
    own.forgive_outage(NOW + 300 * S)
    assert own.unsent.tokens <= 10


def test_a_lower_limit_trims_what_is_settled():
    own = view()
    own.check_alone(NOW, 50)
    own.edit(replace(RULE, limit=20, revision=2))
    assert (own.unsent.tokens, own.forgiven) == (20, 30)
    assert own.check(*FIVE, 1)[0] is False


def test_a_state_tells_of_an_edit_that_the_node_has_not_heard_of():
    lower = replace(RULE, limit=20, revision=2)
    own = view()
    own.check_alone(NOW, 50)
    own.hear(shared(20, rule=lower))
    assert (own.rule.limit, own.rule.revision) == (20, 2)
    assert (own.unsent.tokens, own.forgiven) == (20, 30)
    assert own.check(*FIVE, 1)[0] is False


def test_a_view_knows_better_than_the_store_until_that_has_heard_of_the_limit():
    own, lower = view(30), replace(RULE, limit=20, revision=2)
    assert not own.knows_better
    own.edit(lower)
    assert own.knows_better
    assert LocalView(lower, shared(30)).knows_better  # made after the edit, of a base that is older
    settled = settle(shared(30), own.freeze()).shared
    assert settled == shared(20, rule=lower)
    own.acknowledge(settled)
    assert not own.knows_better


def test_a_limit_of_another_plan_is_in_force_at_the_same_revision():
    own, lower = view(30), replace(RULE, limit=20)
    own.edit(lower)
    assert own.knows_better
    assert own.check(*FIVE, 1)[0] is False
    settled = settle(shared(30), own.freeze()).shared
    assert settled == shared(20, rule=lower)


def test_a_view_of_an_older_rule_or_of_no_state_knows_nothing_better():
    other_rule_edited = replace(RULE, revision=2)
    assert not LocalView(other_rule_edited, shared(30)).knows_better
    assert not LocalView(RULE, shared(3, rule=replace(RULE, limit=20, revision=2))).knows_better
    assert not LocalView(RULE, None).knows_better


@pytest.mark.parametrize("revision", [1, 2])
def test_an_edit_of_another_rule_changes_nothing_but_the_revision(revision):
    own = view(110)
    own.check_alone(NOW + 10 * S, 50)
    state, rule = own._state, replace(RULE, revision=revision)
    own.edit(rule)
    assert own.rule is rule
    assert (own._state, own.unsent.tokens, own.forgiven) == (state, 50, 0)


def test_a_rule_book_that_is_older_than_what_a_state_has_told_changes_nothing():
    told = replace(RULE, limit=20, revision=4)
    own = LocalView(RULE, shared(5, rule=told))
    assert (own.rule.limit, own.rule.revision) == (20, 4)
    own.edit(replace(RULE, limit=50, revision=3))
    assert (own.rule.limit, own.rule.revision) == (20, 4)
    own.edit(replace(RULE, limit=50, revision=4))
    assert own.rule.limit == 50


def test_a_higher_limit_that_a_state_tells_of_trims_nothing():
    own = view()
    own.check_alone(NOW, 100)
    own.hear(shared(rule=replace(RULE, limit=120, revision=2)))
    assert (own.unsent.tokens, own.forgiven) == (100, 0)
    assert own.check_alone(NOW, 20)[0]


def test_a_base_of_an_older_rule_owes_no_more_than_the_new_limit():
    own = view(90)
    own.edit(replace(RULE, limit=20, revision=2))
    assert own.check(*FIVE, 1)[0] is False
    assert own._state == (20, NOW)


def test_a_peek_is_judged_and_charges_nothing():
    own = view(95)
    assert own.peek(NOW, 5)[:2] == (True, 0)
    assert own.peek(NOW, 6)[:2] == (False, 5)
    assert own.is_clean


def test_a_view_is_clean_while_there_is_nothing_to_settle():
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
def test_what_is_left_of_the_base_is_worked_out_anew_when_it_has_grown(algorithm):
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
def test_a_denial_was_wrong_if_what_comes_next_from_the_store_has_room_for_it(left, false):
    newer = replace(RULE, revision=2)
    own = denied(view(100), (NOW, 3), (NOW, 2), (NOW, 4))
    own.hear(shared(100 - left, rule=newer))
    assert own.false_positives == false
    own.hear(shared(0, rule=newer, generation=1))
    assert own.false_positives == false


def test_a_denial_was_right_if_the_node_itself_has_spent_what_the_store_still_has():
    own = view()
    own.check_alone(NOW, 100)
    denied(own, (NOW, 1)).hear(shared(at_us=NOW))
    assert own.false_positives == 0


def test_a_cost_above_the_limit_is_denied_rightly():
    own = denied(view(), (NOW, 101))
    own.hear(shared(generation=1))
    assert own.false_positives == 0


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_what_has_come_free_since_a_denial_was_not_there_and_what_was_left_was(algorithm):
    rule = replace(RULE, algorithm=algorithm)

    def state(*runs):
        return settle(None, Update(rule, 0, runs)).shared

    own = denied(LocalView(rule, state((NOW, 100))), (NOW + 1, 1))
    own.hear(state((NOW, 100), (NOW + 10 * S, 1)))
    assert own.false_positives == 0
    own = denied(LocalView(rule, state((NOW, 100))), (NOW + 1, 1))
    own.hear(state((NOW, 1), (NOW + S, 1)))
    assert own.false_positives == 1


BURST = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, limit=10, burst=1_000)


def test_shares_are_of_the_burst():
    assert spend(LocalView(BURST, None), 1_000) == 100
    assert spend(LocalView(BURST, shared(rule=BURST)), 1_000) == 100
    alone = LocalView(replace(BURST, limit=1_000, burst=5), None)
    assert sum(alone.check_alone(NOW, 1)[0] for _ in range(20)) == 5


@pytest.mark.parametrize("limit", [10, 20])
def test_a_lower_burst_trims_what_is_settled(limit):
    own = LocalView(BURST, shared(rule=BURST))
    own.check_alone(NOW, 500)
    own.edit(replace(BURST, limit=limit, burst=200, revision=2))
    assert (own.unsent.tokens, own.forgiven, own.knows_better) == (200, 300, True)


def test_a_state_tells_of_an_edited_burst():
    lower = replace(BURST, burst=200, revision=2)
    told = SharedState(0, 2, 10, None, 200)
    own = LocalView(BURST, shared(rule=BURST))
    own.check_alone(NOW, 500)
    own.hear(told)
    assert (own.rule, own.unsent.tokens, own.forgiven) == (lower, 200, 300)
    higher = LocalView(BURST, None)
    higher.hear(told._replace(burst=2_000))
    assert (higher.rule.capacity, higher.forgiven) == (2_000, 0)
    without = LocalView(BURST, None)
    without.hear(told._replace(burst=0))
    assert without.rule.capacity == 10


# Checks that wait for other buckets, too


def test_what_is_reserved_counts_towards_the_share_and_is_not_spent():
    one = view()
    assert [one.reserve(*FIVE, 1)[0] for _ in range(10)] == [True] * 10
    assert one.reserve(*FIVE, 1) is None
    assert one.check(*FIVE, 1) is None
    assert (one.unsent.tokens, one.is_clean) == (0, False)
    one.release(10)
    assert one.is_clean
    assert spend(one, 100) == 10


def test_what_is_reserved_is_spent_when_it_is_released():
    one = view()
    one.reserve(*FIVE, 3)
    one.release(3)
    assert one.check_alone(NOW, 3)[1] == 97
    assert one.unsent.tokens == 3


def test_a_reservation_is_denied_as_a_check_is():
    full = view(100)
    assert not full.reserve(*FIVE, 1)[0]
    crowded = view(98)
    crowded.ask(NOW, 2)
    assert not crowded.reserve(*FIVE, 1)[0]


def test_a_reservation_outlives_the_batch_that_asks_for_others():
    one = view()
    one.ask(NOW, 5)
    one.reserve(*FIVE, 3)
    assert one.freeze().asks == (Ask(NOW, 5),)
    one.acknowledge(shared(5))
    assert (one.asked_tokens, one.reserved) == (3, 3)
    one.release(3)
    assert one.is_clean


def test_a_refund_rides_in_the_next_batch():
    one, refund = view(5), Refund(0, 1, NOW, 5, 5, 0)
    one.give_back(refund)
    assert not one.is_clean
    assert one.freeze() == Update(RULE, 0, (), (), (refund,))
    assert one.is_clean
    assert one.freeze().refunds == ()
