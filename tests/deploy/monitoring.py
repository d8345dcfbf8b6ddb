"""The alert rules and the dashboard as data, for the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
ALERTS: Final = ROOT / "deploy/prometheus/alerts.yml"
ALERT_TESTS: Final = Path(__file__).parent / "alerts"
DASHBOARD: Final = ROOT / "deploy/grafana/ratelimitd.json"

_METRIC: Final = re.compile(r"\b(?:rate_limiter_|process_)\w+")
_PART_OF_HISTOGRAM: Final = re.compile(r"_(?:bucket|sum|count)$")


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by the name of their alert."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    read: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return read


def dashboard_queries() -> list[str]:
    """What its panels and variables ask Prometheus."""
    board = dashboard()
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [variable.get("definition", "") for variable in board["templating"]["list"]]
    return [*panels, *filter(None, variables)]


def metrics_in(query: str) -> set[str]:
    """The metrics that a query names; of a histogram its own name, and not those of its series."""
    return {
        _PART_OF_HISTOGRAM.sub("", name)
        if name.startswith("rate_limiter_check_latency_seconds")
        else name
        for name in _METRIC.findall(query)
    }
