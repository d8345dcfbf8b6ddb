import asyncio
import itertools

import pytest

from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.model import Decision, IdentifierType, Reason
from ratelimitd.services.rate_limiter import (
    COUNT_ABOVE_BYTES,
    MAX_BATCH_ITEMS,
    SLICE_ITEMS,
    RateLimiterService,
)
from ratelimitd.stats import LATENCY_BOUNDS_S, CheckStats
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
ALLOWED = Decision(True, 3, 60, 0, Reason.WITHIN_LIMIT, None)
A_CHECK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
BATCH_PATH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"


class LimiterProbe:
    """Allows everything, remembers it, and refuses the timestamp 13 as the policy ``caller`` refuses one.

    It has no rules, so that nothing is for the bulk way.
    """

    book = None
    charge = None

    def __init__(self):
        self.asked = []

    def now_us(self):
        return 0

    def scope(self, endpoint, identifier_type):
        return None

    def check(self, check):
        if check.timestamp == 13:
            raise CheckInvalidError(FieldViolation("timestamp", "unlucky"))
        self.asked.append(check)
        return ALLOWED._replace(remaining=len(self.asked))

    def check_batch(self, checks):
        answers = []
        for check in checks:
            try:
                answers.append(self.check(check))
            except CheckInvalidError as error:
                answers.append(error)
        return answers


@pytest.fixture
def limiter():
    return LimiterProbe()


@pytest.fixture
def stats():
    return CheckStats()


@pytest.fixture
def service(limiter, stats):
    seconds = itertools.count(0.0, 0.004)
    return RateLimiterService(limiter, stats, lambda: next(seconds))


def answer_to(service, items):
    data = pb.BatchRateLimitRequest(requests=items).SerializeToString()
    return service.check_rate_limit_batch(data, CALL)


def responses(answer):
    return list(pb.BatchRateLimitResponse.FromString(answer).responses)


def batch(service, *items):
    return responses(answer_to(service, items))


def test_the_service_offers_the_methods_of_the_contract(service):
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["RateLimiter"].methods]
    assert [path.rpartition("/")[2] for path in service.methods().unary] == names


def test_a_check_is_answered_at_once_with_bytes_and_timed(service, limiter, stats):
    answer = service.check_rate_limit(A_CHECK.SerializeToString(), CALL)
    assert pb.RateLimitResponse.FromString(answer) == pb.RateLimitResponse(
        allowed=True, remaining_tokens=1, reset_time=60, reason=pb.WITHIN_LIMIT
    )
    assert limiter.asked == [(b"u", IdentifierType.USER, "/a", 1, 0, False)]
    assert stats.latency_sum_s == pytest.approx(0.004)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", pb.RateLimitRequest(timestamp=13).SerializeToString()]
)
def test_a_malformed_check_is_refused_counted_and_not_timed(service, limiter, stats, data):
    with pytest.raises(InvalidInputError):
        service.check_rate_limit(data, CALL)
    assert (limiter.asked, stats.invalid_total, sum(stats.latency_counts)) == ([], 1, 0)


def test_a_batch_is_answered_in_order_around_malformed_items(service, limiter, stats):
    late = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a", timestamp=13)
    first, bad, second, refused = batch(service, A_CHECK, pb.RateLimitRequest(), A_CHECK, late)
    assert (first.remaining_tokens, second.remaining_tokens) == (1, 2)
    assert bad.reason == refused.reason == pb.INVALID_REQUEST
    assert bad.error.startswith("requests[1].identifier: ")
    assert refused.error == "requests[3].timestamp: unlucky"
    assert (len(limiter.asked), stats.invalid_total) == (2, 2)


def test_a_batch_shares_its_time_among_its_items(service, stats):
    batch(service, A_CHECK, A_CHECK)
    bucket = next(i for i, bound in enumerate(LATENCY_BOUNDS_S) if bound >= 0.002)
    assert stats.latency_counts[bucket] == 2


def test_an_empty_batch_is_answered_with_none_and_not_timed(service, stats):
    assert batch(service) == []
    assert sum(stats.latency_counts) == 0


def test_a_batch_that_is_no_message_is_refused_and_counted(service, stats):
    with pytest.raises(InvalidInputError, match="BatchRateLimitRequest"):
        service.check_rate_limit_batch(b"\xff", CALL)
    assert stats.invalid_total == 1


def test_a_batch_of_one_slice_is_answered_at_once(service):
    assert len(batch(service, *[A_CHECK] * SLICE_ITEMS)) == SLICE_ITEMS


def test_no_turn_of_the_loop_answers_more_than_a_slice(service, limiter):
    answer = answer_to(service, [A_CHECK] * MAX_BATCH_ITEMS)
    turns = [len(limiter.asked)]
    turns += [len(limiter.asked) for _turn in answer.__await__()]
    turns.append(len(limiter.asked))
    done = [later - before for before, later in itertools.pairwise(turns)]
    assert turns[0] == 0
    assert max(done) == SLICE_ITEMS
    assert sum(done) == MAX_BATCH_ITEMS


async def test_a_long_batch_is_answered_in_order_whoever_checks_between_its_slices(
    service, limiter, stats
):
    items = [A_CHECK] * (2 * SLICE_ITEMS + 1)
    items[SLICE_ITEMS + 1] = pb.RateLimitRequest()
    answering = asyncio.ensure_future(answer_to(service, items))
    await asyncio.sleep(0)  # it has begun
    await asyncio.sleep(0)  # the first slice
    assert len(limiter.asked) == SLICE_ITEMS
    service.check_rate_limit(A_CHECK.SerializeToString(), CALL)
    answers = responses(await answering)
    bad = answers.pop(SLICE_ITEMS + 1)
    assert bad.error.startswith(f"requests[{SLICE_ITEMS + 1}].identifier: ")
    left = [answer.remaining_tokens for answer in answers]
    assert left == sorted(left)
    others = set(range(1, 2 * SLICE_ITEMS + 2)) - set(left)
    assert others == {SLICE_ITEMS + 1}
    assert stats.invalid_total == 1
    assert sum(stats.latency_counts) == len(items) + 1


@pytest.mark.parametrize("identifier", ["u", "u" * 200], ids=["short batch", "long batch"])
async def test_a_thousand_items_are_answered_and_one_more_is_refused(service, limiter, identifier):
    item = pb.RateLimitRequest(identifier=identifier, identifier_type="user", endpoint="/a")
    assert len(responses(await answer_to(service, [item] * 1000))) == 1000
    with pytest.raises(InvalidInputError, match=r"^requests: must be at most 1000 items"):
        batch(service, *[item] * 1001)
    assert len(limiter.asked) == 1000


def test_a_long_batch_is_refused_without_being_parsed(service, monkeypatch):
    monkeypatch.setattr("ratelimitd.services.rate_limiter.parse_batch", pytest.fail)
    data = b"\x0a\x00" * COUNT_ABOVE_BYTES
    with pytest.raises(InvalidInputError, match=r"^requests: "):
        service.check_rate_limit_batch(data, CALL)
