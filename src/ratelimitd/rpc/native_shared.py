"""What all connections of one native server have in common: methods, limits, and how much is in progress.

Counts and starts; never sends, and never decides about a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ratelimitd.rpc.call_head import routes_of
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportError
from ratelimitd.rpc.limits import TransportLimits
from ratelimitd.rpc.turnstile import Turnstile
from ratelimitd.stats import CheckStats


class SharedCalls:
    """The calls of one server, over all its connections. ``monotonic_s`` is in seconds."""

    def __init__(
        self,
        methods: Methods,
        limits: TransportLimits,
        stats: CheckStats,
        monotonic_s: Callable[[], float],
    ) -> None:
        self.routes = routes_of(methods)
        self.limits = limits
        self.stats = stats
        self.monotonic_s = monotonic_s
        self.unary_in_progress = 0
        """Unary calls whose handler has not answered at once."""
        self.streams_in_progress = 0
        self.request_bytes = 0
        """Of requests that are not with a handler yet."""
        self.open_requests = 0
        """Requests that are not answered yet and were not answered at once, those that still arrive among them."""
        self.connections = 0
        self.unread_bytes = 0
        """Of answers that peers have not taken yet."""
        self.turnstile = Turnstile()
        """For messages of streams: each may inflate to the bound on messages."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run what a call needs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def all_ended(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def count(self, cause: TransportError) -> None:
        """Count why a call ended otherwise than its handler meant."""
        self.stats.transport_error(cause)

    def status_of(self, error: Exception) -> RpcError:
        """What to end a call with whose handler raised."""
        if isinstance(error, RpcError):
            return error
        self.count(TransportError.UNEXPECTED)
        return RpcError(StatusCode.INTERNAL, "unexpected error")
