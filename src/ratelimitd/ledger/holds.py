"""Holds: tokens that are charged before their cost is known, and settled afterwards. Pure. See ADR 0055.

A hold is charged as a check is, and keeps what a settle needs: of each of its buckets how many tokens were charged
when, until when the hold lives, and what it was settled with. Whoever keeps the buckets keeps the holds beside them, so
that nothing separates a charge from the hold that may give it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from ratelimitd.algorithms.several import Charge
from ratelimitd.model import Outcome

NUMBER_BYTES: Final = 16
"""A hold's number: 128 bits of a keyed digest, so that no caller constructs the number of another's."""

CHECK_DIGEST_BYTES: Final = 8

MAX_TTL_S: Final = 3_600
DEFAULT_TTL_S: Final = 60


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

    ``outcomes`` are in the order of the charges; of a hold that was made before, what they were then, ``None`` for a
    charge that it does not have. ``expire_us`` is its end in µs since the Unix epoch, 0 if it was denied. ``is_first``:
    it was made by this call.
    """

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

        A hold that there is already is returned as it was made.

        Raises:
            CheckInvalidError: the number is that of a hold of another check; names ``hold_id``.
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
