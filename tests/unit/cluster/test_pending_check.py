import asyncio

import pytest

from ratelimitd.cluster.pending import PendingCheck, granted, refused
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.model import COST_EXCEEDS_LIMIT, LIMIT_EXCEEDED, WITHIN_LIMIT
from tests.unit.cluster.world import RULE, SECOND, limited, state

NOW_US = 1_700_006_400 * SECOND
END_S = 1_700_006_400 + 3_600


@pytest.fixture
async def question():
    answer = asyncio.get_running_loop().create_future()
    return PendingCheck(RULE, NOW_US, 3, peek=True, answer=answer)


async def test_a_question_is_a_check_that_nobody_has_charged(question):
    assert (question.rule, question.now_us, question.cost, question.peek) == (RULE, NOW_US, 3, True)
    assert not question.charged


async def test_it_is_answered_once(question):
    error = StoreUnavailableError("no answer")
    question.resolve(error)
    question.resolve(StoreUnavailableError("again"))
    assert question.answer.result() is error


async def test_one_whose_caller_has_left_is_not_answered(question):
    question.answer.cancel()
    question.resolve(StoreUnavailableError("no answer"))
    question.fail(ValueError("defect"))
    assert question.answer.cancelled()


async def test_an_error_that_nobody_expected_is_the_callers(question):
    question.fail(ValueError("defect"))
    with pytest.raises(ValueError, match="defect"):
        await question.answer


def test_a_grant_tells_what_is_left_with_it():
    view = LocalView(limited(10), state(4, NOW_US, limit=10))
    assert granted(view, NOW_US)[:5] == (True, 6, END_S, 0, WITHIN_LIMIT)


def test_a_grant_is_told_what_was_left_before_those_behind_it():
    view = LocalView(limited(10), state(10, NOW_US, limit=10))
    assert granted(view, NOW_US, 3)[:5] == (True, 3, END_S, 0, WITHIN_LIMIT)


def test_a_grant_of_the_last_token_tells_when_there_is_another():
    view = LocalView(limited(10), state(10, NOW_US, limit=10))
    assert granted(view, NOW_US)[:5] == (True, 0, END_S, 3_600, WITHIN_LIMIT)


def test_a_grant_of_the_largest_limit_is_one():
    view = LocalView(limited(2**31 - 1), state(0, NOW_US, limit=2**31 - 1))
    assert granted(view, NOW_US)[:2] == (True, 2**31 - 1)


def test_a_refusal_is_what_the_view_says_now_that_it_knows():
    view = LocalView(limited(10), state(8, NOW_US, limit=10))
    assert refused(view, NOW_US, 3)[:5] == (False, 2, END_S, 3_600, LIMIT_EXCEEDED)
    assert refused(view, NOW_US, 11)[4] is COST_EXCEEDS_LIMIT


def test_a_refusal_stays_one_when_there_is_enough_by_now():
    view = LocalView(limited(10), state(8, NOW_US, limit=10))
    assert refused(view, NOW_US, 2)[:5] == (False, 2, END_S, 1, LIMIT_EXCEEDED)
