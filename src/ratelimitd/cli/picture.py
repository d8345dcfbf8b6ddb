"""SVG pictures of figures: panels with two axes below a title, in light and dark colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from ratelimitd.cli.client_options import CliError

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

WIDTH: Final = 760

LEFT, RIGHT = 80, WIDTH - 30
"""Horizontal bounds of all panels."""

_NICE: Final = (1, 2, 5, 10)

Points = Iterable[tuple[float, float]]
"""Steps of a curve: the end of each, and its value."""


class Panel(NamedTuple):
    """A rectangle of the picture and the scales of its two axes; y grows upwards."""

    top: float
    height: float
    x_max: float
    y_max: float
    y_min: float = 0

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return round(LEFT + value / self.x_max * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.y_min) / (self.y_max - self.y_min)
        return round(self.top + (1 - share) * self.height, 1)

    def across(self, value: float, label: str, kind: str = "grid") -> str:
        """Return a horizontal line at a value, with its label on the left."""
        y = self.y(value)
        line = f'<line class="{kind}" x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}"/>'
        return f'{line}<text class="end" x="{LEFT - 8}" y="{y + 4}">{label}</text>'

    def up(self, value: float, label: str) -> str:
        """Return a vertical line from the bottom, with its label below."""
        x, bottom = self.x(value), self.top + self.height
        line = f'<line class="grid" x1="{x}" y1="{self.top}" x2="{x}" y2="{bottom}"/>'
        return f'{line}<text class="middle" x="{x}" y="{bottom + 18}">{label}</text>'

    def line(self, start: float, points: Points) -> str:
        """Return a curve of steps that begins at ``start``."""
        return f'<path class="line" d="M{self.x(0)},{self.y(start)}{self._steps(points)}"/>'

    def area(self, points: Points) -> str:
        """Return the area below a curve of steps."""
        zero = self.y(0)
        return f'<path class="area" d="M{self.x(0)},{zero}{self._steps(points)}V{zero}Z"/>'

    def _steps(self, points: Points) -> str:
        return "".join(f"V{self.y(y)}H{self.x(x)}" for x, y in points)


def panel_from_zero(top: float, x_max: float, highest: float) -> tuple[Panel, Iterator[str]]:
    """Return a panel of values from 0 to ``highest``, and the lines of its grid."""
    step = nice(highest / 4)
    count = math.ceil(highest / step)
    panel = Panel(top, 160, x_max, count * step)
    return panel, (panel.across(at * step, f"{at * step:,.10g}") for at in range(count + 1))


def nice(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest such number of at least ``value``."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in _NICE if step * scale >= value * (1 - 1e-9))


def svg(head: str, description: str, height: int, parts: Iterable[str]) -> str:
    """Return the content of a file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {ROLE}>',
        f'<title id="title">{escape(head)}</title>',
        f'<desc id="desc">{escape(description)}</desc>',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="20" y="28">{escape(head)}</text>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


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
