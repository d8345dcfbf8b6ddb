import asyncio
import json
import math

import pytest
from google.protobuf import empty_pb2, json_format

from ratelimitd.web.api.json_messages import SLICE_CHARS, SLICE_ITEMS, json_of
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.web.api.turns import Turns, at_once

RESPONSE = pb.RateLimitResponse(
    allowed=True, remaining_tokens=4, reset_time=2**60, reason=pb.WITHIN_LIMIT, rule_id='é\n"'
)
METRIC = pb.Metric(
    name="a", kind="histogram", labels={"b": "1", "a": "2"},
    histogram=pb.Histogram(upper_bounds=[0.1, 1], cumulative_counts=[1, 2**63, 3], sum=0.5),
)  # fmt: skip


def written(message):
    return asyncio.run(json_of(message, at_once))


def as_the_library(message):
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


MESSAGES = {
    "an answer": RESPONSE,
    "an empty answer": pb.RateLimitResponse(),
    "a batch": pb.BatchRateLimitResponse(responses=[RESPONSE, pb.RateLimitResponse()]),
    "an empty batch": pb.BatchRateLimitResponse(),
    "an optional field that is set": pb.RateLimit(id="i", limit=5, enabled=False),
    "an optional field that is not set": pb.RateLimit(id="i"),
    "a list": pb.ListRateLimitsResponse(rate_limits=[pb.RateLimit(id="i")], next_page_token="t"),
    "health": pb.HealthResponse(status=pb.DEGRADED, error_rate=0.25, rules_revision=7),
    "metrics": pb.MetricsResponse(metrics=[METRIC, pb.Metric(name="b", value=math.inf)]),
    "below all numbers": pb.Metric(value=-math.inf),
    "no number": pb.Metric(value=math.nan),
    "a reason of a later release": pb.RateLimitResponse.FromString(b"\x28\x63"),
    "nothing": empty_pb2.Empty(),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_answer_is_written_as_by_the_library(message):
    assert json.loads(written(message)) == as_the_library(message)


def test_fields_are_written_in_contract_order_on_one_line():
    assert written(pb.RateLimitResponse(allowed=True, reason=pb.NO_RULE)) == (
        b'{"allowed":true,"remaining_tokens":0,"reset_time":"0","retry_after_seconds":0,'
        b'"reason":"NO_RULE","limit":0,"window_seconds":0,"rule_id":"","error":"","limits":[],"limit_name":"","plan":"","wait_ms":0}\n'
    )


async def test_long_list_is_written_in_steps_and_a_short_one_at_once():
    turns = Turns()
    message = pb.BatchRateLimitResponse(responses=[RESPONSE] * (5 * SLICE_ITEMS))
    text = await json_of(message, turns)
    assert json.loads(text) == as_the_library(message)
    assert turns.taken == 5
    await json_of(pb.BatchRateLimitResponse(responses=[RESPONSE] * SLICE_ITEMS), turns)
    assert turns.taken == 5


async def test_large_items_are_written_in_a_step_each():
    turns = Turns()
    message = pb.ListRateLimitsResponse(rate_limits=[pb.RateLimit(id="i" * SLICE_CHARS)] * 3)
    assert json.loads(await json_of(message, turns)) == as_the_library(message)
    assert turns.taken == 2, "beside the first, which is written at once"
