"""What the pages of the rules say of their traffic: figures as text, the sparkline of the table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ratelimitd.observe.rule_traffic import SPANS, Rates, RuleTraffic, Traffic
from ratelimitd.web.pages.rendering import instant, number, short

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
"""The orders that the form of the table offers."""

NEVER: Final = "never since start"
BESIDE: Final = "only beside other rules"
TOGETHER: Final = "not counted apart"

SPARK_WIDTH: Final = 90
SPARK_HEIGHT: Final = 20
SPARK_POINTS: Final = 30


class Spark(NamedTuple):
    """The last quarter of an hour as two lines, of all checks and of blocked ones, and in words."""

    asked: str
    blocked: str
    words: str


class RuleRow(NamedTuple):
    """The traffic of one line of the table of rules; ``spark`` is ``None`` for all but the busiest."""

    allowed: str
    blocked: str
    last_match: str
    spark: Spark | None


def traffic_of(rule_id: str, traffic: RuleTraffic) -> RuleRow:
    """The traffic of a rule for the table."""
    now = traffic.of(rule_id)
    counts = (number(now.allowed), number(now.blocked)) if now.counted else ("–", "–")
    return RuleRow(*counts, last_match(now), _spark(traffic.rates(rule_id, SPANS["15m"])))


def last_match(traffic: Traffic) -> str:
    """When a rule last decided a check, or why that is not known."""
    if not traffic.counted:
        return TOGETHER
    if traffic.last_ms:
        return instant(traffic.last_ms // 1_000)
    return BESIDE if traffic.judged else NEVER


def _spark(rates: Sequence[Rates]) -> Spark | None:
    if not rates:
        return None
    most = SPANS["15m"].most
    asked = [0.0] * (most - len(rates)) + [one.allowed_per_s + one.blocked_per_s for one in rates]
    blocked = [0.0] * (most - len(rates)) + [one.blocked_per_s for one in rates]
    top = max(asked)
    words = f"now {short(asked[-1])} a second, at most {short(top)}"
    return Spark(_path(asked, top), _path(blocked, top) if any(blocked) else "", words)


def _path(values: Sequence[float], top: float) -> str:
    """The highest values of equal parts, as the path of an SVG."""
    part = len(values) // SPARK_POINTS
    points = [max(values[start : start + part]) for start in range(0, len(values), part)]
    width = SPARK_WIDTH / (len(points) - 1)
    scale = (SPARK_HEIGHT - 2) / (top or 1)
    places = [
        f"{place * width:.0f} {SPARK_HEIGHT - 1 - value * scale:.1f}"
        for place, value in enumerate(points)
    ]
    return "M" + "L".join(places)
