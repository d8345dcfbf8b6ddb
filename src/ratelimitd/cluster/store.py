"""What a node needs of the state that nodes share, whoever keeps it: a Valkey or Redis, or a test.

Every request is sent in the turn of the event loop in which it is made, together with the others of that turn, and its
``done`` is called exactly once, in a later turn, with the answer or with the error that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.batches import Batch, Reply
from ratelimitd.ledger.shared_state import Met, SharedState, StoreCheck
from ratelimitd.model import Outcome, Rule

HASH_TAGS: Final = 256
"""Buckets are spread over so many parts by the first byte of their name. Never changes."""


class SharedStore(Protocol):
    """The shared buckets. A bucket's ``name`` is :meth:`ratelimitd.buckets.keys.BucketKeys.stored` of its key."""

    @property
    def tags_per_batch(self) -> int:
        """How many neighbouring hash tags one batch may be of; a divisor of :data:`HASH_TAGS`."""

    def shard_of(self, tag: int) -> str:
        """The server that holds a hash tag, by a name for people."""

    def is_connected(self, tag: int) -> bool:
        """Whether there is a connection to the server that holds a hash tag; if not, one is being made."""

    def read(
        self, name: bytes, rule: Rule, done: Callable[[SharedState | RateLimitdError | None], None]
    ) -> None:
        """Read a bucket; ``None``: it is full."""

    def meet(self, check: StoreCheck, done: Callable[[Met | RateLimitdError], None]) -> None:
        """Decide a first check by the bucket itself. With an error nobody knows whether it was charged."""

    def settle(
        self, tag: int, batch: Batch, done: Callable[[Reply | RateLimitdError | None], None]
    ) -> None:
        """Apply a batch, once however often it is sent; ``None``: it is older than the last of its sender."""

    def decide(self, check: StoreCheck, done: Callable[[Outcome | RateLimitdError], None]) -> None:
        """Decide a check by the bucket itself, for ``strict``; its time may be ``STORE_TIME``. As with :meth:`meet`."""

    def reset(
        self,
        name: bytes,
        rule: Rule,
        least: int,
        done: Callable[[SharedState | RateLimitdError], None],
    ) -> None:
        """Make a bucket full, in a new generation, which is ``least`` at least."""

    def probe(self, tag: int, done: Callable[[RateLimitdError | None], None]) -> None:
        """Find out whether the server that holds a hash tag reads and writes."""


class Timers(Protocol):
    """What is needed of an event loop."""

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> object:
        """Call back in the next turn."""

    def call_later(self, delay: float, callback: Callable[..., object], *arguments: Any) -> object:
        """Call back after ``delay`` seconds."""
