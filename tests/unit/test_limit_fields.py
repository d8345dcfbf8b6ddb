import pytest

from ratelimitd.limit_fields import policy_fields

RULE = {"limit": 10, "window_s": 60, "remaining": 4}


def test_a_rule_is_a_policy_called_by_its_id():
    fields = policy_fields("r-1", **RULE, allowed=True, reset_s=30, retry_after_s=0)
    assert fields == {"RateLimit-Policy": '"r-1";q=10;w=60', "RateLimit": '"r-1";r=4;t=30'}


@pytest.mark.parametrize(("allowed", "window_s"), [(True, 30), (False, 7)])
def test_what_is_left_lasts_until_all_is_free_or_a_denied_check_would_pass(allowed, window_s):
    fields = policy_fields("r-1", **RULE, allowed=allowed, reset_s=30, retry_after_s=7)
    assert fields["RateLimit"].endswith(f";t={window_s}")
