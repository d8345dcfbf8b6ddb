"""What a valid check is: wrong arguments raise, name the argument, and never show its value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd_client import Check
from ratelimitd_client.check import MAX_BATCH, batch_of, request_of
from ratelimiter.v1 import ratelimiter_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=64)
CHECKS = st.builds(
    Check,
    TEXT,
    st.sampled_from(["user", "api_key"]),
    TEXT.filter(lambda endpoint: endpoint not in {"*", "**"}),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.dictionaries(st.sampled_from(["tenant", "org_1", "model"]), TEXT, max_size=3),
)


def contract(check):
    return pb.RateLimitRequest(
        identifier=check.identifier,
        identifier_type=check.identifier_type,
        endpoint=check.endpoint,
        tokens_requested=check.cost,
        timestamp=check.timestamp,
        peek=check.peek,
        also=[
            pb.Identity(identifier_type=kind, identifier=identifier)
            for kind, identifier in check.also.items()
        ],
    )


@given(CHECKS)
def test_a_check_is_the_message_of_the_contract(check):
    assert pb.RateLimitRequest.FromString(check.message()) == contract(check)


@given(st.lists(CHECKS, max_size=5))
def test_several_checks_are_the_message_of_the_contract(checks):
    batch = batch_of(check.message() for check in checks)
    assert list(pb.BatchRateLimitRequest.FromString(batch).requests) == list(map(contract, checks))


@pytest.mark.parametrize("count", [1, MAX_BATCH])
def test_the_longest_checks_are_encoded_too(count):
    also = {kind * 32: "é" * 128 for kind in "abcdefg"}
    endpoint = "\U0001f600" * 255
    longest = Check("é" * 128, "t" * 32, endpoint, 2**31 - 1, 2**63 - 1, peek=True, also=also)
    batch = batch_of([longest.message()] * count)
    assert list(pb.BatchRateLimitRequest.FromString(batch).requests) == [contract(longest)] * count


@pytest.mark.parametrize(
    ("max_wait_s", "max_wait_ms"), [(0, 0), (0.5, 500), (60, 60_000), (0.0019, 1)]
)
def test_the_longest_wait_is_told_in_milliseconds(max_wait_s, max_wait_ms):
    request = request_of("alice", "user", "/x", max_wait_s=max_wait_s)
    assert pb.RateLimitRequest.FromString(request).max_wait_ms == max_wait_ms


@pytest.mark.parametrize("max_wait_s", [-1, 60.001, float("nan"), float("inf")])
def test_a_wait_out_of_bounds_is_refused(max_wait_s):
    with pytest.raises(ValueError, match=r"^max_wait_s must be 0 to 60$"):
        request_of("alice", "user", "/x", max_wait_s=max_wait_s)
    with pytest.raises(TypeError, match="max_wait_s must be a number of seconds, not str"):
        request_of("alice", "user", "/x", max_wait_s=str(max_wait_s))


def test_what_only_equals_a_valid_argument_is_refused_after_it_too():
    assert Check("alice", "user", "/x", 1, 0)
    for cost, timestamp in ((1.0, 0), (1, 0.0)):
        with pytest.raises(TypeError, match="must be a whole number, not float"):
            Check("alice", "user", "/x", cost, timestamp)


@pytest.mark.parametrize(
    "check",
    [
        ("é" * 128, "user", "/x"),
        ("2001:db8::1", "ip", "/x"),
        ("::ffff:192.0.2.7", "ip", "/x"),
        ("k", "api_key", "é" * 255),
        ("k", "api_key", "/x", 2**31 - 1, 2**63 - 1),
    ],
)
def test_what_a_node_takes_is_valid(check):
    assert Check(*check).message()


@pytest.mark.parametrize(
    ("field", "error", "check"),
    [
        ("identifier_type", ValueError, ("alice", "USER", "/x")),
        ("identifier_type", ValueError, ("alice", None, "/x")),
        ("identifier_type", ValueError, ("alice", ["user"], "/x")),
        ("identifier", TypeError, (42, "user", "/x")),
        ("identifier", ValueError, ("", "user", "/x")),
        ("identifier", ValueError, ("é" * 129, "user", "/x")),
        ("identifier", ValueError, ("\ud800", "user", "/x")),
        ("identifier", ValueError, ("not an address", "ip", "/x")),
        ("identifier", ValueError, ("fe80::1%eth0", "ip", "/x")),
        ("endpoint", TypeError, ("alice", "user", None)),
        ("endpoint", TypeError, ("alice", "user", ["/x"])),
        ("endpoint", ValueError, ("alice", "user", "")),
        ("endpoint", ValueError, ("alice", "user", "x" * 256)),
        ("endpoint", ValueError, ("alice", "user", "*")),
        ("endpoint", ValueError, ("alice", "user", "/a\nb")),
        ("endpoint", ValueError, ("alice", "user", "/\ud800")),
        ("cost", ValueError, ("alice", "user", "/x", 0)),
        ("cost", ValueError, ("alice", "user", "/x", 2**31)),
        ("cost", TypeError, ("alice", "user", "/x", 1.5)),
        ("cost", TypeError, ("alice", "user", "/x", [1])),
        ("timestamp", ValueError, ("alice", "user", "/x", 1, -1)),
        ("timestamp", TypeError, ("alice", "user", "/x", 1, None)),
        ("peek", TypeError, ("alice", "user", "/x", 1, 0, "yes")),
        ("also", TypeError, ("alice", "user", "/x", 1, 0, False, [("tenant", "acme")])),
        ("also: identifier", TypeError, ("alice", "user", "/x", 1, 0, False, {"tenant": 5})),
        ("also: identifier_type", ValueError, ("alice", "user", "/x", 1, 0, False, {"T": "acme"})),
    ],
)
def test_a_wrong_argument_is_named_and_not_shown(field, error, check):
    with pytest.raises(error) as refused:
        Check(*check)
    assert str(refused.value).startswith(f"{field} must")
    assert "alice" not in str(refused.value)
    assert "not an address" not in str(refused.value)
