"""Wrong tokens: the allowance of an address, and the callers refused above it."""

import pytest
from google.rpc import error_details_pb2, status_pb2

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.auth import Access, Credentials, Role
from ratelimitd.services.guesses import LOGIN_COST, MAX_GUESSES, SPARE, TokenGuesses
from tests.unit.services.fake_call import FakeCall, bearer

RIGHT = "the-admin-token"
CHECK = "the-check-token"
TRIES = MAX_GUESSES - SPARE
"""Guesses of a connection that sent a wrong token."""


class Node:
    def __init__(self, *trusted_proxies, **credentials):
        self.now_us = 1_700_000_000_000_000
        self.stats = CheckStats()
        table = TokenGuesses(self.stats, lambda: self.now_us, trusted_proxies)
        self.access = Access(Credentials(admin_token=RIGHT, **credentials), table)
        self.required = self.access.requirement(Role.ADMIN)

    def code(self, call):
        try:
            self.required(call)
        except RpcError as error:
            return error.code
        return StatusCode.OK

    def guess(self, times, peer="ipv4:192.0.2.1:1", **options):
        return {self.code(bearer("guess", peer=peer, **options)) for _ in range(times)}


@pytest.fixture
def node():
    return Node()


def test_above_the_allowance_no_token_of_the_address_is_compared(node):
    assert node.guess(TRIES) == {StatusCode.UNAUTHENTICATED}
    assert node.guess(5) == {StatusCode.RESOURCE_EXHAUSTED}
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.1:1")) is StatusCode.RESOURCE_EXHAUSTED
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.2:1")) is StatusCode.OK
    assert node.stats.token_guesses == {"wrong": TRIES, "refused": 6}


def test_one_more_token_is_compared_after_the_retry_delay_of_the_refusal(node):
    node.guess(TRIES)
    with pytest.raises(RpcError) as refused:
        node.required(bearer("guess", peer="ipv4:192.0.2.1:1"))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(refused.value.details).details
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert info.reason == "TOO_MANY_WRONG_TOKENS"
    node.now_us += (retry.retry_delay.seconds - 1) * 1_000_000
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.1:1")) is StatusCode.RESOURCE_EXHAUSTED
    node.now_us += 1_000_000
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.1:1")) is StatusCode.OK


def test_connections_without_a_wrong_token_have_spare_guesses(node):
    node.guess(TRIES)
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.1:2")) is StatusCode.OK
    fresh = {
        code for port in range(3, 3 + SPARE) for code in node.guess(1, f"ipv4:192.0.2.1:{port}")
    }
    assert fresh == {StatusCode.UNAUTHENTICATED}
    assert node.guess(1, "ipv4:192.0.2.1:9999") == {StatusCode.RESOURCE_EXHAUSTED}
    assert node.code(bearer(RIGHT, peer="ipv4:192.0.2.1:2")) is StatusCode.OK, "known by now"


def test_a_connection_with_a_wrong_token_is_not_trusted_for_a_right_one(node):
    known = "ipv4:192.0.2.1:1"
    node.code(bearer(RIGHT, peer=known))
    node.guess(1, known)
    node.code(bearer(RIGHT, peer=known))
    node.guess(TRIES - 1, known)
    assert node.code(bearer(RIGHT, peer=known)) is StatusCode.RESOURCE_EXHAUSTED


def test_a_right_token_of_another_role_admits_no_guess_on_its_connection():
    node = Node(check_token=CHECK)

    def code(port, token):
        return node.code(bearer(token, peer=f"ipv4:192.0.2.1:{port}"))

    ports = range(MAX_GUESSES + 5)
    assert {code(port, CHECK) for port in ports} == {StatusCode.PERMISSION_DENIED}
    codes = [code(port, f"guess {port}") for port in ports]
    assert set(codes[:MAX_GUESSES]) == {StatusCode.UNAUTHENTICATED}
    assert set(codes[MAX_GUESSES:]) == {StatusCode.RESOURCE_EXHAUSTED}
    assert code(ports[-1], CHECK) is StatusCode.PERMISSION_DENIED, "its own token goes on"


