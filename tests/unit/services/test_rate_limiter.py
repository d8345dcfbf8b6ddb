import asyncio
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Algorithm, Decision, IdentifierType, Reason, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.rate_limiter import (
    COUNT_ABOVE_BYTES,
    MAX_ASKS,
    MAX_BATCH_ITEMS,
    SHORT_ITEMS,
    SLICE_ITEMS,
    RateLimiterService,
)
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
ALLOWED = Decision(True, 3, 60, 0, Reason.WITHIN_LIMIT, None)
A_CHECK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
BATCH_PATH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"


async def until(condition):
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it did not happen")


class LimiterProbe:
    """Allows and records all checks, and refuses the timestamp 13 as the policy ``caller`` does.

    It has no rules, so that no check takes the bulk path.
    """

    scopes = SimpleNamespace(book=None, find=lambda _endpoint, _identifier_type: None)
    charge = None
    recorder = None

    def __init__(self):
        self.asked = []

    def now_us(self):
        return 0

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
    return RateLimiterService(
        limiter, stats, lambda: next(seconds), FairQueue(map(float, itertools.count()).__next__)
    )


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
    assert limiter.asked == [(b"u", IdentifierType.USER, "/a", 1, 0, False, (), 0)]
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


def test_an_empty_batch_gets_an_empty_answer_and_is_not_timed(service, stats):
    assert batch(service) == []
    assert sum(stats.latency_counts) == 0


def test_a_malformed_batch_is_refused_and_counted(service, stats):
    with pytest.raises(InvalidInputError, match="BatchRateLimitRequest"):
        service.check_rate_limit_batch(b"\xff", CALL)
    assert stats.invalid_total == 1


def test_a_batch_of_one_slice_is_answered_at_once(service):
    assert len(batch(service, *[A_CHECK] * SHORT_ITEMS)) == SHORT_ITEMS


async def test_no_iteration_answers_more_than_a_slice(service, limiter):
    answering = asyncio.ensure_future(answer_to(service, [A_CHECK] * MAX_BATCH_ITEMS))
    asked = [len(limiter.asked)]
    while not answering.done():
        await asyncio.sleep(0)
        asked.append(len(limiter.asked))
    assert asked[0] == 0
    assert max(later - before for before, later in itertools.pairwise(asked)) == SLICE_ITEMS
    assert asked[-1] == MAX_BATCH_ITEMS


async def test_a_long_batch_is_answered_in_order_with_other_checks_between_its_slices(
    service, limiter, stats
):
    items = [A_CHECK] * (2 * SLICE_ITEMS + 1)
    items[SLICE_ITEMS + 1] = pb.RateLimitRequest()
    answering = asyncio.ensure_future(answer_to(service, items))
    await until(lambda: limiter.asked)
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
async def test_a_batch_of_1000_is_answered_and_one_of_1001_refused(service, limiter, identifier):
    item = pb.RateLimitRequest(identifier=identifier, identifier_type="user", endpoint="/a")
    assert len(responses(await answer_to(service, [item] * 1000))) == 1000
    with pytest.raises(InvalidInputError, match=r"^requests: must be at most 1000 items"):
        batch(service, *[item] * 1001)
    assert len(limiter.asked) == 1000


async def test_a_long_batch_in_another_encoding_is_answered_in_slices(service, limiter):
    data = pb.BatchRateLimitRequest(requests=[A_CHECK] * (SHORT_ITEMS + 1)).SerializeToString()
    answering = service.check_rate_limit_batch(data + b"\x78\x01", CALL)  # an unknown field
    assert limiter.asked == []
    assert len(responses(await answering)) == SHORT_ITEMS + 1


def test_a_long_batch_is_refused_without_being_parsed(service, monkeypatch):
    monkeypatch.setattr("ratelimitd.services.rate_limiter.parse_batch", pytest.fail)
    data = b"\x0a\x00" * COUNT_ABOVE_BYTES
    with pytest.raises(InvalidInputError, match=r"^requests: "):
        service.check_rate_limit_batch(data, CALL)


