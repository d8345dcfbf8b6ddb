"""Warnings of a middleware, at most one a second: what went wrong, what became of it, and which function is to blame.

Never writes what an exception says, since that may hold an identifier: its type, and where it was raised.
"""

from __future__ import annotations

import logging
import traceback
from typing import Final

from ratelimitd_client.clock import Clock
from ratelimitd_client.log_throttle import LogThrottle

_LOG: Final = logging.getLogger("ratelimitd_client.middleware")


class Complaints:
    """Tells of requests with which something went wrong. Threads may share it."""

    __slots__ = ("_pace",)

    def __init__(self, clock: Clock) -> None:
        self._pace = LogThrottle(clock)

    def complain(self, why: str, error: Exception | None = None) -> None:
        """Say what happened to a request, and of which error."""
        requests = self._pace.count()
        if not requests:
            return
        _LOG.warning(
            "%s%s; %d such requests since the last warning",
            why,
            "" if error is None else f" ({_blame(error)})",
            requests,
        )


def _blame(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
