"""Holds: tokens that are charged before their cost is known, and settled afterwards. Pure. See ADR 0055.

A hold is charged like a check, and keeps what a settle needs: the tokens and time of each charge, its end, and the
amount with which it was settled. Holds are stored beside the buckets, so that a charge is never separated from the hold
that may give it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ratelimitd.algorithms.several import Charge
from ratelimitd.errors import FieldViolation
from ratelimitd.model import CONCURRENCY, MAX_TIME_US, Limit, Outcome

NUMBER_BYTES: Final = 16
"""A hold's number: 128 bits of a keyed digest, so that no caller can construct the number of another's hold."""

CHECK_DIGEST_BYTES: Final = 8

MAX_TTL_S: Final = 3_600
DEFAULT_TTL_S: Final = 60

GRACE_S: Final = 60
"""Time for which a hold is kept after its end, so that late settles get a specific error."""

MAX_HOLDS: Final = 100_000
"""Holds in flight that one node has made."""

MAX_HOLDS_PER_BUCKET: Final = 10_000

MIN_ENDS: Final = 1_000
"""Ends of settled holds that may be kept until they are due."""

STEP: Final = 1_000
"""Ends examined in one call: about 1 ms; 100,000 at once took 150 ms."""

OF_ANOTHER_CHECK: Final = FieldViolation("hold_id", "belongs to another check")
OF_WHAT_IS_OVER: Final = FieldViolation(
    "hold_id", "belongs to a hold that was settled or has ended; use a new one for each request"
)

T = TypeVar("T")


class Hold(NamedTuple):
    """A hold to be made.

    ``number`` identifies it, and ``check_digest`` its check: the same number with another digest is refused. ``cost``
    is charged to each of ``charges`` at ``now_us``, for ``ttl_us`` from then on.
    """

    number: bytes
    check_digest: bytes
    charges: Sequence[Charge]
    now_us: int
    cost: int
    ttl_us: int


class Held(NamedTuple):
    """The result of a hold.

    ``outcomes`` are those of the buckets of ``names``, their stored names, in the order of the charges; for a hold made
    before, its own buckets and original outcomes. ``None``: the store did not answer for this bucket. ``expire_us`` is
    the end in µs since the Unix epoch, 0 if the hold was denied. ``is_first``: this call made the hold.
    """

    names: Sequence[bytes]
    outcomes: Sequence[Outcome | None]
    expire_us: int
    is_first: bool = False


class Settled(NamedTuple):
    """The result of a settle.

    ``known``: the hold exists, and was settled now (``is_first``) or before with the same tokens. ``outcomes`` are
    those of a check that costs nothing on each bucket afterwards; ``None`` for a missing bucket.
    """

    known: bool
    is_first: bool = False
    outcomes: Sequence[Outcome | None] = ()


class Holds(Protocol):
    """Holds beside the buckets that they are charged to: a node's own, or shared ones.

    Raises, from each method:
        StoreUnavailableError: the shared state did not answer; the call may have been executed, and can be repeated.
        StoreOverloadedError: the call was not sent.
    """

    async def hold(self, hold: Hold) -> Held:
        """Charge all buckets and keep the hold, or, if an enforced limit denies it, do nothing.

        A hold that is already in flight is returned as it was made, even if its check has other buckets now.

        Raises:
            CheckInvalidError: the number belongs to a hold of another check, or to one that was settled or has ended:
                it would be allowed without a charge. Names ``hold_id``.
            HoldsFullError: a bucket, or the node, has reached its maximum of holds. Nothing was charged.
        """

    async def settle(
        self, number: bytes, limits: Mapping[bytes, Limit | None], actual: int, now_us: int
    ) -> Settled:
        """Charge ``actual`` tokens instead of the held ones, on the buckets of these stored names.

        Idempotent. 0 gives everything back. The outcomes are by the limits in force; that of a bucket without one, or
        with one of another algorithm or window, is by the limit of its last charge.

        Raises:
            HoldEndedError: the hold ended before it was settled.
            HoldSettledError: it was settled with another number of tokens.
        """

    async def extend(
        self, number: bytes, names: Sequence[bytes], ttl_us: int, now_us: int
    ) -> int | None:
        """Extend the hold to ``ttl_us`` after now, never shorten it; return its end in µs, ``None`` if unknown.

        On a concurrency limit it ends at most one window after it was made.

        Raises:
            HoldEndedError: the hold has ended.
            HoldSettledError: it was settled.
        """


def longest_life_us(limits: Sequence[Limit]) -> int:
    """Return the longest life of a hold on these limits, including extensions: that of its slots."""
    lives_us = [limit.window_us for limit in limits if limit.algorithm is CONCURRENCY]
    return min(lives_us, default=MAX_TIME_US)


class OpenHolds(Generic[T]):
    """Holds made by a node, with a note on each, until they are settled there or end by its clock."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, T]] = {}
        """Number → (end in µs, note)."""
        self._ends: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        """Return the number of holds, including ended ones that were not popped yet."""
        return len(self._open)

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number is open."""
        return number in self._open

    def add(self, number: bytes, end_us: int, value: T) -> None:
        """Add a hold, unless it is open."""
        if number not in self._open:
            heappush(self._ends, (end_us, number))
            self._open[number] = end_us, value

    def extend(self, number: bytes, end_us: int) -> None:
        """Extend a hold, if it is open."""
        if number in self._open:
            former_us, value = self._open[number]
            self._open[number] = max(former_us, end_us), value

    def pop(self, number: bytes) -> T | None:
        """Remove a settled hold; return its note, if it was open."""
        end = self._open.pop(number, None)
        return None if end is None else end[1]

    def pop_ended(self, now_us: int) -> list[T]:
        """Remove ended holds; return their notes.

        Examines at most :data:`STEP` ends; the next calls do the rest.
        """
        ended, ends = [], self._ends
        for _ in range(STEP):
            if not ends or ends[0][0] > now_us:
                break
            _, number = heappop(ends)
            if number not in self._open:
                continue
            end_us, value = self._open[number]
            if end_us > now_us:  # the hold was extended
                heappush(ends, (end_us, number))
            else:
                del self._open[number]
                ended.append(value)
        if len(ends) > 2 * len(self._open) + MIN_ENDS:
            # Most are ends of settled holds; this bounds them by the holds in flight.
            self._ends = [(end_us, number) for number, (end_us, _) in self._open.items()]
            heapify(self._ends)
        return ended