class TestBatchesOfCanonicalChecks:
    """With a real limiter and rules, batches are answered from their octets."""

    RULE = Rule(
        "1",
        "/a",
        IdentifierType.USER,
        limit=2_000,
        window_seconds=60,
        algorithm=Algorithm.FIXED_WINDOW,
    )

    class Faulty(Limiter):
        """Fails to charge ``broken``."""

        def charge(self, identifier, scope, now_us, cost):
            if identifier == b"broken":
                raise KeyError(identifier)
            return super().charge(identifier, scope, now_us, cost)

    @pytest.fixture
    def limiter(self, stats):
        limiter = self.Faulty(
            buckets=BucketTable(100),
            clock=ManualClock(),
            stats=stats,
            timestamps="bounded",
            keys=BucketKeys(b"k" * 32),
        )
        limiter.replace_book(RuleBook.of([self.RULE], 1))
        return limiter

    @pytest.fixture(autouse=True)
    def only_in_bulk(self, service, monkeypatch):
        monkeypatch.setattr("ratelimitd.services.rate_limiter.parse_batch", pytest.fail)

    def test_batches_are_answered_in_order_counted_and_timed(self, service, stats):
        answers = batch(service, *[A_CHECK] * 50)
        assert [answer.remaining_tokens for answer in answers] == [*range(1_999, 1_949, -1)]
        assert {answer.rule_id for answer in answers} == {"1"}
        assert (stats.allowed_total, sum(stats.latency_counts)) == (50, 50)

    async def test_1000_checks_are_answered_in_slices(self, service, stats):
        answering = asyncio.ensure_future(answer_to(service, [A_CHECK] * MAX_BATCH_ITEMS))
        allowed = [stats.allowed_total]
        while not answering.done():
            await asyncio.sleep(0)
            allowed.append(stats.allowed_total)
        assert allowed[0] == 0
        assert max(later - before for before, later in itertools.pairwise(allowed)) == SLICE_ITEMS
        assert stats.allowed_total == sum(stats.latency_counts) == MAX_BATCH_ITEMS

    async def test_queued_long_batches_are_kept_as_bytes(self, service):
        data = pb.BatchRateLimitRequest(requests=[A_CHECK] * MAX_BATCH_ITEMS).SerializeToString()
        blocks = sys.getallocatedblocks()
        answering = [
            asyncio.ensure_future(service.check_rate_limit_batch(data, CALL))
            for _ in range(8 + 100)
        ]
        await asyncio.sleep(0)
        assert sys.getallocatedblocks() - blocks < 8 * 3 * MAX_BATCH_ITEMS + 100 * 100
        assert {len(responses(await each)) for each in answering} == {MAX_BATCH_ITEMS}

    async def test_no_iteration_parses_more_than_a_slice(self, service, monkeypatch):
        read, sizes = service._bulk.read, []
        monkeypatch.setattr(
            service._bulk, "read", lambda items: sizes.append(len(items)) or read(items)
        )
        await answer_to(service, [A_CHECK] * (2 * SLICE_ITEMS + 1))
        assert sizes == [SLICE_ITEMS, SLICE_ITEMS, 1]

    async def test_a_malformed_long_batch_charges_nothing(self, service, stats, monkeypatch):
        monkeypatch.undo()  # the last item takes the general path
        items = [A_CHECK.SerializeToString()] * (2 * SLICE_ITEMS) + [b"\xff"]
        data = b"".join(b"\x0a" + bytes([len(item)]) + item for item in items)
        with pytest.raises(InvalidInputError):
            await service.check_rate_limit_batch(data, CALL)
        assert (stats.allowed_total, stats.invalid_total) == (0, 1)

    async def test_changed_rules_apply_to_the_rest_of_a_batch(self, service, limiter, stats):
        answering = asyncio.ensure_future(answer_to(service, [A_CHECK] * 4 * SLICE_ITEMS))
        await until(lambda: stats.allowed_total == SLICE_ITEMS)
        limiter.replace_book(RuleBook.of([replace(self.RULE, limit=75)], 2))
        await until(lambda: stats.allowed_total > SLICE_ITEMS)
        limiter.replace_book(RuleBook.of([], 3))
        answers = responses(await answering)
        limits = [2_000] * SLICE_ITEMS + [75] * SLICE_ITEMS + [0] * 2 * SLICE_ITEMS
        assert [answer.limit for answer in answers] == limits
        assert sum(answer.reason == pb.LIMIT_EXCEEDED for answer in answers) == 25
        assert {answer.reason for answer in answers[2 * SLICE_ITEMS :]} == {pb.NO_RULE}

    def test_a_failed_check_is_answered_fail_open_in_its_place(self, service, stats):
        broken = pb.RateLimitRequest(identifier="broken", identifier_type="user", endpoint="/a")
        first, open_, second = batch(service, A_CHECK, broken, A_CHECK)
        assert (first.remaining_tokens, second.remaining_tokens) == (1_999, 1_998)
        assert (open_.allowed, open_.reason) == (True, pb.FAIL_OPEN_ERROR)
        assert (stats.allowed_total, stats.fail_open_error_total, stats.invalid_total) == (3, 1, 0)


class LimiterWithoutState(LimiterProbe):
    """Decides only ``u`` locally; other identifiers wait until the test releases the shared state."""

    def __init__(self):
        super().__init__()
        self.waited, self.remaining_s, self.may_answer = [], [], asyncio.Event()
        self.asking = 0

    def check(self, check):
        return super().check(check) if check.identifier == b"u" else None

    async def wait(self, checks, remaining_s=None):
        self.asking += 1
        self.remaining_s.append(remaining_s)
        await self.may_answer.wait()
        self.waited.append([check.identifier for check in checks])
        return [
            CheckInvalidError(FieldViolation("timestamp", "unlucky"))
            if check.timestamp == 13
            else ALLOWED._replace(remaining=100 + number)
            for number, check in enumerate(checks)
        ]


