"""The shared state, with a span around each batch that is settled. Everything else is the store's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.batches import Batch, Reply
from ratelimitd.sharedstate.store import RedisStore
from ratelimitd.tracing import Tracer

SETTLE: Final = "ratelimitd.sync"


class TracedStore(RedisStore):
    """A :class:`RedisStore` whose batches are traced."""

    def __init__(self, *arguments: Any, tracer: Tracer, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracer = tracer

    def settle(
        self, tag: int, batch: Batch, done: Callable[[Reply | RateLimitdError | None], None]
    ) -> None:
        """As the store does."""
        span = self._tracer.begin(SETTLE)
        if span is None:
            super().settle(tag, batch, done)
            return
        span.note("ratelimitd.buckets", len(batch.updates))
        span.note("server.address", self.shard_of(tag))

        def settled(reply: Reply | RateLimitdError | None) -> None:
            span.end(type(reply).__name__ if isinstance(reply, RateLimitdError) else "")
            done(reply)

        super().settle(tag, batch, settled)
