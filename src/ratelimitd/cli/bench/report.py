"""The results of a load, as text with charts and as JSON. Pure except for printing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.sax.saxutils import escape

from ratelimitd.cli.bench.workload import QUANTILES, Arrivals, Distribution, Keys, Latencies
from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.output import Output, sparkline
from ratelimitd.model import US_PER_MS

if TYPE_CHECKING:
    from ratelimitd.cli.bench.load import Load, Result
    from ratelimitd.cli.bench.workload import Slot  # with grpc, as in client_options

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
        sent = f"{_arrival(load.arrivals)}, latencies from when each was due"
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
    """Return the rate over time as a line of columns, and its maximum."""
    each = max(1, len(slots) // COLUMNS)
    rates = []
    for start in range(0, len(slots), each):
        part = slots[start : start + each]
        rates.append(sum(slot.answers for slot in part) / (part[-1].to_s - part[0].from_s))
    return sparkline(rates, len(rates)), max(rates)


STYLE: Final = """
    svg { background: #ffffff }
    text { font: 12px system-ui, sans-serif; fill: #57606a }
    .title { font-size: 15px; font-weight: 600; fill: #24292f }
    .end { text-anchor: end }
    .middle { text-anchor: middle }
    .grid { stroke: #d0d7de }
    .planned { stroke: #57606a; stroke-dasharray: 5 4 }
    .line { stroke: #0969da; stroke-width: 2; fill: none }
    .area { fill: #0969da; fill-opacity: 0.25 }
    .errors { fill: #cf222e }
    @media (prefers-color-scheme: dark) {
      svg { background: #0d1117 }
      text { fill: #9198a1 }
      .title { fill: #e6edf3 }
      .grid { stroke: #30363d }
      .planned { stroke: #9198a1 }
      .line { stroke: #58a6ff }
      .area { fill: #58a6ff }
      .errors { fill: #f85149 }
    }
  """

ROLE: Final = 'role="img" aria-labelledby="title desc"'

WIDTH, HEIGHT = 760, 560

_NICE: Final = (1, 2, 5, 10)


class Panel(NamedTuple):
    """A rectangle of the picture and the scales of its two axes; y grows upwards."""

    left: float
    top: float
    width: float
    height: float
    x_max: float
    y_min: float
    y_max: float

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return round(self.left + value / self.x_max * self.width, 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.y_min) / (self.y_max - self.y_min)
        return round(self.top + (1 - share) * self.height, 1)

    def across(self, value: float, label: str, kind: str = "grid") -> str:
        """Return a horizontal line at a value, with its label on the left."""
        y, right = self.y(value), self.left + self.width
        line = f'<line class="{kind}" x1="{self.left}" y1="{y}" x2="{right}" y2="{y}"/>'
        return f'{line}<text class="end" x="{self.left - 8}" y="{y + 4}">{label}</text>'

    def up(self, value: float, label: str) -> str:
        """Return a vertical line from the bottom, with its label below."""
        x, bottom = self.x(value), self.top + self.height
        line = f'<line class="grid" x1="{x}" y1="{self.top}" x2="{x}" y2="{bottom}"/>'
        return f'{line}<text class="middle" x="{x}" y="{bottom + 18}">{label}</text>'


def picture(result: Result, load: Load) -> str:
    """Return the content of the file; without answers it says so."""
    head = f"{rate_of(result):,.0f} checks a second over {result.seconds:.1f} s"
    text = ", ".join(f"{name} {value:.3f} ms" for name, value in figures(result.latencies).items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {ROLE}>',
        f'<title id="title">{escape(head)}</title>',
        f'<desc id="desc">{escape(text)}</desc>',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="20" y="28">{escape(head)}</text>',
        f'<text x="20" y="48">{escape(description(load))}</text>',
    ]
    slots = result.timeline.slots(result.seconds)
    if result.latencies.count:
        parts += _percentiles(result.latencies)
    if slots:
        planned = None if load.arrivals is None else load.arrivals.rate
        parts += _over_time(slots, planned)
    return "\n".join([*parts, "</svg>", ""])


def write_picture(file: Path, text: str, exit_code: int) -> None:
    """Write a picture into the file that ``--picture`` names.

    Raises:
        CliError: the file cannot be written; has the status ``exit_code``.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"--picture: cannot write {file}: {error.strerror}"
        raise CliError(message, exit_code) from None


def _percentiles(latencies: Latencies) -> Iterator[str]:
    """Yield latency by percentile, both logarithmic: each nine has the same width."""
    # The slowest of n answers represents the last half of its share.
    most = 1 - 0.5 / latencies.count
    nines = max(1, math.ceil(-math.log10(1 - most)))
    low, high = _decades(max(1, latencies.min_us), max(1, latencies.max_us))
    panel = Panel(80, 90, WIDTH - 110, 180, nines, low, high)
    yield '<text x="20" y="76">latency by percentile</text>'
    for decade in range(low, high + 1):
        yield panel.across(decade, f"{10**decade / US_PER_MS:g} ms")
    for nine in range(nines + 1):
        yield panel.up(nine, f"p{100 * (1 - 10**-nine):.10g}" if nine else "p0")
    steps = [f"M{panel.x(0)},{panel.y(math.log10(max(1, latencies.min_us)))}"]
    for share, up_to_us in latencies.curve():
        y = panel.y(math.log10(max(1, up_to_us)))
        steps.append(f"V{y}H{panel.x(-math.log10(1 - min(share, most)))}")
    yield f'<path class="line" d="{"".join(steps)}"/>'


def _over_time(slots: Sequence[Slot], planned: float | None) -> Iterator[str]:
    """Yield answers per second over time, with failures below."""
    highest = max([*(slot.rate for slot in slots), planned or 0.0, 1.0])
    step = nice(highest / 4)
    top = math.ceil(highest / step) * step
    panel = Panel(80, 350, WIDTH - 110, 160, slots[-1].to_s, 0, top)
    yield '<text x="20" y="336">answers a second</text>'
    for number in range(round(top / step) + 1):
        yield panel.across(number * step, f"{number * step:,.10g}")
    second = nice(slots[-1].to_s / 8)
    for number in range(math.floor(slots[-1].to_s / second) + 1):
        yield panel.up(number * second, f"{number * second:g} s")
    steps = "".join(f"V{panel.y(slot.rate)}H{panel.x(slot.to_s)}" for slot in slots)
    yield f'<path class="area" d="M{panel.x(0)},{panel.y(0)}{steps}V{panel.y(0)}Z"/>'
    yield f'<path class="line" d="M{panel.x(0)},{panel.y(slots[0].rate)}{steps}"/>'
    for slot in slots:
        if slot.errors:
            x, width = panel.x(slot.from_s), panel.x(slot.to_s) - panel.x(slot.from_s)
            y = panel.y(0) + 22
            yield f'<rect class="errors" x="{x}" y="{y}" width="{max(1.0, width):.1f}" height="5"/>'
    if any(slot.errors for slot in slots):
        yield f'<text class="end" x="72" y="{panel.y(0) + 30}">not answered</text>'
    if planned is not None:
        yield panel.across(planned, "", "planned")


def _decades(low_us: int, high_us: int) -> tuple[int, int]:
    """Return the powers of ten around two latencies, at least one apart."""
    low = math.floor(math.log10(low_us))
    return low, max(low + 1, math.ceil(math.log10(high_us)))


def nice(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest such number of at least ``value``."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in _NICE if step * scale >= value * (1 - 1e-9))
