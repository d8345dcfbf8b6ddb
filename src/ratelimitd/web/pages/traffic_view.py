"""The traffic on the pages of the rules: figures as text, and the sparkline of the table. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Final, NamedTuple

from ratelimitd.observe.history import DEFAULT_SPAN
from ratelimitd.observe.live import Overview
from ratelimitd.observe.rule_traffic import SPANS, Rates, RuleTraffic, Traffic
from ratelimitd.web.pages.rendering import TABLE_ROWS, course, instant, number, short, time_of_day

SORT_WORDS: Final = {
    "endpoint": "endpoint",
    "type": "type",
    "-limit": "highest limit",
    "limit": "lowest limit",
    "-allowed": "most allowed",
    "-blocked": "most blocked",
    "-match": "latest match",
    "match": "longest without a match",
}
"""The sort orders that the form of the table offers."""

NEVER: Final = "never since start"
BESIDE: Final = "only beside other rules"
TOGETHER: Final = "not counted apart"

SPARK_WIDTH: Final = 90
SPARK_HEIGHT: Final = 20
SPARK_POINTS: Final = 30


class Spark(NamedTuple):
    """The last quarter of an hour as two lines, of all checks and of blocked ones, and as text."""

    asked: str
    blocked: str
    words: str


class RuleRow(NamedTuple):
    """The traffic of one line of the table of rules; ``spark`` is ``None`` for all but the busiest.

    ``together``: the decisions by this rule on all nodes that report it; empty without other nodes or reports.
    """

    allowed: str
    blocked: str
    last_match: str
    spark: Spark | None
    together: str


def traffic_of(rule_id: str, traffic: RuleTraffic, overview: Overview) -> RuleRow:
    """Return the traffic of a rule for the table."""
    now = traffic.of(rule_id)
    counts = (number(now.allowed), number(now.blocked)) if now.counted else ("–", "–")
    spark = _spark(traffic.rates(rule_id, SPANS["15m"]))
    return RuleRow(*counts, last_match(now), spark, _together(rule_id, overview))


def last_match(traffic: Traffic) -> str:
    """Return when a rule last decided a check, in UTC, or why that is unknown."""
    if not traffic.counted:
        return TOGETHER
    if traffic.last_ms:
        return instant(traffic.last_ms // 1_000).removesuffix(" UTC")
    return BESIDE if traffic.judged else NEVER


def _spark(rates: Sequence[Rates]) -> Spark | None:
    if not rates:
        return None
    most = SPANS["15m"].most
    asked = [0.0] * (most - len(rates)) + [one.allowed_per_s + one.blocked_per_s for one in rates]
    blocked = [0.0] * (most - len(rates)) + [one.blocked_per_s for one in rates]
    top = max(asked)
    blocked_path = _path(blocked, top) if any(blocked) else ""
    return Spark(_path(asked, top), blocked_path, course(asked[-1], top))


def _path(values: Sequence[float], top: float) -> str:
    """Return the maxima of equal parts, as an SVG path."""
    part = len(values) // SPARK_POINTS
    points = [max(values[start : start + part]) for start in range(0, len(values), part)]
    width = SPARK_WIDTH / (len(points) - 1)
    scale = (SPARK_HEIGHT - 2) / (top or 1)
    places = [
        f"{place * width:.0f} {SPARK_HEIGHT - 1 - value * scale:.1f}"
        for place, value in enumerate(points)
    ]
    return "M" + "L".join(places)


class RuleView(NamedTuple):
    """The traffic of one rule on its own page. ``rows`` are those of the chart, in JSON; empty without a history."""

    row: RuleRow
    path: str
    span: str
    rows: str
    table: Sequence[tuple[str, str, str]]

    @property
    def span_ms(self) -> int:
        """The length of the chart."""
        return SPANS[self.span].kept_s * 1_000

    @property
    def step_ms(self) -> int:
        """The length of each of its rows."""
        return SPANS[self.span].step_s * 1_000

    def address(self, span: str) -> str:
        """Return the address of the chart with another span."""
        return self.path + ("" if span == DEFAULT_SPAN else f"?range={span}")


def view_of_rule(rule_id: str, span: str, traffic: RuleTraffic, overview: Overview) -> RuleView:
    """Return the traffic of a rule for its page; an unknown span is replaced by the default."""
    span = span if span in SPANS else DEFAULT_SPAN
    rates = traffic.rates(rule_id, SPANS[span])
    rows = [[at_ms, round(allowed, 3), round(blocked, 3)] for at_ms, allowed, blocked in rates]
    return RuleView(
        traffic_of(rule_id, traffic, overview),
        f"/rules/{rule_id}",
        span,
        json.dumps(rows, separators=(",", ":")) if rows else "",
        _table(rates, SPANS[span].kept_s // TABLE_ROWS * 1_000),
    )


def _together(rule_id: str, overview: Overview) -> str:
    rates = [one for status in overview.alive for one in status.rules if one.rule_id == rule_id]
    if not rates or not overview.alive[1:]:
        return ""
    allowed = short(sum(one.allowed_per_s for one in rates))
    blocked = short(sum(one.blocked_per_s for one in rates))
    nodes = f"{len(rates)} of {len(overview.alive)} nodes"
    return f"{allowed} allowed and {blocked} blocked a second on {nodes}"


def _table(rates: Sequence[Rates], stretch_ms: int) -> Sequence[tuple[str, str, str]]:
    """Return means of equal periods, the newest first."""
    found = []
    for _, group in groupby(rates, key=lambda one: one.at_ms // stretch_ms):
        some = [*group]
        allowed, blocked = (fmean(column) for column in list(zip(*some, strict=True))[1:])
        found.append((time_of_day(some[-1].at_ms // 1_000), short(allowed), short(blocked)))
    return found[::-1]
