"""Alert rules and dashboard, as far as no Prometheus is needed to judge them."""

import re

import pytest
import yaml

from ratelimitd.observe.metrics import DEFINITIONS
from ratelimitd.workers.metrics import OF_PARENT
from tests.deploy.monitoring import (
    ALERT_TESTS,
    ROOT,
    alerts,
    dashboard,
    dashboard_queries,
    metrics_in,
)

EXPORTED = {definition.name for definition in (*DEFINITIONS, *OF_PARENT)}
RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")


def test_the_alerts_of_the_specification_are_as_it_says():
    specified = {
        "RateLimiterHighLatency": (
            "histogram_quantile(0.95, rate(rate_limiter_check_latency_seconds_bucket[5m])) > 0.002",
            *("5m", "warning"),
        ),
        "RateLimiterCacheMissRate": ("rate_limiter_cache_hit_ratio < 0.90", "10m", "warning"),
        "RateLimiterRedisDown": ("rate_limiter_shared_state_up == 0", "1m", "critical"),
    }
    rules = alerts()
    assert specified == {
        name: (rules[name]["expr"], rules[name]["for"], rules[name]["labels"]["severity"])
        for name in specified
    }


@pytest.mark.parametrize("name", alerts())
def test_an_alert_names_only_what_is_exported(name):
    expression = alerts()[name]["expr"]
    named = metrics_in(expression)
    assert named <= EXPORTED
    assert named or "up{" in expression


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_is_wrong_and_where_to_read_on(name):
    rule = alerts()[name]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"


@pytest.mark.parametrize("name", alerts())
def test_the_runbook_says_of_an_alert_what_it_means_what_to_look_at_and_what_to_do(name):
    _, found, rest = RUNBOOK.partition(f"\n## {name}\n")
    assert found
    entry = rest.split("\n## ")[0]
    assert re.findall(r"^\*\*(\w[\w ]*)\.\*\*", entry, re.MULTILINE) == [
        *("It means", "Look at", "Do"),
    ]


def test_the_runbook_has_an_entry_for_each_alert_and_no_other():
    assert set(re.findall(r"^## (RateLimiter\w+)$", RUNBOOK, re.MULTILINE)) == alerts().keys()


def test_the_runbook_names_only_what_is_exported():
    assert metrics_in(RUNBOOK) <= EXPORTED


@pytest.mark.parametrize("name", alerts())
def test_each_alert_is_tried_firing_and_not_firing(name):
    tried = yaml.safe_load((ALERT_TESTS / f"{name}.yml").read_text(encoding="utf-8"))
    outcomes = {
        test["name"]: {bool(expected["exp_alerts"]) for expected in test["alert_rule_test"]}
        for test in tried["tests"]
    }
    assert {True, False} in outcomes.values()
    assert {False} in outcomes.values()
    assert {
        expected["alertname"] for test in tried["tests"] for expected in test["alert_rule_test"]
    } == {name}


def test_the_dashboard_names_only_what_is_exported():
    for query in dashboard_queries():
        assert metrics_in(query) <= EXPORTED, query


def test_every_panel_asks_the_chosen_prometheus_about_the_chosen_nodes():
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}, panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"], target["expr"]
            assert 'job="$job"' in target["expr"], target["expr"]


def test_the_nodes_to_choose_from_are_those_of_the_chosen_cluster():
    """All of them, too: panels ask by instance, so `All` must not stand for every instance of the job."""
    [nodes] = [one for one in dashboard()["templating"]["list"] if one["name"] == "instance"]
    assert '{job="$job", namespace=~"$namespace"}' in nodes["query"]["query"]
    assert "allValue" not in nodes


def test_no_panel_lies_on_another():
    taken = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_panels_have_ids_and_titles_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