def test_a_connection_with_a_right_token_has_no_unlimited_logins(node):
    call = bearer("guess", peer="ipv4:192.0.2.1:1")
    assert node.code(bearer(RIGHT, peer=call.peer)) is StatusCode.OK
    for port in range(MAX_GUESSES // LOGIN_COST):
        node.access.login(bearer("guess", peer=f"ipv4:192.0.2.1:{9 + port}"))
    with pytest.raises(RpcError):
        node.access.login(call)
    assert node.access.login(bearer(RIGHT, peer=call.peer)) == ""


def test_right_tokens_may_alternate_on_a_connection_while_its_address_has_guesses():
    node = Node(check_token=CHECK)
    peer = "ipv4:192.0.2.1:1"

    def codes():
        return [node.code(bearer(token, peer=peer)) for token in (RIGHT, CHECK, RIGHT)]

    both = [StatusCode.OK, StatusCode.PERMISSION_DENIED, StatusCode.OK]
    node.guess(TRIES, "ipv4:192.0.2.1:2")
    assert codes() == both
    for port in range(SPARE):
        node.guess(1, f"ipv4:192.0.2.1:{9 + port}")
    assert codes() == [StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED, StatusCode.OK]


def test_a_missing_token_and_a_missing_role_are_not_guesses():
    node = Node(check_token=CHECK)
    for call in (FakeCall(), bearer(""), bearer(CHECK), FakeCall(peer_sans=("a",))):
        assert {node.code(call) for _ in range(2 * MAX_GUESSES)} <= {
            StatusCode.UNAUTHENTICATED,
            StatusCode.PERMISSION_DENIED,
        }
    assert node.stats.token_guesses == {"wrong": 0, "refused": 0}


def test_a_login_counts_as_several_guesses(node):
    call = bearer("guess")
    for _ in range(TRIES // LOGIN_COST):
        assert not node.access.login(call)
    with pytest.raises(RpcError):
        node.access.login(bearer(RIGHT))
    assert node.guess(1, call.peer) == {StatusCode.RESOURCE_EXHAUSTED}, "one table for all surfaces"


def forwarded(address):
    return {"authorization": "Bearer guess", "x-forwarded-for": address}


def test_behind_a_trusted_proxy_the_forwarded_address_counts():
    node = Node("192.0.2.0/24")
    proxy = "ipv4:192.0.2.1:1"
    for _ in range(MAX_GUESSES):
        assert node.code(FakeCall(proxy, headers=forwarded("198.51.100.1"))) is (
            StatusCode.UNAUTHENTICATED
        )
    refused = FakeCall(proxy, headers=forwarded("203.0.113.9, 198.51.100.1"))
    assert node.code(refused) is StatusCode.RESOURCE_EXHAUSTED
    other = forwarded("198.51.100.2") | {"authorization": f"Bearer {RIGHT}"}
    assert node.code(FakeCall(proxy, headers=other)) is StatusCode.OK
    guessed = FakeCall(proxy, headers=forwarded("198.51.100.1"))
    assert node.code(guessed) is StatusCode.RESOURCE_EXHAUSTED, "of no connection is it known"


def test_a_header_from_an_untrusted_peer_is_ignored():
    node = Node("192.0.2.0/24")
    codes = [
        node.code(FakeCall("ipv4:198.51.100.1:1", headers=forwarded(f"203.0.113.{number % 256}")))
        for number in range(MAX_GUESSES + 1)
    ]
    assert codes[-1] is StatusCode.RESOURCE_EXHAUSTED


def test_a_peer_that_has_left_is_no_proxy_on_a_unix_socket():
    node = Node("unix")
    for _ in range(MAX_GUESSES):
        node.code(FakeCall("unknown:", headers=forwarded("192.0.2.7")))
    assert node.code(bearer("guess", peer="unknown:")) is StatusCode.RESOURCE_EXHAUSTED
    assert node.code(FakeCall("unix:", headers=forwarded("192.0.2.7"))) is (
        StatusCode.UNAUTHENTICATED
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ipv6:[2001:db8::1]:1", "ipv6:[2001:db8::2]:1", True),
        ("ipv6:[2001:db8::1]:1", "ipv6:[2001:db8:0:1::1]:1", False),
        ("unix:", "unix:", True),
        ("unknown:", "unix:", False),
    ],
)
def test_guesses_count_per_ipv4_address_or_ipv6_network(node, one, other, same):
    node.guess(MAX_GUESSES, one)
    expected = StatusCode.RESOURCE_EXHAUSTED if same else StatusCode.UNAUTHENTICATED
    node.guess(MAX_GUESSES, one)
    for port in range(SPARE):
        node.guess(1, f"{one}{port}")
    assert node.guess(1, other) == {expected}


def test_cached_addresses_and_connections_are_bounded(node):
    node.guess(MAX_GUESSES)
    for number in range(9_999):
        node.guess(1, f"ipv4:198.18.{number // 256}.{number % 256}:1")
    assert node.guess(1) == {StatusCode.RESOURCE_EXHAUSTED}
    node.guess(1, "ipv4:192.0.2.2:1")
    assert node.guess(1) == {StatusCode.UNAUTHENTICATED}, "the oldest is forgotten"
    table = node.access._guesses  # its size has no public view
    assert len(table._spent) == len(table._connections) == 10_000
