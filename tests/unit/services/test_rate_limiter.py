import itertools

import pytest

from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.model import Decision, IdentifierType, Reason
from ratelimitd.services.rate_limiter import COUNT_ABOVE_BYTES, RateLimiterService
from ratelimitd.stats import LATENCY_BOUNDS_S, CheckStats
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
ALLOWED = Decision(True, 3, 60, 0, Reason.WITHIN_LIMIT, None)
A_CHECK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
BATCH_PATH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"


class LimiterProbe:
    """Allows everything, remembers it, and refuses the timestamp 13 as the policy ``caller`` refuses one."""

    def __init__(self):
        self.asked = []

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


def batch(service, *items):
    data = pb.BatchRateLimitRequest(requests=items).SerializeToString()
    answer = service.check_rate_limit_batch(data, CALL)
    return list(pb.BatchRateLimitResponse.FromString(answer).responses)


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
    assert refused.error == "timestamp: unlucky"
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


@pytest.mark.parametrize("identifier", ["u", "u" * 200], ids=["short batch", "long batch"])
def test_a_thousand_items_are_answered_and_one_more_is_refused(service, limiter, identifier):
    item = pb.RateLimitRequest(identifier=identifier, identifier_type="user", endpoint="/a")
    assert len(batch(service, *[item] * 1000)) == 1000
    with pytest.raises(InvalidInputError, match=r"^requests: must be at most 1000 items"):
        batch(service, *[item] * 1001)
    assert len(limiter.asked) == 1000


def test_a_long_batch_is_refused_without_being_parsed(service, monkeypatch):
    monkeypatch.setattr("ratelimitd.services.rate_limiter.parse_batch", pytest.fail)
    data = b"\x0a\x00" * COUNT_ABOVE_BYTES
    with pytest.raises(InvalidInputError, match=r"^requests: "):
        service.check_rate_limit_batch(data, CALL)
