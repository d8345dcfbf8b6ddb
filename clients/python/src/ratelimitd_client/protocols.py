"""What code that asks for decisions may use of a client; the real ones have it, and those for tests."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from ratelimitd_client.check import Check
from ratelimitd_client.decision import Decision


class RateLimiter(Protocol):
    """Decides whether requests may proceed, for code that blocks."""

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        ...

    def close(self) -> None:
        """As :meth:`ratelimitd_client.RateLimiterClient.close`."""
        ...

    def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """As :meth:`ratelimitd_client.RateLimiterClient.wait_until_ready`."""
        ...

    def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> Decision:
        """As :meth:`ratelimitd_client.RateLimiterClient.check`."""
        ...

    def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """As :meth:`ratelimitd_client.RateLimiterClient.check_many`."""
        ...


class AsyncRateLimiter(Protocol):
    """Decides whether requests may proceed, for asyncio."""

    async def __aenter__(self) -> Self:
        """Return itself."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        ...

    async def close(self) -> None:
        """As :meth:`ratelimitd_client.AsyncRateLimiterClient.close`."""
        ...

    async def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """As :meth:`ratelimitd_client.AsyncRateLimiterClient.wait_until_ready`."""
        ...

    async def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> Decision:
        """As :meth:`ratelimitd_client.AsyncRateLimiterClient.check`."""
        ...

    async def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """As :meth:`ratelimitd_client.AsyncRateLimiterClient.check_many`."""
        ...
