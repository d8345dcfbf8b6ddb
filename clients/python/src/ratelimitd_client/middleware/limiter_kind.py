"""Whether what a middleware was given blocks, as its framework does, or is for asyncio: refused at the start if not.

Pure.
"""

from __future__ import annotations

import inspect
from typing import Any

from ratelimitd_client import AsyncRateLimiter, RateLimiter
from ratelimitd_client.middleware.options import Options


def require_kind(
    limiter: RateLimiter | AsyncRateLimiter,
    options: Options[Any] | None = None,
    *,
    asynchronous: bool,
) -> None:
    """See that a limiter is for asyncio, or that it blocks, and ``identify`` with it.

    Raises:
        TypeError: one of them is of the other kind, or the limiter is none at all.
    """
    given: object = limiter
    check = getattr(given, "check", None)
    is_class = isinstance(given, type)
    if is_class or not callable(check) or inspect.iscoroutinefunction(check) is not asynchronous:
        wanted = "an AsyncRateLimiterClient" if asynchronous else "a RateLimiterClient"
        what = "a class" if is_class else type(given).__name__
        message = f"limiter must be {wanted}, or what has its methods, not {what}"
        raise TypeError(message)
    # For asyncio both kinds will do. Here it would not be awaited, and each request would pass unchecked.
    identify = options.identify if isinstance(options, Options) else None
    if not asynchronous and inspect.iscoroutinefunction(identify):
        message = "identify must be a function that is no coroutine, since the framework blocks"
        raise TypeError(message)
