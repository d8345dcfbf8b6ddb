"""Renders a reading for a terminal of any width, and as JSON. Calls no node.

Text from a node is shown as plain characters, so it cannot control the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    # JSON lacks infinity: values beyond the last bound of a histogram are null.
    values["latency"] = reading.latency and {
        name: value if math.isfinite(value) else None
        for name, value in reading.latency._asdict().items()
    }
    values["busiest"] = [
        {**rule._asdict(), "name": names.get(rule.rule_id, "")} for rule in reading.busiest
    ]
    return values


def _head(reading: Reading, lost: str) -> Text:
    status = "AWAY" if lost else reading.status
    head = Text.assemble(
        (printable(reading.node_id) or NOTHING, "bold"),
        "  ",
        (status, _STYLES.get(status, "red")),
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
    yield "hit ratio", Text(_number(reading.hit_ratio, ".3f"))
    yield "buckets", Text(_number(reading.buckets))
    memory = reading.memory_bytes
    yield "memory", Text(NOTHING if memory is None else f"{memory / MIB:,.1f} MiB")
    yield "connections", Text(_number(reading.connections))
    yield "rules", Text(_number(reading.rules))
    if reading.cluster_nodes is not None:
        promised = _number(reading.excess_bound_ratio, ".1%")
        excess = f"{_number(reading.excess_ratio, '.1%')} (promised {promised})"
        if reading.fail_open_per_s:
            excess += ", fail open left out"
        reached = reading.shared_state_connected
        yield (
            "shared state",
            Text("connected" if reached else "not connected", "green" if reached else "red"),
        )
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
        shown = f"≤ {_duration(value)}" if math.isfinite(value) else "above all bounds"
        yield name, Text(shown)


def _pairs(rows: Iterator[tuple[str, Text]], width: int) -> Table:
    pairs = list(rows)
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
    table.add_column("RULE")
    for title in ("BLOCKED/s", "ALLOWED/s", "BLOCKED"):
        table.add_column(title, justify="right", no_wrap=True)
    for rule in reading.busiest:
        # Not the column: a table shrinks those of the numbers, too, if none may wrap.
        name = Text(
            printable(names.get(rule.rule_id, rule.rule_id)), no_wrap=True, overflow="ellipsis"
        )
        rates = _number(rule.blocked_per_s), _number(rule.allowed_per_s)
        table.add_row(name, *rates, f"{rule.blocked_total:,}")
    return table


def _number(value: float | None, form: str = "") -> str:
    """Return a number in this format, by default with a decimal unless it is whole or has three digits before it."""
    if value is None:
        return NOTHING
    whole = value == int(value) or value >= 100  # noqa: PLR2004 -- see above
    return format(value, form or (",.0f" if whole else ",.1f"))


def _duration(value_ms: float) -> str:
    # From 999.5 on, three digits would be 1e+03.
    return f"{value_ms:.3g} ms" if value_ms < MS_PER_S - 0.5 else f"{value_ms / MS_PER_S:,.1f} s"
