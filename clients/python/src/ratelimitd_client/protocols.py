"""What code that asks for decisions needs of a client; the real ones have it, and those for tests."""

from __future__ import annotations

from typing import Protocol

from ratelimitd_client.decision import Decision


class RateLimiter(Protocol):
    """Decides whether requests may proceed, for code that blocks."""

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


class AsyncRateLimiter(Protocol):
    """Decides whether requests may proceed, for asyncio."""

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
