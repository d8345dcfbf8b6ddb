"""What users and our own tests need to test against ratelimitd without waiting: a clock that is set by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only when told to. Implements :class:`ratelimitd.clock.Clock`."""

    __slots__ = ("_monotonic_us", "_now_us")

    def __init__(self, now_us: int = 1_700_006_400_000_000) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        """The wall time that was set, in µs since the Unix epoch."""
        return self._now_us

    def monotonic_us(self) -> int:
        """µs advanced since this clock was made."""
        return self._monotonic_us

    def advance(self, *, seconds: float = 0, us: int = 0) -> None:
        """Let ``seconds`` plus ``us`` microseconds pass.

        Raises:
            ValueError: the sum is negative; use :meth:`step` for a wall clock that is set back.
        """
        delta_us = round(seconds * 1_000_000) + us
        if delta_us < 0:
            message = "time does not pass backwards: use step()"
            raise ValueError(message)
        self._now_us += delta_us
        self._monotonic_us += delta_us

    def step(self, us: int) -> None:
        """Set the wall clock ``us`` microseconds forward or back, without time passing."""
        self._now_us += us
