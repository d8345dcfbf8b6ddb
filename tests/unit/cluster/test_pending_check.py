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


@pytest.mark.parametrize(
    ("spent", "later", "left", "retry_after"),
    [(4, 0, 6, 0), (10, 3, 3, 0), (10, 0, 0, 3_600)],
    ids=["alone", "before others", "of the last token"],
)
def test_a_grant_tells_what_is_left_with_it(spent, later, left, retry_after):
    view = LocalView(limited(10), state(spent, NOW_US, limit=10))
    expected = True, left, END_S, retry_after, WITHIN_LIMIT
    assert granted(view, NOW_US, later)[:5] == expected


def test_a_grant_of_the_largest_limit_is_one():
    view = LocalView(limited(2**31 - 1), state(0, NOW_US, limit=2**31 - 1))
    assert granted(view, NOW_US)[:2] == (True, 2**31 - 1)


def test_a_refusal_is_what_the_view_says_now_and_stays_one_when_there_is_enough():
    view = LocalView(limited(10), state(8, NOW_US, limit=10))
    assert refused(view, NOW_US, 3)[:5] == (False, 2, END_S, 3_600, LIMIT_EXCEEDED)
    assert refused(view, NOW_US, 11)[4] is COST_EXCEEDS_LIMIT
    assert refused(view, NOW_US, 2)[:5] == (False, 2, END_S, 1, LIMIT_EXCEEDED)
