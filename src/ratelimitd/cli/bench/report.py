"""The results of a load, as text with charts and as JSON. Pure except for printing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

from ratelimitd.cli.bench.load import Load, Result
from ratelimitd.cli.bench.workload import QUANTILES, Distribution, Keys, Latencies, Slot
from ratelimitd.cli.output import Output, sparkline
from ratelimitd.cli.picture import Panel, nice, panel_from_zero, svg
from ratelimitd.model import US_PER_MS

BAR_WIDTH: Final = 40

COLUMNS: Final = 50
"""Width of the line that shows the rate over time."""

LATE_US: Final = 1_000
"""A check sent this late is off by as much as the latency of a node in the same network."""

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_FULL: Final = "█"


def print_report(result: Result, load: Load, output: Output) -> None:
    """Print figures and charts, and any caveats."""
    latencies = result.latencies
    output.line(
        f"{latencies.count:,} checks in {result.seconds:.2f} s: {rate_of(result):,.0f} a second"
    )
    output.line(f"  {description(load)}")
    output.line(
        f"{result.allowed:,} allowed, {result.denied:,} denied, {result.fail_open:,} fail open"
    )
    for name, count in sorted(result.errors.items()):
        output.line(output.styled(f"{count:,} not answered: {name}", "bad"))
    for warning in warnings(result):
        output.line(output.styled(f"warning: {warning}", "warn"))
    if not latencies.count:
        return
    output.line()
    output.pairs((name, f"{value:.3f} ms") for name, value in figures(latencies).items())
    output.line()
    bars = latencies.bars()
    most = max(bar.checks for bar in bars)
    for bar in bars:
        share = bar.checks / latencies.count
        label = f"≤ {bar.up_to_us / US_PER_MS:g} ms"
        output.line(
            f"{label:>12}  {_bar(bar.checks / most):<{BAR_WIDTH}}  {share:6.1%}  {bar.checks:,}"
        )
    output.line()
    line, highest = _rates(result.timeline.slots(result.seconds))
    output.line(f"{'a second':>12}  {line}  up to {highest:,.0f}")


def as_json(result: Result, load: Load) -> dict[str, Any]:
    """Return all results, with units in the names."""
    latencies, arrivals, keys = result.latencies, load.arrivals, load.keys
    return {
        "loop": "closed" if arrivals is None else "open",
        "concurrency": load.concurrency,
        "rate_per_s": arrivals and arrivals.rate,
        "arrival": arrivals and arrivals.arrival,
        "keys": keys.count,
        "distribution": keys.distribution,
        "exponent": keys.exponent if keys.distribution is Distribution.ZIPF else None,
        "hot_share": keys.hot_share if keys.distribution is Distribution.HOT else None,
        "seed": keys.seed,
        "checks": latencies.count,
        "seconds": result.seconds,
        "checks_per_s": rate_of(result),
        "allowed": result.allowed,
        "denied": result.denied,
        "fail_open": result.fail_open,
        "errors": dict(result.errors),
        "latency_from": "sent" if arrivals is None else "due",
        "latency_ms": figures(latencies),
        "histogram": [
            {"up_to_ms": bar.up_to_us / US_PER_MS, "checks": bar.checks} for bar in latencies.bars()
        ],
        "sent_late_ms": None if arrivals is None else figures(result.delays),
        "waited": result.waited,
        "unsent": result.unsent,
        "over_time": [
            {
                "from_s": slot.from_s,
                "to_s": slot.to_s,
                "checks": slot.answers,
                "errors": slot.errors,
                "max_ms": slot.max_us / US_PER_MS,
            }
            for slot in result.timeline.slots(result.seconds)
        ],
        "warnings": warnings(result),
    }


def warnings(result: Result) -> list[str]:
    """Return the deviations of the load sent from the load requested."""
    found = []
    late_us = result.delays.quantile_us(0.99)
    if result.unsent:
        found.append(
            f"about {result.unsent:,} checks were due and never sent: latencies would be longer with them"
        )
    if late_us > LATE_US:
        late = f"1 check in 100 was sent {late_us / US_PER_MS:.1f} ms late or later, which its latency contains"
        if result.waited * 100 > result.delays.count:
            reason = "all --concurrency checks were in flight: raise it, or the node or the generator is at its limit"
        else:
            reason = "the generator did not keep up with the rate"
        found.append(f"{late}: {reason}")
    return found


def description(load: Load) -> str:
    """Return the load in words."""
    if load.arrivals is None:
        sent = f"{load.concurrency:,} at a time, each sent when the one before it was answered"
    else:
        arrivals = f"{load.arrivals.rate:,.10g} a second, {load.arrivals.arrival}"
        sent = f"{arrivals}, latencies from when each was due"
    return f"{sent}; {_keys(load.keys)}"


def figures(latencies: Latencies) -> dict[str, float]:
    """Return mean, minimum, percentiles and maximum, in ms."""
    values = {"mean": latencies.mean_us, "min": latencies.min_us}
    values |= {f"p{share * 100:g}": latencies.quantile_us(share) for share in QUANTILES}
    values["max"] = latencies.max_us
    return {name: value / US_PER_MS for name, value in values.items()}


def rate_of(result: Result) -> float:
    """Return the mean answers per second."""
    return result.latencies.count / result.seconds if result.seconds else 0.0


def _keys(keys: Keys) -> str:
    text = f"{keys.count:,} keys, {keys.distribution}"
    if keys.distribution is Distribution.ZIPF:
        return f"{text} {keys.exponent:g}"
    if keys.distribution is Distribution.HOT:
        return f"{text} {keys.hot_share:.0%}"
    return text


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * len(_EIGHTHS))
    whole, part = divmod(eighths, len(_EIGHTHS))
    return _FULL * whole + (_EIGHTHS[part] if part else "")


def _rates(slots: Sequence[Slot]) -> tuple[str, float]:
    """Return the rate over time as a line of columns, and its maximum."""
    each = max(1, len(slots) // COLUMNS)
    rates = []
    for start in range(0, len(slots), each):
        part = slots[start : start + each]
        rates.append(sum(slot.answers for slot in part) / (part[-1].to_s - part[0].from_s))
    return sparkline(rates, len(rates)), max(rates)


def picture(result: Result, load: Load) -> str:
    """Return the content of the file; without answers it says so."""
    head = f"{rate_of(result):,.0f} checks a second over {result.seconds:.1f} s"
    text = ", ".join(f"{name} {value:.3f} ms" for name, value in figures(result.latencies).items())
    parts = [f'<text x="20" y="48">{escape(description(load))}</text>']
    slots = result.timeline.slots(result.seconds)
    if result.latencies.count:
        parts += _percentiles(result.latencies)
    if slots:
        planned = None if load.arrivals is None else load.arrivals.rate
        parts += _over_time(slots, planned)
    return svg(head, text, 560, parts)


def _percentiles(latencies: Latencies) -> Iterator[str]:
    """Yield latency by percentile, both logarithmic: each nine has the same width."""
    # The slowest of n answers represents the last half of its share.
    most = 1 - 0.5 / latencies.count
    nines = max(1, math.ceil(-math.log10(1 - most)))
    low = math.floor(math.log10(max(1, latencies.min_us)))
    high = max(low + 1, math.ceil(math.log10(max(1, latencies.max_us))))
    panel = Panel(90, 180, nines, high, low)
    yield '<text x="20" y="76">latency by percentile</text>'
    for decade in range(low, high + 1):
        yield panel.across(decade, f"{10**decade / US_PER_MS:g} ms")
    for nine in range(nines + 1):
        yield panel.up(nine, f"p{100 * (1 - 10**-nine):.10g}" if nine else "p0")
    points = (
        (-math.log10(1 - min(share, most)), math.log10(max(1, up_to_us)))
        for share, up_to_us in latencies.curve()
    )
    yield panel.line(math.log10(max(1, latencies.min_us)), points)


def _over_time(slots: Sequence[Slot], planned: float | None) -> Iterator[str]:
    """Yield answers per second over time, with failures below."""
    highest = max([*(slot.rate for slot in slots), planned or 0.0, 1.0])
    panel, grid = panel_from_zero(350, slots[-1].to_s, highest)
    yield '<text x="20" y="336">answers a second</text>'
    yield from grid
    second = nice(slots[-1].to_s / 8)
    for number in range(math.floor(slots[-1].to_s / second) + 1):
        yield panel.up(number * second, f"{number * second:g} s")
    points = [(slot.to_s, slot.rate) for slot in slots]
    yield panel.area(points)
    yield panel.line(slots[0].rate, points)
    for slot in slots:
        if slot.errors:
            x, width = panel.x(slot.from_s), panel.x(slot.to_s) - panel.x(slot.from_s)
            y = panel.y(0) + 22
            yield f'<rect class="errors" x="{x}" y="{y}" width="{max(1.0, width):.1f}" height="5"/>'
    if any(slot.errors for slot in slots):
        yield f'<text class="end" x="72" y="{panel.y(0) + 30}">not answered</text>'
    if planned is not None:
        yield panel.across(planned, "", "planned")
