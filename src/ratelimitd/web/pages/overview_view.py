"""The content of the overview page: every figure as text, every judgement as a word. Pure.

The page and the live stream use the same content, so an updated page equals a reloaded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from ratelimitd.observe.health import MAX_AVERAGE_LATENCY_MS, MAX_ERROR_RATE, MIN_CACHE_HIT_RATIO
from ratelimitd.observe.history import SPANS, Sample, Span, folded, summed
from ratelimitd.observe.live import NodeView, Overview
from ratelimitd.observe.node_status import NodeStatus
from ratelimitd.web.pages.rendering import (
    NONE,
    TABLE_ROWS,
    course,
    milliseconds,
    number,
    percent,
    seconds,
    short,
    size,
    time_of_day,
)

P99: Final = 6
HIT_RATIO: Final = 7
"""Columns of a row used by the chart summaries."""


@lru_cache(maxsize=2 * sum(span.most for span in SPANS.values()))
def row(sample: Sample) -> Sequence[float | None]:
    """Return a sample as a row of the charts.

    Time in ms, allowed, blocked and fail-open per second, the 50th, 95th and 99th percentile in ms, hit ratio, buckets.
    """
    return [
        sample.at_ms,
        *(
            None if value is None else round(value, 3)
            for value in (
                sample.allowed_per_s,
                sample.blocked_per_s,
                sample.fail_open_per_s,
                sample.percentile_ms(0.5),
                sample.percentile_ms(0.95),
                sample.percentile_ms(0.99),
                sample.hit_ratio,
            )
        ),
        sample.buckets,
    ]


RECENT_SAMPLES: Final = 5
"""Ratios and percentiles cover the last ten seconds: two seconds have too few checks."""

GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
"""Marks of a figure, in addition to its text."""

_POINT: Final = 0.01
"""Precision of a rounded ratio."""

_TOO_FEW: Final = ", once there are enough checks"


class Tile(NamedTuple):
    """One figure; ``note`` gives its reference, ``tone`` is empty or one of the marks."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


class Condition(NamedTuple):
    """One of the four conditions of health, for the node with the worst value."""

    name: str
    value: str
    wanted: str
    met: bool


