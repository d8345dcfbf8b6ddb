"""What a limiter needs of others: buckets, a journal of resets, a recorder of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from ratelimitd.algorithms import Decide
from ratelimitd.algorithms.several import Charge
from ratelimitd.errors import RateLimitdError
from ratelimitd.model import Check, Limit, Outcome


class Buckets(Protocol):
    """The buckets a node decides on: its own, or the shared ones it knows."""

    def apply(  # noqa: PLR0917 - called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Judge and charge a check; return ``None`` if the shared state has to decide.

        Raises:
            BreakerOpenError: the shared state is not asked now. Nothing was charged.
        """

    def peek(  # noqa: PLR0917 - the same signature as apply
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Judge a check as :meth:`apply` would, and charge nothing."""

    def apply_all(
        self, charges: Sequence[Charge], now_us: int, cost: int
    ) -> Sequence[Outcome] | None:
        """Judge a check on several buckets, and charge all of them or, if one denies it, none.

        Outcomes are in the order of ``charges``; see :func:`ratelimitd.algorithms.several.decide_all`. ``None``: the
        shared state has to decide, and nothing was charged.
        """

    def peek_all(
        self, charges: Sequence[Charge], now_us: int, cost: int
    ) -> Sequence[Outcome] | None:
        """Judge a check as :meth:`apply_all` would, and charge nothing."""


class RemoteBuckets(Buckets, Protocol):
    """Buckets that nodes share."""

    def wait(
        self, key: bytes, rule: Limit, now_us: int, cost: int, *, peek: bool
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Ask the shared state to decide a check, at once.

        ``StoreUnavailableError``: it did not answer in time, and the check may have been charged. With any other error
        nothing was charged.
        """

    def wait_all(
        self,
        charges: Sequence[Charge],
        now_us: int,
        cost: int,
        *,
        peek: bool,
        is_counted: bool = True,
    ) -> Awaitable[Sequence[Outcome | Exception]]:
        """Ask the shared state to decide a check on several buckets, at once; all are charged or none is.

        ``is_counted``: an absent bucket is a miss.

        In the place of an outcome is the error of a bucket that cannot be decided. It denies nothing, unless the
        breaker is open and denies.
        """

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Limit]) -> None:
        """Let the buckets of ``keys``, each with its limit, start afresh on every node.

        Raises:
            StoreUnavailableError: not known to be done.
            StoreOverloadedError: at least one was not asked for.
        """


class Journal(Protocol):
    """Where resets are written before they are answered, so that no restart undoes them."""

    async def reset(self, keys: Sequence[bytes]) -> None:
        """Write that the buckets of ``keys`` start afresh; done when it is on disk.

        Raises:
            StoreUnavailableError: it cannot be written.
        """


class Recorder(Protocol):
    """Notes checks for a trace; each call is as cheap as it can be, and must not raise."""

    @property
    def seed(self) -> int:
        """Checks with ``crc32(identifier, seed) < below`` are recorded; no others need to be noted."""

    @property
    def below(self) -> int:
        """See :attr:`seed`."""

    def note(self, identifier: bytes, check: Check, at_us: int, *, allowed: bool) -> None:
        """Note a check of ``identifier``, whatever ``check`` has in its place, that was judged at ``at_us``, in µs."""
