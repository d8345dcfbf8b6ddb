from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import CheckInvalidError, FieldViolation
from ratelimitd.model import (
    Algorithm,
    AssignedPlan,
    Check,
    ConsideredRule,
    Decision,
    Explained,
    IdentifierType,
    LimitStatus,
    Match,
    Plan,
    Reason,
    Rule,
)
from ratelimitd.services.convert import (
    Identities,
    Target,
    answer_of,
    check_of,
    explanation_of,
    invalid_answer_of,
    is_canonical_address,
    target_of,
)
from ratelimitd.services.wire import parse, parse_check
from ratelimiter.v1 import ratelimiter_pb2 as pb

VALID = {"identifier": "u", "identifier_type": "user", "endpoint": "/a"}
RULE = Rule(
    "id-1", "/a", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET
)


def read(**fields):
    return check_of(parse_check(pb.RateLimitRequest(**{**VALID, **fields}).SerializeToString()))


def refused(**fields):
    with pytest.raises(CheckInvalidError) as caught:
        read(**fields)
    return [violation.field for violation in caught.value.violations]


def test_a_check_is_converted_field_by_field():
    assert read(tokens_requested=3, timestamp=5, peek=True) == Check(
        b"u", IdentifierType.USER, "/a", 3, 5, True
    )


def test_unset_fields_have_their_defaults():
    assert read() == Check(b"u", IdentifierType.USER, "/a", 1, 0, False)


@pytest.mark.parametrize(
    ("sent", "canonical"),
    [
        ("1.2.3.4", b"1.2.3.4"),
        ("::ffff:1.2.3.4", b"1.2.3.4"),
        ("0:0::1", b"::1"),
        ("2001:DB8::0:1", b"2001:db8::1"),
    ],
)
def test_an_address_is_converted_to_canonical_form(sent, canonical):
    assert read(identifier_type="ip", identifier=sent).identifier == canonical


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "1.2.3",
        "01.2.3.4",
        "1.2.3.04",
        "1.2.3.4 ",
        "1.2.3.4:80",
        "1.2.3.4/32",
        "fe80::1%0",
        "x",
        "é",
    ],
)
def test_text_that_is_not_a_plain_address_is_refused(sent):
    assert refused(identifier_type="ip", identifier=sent) == ["identifier"]


def test_an_error_does_not_repeat_the_identifier():
    with pytest.raises(CheckInvalidError) as caught:
        read(identifier_type="ip", identifier="secret-key")
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize("identifier", ["i" * 256, "é" * 128, "\x00", "a:b{*}", "*"])
def test_other_identifiers_are_opaque(identifier):
    assert read(identifier=identifier).identifier == identifier.encode()


@pytest.mark.parametrize("identifier", ["", "i" * 257, "é" * 129])
def test_an_identifier_has_1_to_256_bytes(identifier):
    assert refused(identifier=identifier) == ["identifier"]


def test_the_length_of_an_identifier_of_an_unknown_type_is_validated():
    assert refused(identifier="", identifier_type="x") == ["identifier", "identifier_type"]
    assert refused(identifier="not an address", identifier_type="x") == ["identifier_type"]


@pytest.mark.parametrize("endpoint", ["e" * 255, "é" * 255, "/*", "/**", " ", "/a?b=c"])
def test_an_endpoint_is_used_unchanged(endpoint):
    assert read(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "*", "e" * 256, "/\x00", "/\n", "/\t", "/\x1f", "/\x7f", "/\x80", "/\x9f"]
)
def test_an_endpoint_has_1_to_255_characters_none_a_control_and_is_not_the_star(endpoint):
    assert refused(endpoint=endpoint) == ["endpoint"]