def waits(identifier="far", timestamp=0):
    return pb.RateLimitRequest(
        identifier=identifier, identifier_type="user", endpoint="/a", timestamp=timestamp
    )


class TestChecksThatWait:
    @pytest.fixture
    async def limiter(self):
        return LimiterWithoutState()

    async def test_a_check_is_answered_and_timed_after_the_shared_state(
        self, service, limiter, stats
    ):
        answering = service.check_rate_limit(waits().SerializeToString(), CALL)
        assert sum(stats.latency_counts) == 0
        limiter.may_answer.set()
        assert pb.RateLimitResponse.FromString(await answering).remaining_tokens == 100
        assert (limiter.waited, sum(stats.latency_counts)) == ([[b"far"]], 1)
        assert stats.latency_sum_s == pytest.approx(0.004)

    async def test_a_check_with_a_refused_timestamp_is_counted_and_not_timed(
        self, service, limiter, stats
    ):
        limiter.may_answer.set()
        with pytest.raises(CheckInvalidError, match="unlucky"):
            await service.check_rate_limit(waits(timestamp=13).SerializeToString(), CALL)
        assert (stats.invalid_total, sum(stats.latency_counts)) == (1, 0)

    async def test_checks_of_a_batch_wait_together_and_are_answered_in_order(
        self, service, limiter, stats
    ):
        items = [waits("x"), A_CHECK, waits("y"), pb.RateLimitRequest(), waits("z", 13), A_CHECK]
        answering = answer_to(service, items)
        assert sum(stats.latency_counts) == 0
        limiter.may_answer.set()
        first, known, second, bad, refused, last = responses(await answering)
        assert [first.remaining_tokens, second.remaining_tokens] == [100, 101]
        assert [known.remaining_tokens, last.remaining_tokens] == [1, 2]
        assert bad.error.startswith("requests[3].identifier: ")
        assert refused.error == "requests[4].timestamp: unlucky"
        assert limiter.waited == [[b"x", b"y", b"z"]]
        assert (stats.invalid_total, sum(stats.latency_counts)) == (2, len(items))

    async def test_the_limiter_is_told_how_long_the_caller_waits(self, service, limiter):
        limiter.may_answer.set()
        call = FakeCall(remaining_s=0.02)
        await service.check_rate_limit(waits().SerializeToString(), call)
        few = pb.BatchRateLimitRequest(requests=[waits()]).SerializeToString()
        await service.check_rate_limit_batch(few, call)
        assert limiter.remaining_s == [0.02, 0.02]

    async def test_checks_of_a_long_batch_wait_slice_by_slice(self, service, limiter, stats):
        items = [waits(), A_CHECK] * 2 * SLICE_ITEMS
        limiter.may_answer.set()
        answers = responses(await answer_to(service, items))
        left = [answer.remaining_tokens for answer in answers]
        assert left[::2] == [*range(100, 100 + SLICE_ITEMS // 2)] * 4
        assert left[1::2] == [*range(1, 2 * SLICE_ITEMS + 1)]
        assert len(limiter.waited) == 4
        assert sum(stats.latency_counts) == len(items)

    async def test_few_slices_wait_at_a_time_and_callers_do_not_block_each_other(
        self, service, limiter
    ):
        data = pb.BatchRateLimitRequest(requests=[waits()] * MAX_BATCH_ITEMS).SerializeToString()
        flood = [
            asyncio.ensure_future(service.check_rate_limit_batch(data, FakeCall(peer="ipv4:1:1")))
            for _ in range(3)
        ]
        await until(lambda: limiter.asking == MAX_ASKS)
        small = pb.BatchRateLimitRequest(requests=[waits("near")]).SerializeToString()
        answering = asyncio.ensure_future(
            service.check_rate_limit_batch(small, FakeCall(peer="ipv4:2:1"))
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert limiter.asking == MAX_ASKS
        limiter.may_answer.set()
        assert len(responses(await answering)) == 1
        assert [b"near"] in limiter.waited[: 2 * MAX_ASKS]
        assert [len(responses(await each)) for each in flood] == [MAX_BATCH_ITEMS] * 3

    async def test_a_caller_that_leaves_is_not_timed(self, service, limiter, stats):
        answering = asyncio.ensure_future(answer_to(service, [waits()]))
        await asyncio.sleep(0)
        answering.cancel()
        await asyncio.wait([answering])
        assert (limiter.waited, sum(stats.latency_counts)) == ([], 0)
