"""Figures as people read them at a glance: three digits that matter, with their unit. Pure.

What there is no figure for is a dash.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.web.rendering import number

NONE: Final = "–"

NEXT_TO_NOTHING: Final = 0.005
NEXT_TO_ALL: Final = 0.999
FOUR_DIGITS: Final = 1_000

_GAP: Final = "\u202f"
"""A thin space that no line ends at."""


def short(value: float) -> str:
    """With decimals only while they matter: ``0``, ``0.04``, ``3.5``, ``420``, ``12 345``."""
    if value < 0:
        return "−" + short(-value)
    if 0 < value < NEXT_TO_NOTHING:
        return f"<{_GAP}0.01"
    for below, digits in ((0.095, 2), (9.95, 1)):
        if value != round(value) and value < below:
            return f"{value:.{digits}f}"
    return number(round(value))


def faded(value: float) -> str:
    """A count that fades with time: what little is left of it is not told to the hundredth."""
    return f"<{_GAP}1" if value < 1 else short(value)


def milliseconds(value_ms: float | None) -> str:
    """A latency: ``35 µs`` or ``1.5 ms``."""
    if value_ms is None:
        return NONE
    if value_ms < 1:
        return f"{round(value_ms * 1_000)}{_GAP}µs"
    return f"{short(value_ms)}{_GAP}ms"


def seconds(value_s: float) -> str:
    """A duration from milliseconds to minutes."""
    if 0 < abs(value_s) < 1:
        sign = "−" if value_s < 0 else ""
        return sign + milliseconds(abs(value_s) * 1_000)
    return f"{short(value_s)}{_GAP}s"


def percent(ratio: float | None) -> str:
    """A part of a whole; all of it and next to all of it are told apart."""
    if ratio is None:
        return NONE
    if NEXT_TO_ALL <= ratio < 1:
        return f"99.9{_GAP}%"
    return f"{short(ratio * 100)}{_GAP}%"


def size(octets: int) -> str:
    """Memory, in the unit in which it has one to three digits before the point."""
    value = float(octets)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < FOUR_DIGITS:
            return f"{short(value)}{_GAP}{unit}"
        value /= 1_024
    return f"{short(value)}{_GAP}TiB"
