"""The result of a hold in several parts."""

from dataclasses import replace

import pytest

from ratelimitd.errors import (
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.ledger.shared_holds import (
    HoldReply,
    Made,
    Stepped,
    StepReply,
    conclude,
    conclude_step,
    has_part,
)
from ratelimitd.model import (
    ALLOWED,
    DENIED,
    LIMIT_EXCEEDED,
    WITHIN_LIMIT,
    Algorithm,
    Enforcement,
)
from tests.store_scripts import key_of, rule_of

WINDOW = rule_of(Algorithm.FIXED_WINDOW, 10)
SLOTS = rule_of(Algorithm.CONCURRENCY, 10)
LEFT_3 = (ALLOWED, 3, 100, 0, WITHIN_LIMIT, None)
LEFT_9 = (ALLOWED, 9, 100, 7, WITHIN_LIMIT, None)
NONE_LEFT = (DENIED, 0, 100, 9, LIMIT_EXCEEDED, None)
AWAY = StoreUnavailableError("no answer")

A, B, C, D = (key_of(number) for number in range(4))

MADE = HoldReply(Made.MADE, 500, [LEFT_3], [A])
FOUND = HoldReply(Made.FOUND, 400, [LEFT_9], [B])
REFUSED = HoldReply(Made.DENIED, 0, [NONE_LEFT], [C])
FULL = HoldReply(Made.FULL, 0, [LEFT_3], [B])
OTHER = HoldReply(Made.OF_ANOTHER_CHECK, 0, (), ())


def test_a_hold_is_made_if_all_parts_are_and_ends_with_the_earliest():
    held = conclude([A, B], [WINDOW, SLOTS], 2, [([1], FOUND), ([0], MADE)])
    assert held == ([A, B], [LEFT_3, LEFT_9], 400, False)
    assert conclude([A], [WINDOW], 2, [([0], MADE)]).is_first


def test_a_found_hold_has_its_original_buckets():
    found = HoldReply(Made.FOUND, 400, [LEFT_9, LEFT_3], [B, A])
    held = conclude([A, C], [WINDOW, SLOTS], 2, [([0, 1], found)])
    assert held == ([A, B], [LEFT_3, LEFT_9], 400, False)
    held = conclude([C, D], [WINDOW, SLOTS], 2, [([0, 1], found)])
    assert held == ([B, A], [LEFT_9, LEFT_3], 400, False)


def test_a_denied_hold_reports_the_buckets_without_it():
    parts = [([2], REFUSED), ([0], MADE), ([1], MADE._replace(names=[B]))]
    held = conclude([A, B, C], [WINDOW, SLOTS, WINDOW], 2, parts)
    without = [(ALLOWED, left, 100, 0, WITHIN_LIMIT, None) for left in (5, 4)]
    assert held == ([A, B, C], [*without, NONE_LEFT], 0, False)


def test_a_bucket_without_the_hold_has_at_most_its_capacity():
    parts = [([0], HoldReply(Made.MADE, 500, [LEFT_9], [A])), ([1], REFUSED)]
    assert conclude([A, C], [WINDOW, WINDOW], 5, parts).outcomes[0][1] == 10


def test_the_denial_of_an_observing_limit_is_kept_in_a_denied_hold():
    parts = [([0], HoldReply(Made.MADE, 500, [NONE_LEFT], [A])), ([1], REFUSED)]
    assert conclude([A, C], [WINDOW, WINDOW], 5, parts).outcomes[0] == NONE_LEFT


def test_the_outcome_of_a_found_part_is_unchanged_in_a_denied_hold():
    assert (
        conclude([B, C], [WINDOW, WINDOW], 5, [([0], FOUND), ([1], REFUSED)]).outcomes[0] == LEFT_9
    )


def test_a_denial_precedes_full_buckets_and_failed_parts():
    for other in (FULL, AWAY):
        held = conclude([B, C], [WINDOW, WINDOW], 2, [([0], other), ([1], REFUSED)])
        assert (held.outcomes[1], held.expire_us) == (NONE_LEFT, 0)


@pytest.mark.parametrize(
    ("reply", "error"),
    [(OTHER, CheckInvalidError), (FULL, HoldsFullError), (AWAY, StoreUnavailableError)],
)
def test_a_hold_with_a_failed_part_is_an_error(reply, error):
    with pytest.raises(error):
        conclude([A, B], [WINDOW, WINDOW], 2, [([0], MADE), ([1], reply)])


def test_a_failed_part_that_only_observes_is_left_out_of_a_hold():
    limits = [WINDOW, replace(WINDOW, enforcement=Enforcement.OBSERVE)]
    held = conclude([A, B], limits, 2, [([1], AWAY), ([0], MADE)])
    assert held == ([A, B], [LEFT_3, None], 500, True)
    repeated = conclude([B, A], limits[::-1], 2, [([0], AWAY), ([1], FOUND._replace(names=[A]))])
    assert repeated == ([A], [LEFT_9], 400, False)
    with pytest.raises(StoreUnavailableError):
        conclude([B, A], limits[::-1], 2, [([0, 1], AWAY)])
    with pytest.raises(StoreUnavailableError):
        conclude([B], limits[1:], 2, [([0], AWAY)])


def test_the_error_for_a_hold_of_another_check_names_the_field():
    with pytest.raises(CheckInvalidError) as caught:
        conclude([A], [WINDOW], 2, [([0], OTHER)])
    assert [one.field for one in caught.value.violations] == ["hold_id"]


def test_parts_that_may_have_been_made_are_detected():
    assert [has_part(reply) for reply in (MADE, FOUND, AWAY)] == [True] * 3
    not_asked = StoreOverloadedError("too much")
    assert [has_part(reply) for reply in (REFUSED, FULL, OTHER, not_asked)] == [False] * 4


DONE = StepReply(Stepped.DONE, 500, 2, 0, [LEFT_3])
AGAIN = StepReply(Stepped.AS_BEFORE, 400, 0, 0, [LEFT_9])


def test_a_step_is_done_if_one_part_did_it_in_this_call():
    reply = conclude_step(2, [([1], AGAIN), ([0], DONE)], field="actual")
    assert reply == (Stepped.DONE, 400, 2, 0, [LEFT_3, LEFT_9])
    assert conclude_step(1, [([0], AGAIN)], field="actual").stepped is Stepped.AS_BEFORE


def test_a_hold_with_a_lost_part_is_known():
    unknown = StepReply(Stepped.UNKNOWN)
    reply = conclude_step(2, [([0], unknown), ([1], DONE)], field="actual")
    assert reply == (Stepped.DONE, 500, 2, 0, [None, LEFT_3])
    assert conclude_step(1, [([0], unknown)], field="actual") == (Stepped.UNKNOWN, 0, 0, 0, [None])
    assert conclude_step(0, [], field="actual").stepped is Stepped.UNKNOWN


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (StepReply(Stepped.ENDED), HoldEndedError),
        (StepReply(Stepped.SETTLED), HoldSettledError),
        (AWAY, StoreUnavailableError),
    ],
)
def test_a_step_refused_by_a_part_is_an_error(reply, error):
    with pytest.raises(error):
        conclude_step(2, [([0], DONE), ([1], reply)], field="actual")


def test_a_settled_part_precedes_an_unknown_one():
    with pytest.raises(HoldSettledError, match=r"^hold:"):
        conclude_step(2, [([0], AWAY), ([1], StepReply(Stepped.SETTLED))], field="hold")
