"""A refund gives back as much as possible, but a bucket never allows more than without the charge."""

from dataclasses import replace
from random import Random

import pytest

from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.several import Part
from ratelimitd.ledger.shared_state import SharedState, Update, refund_of, refunded, standing
from ratelimitd.model import Algorithm, Reason
from tests.ledger_model import settle
from tests.outcomes import rule_of, runs_of

NOW = 1_700_000_000_000_000
S = 1_000_000


BUCKET = rule_of(Algorithm.TOKEN_BUCKET)
WINDOW = rule_of(Algorithm.FIXED_WINDOW)
LOG = rule_of(Algorithm.SLIDING_WINDOW)
TOKEN = BUCKET.window_us


def charged(of, *runs, generation=0, revision=0):
    state = ACCOUNTS[of.algorithm].charged(None, of, runs)
    return SharedState(generation, revision, of.limit, state)


def used(shared, of, now_us=NOW):
    return ACCOUNTS[of.algorithm].used(shared.state, of, now_us)


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_an_immediate_refund_restores_the_bucket(of):
    before = charged(of, (NOW - S, 3))
    after = charged(of, (NOW - S, 3), (NOW, 4))
    back = refunded(after, of, [refund_of(after, of, 4)])
    for later_us in range(0, 12 * S, S // 2):
        assert used(back, of, NOW + later_us) == used(before, of, NOW + later_us)
    assert back.refunded == 4


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_standing_grows_with_a_refund_and_with_a_later_charge(of):
    first = charged(of, (NOW, 4))
    back = refunded(first, of, [refund_of(first, of, 4)])
    again = back._replace(state=ACCOUNTS[of.algorithm].charged(back.state, of, [(NOW, 4)]))
    assert standing(first, of) < standing(back, of) < standing(again, of)


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
@pytest.mark.parametrize("changes", [{"generation": 1}, {"revision": 1}])
def test_a_charge_of_another_generation_or_revision_is_not_given_back(of, changes):
    after = charged(of, (NOW, 4))
    other = after._replace(**changes)
    assert refunded(other, of, [refund_of(after, of, 4)]) == other


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_lost_charges_are_not_given_back(of):
    refund = refund_of(charged(of, (NOW, 4)), of, 4)
    lost = SharedState(0, 0, of.limit)
    older = charged(of, (NOW - 1, 4))
    for stored in (lost, older):
        assert refunded(stored, of, [refund]) == stored
    # The store counts fewer refunds than at the charge, so it has lost the charge.
    after = charged(of, (NOW, 4))
    assert refunded(after, of, [refund._replace(refunded=1)]) == after


def test_a_token_bucket_gives_back_the_part_not_refilled_since():
    """One token refills in a second: of four missing from an otherwise full bucket, two are back after two seconds."""
    refund = refund_of(charged(BUCKET, (NOW, 4)), BUCKET, 4)
    after = charged(BUCKET, (NOW, 4), (NOW + 2 * S, 3))
    assert used(after, BUCKET, NOW + 2 * S) == 5
    back = refunded(after, BUCKET, [refund])
    assert (used(back, BUCKET, NOW + 2 * S), back.refunded) == (3, 2)
    much_later = charged(BUCKET, (NOW, 4), (NOW + 5 * S, 3))
    assert refunded(much_later, BUCKET, [refund]) == much_later


def test_a_token_bucket_that_lacked_more_gives_back_the_whole_charge():
    after = charged(BUCKET, (NOW, 5), (NOW, 4))
    refund = refund_of(after, BUCKET, 4)
    assert refund.spent == 9
    later = charged(BUCKET, (NOW, 9), (NOW + 4 * S, 1))
    back = refunded(later, BUCKET, [refund])
    assert (used(later, BUCKET, NOW + 4 * S), used(back, BUCKET, NOW + 4 * S)) == (6, 2)


def test_a_refunded_fraction_of_a_token_counts_as_one():
    refund = refund_of(charged(BUCKET, (NOW, 1)), BUCKET, 1)
    after = charged(BUCKET, (NOW, 1), (NOW + S // 4, 1))
    back = refunded(after, BUCKET, [refund])
    assert back.state == (TOKEN, NOW + S // 4)
    assert back.refunded == 1


def test_a_token_bucket_gives_back_no_more_than_it_lacks():
    refund = Refund(0, 0, NOW, 5, 9, 0)
    assert refunded(charged(BUCKET, (NOW, 3)), BUCKET, [refund]).state == (0, NOW)


def test_refunds_of_other_charges_reduce_a_refund():
    """Without both charges the bucket is full all the time, so all refill is due to them."""
    first = charged(BUCKET, (NOW, 5))
    second = charged(BUCKET, (NOW, 5), (NOW, 5))
    refunds = [refund_of(first, BUCKET, 5), refund_of(second, BUCKET, 5)]
    after = refunded(second, BUCKET, refunds[:1])
    later = after._replace(
        state=ACCOUNTS[BUCKET.algorithm].charged(after.state, BUCKET, [(NOW + 4 * S, 3)])
    )
    back = refunded(later, BUCKET, refunds[1:])
    assert used(back, BUCKET, NOW + 4 * S) == 3


def test_a_window_gives_nothing_back_to_a_later_one():
    start = NOW - NOW % WINDOW.window_us
    refund = refund_of(charged(WINDOW, (start, 4)), WINDOW, 4)
    last = charged(WINDOW, (start, 4), (start + 10 * S - 1, 3))
    assert refunded(last, WINDOW, [refund]).state == (3, start + 10 * S - 1)
    later = charged(WINDOW, (start, 4), (start + 10 * S, 3))
    assert refunded(later, WINDOW, [refund]) == later


def test_a_refund_keeps_the_overdraft_of_the_previous_window():
    start = NOW - NOW % WINDOW.window_us
    after = charged(WINDOW, (start - 1, 12), (start, 4))
    assert refunded(after, WINDOW, [refund_of(after, WINDOW, 4)]).state == (2, start, 12)


def test_a_window_gives_back_no_more_than_its_count():
    refund = Refund(0, 0, NOW, 5, 5, 0)
    assert refunded(charged(WINDOW, (NOW, 3)), WINDOW, [refund]).state == (0, NOW)


@pytest.mark.parametrize(
    ("runs", "at", "tokens", "expected"),
    [
        ([(1, 2), (2, 3), (3, 4)], 3, 2, [(1, 2), (2, 3), (3, 2)]),
        ([(1, 2), (2, 3), (3, 4)], 3, 4, [(1, 2), (2, 3), (3, 0)]),
        ([(1, 2), (2, 3), (3, 4)], 3, 6, [(1, 2), (2, 1), (3, 0)]),
        ([(1, 2), (2, 3), (3, 4)], 3, 99, [(3, 0)]),
        ([(1, 2), (2, 3), (3, 4)], 2, 1, [(1, 2), (2, 2), (3, 4)]),
        ([(1, 2), (2, 3), (3, 4)], 2, 3, [(1, 2), (3, 4)]),
        ([(1, 2), (2, 3), (3, 4)], 2, 99, [(3, 4)]),
        ([(1, 2), (2, 3), (3, 4)], 0, 1, [(1, 2), (2, 3), (3, 4)]),
    ],
)
def test_a_log_gives_back_the_latest_tokens_up_to_the_charge(runs, at, tokens, expected):
    after = charged(LOG, *((NOW + at_us, spent) for at_us, spent in runs))
    back = refunded(after, LOG, [Refund(0, 0, NOW + at, tokens, 0, 0)])
    assert [(at_us - NOW, spent) for at_us, spent in runs_of(back.state)] == expected


def test_entries_without_tokens_do_not_accumulate():
    shared = charged(LOG, (NOW, 1))
    for step in range(1, 50):
        update = Update(LOG, 0, ((NOW + step, 1),))
        shared = settle(shared, update).shared
        shared = refunded(shared, LOG, [refund_of(shared, LOG, 1)])
    assert runs_of(shared.state) == [(NOW, 1), (NOW + 49, 0)]


def test_a_refund_excludes_later_charges_of_the_same_batch():
    after = charged(BUCKET, (NOW, 2), (NOW, 3))
    refund = refund_of(after, BUCKET, 2, at_us=NOW - S, later=3)
    assert (refund.at_us, refund.tokens, refund.spent) == (NOW - S, 2, 2)


def test_refunds_are_applied_before_asks():
    shared = charged(WINDOW, (NOW, 10))
    update = Update(WINDOW, 0, (), [(NOW, 4)], [refund_of(shared, WINDOW, 4)])
    settled = settle(shared, update)
    assert settled.grants == (True,)
    assert settled.shared == SharedState(0, 0, 10, (10, NOW), refunded=4)


def test_an_edit_in_the_same_batch_voids_a_refund():
    shared = charged(WINDOW, (NOW, 10))
    edited = replace(WINDOW, limit=5, revision=1)
    update = Update(edited, 0, (), (), [refund_of(shared, WINDOW, 4)])
    assert settle(shared, update).shared == SharedState(0, 1, 5, (5, NOW))


# Never more than without the charge


class Twice:
    """A bucket with charges that are given back later, beside one without these charges."""

    def __init__(self, of, chance):
        self.of, self.chance = of, chance
        self.now_us = NOW
        self.shared = self.without = SharedState(0, 0, of.limit)
        self.open = []

    def charge(self, tokens, *, is_kept):
        run = [(self.now_us, tokens)]
        self.shared = settle(self.shared, Update(self.of, 0, run)).shared
        if is_kept:
            self.without = settle(self.without, Update(self.of, 0, run)).shared
            return
        if self.chance.random() < 0.5:
            refund = refund_of(self.shared, self.of, tokens)
        else:  # a repeated reply
            refund = Refund(0, 0, self.now_us, tokens, tokens, self.shared.refunded)
        self.open.append(refund)

    def step(self):
        chance = self.chance
        self.now_us += chance.choice((0, 1, S // 10, S, 3 * S))
        if self.open and chance.random() < 0.4:
            refund = self.open.pop(chance.randrange(len(self.open)))
            self.shared = refunded(self.shared, self.of, [refund])
        else:
            self.charge(chance.randint(1, 4), is_kept=chance.random() < 0.5)

    def lacks_enough(self):
        """Return whether at any later time at least as much is missing as without the charges."""
        times = [self.now_us + after * S // 2 for after in range(25)]
        return all(
            used(self.shared, self.of, at_us) >= used(self.without, self.of, at_us)
            for at_us in times
        )


@pytest.mark.deep
@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_no_bucket_ever_allows_more_than_without_the_charges(of):
    for seed in range(250):
        pair = Twice(of, Random(seed))
        for _ in range(40):
            pair.step()
            assert pair.lacks_enough(), seed
        while pair.open:
            pair.shared = refunded(pair.shared, of, [pair.open.pop()])
        assert pair.lacks_enough(), seed


@pytest.mark.parametrize("limit", [10, 5])
@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_after_a_denial_the_remaining_tokens_follow_the_limit_in_the_store(of, limit):
    part = Part(of, 1)
    part.shared = charged(of, (NOW, 4), revision=1)._replace(limit=limit)
    part.refund = refund_of(part.shared, of, 1)
    part.outcome = (True, 6, NOW // S + 10, 0, Reason.WITHIN_LIMIT, None)
    part.leave(NOW)
    assert part.outcome[:2] == (True, limit - 3)


@pytest.mark.parametrize("revision", [1, 2])
@pytest.mark.parametrize(("limit", "left"), [(5, 8), (20, 8)])
@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG])
def test_after_a_denial_the_remaining_tokens_follow_an_edit_that_the_store_has_not(
    of, limit, left, revision
):
    part = Part(replace(of, revision=revision), 1)
    part.shared = charged(of, (NOW, 2), revision=1)._replace(limit=limit)
    part.outcome = (True, left - 1, NOW // S + 10, 0, Reason.WITHIN_LIMIT, None)
    part.leave(NOW)
    assert part.outcome[:2] == (True, left)


@pytest.mark.parametrize("of", [BUCKET, WINDOW])
def test_after_a_denial_an_edit_that_the_store_has_not_caps_the_debt(of):
    part = Part(replace(of, limit=3, revision=2), 1)
    part.shared = charged(of, (NOW, 9), revision=1)
    part.outcome = (True, 2, NOW // S + 10, 0, Reason.WITHIN_LIMIT, None)
    later = NOW + 10 * S
    part.leave(later)
    assert part.outcome[:2] == (True, 3)
