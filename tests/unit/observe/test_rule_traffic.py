import asyncio
from itertools import pairwise

import pytest

from ratelimitd import counters
from ratelimitd.counters import CheckStats
from ratelimitd.observe import rule_traffic
from ratelimitd.observe.denials import TOP
from ratelimitd.observe.node_status import BusyRule
from ratelimitd.observe.rule_traffic import SPANS, STEP_S, Rates, RuleTraffic, Traffic
from ratelimitd.testing import ManualClock


class Node:
    def __init__(self):
        self.stats, self.clock = CheckStats(), ManualClock()
        self.traffic = RuleTraffic(self.stats, self.clock.now_us)

    def decide(self, rule_id, allowed=0, blocked=0):
        self.stats.used_rules.add(rule_id)
        pair = self.stats.rule_counters(rule_id)
        pair[0] += allowed
        pair[1] += blocked

    async def step(self, **decided):
        """Ten seconds in which each rule allows the given number of checks."""
        self.clock.advance(seconds=STEP_S)
        for rule_id, allowed in decided.items():
            self.decide(rule_id, allowed)
        await self.traffic.sample()

    @property
    def now_ms(self):
        return self.clock.now_us() // 1_000

    def rates(self, rule_id, span="1h"):
        return [one.allowed_per_s for one in self.traffic.rates(rule_id, SPANS[span])]


@pytest.fixture
def node():
    return Node()


async def test_rule_has_its_counts_and_the_time_of_its_last_decision(node):
    assert node.traffic.of("a") == Traffic()
    node.decide("a", 3, 1)
    await node.step()
    last_ms = node.now_ms
    await node.step()
    assert node.traffic.of("a") == Traffic(3, 1, last_ms, judged=True)
    node.decide("a", 2)
    assert node.traffic.of("a") == Traffic(5, 1, node.now_ms, judged=True)


async def test_rule_that_applies_beside_others_counts_as_used(node):
    node.decide("a")
    await node.step()
    assert node.traffic.of("a") == Traffic(judged=True)


async def test_rule_without_separate_counters_reports_that(node, monkeypatch):
    monkeypatch.setattr(counters, "MAX_RULE_LABELS", 1)
    monkeypatch.setattr(counters, "MAX_FURTHER_RULES", 1)
    await node.step(a=1, b=2, c=4)
    assert [node.traffic.of(one).allowed for one in "abc"] == [1, 2, 0]
    assert node.traffic.of("c") == Traffic(judged=True, counted=False)


async def test_rates_begin_with_the_history_of_a_rule(node):
    assert node.rates("a") == []
    await node.step(a=10)
    assert node.rates("a") == []
    await node.step(a=20)
    node.decide("a", blocked=5)
    await node.step()
    assert node.traffic.rates("a", SPANS["5m"]) == [
        Rates(node.now_ms - 10_000, 2.0, 0.0),
        Rates(node.now_ms, 0.0, 0.5),
    ]


async def test_each_span_has_its_step_and_length(node):
    for number in range(600):
        await node.step(a=10 * number)
    for span in ("5m", "15m", "1h"):
        most = SPANS[span].most
        assert node.rates("a", span) == [float(one) for one in range(600 - most, 600)]
    day = node.rates("a", "24h")
    assert len(day) == 600 // 24
    assert day[0] == sum(range(2, 24)) / 22  # its first check started its history
    assert day[1] == sum(range(24, 48)) / 24
    ends_ms = [one.at_ms for one in node.traffic.rates("a", SPANS["24h"])]
    assert ends_ms[-1] == node.now_ms
    assert {after - before for before, after in pairwise(ends_ms)} == {240_000}
    await node.step(a=6_000)
    assert node.rates("a", "24h")[-1] == 600.0


async def test_history_covers_at_most_a_day(node):
    for _ in range(24 * SPANS["24h"].most + 30):
        await node.step(a=10)
    assert node.rates("a", "24h") == [1.0] * SPANS["24h"].most


async def test_restarted_counters_make_no_negative_rate(node):
    for _ in range(2):
        await node.step(a=50)
    node.stats.forget_rules(lambda rule_id: False)
    await node.step(a=20)
    assert node.rates("a") == [5.0, 2.0]


async def test_removed_rule_is_dropped(node):
    for _ in range(2):
        await node.step(a=50)
    node.stats.forget_rules(lambda rule_id: False)
    await node.step()
    assert node.rates("a") == []
    assert node.traffic.of("a") == Traffic()


async def test_busiest_rules_have_a_history_and_lose_it_to_one_twice_as_busy(node, monkeypatch):
    monkeypatch.setattr(rule_traffic, "KEPT_RULES", 2)
    await node.step(a=100, b=50, c=10)
    await node.step(a=100, b=50, c=10)
    assert [bool(node.rates(one)) for one in "abc"] == [True, True, False]
    await node.step(c=120)  # 140 is less than twice the 100 of b
    await node.step(c=20)
    assert [bool(node.rates(one)) for one in "abc"] == [True, True, False]
    await node.step(c=100)
    assert [bool(node.rates(one)) for one in "abc"] == [True, False, False]
    await node.step()
    assert [bool(node.rates(one)) for one in "abc"] == [True, False, True]


async def test_busiest_rules_are_reported_with_their_rates_of_the_last_minute(node):
    assert node.traffic.busiest == ()
    rules = {f"rule {number}": 10 * (number + 1) for number in range(TOP + 2)}
    await node.step(**rules)
    assert node.traffic.busiest == []
    for _ in range(9):
        await node.step(**rules)
    node.decide("rule 11", blocked=6)
    await node.step(**rules)
    busiest = node.traffic.busiest
    assert [one.rule_id for one in busiest] == [f"rule {number}" for number in range(11, 1, -1)]
    assert busiest[0] == BusyRule("rule 11", 12.0, pytest.approx(0.1))


async def test_sampling_many_rules_yields_to_other_tasks(node):
    for number in range(3_000):
        node.decide(str(number), 1)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await node.step()
    running.cancel()
    assert turns >= 3_000 / rule_traffic.RULES_PER_ITERATION
    assert node.traffic.of("2999").last_ms == node.now_ms
    for _ in range(2):
        await node.step(**{"2999": 10})
    kept = [one for one in range(3_000) if node.rates(str(one))]
    assert len(kept) == rule_traffic.KEPT_RULES


async def test_page_rendered_during_a_sample_shows_the_previous_one(node):
    for number in range(400):
        await node.step(**{"a": 10 * number, "0": 1})
    before = node.traffic.rates("a", SPANS["1h"])
    for number in range(3 * rule_traffic.RULES_PER_ITERATION):
        node.decide(f"other {number}", 1)
    sampling = asyncio.create_task(node.step(a=70))
    await asyncio.sleep(0)
    assert node.traffic.rates("a", SPANS["1h"]) == before
    await sampling
    assert node.rates("a")[-1] == 7.0
