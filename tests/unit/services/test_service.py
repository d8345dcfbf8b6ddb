from dataclasses import replace

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.errors import CheckInvalidError, InvalidInputError
from ratelimitd.model import Enforcement
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.envoy import METHOD, EnvoyService
from ratelimitd.testing import ManualClock
from tests.envoy_messages import Response, request_of
from tests.unit.limiter.nodes import GRANTED, REFUSED, Sharing
from tests.unit.services.envoy_node import OPTIONS, A, B, Node
from tests.unit.services.fake_call import FakeCall

ADA_A = [("user_id", "ada"), ("path", "a")]
ADA_B = [("user_id", "ada"), ("path", "b")]
OK, OVER_LIMIT = Response.OK, Response.OVER_LIMIT


@pytest.fixture
def node():
    return Node()


def codes(answer):
    return [status.code for status in answer.statuses]


def test_the_method_is_envoys(node):
    assert METHOD == "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
    assert [*node.service.methods().unary] == [METHOD]


def test_identifiers_are_read_from_settings(node):
    with pytest.raises(CheckInvalidError, match="must be an IPv4 or IPv6 address"):
        node.ask([("a=b", "ada"), ("path", "a")])


def test_a_limit_is_reached_at_the_right_request(node):
    answers = [node.ask(ADA_A).overall_code for _ in range(4)]
    assert answers == [OK, OK, OK, OVER_LIMIT]
    assert (node.stats.allowed_total, node.stats.blocked_total) == (3, 1)
    assert node.stats.by_rule["a"] == [3, 1]


def test_hits_are_charged(node):
    assert node.ask(ADA_A, hits=3).overall_code == OK
    assert node.ask(ADA_A).overall_code == OVER_LIMIT


def test_nothing_is_charged_unless_all_pass(node):
    assert codes(node.ask(ADA_A, ADA_B)) == [OK, OK]
    assert codes(node.ask(ADA_A, ADA_B)) == [OK, OVER_LIMIT]
    assert node.left(ADA_A) == 1  # of 3: one was consumed, and a peek answers as if it consumed one


def test_descriptors_that_share_a_bucket_of_another_rule_are_charged_all_or_none(node):
    everywhere = replace(B, id="every", endpoint="**", limit=3)
    observed = replace(everywhere, id="all", identifier_type="all", enforcement=Enforcement.OBSERVE)
    node.limiter.replace_book(RuleBook.of([everywhere, observed], 1))
    assert node.ask(ADA_A, ADA_B).overall_code == OK
    for _ in range(2):
        assert codes(node.ask(ADA_A, ADA_B)) == [OVER_LIMIT, OVER_LIMIT]
    assert codes(node.ask((ADA_A, 0), ADA_B)) == [OK, OK]
    assert codes(node.ask(ADA_A)) == [OVER_LIMIT]


def test_descriptors_decided_twice_are_counted_once(node):
    node.ask(ADA_A, ADA_B)
    node.ask(ADA_A, ADA_B)
    assert node.stats.by_rule == {"a": [2, 0], "b": [1, 1]}
    assert sum(node.stats.latency_counts) == 4
    assert node.stats.bucket_known_total >= 0


def test_descriptors_of_one_bucket_share_it(node):
    assert codes(node.ask(ADA_A, ADA_A)) == [OK, OK]
    assert codes(node.ask(ADA_A, ADA_A)) == [OVER_LIMIT, OVER_LIMIT]
    assert codes(node.ask(ADA_A)) == [OK]


@pytest.mark.parametrize(
    "descriptors", [[(ADA_A, 0), (ADA_A, 2)], [(ADA_A, 2), (ADA_A, 0)], [(ADA_A, 2)]]
)
def test_a_descriptor_without_hits_adds_nothing_to_others(node, descriptors):
    node.ask(*descriptors)
    assert codes(node.ask(ADA_A)) == [OK]
    assert codes(node.ask(ADA_A)) == [OVER_LIMIT]


def test_descriptors_without_hits_charge_nothing(node):
    for _ in range(5):
        assert node.ask((ADA_A, 0), (ADA_B, 0)).overall_code == OK


def test_without_a_rule_everything_passes(node):
    answer = node.ask([("user_id", "ada"), ("path", "c")])
    assert (answer.overall_code, len(answer.response_headers_to_add)) == (OK, 0)


def test_a_malformed_request_is_counted_and_charges_nothing(node):
    with pytest.raises(InvalidInputError):
        node.ask(ADA_A, [])
    assert (node.stats.invalid_total, node.stats.allowed_total) == (1, 0)


class TurningClock(ManualClock):
    """Once ``armed``, advances a minute after each reading."""

    armed = False

    def now_us(self):
        now_us = super().now_us()
        if self.armed:
            self.advance(seconds=60)
        return now_us


def test_a_window_that_ends_within_a_request_allows_nothing_uncharged():
    clock = TurningClock()
    node = Node(clock)
    assert node.ask(ADA_A, ADA_B).overall_code == OK
    clock.armed = True
    assert codes(node.ask(ADA_A, ADA_B)) == [OK, OVER_LIMIT]
    assert node.stats.by_rule == {"a": [2, 0], "b": [1, 1]}


def test_a_full_bucket_beside_a_denied_one_has_no_retry_delay_of_the_sum(node):
    """The sum of all hits exceeds B's limit, but B is charged one."""
    node.ask(ADA_A, hits=3)
    answer = node.ask((ADA_A, 2), ADA_B)
    assert codes(answer) == [OVER_LIMIT, OK]
    headers = {one.key.lower(): one.value for one in answer.response_headers_to_add}
    assert int(headers["retry-after"]) <= 60


async def test_an_answer_of_the_shared_state_is_awaited():
    limiter = Sharing(A, B).limiter
    limiter.shared.answers = [GRANTED, REFUSED]
    service = EnvoyService(limiter, CheckStats(), lambda: 0.0, **OPTIONS, holds=Node().holds)
    data = request_of("edge", ADA_B, ADA_A).SerializeToString()
    answer = Response.FromString(await service.should_rate_limit(data, FakeCall()))
    assert codes(answer) == [OK, OVER_LIMIT]