@pytest.mark.parametrize(("sent", "cost"), [(0, 1), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_a_cost_of_zero_is_one(sent, cost):
    assert read(tokens_requested=sent).cost == cost


@pytest.mark.parametrize("field", [1, 2, 3])
def test_invalid_utf8_is_refused_by_field(field):
    data = pb.RateLimitRequest(**VALID).SerializeToString() + bytes([field << 3 | 2, 1, 0xFF])
    for contract, convert in ((pb.RateLimitRequest, check_of), (pb.ResetRequest, target_of)):
        with pytest.raises(CheckInvalidError) as caught:
            convert(parse(contract, data))
        [violation] = caught.value.violations
        assert violation.field == ["identifier", "identifier_type", "endpoint"][field - 1]


def test_every_invalid_field_is_named():
    message = parse_check(pb.RateLimitRequest(tokens_requested=-1).SerializeToString())
    with pytest.raises(CheckInvalidError) as caught:
        check_of(message)
    assert [violation.field for violation in caught.value.violations] == [
        "identifier", "identifier_type", "endpoint", "tokens_requested",
    ]  # fmt: skip


def test_a_reset_is_converted_and_validated_like_a_check():
    message = pb.ResetRequest(identifier="::ffff:1.1.1.1", identifier_type="ip", endpoint="/a")
    assert target_of(parse(pb.ResetRequest, message.SerializeToString())) == Target(
        b"1.1.1.1", IdentifierType.IP, "/a"
    )
    with pytest.raises(CheckInvalidError):
        target_of(parse(pb.ResetRequest, b""))


@given(
    st.binary(max_size=300),
    st.binary(max_size=60),
    st.binary(max_size=300),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_field_values_yield_a_check_or_named_violations(identifier, kind, endpoint, tokens):  # fmt: skip
    message = parse_check(b"")
    message.identifier, message.identifier_type = identifier, kind
    message.endpoint, message.tokens_requested = endpoint, tokens
    refused: tuple[FieldViolation, ...] = ()
    try:
        check_of(message)
    except CheckInvalidError as error:
        refused = error.violations
    assert ("tokens_requested" in [field for field, _ in refused]) == (not 0 <= tokens < 2**31)


def test_a_decision_is_encoded_with_its_rule():
    decision = Decision(True, 3, 1_700_000_000, 0, Reason.WITHIN_LIMIT, RULE, RULE)
    assert answer_of(decision) == pb.RateLimitResponse(
        allowed=True, remaining_tokens=3, reset_time=1_700_000_000, reason=pb.WITHIN_LIMIT,
        limit=10, window_seconds=60, rule_id="id-1", limit_name="default",
    )  # fmt: skip


def test_a_decision_without_a_rule_names_none():
    decision = Decision(True, 1, 0, 0, Reason.FAIL_OPEN_ERROR, None)
    assert answer_of(decision) == pb.RateLimitResponse(
        allowed=True, remaining_tokens=1, reason=pb.FAIL_OPEN_ERROR
    )


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_one_of_the_contract(reason):
    assert pb.Reason.Name(answer_of(Decision(True, 0, 0, 0, reason, None)).reason) == reason.name


def test_a_malformed_item_is_not_allowed_and_names_place_and_reason():
    error = CheckInvalidError(FieldViolation("endpoint", "must be"), FieldViolation("x", "no"))
    assert invalid_answer_of(error, "requests[0].") == pb.RateLimitResponse(
        reason=pb.INVALID_REQUEST, error="requests[0].endpoint: must be; requests[0].x: no"
    )


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        (b"192.0.2.7", True),
        (b"2001:db8::1", True),
        (b"2001:DB8::1", False),
        (b"2001:db8:0::1", False),
        (b"::ffff:192.0.2.7", False),
    ],
)
def test_an_address_has_one_canonical_form(raw, canonical):
    assert is_canonical_address(raw) is canonical


def test_other_text_is_not_a_canonical_address():
    with pytest.raises(ValueError, match="must be an IPv4 or IPv6 address"):
        is_canonical_address(b"192.0.2.007")


ALLOWED = LimitStatus(True, 9, 60, 0, Reason.WITHIN_LIMIT, RULE, RULE)
DENIED = LimitStatus(False, 0, 60, 9, Reason.LIMIT_EXCEEDED, RULE, RULE)


def test_an_explanation_names_the_plans_of_the_identities_and_their_remedies():
    rule = replace(RULE, plans=(Plan("pro", (RULE,)),))
    decision = Decision(*DENIED[:4], Reason.BLOCKED, plan="blocked")
    passed_over = ConsideredRule(rule, Match.PASSED_OVER, (), "blocked")
    plans = (
        AssignedPlan("user", "blocked", 99),
        AssignedPlan("ip", "blocked", 0),
        AssignedPlan("a", "pro", 0),
        AssignedPlan("b", "gold", 7),
        AssignedPlan("c", "unlimited", 0),
    )
    check = Check(b"u", IdentifierType.USER, "/a")
    found = explanation_of(check, Explained(decision, (passed_over,), plans))
    assert [one.remedy for one in found.plans] == [
        "unassign the user from blocked, or wait 9 s",
        "unassign the ip from blocked",
        "",
        "give a rule limits for the plan gold: until then its own limits hold",
        "",
    ]
    assert (found.plans[3].identifier_type, found.plans[3].expire_time) == ("b", 7)
    assert found.rules[0].remedy == "unassign the identity from blocked"
    assert (found.rules[0].plan, found.answer.plan) == ("blocked", "blocked")


def test_an_answer_names_the_plan_and_the_rules_passed_over():
    passed_over = LimitStatus(*ALLOWED[:4], Reason.UNLIMITED, RULE, None, "unlimited")
    judged = LimitStatus(*ALLOWED[:5], RULE, RULE, "pro")
    answer = answer_of(Decision(*ALLOWED[:5], RULE, RULE, (judged, passed_over), plan="pro"))
    assert (answer.plan, answer.limits[0].plan, answer.limits[1].plan) == (
        "pro",
        "pro",
        "unlimited",
    )
    assert (answer.limits[1].name, answer.limits[1].limit) == ("", 0)


@pytest.mark.parametrize(
    ("match", "statuses", "remedy"),
    [
        (Match.JUDGES, (DENIED._replace(allowed=True),), ""),
        (Match.JUDGES, (DENIED,), "wait 9 s"),
        (Match.JUDGES, (DENIED, DENIED._replace(retry_after=20), DENIED), "wait 20 s"),
        (Match.JUDGES, (DENIED._replace(remaining=3),), "wait 9 s, or ask for at most 3 tokens"),
        (
            Match.JUDGES,
            (DENIED._replace(reason=Reason.COST_EXCEEDS_LIMIT),),
            "ask for at most 10 tokens, or raise the limit default to 12",
        ),
        (
            Match.JUDGES,
            (DENIED._replace(reason=Reason.COST_EXCEEDS_LIMIT, limit=replace(RULE, burst=11)),),
            "ask for at most 11 tokens, or raise the burst of default to 12",
        ),
        (Match.DISABLED, (), "enable the rule"),
        (Match.OVERRIDDEN, (), "disable the rule of the endpoint for ip+user"),
        (Match.NOT_NAMED, (), "name the ip of the request"),
    ],
)
def test_an_explanation_names_the_remedy(match, statuses, remedy):
    rule = replace(RULE, identifier_type="ip+user")
    considered = ConsideredRule(rule, match, statuses)
    check = Check(b"u", IdentifierType.USER, "/a", 12)
    decision = Decision(*DENIED[:5], RULE, RULE)
    others = [ConsideredRule(RULE, Match.DISABLED)] * 200
    every = (*others, considered) if statuses else (considered, *others)
    found = explanation_of(check, Explained(decision, every, ()))
    assert (found.rules[0].match, found.rules[0].remedy) == (match, remedy)
    assert [one.reason for one in found.rules[0].limits] == [one.reason for one in statuses]
    assert (len(found.rules), found.answer.retry_after_seconds) == (100, 9)


def test_nodes_with_shared_state_refuse_max_wait_ms():
    request = pb.RateLimitRequest(
        identifier="u", identifier_type="user", endpoint="/a", max_wait_ms=60_000
    )
    asked = parse_check(request.SerializeToString())
    assert check_of(asked).max_wait_ms == 60_000
    with pytest.raises(CheckInvalidError, match="max_wait_ms: needs a node without shared state"):
        check_of(asked, Identities.of(())._replace(wait=False))
    request.max_wait_ms, request.tokens_requested = 0, -1
    asked = parse_check(request.SerializeToString())
    with pytest.raises(CheckInvalidError) as refused:
        check_of(asked, Identities.of(())._replace(wait=False))
    assert [one.field for one in refused.value.violations] == ["tokens_requested"]


def test_an_answer_contains_wait_ms():
    decision = Decision(True, 0, 60, 1, Reason.WITHIN_LIMIT, RULE, RULE, wait_ms=250)
    assert answer_of(decision).wait_ms == 250
