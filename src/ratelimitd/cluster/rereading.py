"""Which buckets are read again because checks of them were denied: a denial may be about what others gave back.

Rule 10 of the ledger: with the sync, and less and less often while nothing new comes. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from ratelimitd.cluster.bucket import Bucket

PAUSES_US: Final = (100_000, 300_000, 700_000, 1_000_000)
"""Between two looks at a bucket; the last one holds on."""

MAX_BUCKETS: Final = 100_000
"""Denied buckets that are looked after; further ones are found again when their checks come."""


class _Look(NamedTuple):
    due_us: int
    times: int
    bucket: Bucket


class Rereading:
    """The denied buckets of a node, by when they are due. ``now_us`` is monotonic."""

    def __init__(self) -> None:
        self._queues = tuple(deque[_Look]() for _ in PAUSES_US)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def denied(self, bucket: Bucket, now_us: int) -> None:
        """A check of this bucket was denied, the first one since it was last read."""
        bucket.is_denied = True
        if not bucket.is_watched and self._count < MAX_BUCKETS:
            bucket.is_watched = True
            self._later(bucket, 0, now_us)

    def due(self, now_us: int, most: int) -> list[tuple[Bucket, int]]:
        """The next buckets to be read, each with how often it was before. Each has to come back by :meth:`looked`.

        One of which no check was denied since its last look is left alone from now on.
        """
        looks: list[tuple[Bucket, int]] = []
        for queue in self._queues:
            # Each queue has one pause, so it is in the order of time.
            while queue and queue[0].due_us <= now_us and most:
                most -= 1
                _, times, bucket = queue.popleft()
                self._count -= 1
                if bucket.is_denied:
                    bucket.is_denied = False
                    looks.append((bucket, times))
                else:
                    bucket.is_watched = False
        return looks

    def looked(self, bucket: Bucket, times: int, now_us: int, *, is_news: bool) -> None:
        """It was read, or could not be: the next look comes later, but soon after news."""
        self._later(bucket, 0 if is_news else times + 1, now_us)

    def _later(self, bucket: Bucket, times: int, now_us: int) -> None:
        step = min(times, len(PAUSES_US) - 1)
        self._queues[step].append(_Look(now_us + PAUSES_US[step], times, bucket))
        self._count += 1
