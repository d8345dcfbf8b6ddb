"""The conformance vectors over the wire: a real node that trusts its callers' time."""

import grpc.aio
import pytest

from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as pb_grpc
from tests.conformance.vectors import CASES, expected


@pytest.fixture
async def channel(transport):
    """A channel to a node with one rule for each case; the endpoint is the case's number."""
    async with (
        running_node(timestamps="caller", http_listen="", transport=transport) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        config = pb_grpc.RateLimiterConfigStub(channel)
        for number, case in enumerate(CASES):
            rule = pb.RateLimit(
                endpoint=f"/{number}",
                identifier_type="user",
                limit=case.limit,
                window_seconds=case.window_seconds,
                algorithm=case.algorithm,
            )
            await config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
        yield channel


def requests_of(number, case, identifier):
    return [
        pb.RateLimitRequest(
            identifier=identifier,
            identifier_type="user",
            endpoint=f"/{number}",
            tokens_requested=step["cost"],
            timestamp=step["at_us"],
        )
        for step in case.steps
    ]


def answered(response):
    reason = pb.Reason.Name(response.reason)
    times = (response.reset_time, response.retry_after_seconds)
    return (response.allowed, response.remaining_tokens, *times, reason)


async def test_every_vector_holds_check_by_check(channel):
    checks = pb_grpc.RateLimiterStub(channel)
    for number, case in enumerate(CASES):
        answers = [await checks.CheckRateLimit(ask) for ask in requests_of(number, case, "single")]
        assert list(map(answered, answers)) == list(map(expected, case.steps)), case.name
        assert {(answer.limit, answer.window_seconds) for answer in answers} == {
            (case.limit, case.window_seconds)
        }


async def test_every_vector_holds_in_one_batch(channel):
    """All cases at once, each step of a case behind the same step of the others, under one identifier."""
    asked = [
        (index, number, case, request)
        for number, case in enumerate(CASES)
        for index, request in enumerate(requests_of(number, case, "batch"))
    ]
    asked.sort(key=lambda item: item[:2])
    batch = pb.BatchRateLimitRequest(requests=[request for *_, request in asked])
    answers = (await pb_grpc.RateLimiterStub(channel).CheckRateLimitBatch(batch)).responses
    for (index, _, case, _), answer in zip(asked, answers, strict=True):
        assert answered(answer) == expected(case.steps[index]), f"{case.name}, step {index}"
