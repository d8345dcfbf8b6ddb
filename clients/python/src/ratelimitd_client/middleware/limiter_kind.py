"""Which kind of limiter a middleware was given: the wrong one is refused at the start, not with the first request.

Pure.
"""

from __future__ import annotations

import inspect

from ratelimitd_client.protocols import AsyncRateLimiter, RateLimiter


def require_kind(limiter: RateLimiter | AsyncRateLimiter, *, asynchronous: bool) -> None:
    """See that a limiter is for asyncio, or that it blocks.

    Raises:
        TypeError: it is of the other kind, or none at all.
    """
    check = getattr(limiter, "check", None)
    if not callable(check) or inspect.iscoroutinefunction(check) is not asynchronous:
        wanted = "an AsyncRateLimiterClient" if asynchronous else "a RateLimiterClient"
        message = f"limiter must be {wanted}, or what has its methods, not {type(limiter).__name__}"
        raise TypeError(message)
