"""Rows of a report: a figure and its baseline from the same run."""

import json
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One figure. ``baseline`` is in the unit of ``value``; the ratio is value / baseline."""

    name: str
    value: float
    unit: str
    baseline_name: str = ""
    baseline: float | None = None


def show(title: str, rows: list[Row]) -> None:
    """Print the rows as a table."""
    print(f"\n{title}")
    print(f"  {'':52} {'measured':>14}   {'baseline':>14}   {'ratio':>7}")
    for row in rows:
        baseline = "" if row.baseline is None else f"{row.baseline:>14,.4g}"
        ratio = "" if not row.baseline else f"{row.value / row.baseline:>7.2f}"
        beside = f"   {row.baseline_name}" if row.baseline_name else ""
        print(
            f"  {f'{row.name} [{row.unit}]':52} {row.value:>14,.4g}   {baseline:>14}   {ratio:>7}{beside}",
            flush=True,
        )


def save(path: Path, parts: dict[str, list[Row]]) -> None:
    """Save the figures for comparison with another run."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {title: [row._asdict() for row in rows] for title, rows in parts.items()}, indent=1
        )
    )


def percentile(values: list[float], part: float) -> float:
    """Return the value below which the fraction ``part`` of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
