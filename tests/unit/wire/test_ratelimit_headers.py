import pytest

from ratelimitd.web.api.json_api import limit_fields
from ratelimitd_client.decision import decision_of
from ratelimitd_wire.ratelimit_headers import REVISIONS, ratelimit_headers
from ratelimiter.v1 import ratelimiter_pb2 as pb

RULE = {"limit": 10, "window_s": 60, "remaining": 4}


def test_a_rule_is_a_policy_named_by_its_id():
    fields = ratelimit_headers("r-1", **RULE, allowed=True, reset_s=30, retry_after_s=0)
    assert fields == {"RateLimit-Policy": '"r-1";q=10;w=60', "RateLimit": '"r-1";r=4;t=30'}


@pytest.mark.parametrize(("allowed", "window_s"), [(True, 30), (False, 7)])
def test_the_effective_window_ends_when_all_is_free_or_a_denied_check_would_pass(allowed, window_s):
    fields = ratelimit_headers("r-1", **RULE, allowed=allowed, reset_s=30, retry_after_s=7)
    assert fields["RateLimit"].endswith(f";t={window_s}")


def test_revision_7_is_one_field_without_a_name():
    fields = ratelimit_headers(
        "r-1", **RULE, allowed=True, reset_s=30, retry_after_s=0, revision="draft-7"
    )
    assert fields == {
        "RateLimit-Policy": "10;w=60",
        "RateLimit": "limit=10, remaining=4, reset=30",
    }


def test_revision_6_is_three_fields():
    fields = ratelimit_headers(
        "r-1", **RULE, allowed=False, reset_s=30, retry_after_s=7, revision="draft-6"
    )
    assert fields == {
        "RateLimit-Policy": "10;w=60",
        "RateLimit-Limit": "10",
        "RateLimit-Remaining": "4",
        "RateLimit-Reset": "7",
    }


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("allowed", [True, False])
def test_the_node_and_the_client_send_the_same_fields(allowed, revision):
    answer = pb.RateLimitResponse(
        allowed=allowed,
        remaining_tokens=0,
        reset_time=1_060,
        retry_after_seconds=0 if allowed else 6,
        limit=10,
        window_seconds=60,
        rule_id="r-1",
        reason=pb.WITHIN_LIMIT if allowed else pb.LIMIT_EXCEEDED,
    )
    of_node = limit_fields(answer, 1_000, revision)
    assert of_node == decision_of(answer, 1_000).headers(policy="r-1", revision=revision)
    ends_s = of_node.get("RateLimit-Reset") or of_node["RateLimit"].rpartition("=")[2]
    assert ends_s == str(60 if allowed else 6)