class NodeRow(NamedTuple):
    """One line of the table of nodes; each figure has a mark, empty for most."""

    name: str
    is_this: bool
    gone: bool
    state: str
    state_tone: str
    addresses: str
    version: str
    figures: Sequence[Tile]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of the nodes on the overview."""

    verdict: str
    tone: str
    health_text: str
    conditions: Sequence[Condition]
    stale_for: str
    """How long the state of the other nodes has been unknown; empty if known."""
    tiles: Sequence[Tile]
    nodes: Sequence[NodeRow]
    gone: int
    advice: str
    """The setting to use instead, while a breaker is open; empty if none."""


def view_of(overview: Overview, history: Sequence[Sample], on_breaker_open: str) -> View:
    """Return the view. ``history`` ends with the current sample or is empty; ``on_breaker_open`` is the setting."""
    alive = overview.alive
    newest = max(status.rules_revision for status in alive)
    stale_for = "" if overview.stale_s is None else seconds(round(overview.stale_s))
    verdict, tone = _verdict(alive, stale_for)
    return View(
        verdict=verdict,
        tone=tone,
        health_text=_health_text(alive, stale_for),
        conditions=_conditions(alive, shares=overview.shares),
        stale_for=stale_for,
        tiles=_tiles(overview, _recent(overview, history)),
        nodes=[_node_row(node, newest, stale_for) for node in overview.nodes],
        gone=sum(node.gone for node in overview.nodes),
        advice=_advice(alive, on_breaker_open),
    )


def summary_of(history: Sequence[Sample]) -> Sequence[tuple[str, str]]:
    """Return the charts in words, for visitors who cannot see them."""
    if not history:
        return ()
    rows = [*map(row, history)]
    latencies = [one for each in rows if (one := each[P99]) is not None]
    ratios = [one for each in rows if (one := each[HIT_RATIO]) is not None]
    now = history[-1]
    return (
        ("Allowed", course(now.allowed_per_s, max(one.allowed_per_s for one in history))),
        ("Blocked", course(now.blocked_per_s, max(one.blocked_per_s for one in history))),
        ("Fail-open", course(now.fail_open_per_s, max(one.fail_open_per_s for one in history))),
        (
            "Latency, 99th percentile",
            f"now {milliseconds(now.percentile_ms(0.99))}, at most {milliseconds(max(latencies, default=None))}",
        ),
        (
            "Hit ratio",
            f"now {percent(now.hit_ratio)}, at least {percent(min(ratios, default=None))}",
        ),
        (
            "Buckets",
            f"now {short(now.buckets)}, at most {short(max(one.buckets for one in history))}",
        ),
    )


TABLE_HEADINGS: Final = ("Allowed", "Blocked", "Fail-open", "99 % within", "Hit ratio", "Buckets")


def table_of(history: Sequence[Sample], span: Span) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the charts as a table, newest first: means of a twelfth of the span each."""
    return [
        (
            time_of_day(one.at_ms // 1_000),
            (
                short(one.allowed_per_s),
                short(one.blocked_per_s),
                short(one.fail_open_per_s),
                milliseconds(one.percentile_ms(0.99)),
                percent(one.hit_ratio),
                short(one.buckets),
            ),
        )
        for one in reversed(folded(history, span.kept_s // TABLE_ROWS))
    ]


def _recent(overview: Overview, history: Sequence[Sample]) -> Sample:
    """Return the sum of the last ten seconds, or the last sample at longer intervals."""
    since_ms = overview.total.at_ms - 10_000
    last = islice(reversed(history), RECENT_SAMPLES)
    return summed([one for one in last if one.at_ms > since_ms] or [overview.total])


def _verdict(alive: Sequence[NodeStatus], stale_for: str) -> tuple[str, str]:
    """Return the worst state that any node reports; ignores nodes whose status could not be read."""
    if not all(status.healthy for status in alive):
        return "DEGRADED", WARN
    return ("UNKNOWN", WARN) if stale_for else ("HEALTHY", GOOD)


def _health_text(alive: Sequence[NodeStatus], stale_for: str) -> str:
    if stale_for:
        return f"the state of the other nodes has been unknown for {stale_for}"
    if len(alive) == 1:
        return ""
    healthy = sum(status.healthy for status in alive)
    return f"{healthy} of {len(alive)} nodes are healthy"


def _conditions(alive: Sequence[NodeStatus], *, shares: bool) -> Sequence[Condition]:
    cut_off = min(alive, key=lambda one: one.shared_state_connected)
    least = min(alive, key=lambda one: (one.hit_ratio_met, one.hit_ratio))
    slowest = max(alive, key=lambda one: (not one.latency_met, one.average_latency_ms))
    failing = max(alive, key=lambda one: one.error_rate)
    ratio_wanted = f"more than {percent(MIN_CACHE_HIT_RATIO)}"
    if least.hit_ratio_met and least.hit_ratio <= MIN_CACHE_HIT_RATIO:
        ratio_wanted += _TOO_FEW
    latency_wanted = f"less than {milliseconds(MAX_AVERAGE_LATENCY_MS)}"
    if slowest.latency_met and slowest.average_latency_ms >= MAX_AVERAGE_LATENCY_MS:
        latency_wanted += _TOO_FEW
    is_reached = cut_off.shared_state_connected
    reached = ("reached" if is_reached else "away") if shares else "this node's memory"
    # Without checks there is no latency, rather than one of 0.
    latency = milliseconds(slowest.average_latency_ms or None)
    found = (
        (cut_off, Condition("Shared state", reached, "", is_reached)),
        (
            least,
            Condition("Known buckets", _hit_ratio(least), ratio_wanted, least.hit_ratio_met),
        ),
        (slowest, Condition("Average latency", latency, latency_wanted, slowest.latency_met)),
        (
            failing,
            Condition(
                "Fail-open answers",
                percent(failing.error_rate),
                f"less than {percent(MAX_ERROR_RATE)}",
                failing.error_rate < MAX_ERROR_RATE,
            ),
        ),
    )
    return [
        one if one.met or len(alive) == 1 else one._replace(value=f"{one.value} on {node.node_id}")
        for node, one in found
    ]


def _hit_ratio(status: NodeStatus) -> str:
    """Return the hit ratio; a value below the bound is not rounded up to it."""
    if status.hit_ratio < MIN_CACHE_HIT_RATIO:
        return percent(min(status.hit_ratio, MIN_CACHE_HIT_RATIO - _POINT))
    return percent(status.hit_ratio)


def _tiles(overview: Overview, recent: Sample) -> Sequence[Tile]:
    total = overview.total
    return (
        Tile("Allowed", short(total.allowed_per_s), "a second"),
        Tile("Blocked", short(total.blocked_per_s), "a second"),
        Tile(
            "Fail-open",
            short(total.fail_open_per_s),
            "a second",
            BAD if total.fail_open_per_s else "",
        ),
        Tile(
            "Latency, 99 % within",
            milliseconds(recent.percentile_ms(0.99)),
            f"half {milliseconds(recent.percentile_ms(0.5))}, 95 % {milliseconds(recent.percentile_ms(0.95))}",
        ),
        Tile("Hit ratio", percent(recent.hit_ratio), "checks of known buckets"),
        Tile("Buckets", short(total.buckets), "held in memory"),
        Tile("Memory", size(total.memory_bytes), "of all nodes" if overview.nodes[1:] else ""),
        _breaker(overview.alive),
        _over_admission(overview.alive, fails_open=total.fail_open_per_s > 0),
    )


def _breaker(alive: Sequence[NodeStatus]) -> Tile:
    """Return the tile of the node whose breaker waits longest, if any."""
    worst = max(alive, key=lambda one: (one.breaker_state == "open", one.retry_s))
    if worst.breaker_state == "closed":
        if not all(one.shared_state_connected for one in alive):
            return Tile("Breaker", "closed", "nodes decide by what they know until it opens")
        return Tile("Breaker", "closed", "checks are decided as usual", GOOD)
    note = f"next try in {seconds(round(worst.retry_s))}"
    if alive[1:]:
        note += f", on {worst.node_id}"
    return Tile("Breaker", worst.breaker_state.replace("_", " "), note, BAD)


def _advice(alive: Sequence[NodeStatus], on_breaker_open: str) -> str:
    does = {"fail_open": "allows", "deny": "denies"}.get(on_breaker_open)
    if does is None or all(one.breaker_state == "closed" for one in alive):
        return ""
    return (
        f"While its breaker is open a node {does} every check (ON_BREAKER_OPEN={on_breaker_open})."
        " With ON_BREAKER_OPEN=local, which we recommend, it keeps limiting by the buckets it knows."
    )


def _over_admission(alive: Sequence[NodeStatus], *, fails_open: bool) -> Tile:
    """Return the tile of the node furthest beyond its bound, else with the most excess; an embedded node is exact."""
    worst = max(alive, key=lambda one: (_is_beyond(one), one.excess_ratio, one.excess_bound_ratio))
    if not worst.excess_bound_ratio:
        return Tile("Over-admission", "none", "a single node is exact")
    return Tile(
        "Over-admission",
        percent(worst.excess_ratio),
        f"of a limit; at most {percent(worst.excess_bound_ratio)} is promised"
        + (", fail-open answers left out" if fails_open else ""),
        BAD if _is_beyond(worst) else "",
    )


def _is_beyond(status: NodeStatus) -> bool:
    return status.excess_ratio > status.excess_bound_ratio


def _node_row(node: NodeView, newest_revision: int, stale_for: str) -> NodeRow:
    status = node.status
    sample = status.sample
    behind = status.rules_revision < newest_revision and not node.gone
    state, tone = _state(node, stale_for)
    breaker = status.breaker_state.replace("_", " ")
    if status.breaker_state != "closed":
        breaker += f", {seconds(round(status.retry_s))}"
    figures = (
        Tile("Revision", number(status.rules_revision), tone=WARN if behind else ""),
        Tile("Allowed", short(sample.allowed_per_s)),
        Tile("Blocked", short(sample.blocked_per_s)),
        Tile(
            "Fail-open", short(sample.fail_open_per_s), tone=BAD if sample.fail_open_per_s else ""
        ),
        Tile("99 % within", milliseconds(sample.percentile_ms(0.99))),
        Tile("Hit ratio", percent(status.hit_ratio), tone="" if status.hit_ratio_met else WARN),
        Tile("Buckets", short(sample.buckets)),
        Tile("Memory", size(sample.memory_bytes)),
        Tile("Breaker", breaker, tone="" if status.breaker_state == "closed" else BAD),
        Tile("Sync lag", seconds(status.sync_lag_s), tone=WARN if status.sync_lag_s > 1 else ""),
        Tile(
            "Skew",
            seconds(status.clock_error_s),
            tone=WARN if abs(status.clock_error_s) > 1 else "",
        ),
        Tile(
            "Over-admission",
            f"{percent(status.excess_ratio)} of {percent(status.excess_bound_ratio)}"
            if status.excess_bound_ratio
            else NONE,
            tone=BAD if _is_beyond(status) else "",
        ),
    )
    return NodeRow(
        name=status.node_id,
        is_this=node.is_this,
        gone=node.gone,
        state=state,
        state_tone=tone,
        addresses=" · ".join(filter(None, (status.grpc_address, status.http_address))),
        version=status.version,
        figures=figures,
    )


def _state(node: NodeView, stale_for: str) -> tuple[str, str]:
    if stale_for and not node.is_this:
        return f"not heard for {stale_for}", WARN
    if node.gone:
        return f"gone, last seen {seconds(round(node.age_s))} ago", BAD
    return ("healthy", GOOD) if node.status.healthy else ("degraded", WARN)
