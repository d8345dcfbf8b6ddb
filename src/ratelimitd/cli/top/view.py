"""Renders a reading for a terminal of any width, and as JSON. Calls no node.

Text from a node is shown as plain characters, so it cannot control the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ratelimitd.cli.output import sparkline
from ratelimitd.cli.top.reading import MS_PER_S, Frame, Latency, Reading
from ratelimitd.errors import printable

WIDE: Final = 80
"""Terminal width from which the measurements use two columns."""

MIB: Final = 1024 * 1024

NOTHING: Final = "–"

_STYLES: Final = {
    "HEALTHY": "green",
    "closed": "green",
    "DEGRADED": "yellow",
    "half_open": "yellow",
}
"""Other states are red."""

Pairs = Sequence[tuple[str, Text]]


def drawn(frame: Frame, width: int) -> RenderableType:
    """Render everything about a node."""
    reading = frame.reading
    parts: list[RenderableType] = [
        _head(reading, frame.lost),
        Text(),
        _pairs(_measurements(reading), width),
    ]
    if any(frame.checks_per_s):
        parts += [Text(), Text(f"checks/s  {sparkline(frame.checks_per_s, max(1, width - 10))}")]
    if reading.busiest:
        parts += [Text(), _rules(reading, frame.names)]
    return Group(*parts)


def as_json(reading: Reading, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the reading for a program; values that a node does not report are null."""
    values = reading._asdict()
    latency = reading.latency
    values["latency"] = latency and {
        name: _finite(value) for name, value in latency._asdict().items()
    }
    values["busiest"] = [
        {**rule._asdict(), "name": names.get(rule.rule_id, "")} for rule in reading.busiest
    ]
    return values


def _finite(value: float) -> float | None:
    """Return ``None`` for infinity, which JSON lacks: values beyond the last bound of a histogram."""
    return value if math.isfinite(value) else None


def _head(reading: Reading, lost: str) -> Text:
    head = Text.assemble(
        (printable(reading.node_id) or NOTHING, "bold"),
        "  ",
        (reading.status, _STYLES.get(reading.status, "red")),
        f"  rules revision {reading.rules_revision}",
    )
    if lost:
        head.append(f"\n{printable(lost)}; trying again", "red")
    return head


def _measurements(reading: Reading) -> Iterator[tuple[str, Text]]:
    blocked_style = "yellow" if reading.blocked_per_s else ""
    open_style = "red" if reading.fail_open_per_s else ""
    breaker = printable(reading.breaker_state)
    yield "allowed", Text(f"{_number(reading.allowed_per_s)}/s")
    yield "blocked", Text(f"{_number(reading.blocked_per_s)}/s", blocked_style)
    yield "fail open", Text(f"{_number(reading.fail_open_per_s)}/s", open_style)
    yield "breaker", Text(breaker or NOTHING, _STYLES.get(breaker, "red") if breaker else "")
    yield from _latencies(reading.latency)
    yield "hit ratio", Text(_ratio(reading.hit_ratio))
    yield "buckets", Text(_number(reading.buckets))
    yield "memory", Text(_mebibytes(reading.memory_bytes))
    yield "connections", Text(_number(reading.connections))
    yield "rules", Text(_number(reading.rules))
    if reading.cluster_nodes is not None:
        excess = (
            f"{_percent(reading.excess_ratio)} (promised {_percent(reading.excess_bound_ratio)})"
        )
        if reading.fail_open_per_s:
            excess += ", fail open left out"
        yield "nodes", Text(_number(reading.cluster_nodes))
        yield "sync lag", Text(_duration((reading.sync_lag_s or 0.0) * MS_PER_S))
        yield "over-admission", Text(excess)


def _latencies(latency: Latency | None) -> Iterator[tuple[str, Text]]:
    """Yield mean and quantiles; the mean is exact, a quantile is the upper bound of its bucket."""
    if latency is None:
        yield "latency", Text(NOTHING)
        return
    yield "latency", Text(f"{_duration(latency.mean_ms)} mean")
    for name, value in (("p50", latency.p50_ms), ("p95", latency.p95_ms), ("p99", latency.p99_ms)):
        yield (
            name,
            Text(f"≤ {_duration(value)}" if math.isfinite(value) else "above all bounds"),
        )


def _pairs(rows: Iterator[tuple[str, Text]], width: int) -> Table:
    pairs: Pairs = list(rows)
    columns = 2 if width >= WIDE else 1
    table = Table.grid(padding=(0, 2), expand=False)
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, min_width=24 if columns > 1 else None)
    height = -(-len(pairs) // columns)
    for row in range(height):
        chosen = [pairs[place] for place in range(row, len(pairs), height)]
        table.add_row(*[cell for name, value in chosen for cell in (Text(name), value)])
    return table


def _rules(reading: Reading, names: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("RULE", no_wrap=True, overflow="ellipsis")
    for title in ("BLOCKED/s", "ALLOWED/s", "BLOCKED"):
        table.add_column(title, justify="right", no_wrap=True)
    for rule in reading.busiest:
        name = Text(printable(names.get(rule.rule_id, rule.rule_id)))
        rates = _number(rule.blocked_per_s), _number(rule.allowed_per_s)
        table.add_row(name, *rates, f"{rule.blocked_total:,}")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"  # noqa: PLR2004 -- three digits say enough


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _mebibytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / MIB:,.1f} MiB"


def _duration(value_ms: float) -> str:
    # From 999.5 on, three digits would be 1e+03.
    return f"{value_ms:.3g} ms" if value_ms < MS_PER_S - 0.5 else f"{value_ms / MS_PER_S:,.1f} s"
