"""The check path's answers, field by field, as a caller receives them."""

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import check


async def test_an_answer_carries_the_decision_and_the_rule_behind_it(node):
    rule = await node.rule("/a", limit=2, window_seconds=60)
    now_s = node.clock.now_us() // 1_000_000
    assert now_s % 60 == 0  # so that the window ends a minute from now
    common = {
        "limit": 2, "window_seconds": 60, "rule_id": rule.id, "reset_time": now_s + 60,
        "limit_name": "default",
    }  # fmt: skip
    answers = [await node.checks.CheckRateLimit(check()) for _ in range(3)]
    within = {"allowed": True, "reason": pb.WITHIN_LIMIT}
    assert answers == [
        pb.RateLimitResponse(remaining_tokens=1, **within, **common),
        pb.RateLimitResponse(remaining_tokens=0, retry_after_seconds=60, **within, **common),
        pb.RateLimitResponse(reason=pb.LIMIT_EXCEEDED, retry_after_seconds=60, **common),
    ]


async def test_a_cost_of_zero_is_one_and_a_peek_spends_nothing(node):
    await node.rule("/a", limit=10)
    for fields, left in (
        ({"tokens_requested": 0}, 9), ({"tokens_requested": 1}, 8), ({"peek": True}, 7), ({}, 7),
    ):  # fmt: skip
        assert (await node.checks.CheckRateLimit(check(**fields))).remaining_tokens == left


async def test_a_check_without_a_rule_is_allowed_with_that_reason(node):
    answer = await node.checks.CheckRateLimit(check())
    expected = pb.RateLimitResponse(
        allowed=True, remaining_tokens=2**31 - 1, reset_time=0, reason=pb.NO_RULE
    )
    assert answer == expected


async def test_an_unexpected_error_in_a_check_fails_open(node):
    await node.rule("/a")

    def broken(*_args):
        raise RuntimeError

    node.limiter.buckets.apply = broken
    answer = await node.checks.CheckRateLimit(check())
    expected = pb.RateLimitResponse(
        allowed=True, remaining_tokens=1, reset_time=0, reason=pb.FAIL_OPEN_ERROR
    )
    assert answer == expected
    assert node.fail_opens() == (0, 1)


async def test_checks_are_timed_and_a_batch_shares_its_time_among_its_items(node):
    await node.checks.CheckRateLimit(check())
    batch = pb.BatchRateLimitRequest(requests=[check()] * 5)
    await node.checks.CheckRateLimitBatch(batch)
    assert sum(node.stats.latency_counts) == 6
    assert node.stats.latency_sum_s > 0


CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"

ITEMS = st.lists(
    st.builds(
        check,
        identifier=st.sampled_from(["a", "b", ""]),
        endpoint=st.sampled_from(["/token", "/log", "/window", "/none", "*"]),
        tokens_requested=st.integers(-1, 6),
        peek=st.booleans(),
    ),
    max_size=30,
)


@pytest.fixture
async def limited(node):
    """A node with a rule of each algorithm."""
    for endpoint, algorithm in (
        ("/token", "token_bucket"), ("/log", "sliding_window"), ("/window", "fixed_window"),
    ):  # fmt: skip
        await node.rule(endpoint, algorithm=algorithm, limit=5)
    return node


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=ITEMS)
async def test_a_batch_equals_the_same_checks_in_order(limited, items):
    await reset_all(limited)
    alone = [await limited.outcome(CHECK, item.SerializeToString()) for item in items]
    await reset_all(limited)
    batch = await limited.checks.CheckRateLimitBatch(pb.BatchRateLimitRequest(requests=items))
    assert len(batch.responses) == len(items)
    for together, (code, answer) in zip(batch.responses, alone, strict=True):
        if together.reason == pb.INVALID_REQUEST:
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        else:
            assert together == pb.RateLimitResponse.FromString(answer)


async def reset_all(node):
    for identifier in ("a", "b"):
        for endpoint in ("/token", "/log", "/window"):
            await node.health.ResetRateLimit(
                pb.ResetRequest(identifier=identifier, identifier_type="user", endpoint=endpoint)
            )


async def test_an_explanation_is_the_answer_and_the_rules_behind_it(node):
    await node.rule("/a", limit=2)
    await node.rule("*", limit=1)
    request = check(peek=True)
    found = await node.health.ExplainRateLimit(request)
    assert found.answer == await node.checks.CheckRateLimit(request)
    assert [(rule.endpoint, rule.match) for rule in found.rules] == [
        ("/a", pb.JUDGES), ("*", pb.OVERRIDDEN),
    ]  # fmt: skip
    assert node.stats.allowed_total == 1
