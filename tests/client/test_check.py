"""What a valid check is: wrong arguments raise, name the argument, and never show its value."""

import pytest

from ratelimitd_client import Check
from ratelimiter.v1 import ratelimiter_pb2 as pb


def test_a_check_is_the_message_of_the_contract():
    check = Check("alice", "user", "/x", cost=3, timestamp=1_700_000_000, peek=True)
    assert check.message() == pb.RateLimitRequest(
        identifier="alice",
        identifier_type="user",
        endpoint="/x",
        tokens_requested=3,
        timestamp=1_700_000_000,
        peek=True,
    )


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
        ("identifier", TypeError, (42, "user", "/x")),
        ("identifier", ValueError, ("", "user", "/x")),
        ("identifier", ValueError, ("é" * 129, "user", "/x")),
        ("identifier", ValueError, ("\ud800", "user", "/x")),
        ("identifier", ValueError, ("not an address", "ip", "/x")),
        ("identifier", ValueError, ("fe80::1%eth0", "ip", "/x")),
        ("endpoint", TypeError, ("alice", "user", None)),
        ("endpoint", ValueError, ("alice", "user", "")),
        ("endpoint", ValueError, ("alice", "user", "x" * 256)),
        ("endpoint", ValueError, ("alice", "user", "*")),
        ("endpoint", ValueError, ("alice", "user", "/a\nb")),
        ("endpoint", ValueError, ("alice", "user", "/\ud800")),
        ("cost", ValueError, ("alice", "user", "/x", 0)),
        ("cost", ValueError, ("alice", "user", "/x", 2**31)),
        ("cost", TypeError, ("alice", "user", "/x", 1.5)),
        ("timestamp", ValueError, ("alice", "user", "/x", 1, -1)),
        ("timestamp", TypeError, ("alice", "user", "/x", 1, None)),
    ],
)
def test_a_wrong_argument_is_named_and_not_shown(field, error, check):
    with pytest.raises(error) as refused:
        Check(*check)
    assert str(refused.value).startswith(f"{field} must")
    assert "alice" not in str(refused.value)
    assert "not an address" not in str(refused.value)
