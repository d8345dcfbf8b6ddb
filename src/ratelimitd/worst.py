"""The worst of what was measured lately: a gauge that a scrape every 15 s does not miss the peaks of.

Pure: never reads a clock; the time is handed in.
"""

from __future__ import annotations


class WorstRecent:
    """The largest value of the current stretch of ``stretch_us`` and of the one before it."""

    def __init__(self, stretch_us: int) -> None:
        self._stretch_us = stretch_us
        self._stretch = 0
        self._current = 0.0
        self._before = 0.0

    def note(self, now_us: int, value: float) -> float:
        """Take in one value; returns the worst of the last one to two stretches."""
        stretch = now_us // self._stretch_us
        if stretch != self._stretch:
            self._before = self._current if stretch == self._stretch + 1 else 0.0
            self._current, self._stretch = 0.0, stretch
        self._current = max(self._current, value)
        return max(self._current, self._before)
