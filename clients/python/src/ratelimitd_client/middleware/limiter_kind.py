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
    given: object = limiter
    check = getattr(given, "check", None)
    is_class = isinstance(given, type)
    if is_class or not callable(check) or inspect.iscoroutinefunction(check) is not asynchronous:
        wanted = "an AsyncRateLimiterClient" if asynchronous else "a RateLimiterClient"
        what = "a class" if is_class else type(given).__name__
        message = f"limiter must be {wanted}, or what has its methods, not {what}"
        raise TypeError(message)
