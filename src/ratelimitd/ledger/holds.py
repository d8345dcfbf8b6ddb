"""Holds: tokens that are charged before their cost is known, and settled afterwards. Pure. See ADR 0055.

A hold is charged as a check is, and keeps what a settle needs: of each of its buckets how many tokens were charged
when, until when the hold lives, and what it was settled with. Whoever keeps the buckets keeps the holds beside them, so
that nothing separates a charge from the hold that may give it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ratelimitd.algorithms.several import Charge
from ratelimitd.errors import FieldViolation
from ratelimitd.model import Outcome

NUMBER_BYTES: Final = 16
"""A hold's number: 128 bits of a keyed digest, so that no caller constructs the number of another's."""

CHECK_DIGEST_BYTES: Final = 8

MAX_TTL_S: Final = 3_600
DEFAULT_TTL_S: Final = 60

GRACE_S: Final = 60
"""How long a hold is remembered after its end, to tell late settles why they do nothing."""

MAX_HOLDS: Final = 100_000
"""Holds in flight that one node has made."""

MAX_HOLDS_PER_BUCKET: Final = 10_000

MIN_ENDS: Final = 1_000
"""Ends of settled holds that are kept until their time comes."""

STEP: Final = 1_000
"""Ends that are looked at in one call: about 1 ms, where 100,000 at once took 150."""

OF_ANOTHER_CHECK: Final = FieldViolation("hold_id", "is that of another check")
OF_WHAT_IS_OVER: Final = FieldViolation(
    "hold_id", "is that of a hold that was settled or has ended; each request takes its own"
)

T = TypeVar("T")


class Hold(NamedTuple):
    """A hold to be made.

    ``number`` names it, ``check_digest`` says which check it is of: the same number with another digest is refused.
    ``cost`` is charged to each of ``charges`` at ``now_us``, for ``ttl_us`` from then on.
    """

    number: bytes
    check_digest: bytes
    charges: Sequence[Charge]
    now_us: int
    cost: int
    ttl_us: int


class Held(NamedTuple):
    """What became of a hold.

    ``outcomes`` are those of the buckets of ``names``, which are stored ones: of the charges in their order; of a hold
    that was made before, of the buckets that it has, and what was told then. ``None``: the store did not answer about
    that bucket. ``expire_us`` is its end in µs since the Unix epoch, 0 if it was denied. ``is_first``: it was made by
    this call.
    """

    names: Sequence[bytes]
    outcomes: Sequence[Outcome | None]
    expire_us: int
    is_first: bool = False


class Settled(NamedTuple):
    """What a settle made of the buckets of a hold.

    ``known``: there is such a hold, settled now (``is_first``) or before with the same tokens. ``outcomes`` say what
    each bucket has now, as of a check that costs nothing; ``None`` of one that is not there.
    """

    known: bool
    is_first: bool = False
    outcomes: Sequence[Outcome | None] = ()


class Holds(Protocol):
    """Holds beside the buckets that they are charged to: a node's own, or shared ones.

    Raises, from each method:
        StoreUnavailableError: the shared state did not answer; the call may have been done, and can be repeated.
        StoreOverloadedError: it was not asked.
    """

    async def hold(self, hold: Hold) -> Held:
        """Charge all buckets and keep the hold, or, if an enforced limit denies it, nothing.

        A hold that is in flight already is returned as it was made, whatever buckets its check has by now.

        Raises:
            CheckInvalidError: the number is that of a hold of another check, or of one that was settled or has ended:
                it would be allowed and charge nothing. Names ``hold_id``.
            HoldsFullError: a bucket, or the node, has as many holds as it may have. Nothing was charged.
        """

    async def settle(
        self, number: bytes, names: Sequence[bytes], actual: int, now_us: int
    ) -> Settled:
        """Charge ``actual`` tokens for the hold in place of what it holds, on the buckets of these stored names.

        Once, however often it is called. 0 gives everything back.

        Raises:
            HoldEndedError: its time was over before it was settled.
            HoldSettledError: it was settled with another number of tokens.
        """

    async def extend(
        self, number: bytes, names: Sequence[bytes], ttl_us: int, now_us: int
    ) -> int | None:
        """Let the hold end ``ttl_us`` after now, never sooner than it would; returns its end, in µs.

        On a limit of slots it ends at most one window after it was made. ``None``: there is no such hold.

        Raises:
            HoldEndedError: its time is over.
            HoldSettledError: it was settled.
        """


class OpenHolds(Generic[T]):
    """Holds that a node has made, and what it notes of each, until they are settled there or end by its clock."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, T]] = {}
        """Number → end in µs, and what is noted."""
        self._ends: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        """Return the number of holds, those included that have ended and were not popped."""
        return len(self._open)

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number is open."""
        return number in self._open

    def add(self, number: bytes, end_us: int, noted: T) -> None:
        """Note a hold that was made, unless it is open."""
        if number not in self._open:
            heappush(self._ends, (end_us, number))
            self._open[number] = end_us, noted

    def extend(self, number: bytes, end_us: int) -> None:
        """Let a hold end later, if it is open."""
        if number in self._open:
            former_us, noted = self._open[number]
            self._open[number] = max(former_us, end_us), noted

    def pop(self, number: bytes) -> T | None:
        """Forget a hold that was settled; returns what was noted of it, if it was open."""
        end = self._open.pop(number, None)
        return None if end is None else end[1]

    def pop_ended(self, now_us: int) -> list[T]:
        """Forget holds that have ended; returns what was noted of them.

        After more than :data:`STEP` ends at a time the rest is left to the next calls.
        """
        ended, ends = [], self._ends
        for _ in range(STEP):
            if not ends or ends[0][0] > now_us:
                break
            _, number = heappop(ends)
            if number not in self._open:
                continue
            end_us, noted = self._open[number]
            if end_us > now_us:  # it was extended
                heappush(ends, (end_us, number))
            else:
                del self._open[number]
                ended.append(noted)
        if len(ends) > 2 * len(self._open) + MIN_ENDS:
            # Most are of holds that were settled: what a caller leaves behind is bounded by what is in flight.
            self._ends = [(end_us, number) for number, (end_us, _) in self._open.items()]
            heapify(self._ends)
        return ended
