import json

import pytest

from ratelimitd.observe.live import NodeView, Overview
from ratelimitd.observe.node_status import BusyRule
from ratelimitd.web.pages.traffic_view import BESIDE, NEVER, TOGETHER, traffic_of, view_of_rule
from tests.unit.observe.test_live import status_of
from tests.unit.observe.test_rule_traffic import Node as TrafficNode


class Node(TrafficNode):
    def view(self, span="", *statuses):
        return view_of_rule("a", span, self.traffic, overview_of(*statuses or [status_of()]))

    def row(self, rule_id="a"):
        return traffic_of(rule_id, self.traffic, overview_of(status_of()))


def overview_of(*statuses):
    nodes = [NodeView(one, is_this=False, age_s=0.0, gone=False) for one in statuses]
    nothing = {"endpoints": (), "identifiers": (), "holds": ()}
    return Overview(total=statuses[0].sample, nodes=nodes, stale_s=None, shares=True, **nothing)


@pytest.fixture
def node():
    return Node()


async def test_rule_without_checks_was_never_matched(node):
    assert node.row() == ("0", "0", NEVER, None, "")


async def test_rule_that_only_applied_beside_others_says_so(node):
    node.decide("a")
    assert node.row() == ("0", "0", BESIDE, None, "")


async def test_rule_without_separate_counters_has_no_numbers(node, monkeypatch):
    monkeypatch.setattr("ratelimitd.counters.MAX_RULE_LABELS", 0)
    monkeypatch.setattr("ratelimitd.counters.MAX_FURTHER_RULES", 0)
    node.decide("a", 3)
    assert node.row() == ("–", "–", TOGETHER, None, "")


async def test_busy_rule_has_counts_last_match_and_sparkline(node):
    node.decide("a", 1)
    await node.step()
    node.decide("a", 1_200, 300)
    await node.step()
    row = node.row()
    assert row[:2] == ("1\u202f201", "300")
    assert row.last_match == "2023-11-15 00:00:20"
    assert row.spark.asked.startswith("M0 19.0L3 19.0")
    assert row.spark.asked.endswith("L90 1.0")
    assert row.spark.blocked.endswith("L90 15.4")
    assert row.spark.words == "now 150 a second, at most 150"


async def test_line_without_checks_is_at_the_bottom(node):
    node.decide("a", 1)
    await node.step()
    await node.step()
    spark = node.row().spark
    assert {place.split()[1] for place in spark.asked[1:].split("L")} == {"19.0"}
    assert not spark.blocked


async def test_rule_without_a_history_has_no_chart(node):
    view = node.view("1h")
    assert (view.row, view.rows, view.table) == (node.row(), "", [])


async def test_rule_has_a_chart_and_an_equal_table(node):
    node.decide("a", 1)
    for number in range(20):
        await node.step()
        node.decide("a", 10 * number, 5)
    view = node.view("5m")
    assert (view.span, view.span_ms, view.step_ms) == ("5m", 300_000, 10_000)
    rows = json.loads(view.rows)
    assert len(rows) == 19
    assert rows[-1][1:] == [18.0, 0.5]
    assert [rows[-1][0] - rows[0][0], rows[-1][0]] == [180_000, node.clock.now_us() // 1_000]
    assert view.table[:2] == [("00:03:20", "18", "0.5"), ("00:03:10", "16", "0.5")]
    assert len(view.table) == 9
    assert node.view("1h").address("24h") == "/rules/a?range=24h"
    assert node.view("7y").span == "15m"
    assert node.view("1h").address("15m") == "/rules/a"


def test_rates_of_all_nodes_cover_those_that_report(node):
    told = BusyRule("a", 2.0, 0.5)
    here = status_of(rules=[told, BusyRule("b", 1.0, 1.0)])
    there = status_of("n2", rules=[told._replace(allowed_per_s=3.0)])
    silent = status_of("n3")
    assert node.view("", here, there, silent).row.together == (
        "5 allowed and 1 blocked a second on 2 of 3 nodes"
    )
    assert not node.view("", here).row.together
    assert not node.view("", silent, status_of("n4")).row.together
