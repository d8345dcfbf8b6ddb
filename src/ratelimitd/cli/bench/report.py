"""What came of a load, as text with pictures of it and as JSON. Pure but for what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ratelimitd.cli.bench.keys import Arrivals, Distribution, Keys
from ratelimitd.cli.bench.latencies import QUANTILES, US_PER_MS, Latencies
from ratelimitd.cli.output import Output

if TYPE_CHECKING:
    from ratelimitd.cli.bench.load import Load, Result, Slot  # with grpc, see target.py

BAR_WIDTH: Final = 40

COLUMNS: Final = 50
"""Of the line that shows the rate over time."""

LATE_US: Final = 1_000
"""A check that is sent so late is measured wrongly by as much as a node in the same network takes."""

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_FULL: Final = "█"


def print_report(result: Result, load: Load, output: Output) -> None:
    """Print figures and pictures, and what is to be known before they are believed."""
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
    """Everything, with units in the names."""
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
    """What makes the figures others than those of the load that was asked for."""
    found = []
    late_us = result.delays.quantile_us(0.99)
    if result.unsent:
        found.append(
            f"about {result.unsent:,} checks were due and never sent: latencies would be longer with them"
        )
    if late_us > LATE_US:
        late = f"1 check in 100 was sent {late_us / US_PER_MS:.1f} ms late or later, which its latency contains"
        if result.waited * 100 > result.delays.count:
            reason = "as many as --concurrency allows were under way: too few, or node or generator are at their limit"
        else:
            reason = "the generator did not keep up with the rate"
        found.append(f"{late}: {reason}")
    return found


def description(load: Load) -> str:
    """The load in words."""
    if load.arrivals is None:
        sent = f"{load.concurrency:,} at a time, each sent when the one before it was answered"
    else:
        sent = f"{_arrival(load.arrivals)}, latencies from when each was due"
    return f"{sent}; {_keys(load.keys)}"


def figures(latencies: Latencies) -> dict[str, float]:
    """Mean, least, percentiles and most, in ms."""
    values = {"mean": latencies.mean_us, "min": latencies.min_us}
    values |= {f"p{share * 100:g}": latencies.quantile_us(share) for share in QUANTILES}
    values["max"] = latencies.max_us
    return {name: value / US_PER_MS for name, value in values.items()}


def rate_of(result: Result) -> float:
    """Answers a second, over all."""
    return result.latencies.count / result.seconds if result.seconds else 0.0


def _arrival(arrivals: Arrivals) -> str:
    return f"{arrivals.rate:,.10g} a second, {arrivals.arrival}"


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
    """The rate over time as a line of columns, and the highest of them."""
    each = max(1, len(slots) // COLUMNS)
    rates = []
    for start in range(0, len(slots), each):
        part = slots[start : start + each]
        rates.append(sum(slot.answers for slot in part) / (part[-1].to_s - part[0].from_s))
    highest = max(rates)
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(rate / highest * top)] for rate in rates), highest
