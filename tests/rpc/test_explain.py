"""Predictions hold: explanations match the checks after them, observed limits match enforced ones."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import grpc.aio
import pytest

from ratelimitd.cli import main
from ratelimitd.model import Enforcement
from ratelimitd.services.convert_rules import rate_limit_of
from ratelimitd.testing import ManualClock, running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.property.test_several_limits_against_fractions import as_rule, random_rules

CHECKS_PER_POLICY = 50
NAMES = {"user": ("ada", "bob"), "tenant": ("t", "u"), "ip": ("::1", "::2")}


class Asked:
    """A node with a declared type, a manual clock, and stubs of its services."""

    def __init__(self, node, channel, clock):
        self.address, self.stats, self.clock = node.grpc_address, node.stats, clock
        self.checks = stubs.RateLimiterStub(channel)
        self.rules = stubs.RateLimiterConfigStub(channel)
        self.health = stubs.RateLimiterHealthStub(channel)

    async def create(self, rule):
        return await self.rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))

    async def check(self, **fields):
        return await self.checks.CheckRateLimit(pb.RateLimitRequest(**fields))


@pytest.fixture
async def node(transport):
    clock = ManualClock()
    async with (
        running_node(
            clock=clock, http_listen="", log_level="error", transport=transport,
            identifier_types="tenant",
        ) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):  # fmt: skip
        yield Asked(running, channel, clock)


def policy_of(rng):
    """Return rules of which some limits only observe."""
    for rule in random_rules(rng):
        limits = [
            replace(limit, enforcement=Enforcement.OBSERVE) if rng.random() < 0.2 else limit
            for limit in rule.limits
        ]
        observes = limits[0].enforcement
        place = rule.endpoint, rule.identifier_type
        yield rate_limit_of(replace(as_rule("", place, limits), enforcement=observes))


def check_of(rng, scarce):
    kinds = rng.sample(["user", "tenant", "ip"], rng.randint(1, 3))
    (first, *also) = [
        pb.Identity(identifier_type=kind, identifier=rng.choice(NAMES[kind])) for kind in kinds
    ]
    return pb.RateLimitRequest(
        identifier=first.identifier,
        identifier_type=first.identifier_type,
        also=also,
        endpoint=rng.choice(["/e", "/e", "/f"]),
        tokens_requested=rng.choice([1, 1, rng.randint(1, scarce), min(scarce + 1, 2**31 - 1)]),
    )


async def agree(node, rng, met):
    """Send random checks to a random policy, each explained beforehand."""
    rules = [await node.create(rule) for rule in policy_of(rng)]
    limits = [limit for rule in rules for limit in (*rule.limits, rule)]
    scarce = min(limit.limit for limit in limits)
    for _ in range(CHECKS_PER_POLICY):
        node.clock.advance(us=rng.randint(0, 10**6 * rng.choice([1, 10, 1_000])))
        request = check_of(rng, scarce)
        found = await node.health.ExplainRateLimit(request)
        answer = await node.checks.CheckRateLimit(request)
        assert found.answer == answer, (rules, request)
        told = [limit for rule in found.rules for limit in rule.limits]
        if answer.limits:
            assert sorted(map(str, told)) == sorted(map(str, answer.limits))
        else:
            assert len(told) == (answer.reason != pb.NO_RULE)
        met[pb.Reason.Name(answer.reason)] += 1
        met["several limits"] += len(told) > 1
        met["would be denied"] += answer.allowed and not all(one.allowed for one in told)
    for rule in rules:
        await node.rules.DeleteRateLimit(pb.DeleteRateLimitRequest(id=rule.id))


async def agree_on(node, checks):
    rng, met = random.Random(7), Counter[str]()
    for _ in range(checks // CHECKS_PER_POLICY):
        await agree(node, rng, met)
    # The rare cases must occur, or the agreement proves little.
    assert set(met) == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT", "NO_RULE", "several limits",
        "would be denied",
    }  # fmt: skip
    assert min(met.values()) >= checks // 200, met


@pytest.mark.deep
async def test_1_000_explanations_match_the_checks_after_them(node):
    await agree_on(node, 1_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_100_000_explanations_match_the_checks_after_them(node):
    await agree_on(node, 100_000)


CANDIDATE = pb.Limit(name="candidate", limit=5, window_seconds=10, algorithm="token_bucket")
LIVE = pb.Limit(name="live", limit=1_000_000, window_seconds=60, algorithm="fixed_window")
BESIDE = pb.Limit(enforcement=pb.OBSERVE)
BESIDE.MergeFrom(CANDIDATE)


async def test_an_observed_candidate_denies_as_if_enforced_and_keeps_its_count_when_promoted(
    node, transport, capsys
):
    rng, seen = random.Random(3), Counter[bool]()
    place = {"endpoint": "/a", "identifier_type": "user"}
    settings = {"http_listen": "", "log_level": "error", "transport": transport}
    async with (
        running_node(clock=node.clock, **settings) as enforcing,
        grpc.aio.insecure_channel(enforcing.grpc_address) as channel,
    ):
        other = Asked(enforcing, channel, node.clock)
        await other.create(pb.RateLimit(**place, limits=[CANDIDATE]))
        rule = await node.create(pb.RateLimit(**place, limits=[LIVE, BESIDE]))

        async def both():
            node.clock.advance(us=rng.randint(0, 2_000_000))
            asked = {**place, "identifier": rng.choice(["ada", "bob", "eve"])}
            asked["tokens_requested"] = rng.randint(1, 6)
            return await node.check(**asked), await other.check(**asked)

        for _ in range(300):
            beside, in_force = await both()
            assert beside.allowed
            [on_paper] = [one for one in beside.limits if one.name == "candidate"]
            for name in ("allowed", "remaining_tokens", "reset_time", "retry_after_seconds"):
                assert getattr(on_paper, name) == getattr(in_force, name)
            assert on_paper.reason == in_force.reason
            seen[in_force.allowed] += 1
        assert min(seen.values()) > 50
        assert [*node.stats.would_deny.values()] == [[seen[False]]]
        command = ["rules", "promote", rule.id, "candidate", "--json", "--target", node.address]
        assert await asyncio.to_thread(main, command) == 0
        promoted = json.loads(capsys.readouterr().out)
        assert [limit["name"] for limit in promoted["limits"]] == ["candidate"]
        for _ in range(100):
            now_live, in_force = await both()
            now_live.rule_id = in_force.rule_id
            assert now_live == in_force
