"""Refunds of hits: invalid requests are refused without a change."""

import pytest

from ratelimitd.errors import HoldEndedError, HoldSettledError, InvalidInputError
from ratelimitd.services.convert_envoy import MAX_DESCRIPTORS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.envoy_messages import Response, giving_back, request_of
from tests.unit.services.envoy_node import Node
from tests.unit.services.fake_call import FakeCall

ADA = [("user_id", "ada"), ("path", "a")]
HELD = 2


@pytest.fixture
def node():
    return Node()


async def hold(node, peer=FakeCall.peer, endpoint="edge/path=a"):
    check = pb.RateLimitRequest(
        identifier="ada", identifier_type="user", endpoint=endpoint, tokens_requested=HELD
    )
    data = pb.HoldRequest(check=check, ttl_seconds=30).SerializeToString()
    return pb.HoldResponse.FromString(await node.holds.hold(data, FakeCall(peer))).hold


async def send(node, request):
    return Response.FromString(
        await node.service.should_rate_limit(request.SerializeToString(), FakeCall())
    )


def free(node):
    return node.left(ADA) + 1  # a peek answers as if it consumed one


def named(text):
    return [("hold", text)]


def mixed(text, *, check_first):
    request = giving_back((named(text), 1))
    request.descriptors.insert(1 - check_first, request_of("edge", ADA).descriptors[0])
    return request


WRONG = {
    "no domain": (lambda text: giving_back((named(text), 1), domain=""), "domain"),
    "no descriptors": (lambda _: giving_back(), "descriptors"),
    "many": (lambda text: giving_back(*[(named(text), 1)] * (MAX_DESCRIPTORS + 1)), "descriptors"),
    "no hold": (lambda _: giving_back((ADA, 1)), "descriptors[0].is_negative_hits"),
    "another key": (
        lambda text: giving_back(([("Hold", text)], 1)),
        "descriptors[0].is_negative_hits",
    ),
    "no entries": (lambda _: giving_back(([], 1)), "descriptors[0].is_negative_hits"),
    "two entries": (
        lambda text: giving_back((named(text) + named(text), 1)),
        "descriptors[0].is_negative_hits",
    ),
    "checks behind": (
        lambda text: mixed(text, check_first=False),
        "descriptors[0].is_negative_hits",
    ),
    "checks before": (
        lambda text: mixed(text, check_first=True),
        "descriptors[1].is_negative_hits",
    ),
    "a forged text": (
        lambda text: giving_back((named(text.swapcase()), 1)),
        "descriptors[0].entries[0].value",
    ),
    "the second is wrong": (
        lambda text: giving_back((named(text), 1), (named(""), 1)),
        "descriptors[1].entries[0].value",
    ),
    "more than was held": (
        lambda text: giving_back((named(text), HELD + 1)),
        "descriptors[0].hits_addend",
    ),
    "hits beyond int64": (
        lambda text: giving_back((named(text), 2**64 - 1)),
        "descriptors[0].hits_addend",
    ),
    "no hits": (lambda text: giving_back((named(text), 0), hits=1), "descriptors[0].hits_addend"),
    "hits unset": (lambda text: giving_back(named(text)), "descriptors[0].hits_addend"),
    "many hits of the request": (
        lambda text: giving_back(named(text), hits=HELD + 1),
        "descriptors[0].hits_addend",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_violations_are_named_and_nothing_is_settled(node, what):
    request_from, field = WRONG[what]
    text = await hold(node)
    with pytest.raises(InvalidInputError) as refused:
        await send(node, request_from(text))
    assert [violation.field for violation in refused.value.violations] == [field]
    assert free(node) == 3 - HELD
    assert (node.stats.invalid_total, node.stats.holds["settled"]) == (1, 0)


async def test_a_hold_of_another_caller_is_refused(node):
    request = giving_back((named(await hold(node, peer="ipv4:192.0.2.1:1")), 1))
    with pytest.raises(InvalidInputError, match=r"^descriptors\[0\]\.entries\[0\]\.value: is no"):
        await send(node, request)


async def test_the_hits_of_the_request_are_those_of_descriptors_without_their_own(node):
    answer = await send(node, giving_back(named(await hold(node)), hits=HELD))
    assert answer.statuses[0].limit_remaining == 3


async def test_a_hold_twice_in_a_request_is_refunded_once(node):
    text = await hold(node)
    answer = await send(node, giving_back((named(text), 1), (named(text), 1)))
    assert [status.limit_remaining for status in answer.statuses] == [2, 2]
    assert free(node) == 2


async def test_an_error_names_the_descriptor_and_leaves_the_earlier_ones_settled(node):
    text = await hold(node)
    with pytest.raises(HoldSettledError, match=r"^descriptors\[1\]: the hold was settled"):
        await send(node, giving_back((named(text), 2), (named(text), 1)))
    assert free(node) == 3


async def test_an_ended_hold_stays_charged(node):
    text = await hold(node)
    node.clock.advance(seconds=30)
    with pytest.raises(HoldEndedError, match=r"^descriptors\[0\]: its time is over"):
        await send(node, giving_back((named(text), 1)))
    assert free(node) == 3 - HELD


async def test_a_refund_of_an_empty_hold_shows_no_limit(node):
    text = await hold(node, endpoint="/without/a/rule")
    answer = await send(node, giving_back((named(text), 1)))
    assert answer.overall_code == Response.OK
    [status] = answer.statuses
    assert (status.code, status.HasField("current_limit")) == (Response.OK, False)
