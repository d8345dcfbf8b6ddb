import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.observe.rule_traffic import STEP_S, RuleTraffic
from ratelimitd.testing import ManualClock
from ratelimitd.web.pages.traffic_view import BESIDE, NEVER, TOGETHER, traffic_of


class Node:
    def __init__(self):
        self.stats, self.clock = CheckStats(), ManualClock()
        self.traffic = RuleTraffic(self.stats, self.clock.now_us)

    def decide(self, rule_id, allowed=0, blocked=0):
        self.stats.used_rules.add(rule_id)
        pair = self.stats.rule_counters(rule_id)
        pair[0] += allowed
        pair[1] += blocked

    async def step(self):
        self.clock.advance(seconds=STEP_S)
        await self.traffic.sample()

    def row(self, rule_id="a"):
        return traffic_of(rule_id, self.traffic)


@pytest.fixture
def node():
    return Node()


async def test_a_rule_that_nothing_asked_for_was_never_matched(node):
    assert node.row() == ("0", "0", NEVER, None)


async def test_a_rule_that_only_judged_beside_others_says_so(node):
    node.decide("a")
    assert node.row() == ("0", "0", BESIDE, None)


async def test_a_rule_that_is_counted_with_others_has_no_numbers(node, monkeypatch):
    monkeypatch.setattr("ratelimitd.counters.MAX_RULE_LABELS", 0)
    monkeypatch.setattr("ratelimitd.counters.MAX_FURTHER_RULES", 0)
    node.decide("a", 3)
    assert node.row() == ("–", "–", TOGETHER, None)


async def test_a_busy_rule_has_its_counts_its_last_match_and_its_last_quarter_of_an_hour(node):
    node.decide("a", 1)
    await node.step()
    node.decide("a", 1_200, 300)
    await node.step()
    row = node.row()
    assert row[:2] == ("1\u202f201", "300")
    assert row.last_match.endswith("UTC")
    assert row.spark.asked.startswith("M0 19.0L3 19.0")
    assert row.spark.asked.endswith("L90 1.0")
    assert row.spark.blocked.endswith("L90 15.4")
    assert row.spark.words == "now 150 a second, at most 150"


async def test_without_checks_the_line_is_at_the_bottom(node):
    node.decide("a", 1)
    await node.step()
    await node.step()
    spark = node.row().spark
    assert {place.split()[1] for place in spark.asked[1:].split("L")} == {"19.0"}
    assert not spark.blocked
