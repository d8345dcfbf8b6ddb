"""Interfaces that a limiter depends on: buckets, a journal of resets, a recorder of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from ratelimitd.algorithms import Decide
from ratelimitd.algorithms.several import Charge
from ratelimitd.errors import RateLimitdError
from ratelimitd.model import Check, Limit, Outcome


class Buckets(Protocol):
    """The buckets that a node decides on: its own, or its views of shared ones."""

    def apply(  # noqa: PLR0917 - called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Judge and charge a check; return ``None`` if the shared state has to decide.

        Raises:
            BreakerOpenError: the circuit breaker is open. Nothing was charged.
        """

    def peek(  # noqa: PLR0917 - the same signature as apply
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Judge a check as :meth:`apply` would, and charge nothing."""

    def apply_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> Sequence[Outcome] | None:
        """Judge a check on several buckets, and charge all of them or, if an enforced limit denies it, none.

        Costs and outcomes are in the order of ``charges``; see :func:`ratelimitd.algorithms.several.decide_all`.
        ``None``: the shared state has to decide, and nothing was charged.
        """

    def peek_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> Sequence[Outcome] | None:
        """Judge a check as :meth:`apply_each` would, and charge nothing."""


class RemoteBuckets(Buckets, Protocol):
    """Buckets that nodes share."""

    def wait(  # noqa: PLR0917 - as apply
        self,
        key: bytes,
        rule: Limit,
        now_us: int,
        cost: int,
        remaining_s: float | None = None,
        *,
        peek: bool,
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Ask the shared state to decide a check, at once.

        After a ``StoreUnavailableError`` the check may have been charged; after any other error it was not.
        """

    def wait_all(
        self,
        charges: Sequence[Charge],
        now_us: int,
        costs: Sequence[int],
        remaining_s: float | None = None,
        *,
        peek: bool,
        is_counted: bool = True,
    ) -> Awaitable[Sequence[Outcome | Exception]]:
        """Ask the shared state to decide a check on several buckets, at once; all are charged their costs, or none is.

        ``charges`` must not be empty. ``is_counted``: count an absent bucket as a miss.

        A bucket that cannot be decided has its error in place of an outcome. The error denies nothing, unless the
        breaker is open and denies.
        """

    async def refresh(self, keys: Sequence[bytes]) -> None:
        """Renew what the node knows of the buckets of ``keys``, as far as the shared state answers."""

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Limit]) -> None:
        """Reset the buckets of ``keys``, each with its limit, on every node.

        Raises:
            StoreUnavailableError: the result is unknown.
            StoreOverloadedError: at least one reset was not sent.
        """


class Journal(Protocol):
    """Makes resets durable before they are answered, so that no restart undoes them."""

    async def reset(self, keys: Sequence[bytes]) -> None:
        """Record the reset of the buckets of ``keys``; returns when it is on disk.

        Raises:
            StoreUnavailableError: it cannot be written.
        """


class Recorder(Protocol):
    """Records checks for a trace. Calls must be cheap and must not raise."""

    @property
    def seed(self) -> int:
        """Only checks with ``crc32(identifier, seed) < below`` are recorded."""

    @property
    def below(self) -> int:
        """See :attr:`seed`."""

    def record(self, identifier: bytes, check: Check, at_us: int, *, allowed: bool) -> None:
        """Record a check that was judged at ``at_us`` (µs); ``identifier`` replaces that of ``check``."""
