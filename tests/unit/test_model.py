import dataclasses

import pytest

from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    Algorithm,
    Check,
    IdentifierType,
    Reason,
    Rule,
)
from ratelimiter.v1 import ratelimiter_pb2

RULE = Rule(
    "1",
    "/orders",
    IdentifierType.USER,
    limit=10,
    window_seconds=60,
    algorithm=Algorithm.TOKEN_BUCKET,
)


def rule(**changes):
    return dataclasses.replace(RULE, **changes)


def test_a_rule_knows_its_window_in_microseconds():
    assert RULE.window_us == 60_000_000
    assert rule(window_seconds=INT32_MAX).window_us == INT32_MAX * 1_000_000


def test_a_rule_is_enabled_unless_it_says_otherwise():
    assert rule().enabled


def test_a_rule_cannot_be_changed_while_a_check_holds_it():
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule().limit = 11


def test_rules_with_equal_fields_are_equal_and_equally_hashed():
    assert rule() == rule()
    assert hash(rule()) == hash(rule())
    assert rule() != rule(limit=11)


def test_a_check_costs_one_token_now_and_is_charged_unless_it_says_otherwise():
    check = Check(b"ada", IdentifierType.USER, "/orders")
    assert (check.cost, check.timestamp, check.peek) == (1, 0, False)


def test_names_are_those_of_the_wire():
    assert sorted(Algorithm) == ["concurrency", "fixed_window", "sliding_window", "token_bucket"]
    assert sorted(IdentifierType) == ["api_key", "ip", "user"]


def test_reasons_have_the_numbers_of_the_contract():
    assert {reason.name: reason.value for reason in Reason} | {"REASON_UNSPECIFIED": 0} == dict(
        ratelimiter_pb2.Reason.items()
    )


def test_the_latest_time_is_exact_in_a_double():
    assert int(float(MAX_TIME_US)) == MAX_TIME_US
    assert float(MAX_TIME_US + 2) == float(MAX_TIME_US + 1)
