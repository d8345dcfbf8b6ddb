"""Checks that a batch takes to the store, and what becomes of them."""

import asyncio

import pytest

from ratelimitd.cluster.pending import Bucket, PendingCheck, Requested
from tests.unit.cluster.world import NO_TAG, SECOND, limited, name_of, state

NOW_US = 1_700_006_400 * SECOND
RULE = limited(10)


@pytest.fixture
def bucket():
    return Bucket(b"a", name_of(b"a"), NO_TAG, RULE, state(5, NOW_US, limit=10))


@pytest.fixture
async def question():
    """Makes checks that wait."""

    def make(cost=1):
        answer = asyncio.get_running_loop().create_future()
        return PendingCheck(RULE, NOW_US, cost, peek=False, answer=answer)

    return make


async def test_a_check_waits_until_a_batch_takes_it_and_is_told_what_it_brings(bucket, question):
    asked, first, second, third = Requested(), question(2), question(4), question(1)
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


def test_of_a_bucket_that_nobody_waits_for_nothing_is_taken_or_decided(bucket):
    asked = Requested()
    asked.take(bucket)
    asked.decide(bucket, ())
    assert not asked.are_taken


async def test_one_is_withdrawn_until_a_batch_has_taken_it(bucket, question):
    asked, first, second = Requested(), question(), question()
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
async def test_a_grant_that_comes_late_pays_for_what_the_view_has_charged(
    bucket, question, charged, grant
):
    asked, late = Requested(), question()
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


async def test_those_of_a_batch_that_is_given_up_are_forgotten(bucket, question):
    asked = Requested()
    asked.wait(bucket, question())
    asked.take(bucket)
    asked.forget_taken()
    assert not asked.are_taken
