import json

import pytest

from ratelimitd.web.api.connect import Types
from ratelimitd.web.api.json_api import HttpCheck, limit_fields
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.web.api.turns import at_once

NOW_S = 1_700_006_400.25
RULE_ID = "0e8f3b6c-7b5e-4a39-9d5f-0a1c7f0f2b11"
RULE = {"limit": 10, "window_seconds": 60, "rule_id": RULE_ID}


def decision(**fields):
    return pb.RateLimitResponse(**{"allowed": True, "reason": pb.WITHIN_LIMIT, **RULE, **fields})


def denial(**fields):
    denied = {"allowed": False, "reason": pb.LIMIT_EXCEEDED, "retry_after_seconds": 7}
    return decision(**{**denied, **fields})


async def answer(message):
    types = Types(pb.RateLimitRequest, pb.RateLimitResponse)
    return await HttpCheck(lambda: NOW_S, NEWEST_REVISION).answer(
        message.SerializeToString(), types, at_once
    )


def test_allowed_check_has_no_retry_after_even_without_tokens_left():
    fields = limit_fields(
        decision(retry_after_seconds=6, reset_time=1_700_006_460), NOW_S, NEWEST_REVISION
    )
    assert "Retry-After" not in fields


def test_denial_has_retry_after_and_a_bounded_reset():
    fields = limit_fields(
        denial(remaining_tokens=2, reset_time=1_700_006_460), NOW_S, NEWEST_REVISION
    )
    assert fields["Retry-After"] == "7"
    assert fields["RateLimit"] == f'"{RULE_ID}";r=2;t=7'


@pytest.mark.parametrize(("reset_time", "window_s"), [(1, 0), (2_000_000_000, 60)])
def test_check_at_another_time_yields_a_bounded_reset(reset_time, window_s):
    fields = limit_fields(decision(reset_time=reset_time), NOW_S, NEWEST_REVISION)
    assert fields["RateLimit"].endswith(f";t={window_s}")


@pytest.mark.parametrize("reason", [pb.NO_RULE, pb.FAIL_OPEN_ERROR, pb.FAIL_OPEN_BREAKER])
async def test_check_without_a_deciding_rule_has_no_policy_and_is_200(reason):
    response = await answer(pb.RateLimitResponse(allowed=True, reason=reason, remaining_tokens=1))
    assert response.status_code == 200
    assert not {"ratelimit", "ratelimit-policy", "retry-after"} & set(response.headers)
    assert json.loads(response.body)["reason"] == pb.Reason.Name(reason)


async def test_denial_by_an_open_breaker_has_retry_after():
    message = pb.RateLimitResponse(reason=pb.FAIL_OPEN_BREAKER, retry_after_seconds=3)
    response = await answer(message)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert "ratelimit" not in response.headers
