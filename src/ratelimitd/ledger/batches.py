"""Numbered batches of updates: sent until they are acknowledged, applied exactly once. Pure.

A sender has one batch on its way at a time and repeats it unchanged. The store applies each number of a sender once
and in order, and answers the last one again from what it kept, so that a lost reply costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ratelimitd.ledger.shared_state import (
    Met,
    Settled,
    SharedState,
    StoreCheck,
    Update,
    meet,
    settle,
)

MAX_UPDATES: Final = 100
"""Of one batch, as the specification has it."""


LEAST_INTERVAL_US: Final = 10_000
"""Between two batches of a sender: an attacked bucket costs the store 100 calls a second for each node, no more."""


class Batch(NamedTuple):
    """What one sender says of up to ``MAX_UPDATES`` buckets; ``sender`` is a node and its incarnation."""

    sender: str
    number: int
    frozen_at_us: int
    updates: Mapping[bytes, Update]


class Reply(NamedTuple):
    """What the store answers to a batch."""

    number: int
    settled: Mapping[bytes, Settled]


class Sender:
    """The batches of one node to one part of the store.

    Attributes:
        outstanding: the batch that is not acknowledged yet, if there is one.
    """

    __slots__ = ("_frozen_at_us", "_name", "_number", "outstanding")

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._frozen_at_us: int | None = None
        self.outstanding: Batch | None = None

    def wait_us(self, now_us: int) -> int | None:
        """How long the next batch has to wait for its turn; ``None`` while one is outstanding."""
        if self.outstanding is not None:
            return None
        if self._frozen_at_us is None:
            return 0
        # A clock that was set back must not silence the node.
        return min(LEAST_INTERVAL_US, max(0, self._frozen_at_us + LEAST_INTERVAL_US - now_us))

    def freeze(self, updates: Iterable[tuple[bytes, Update]], now_us: int) -> Batch:
        """Make the next batch. There must be none outstanding, nor more updates than one may have."""
        self._number += 1
        self._frozen_at_us = now_us
        self.outstanding = Batch(self._name, self._number, now_us, dict(updates))
        return self.outstanding

    def acknowledged(self, reply: Reply) -> Batch | None:
        """The batch that a reply acknowledges; ``None`` for one that came before."""
        batch = self.outstanding
        if batch is None or reply.number != batch.number:
            return None
        self.outstanding = None
        return batch


class Ledger:
    """The store's side: the buckets, and of each sender the last reply.

    Attributes:
        buckets: by key.
    """

    __slots__ = ("_replies", "buckets")

    def __init__(self) -> None:
        self.buckets: dict[bytes, SharedState] = {}
        self._replies: dict[str, Reply] = {}

    def apply(self, batch: Batch) -> Reply | None:
        """Apply a batch once; ``None`` for one that is older than the last of its sender.

        A sender goes on to the next number when it has the reply, so that a gap tells only that the store has lost
        batches that it had acknowledged, as a failover may: what it has not seen is new to it.
        """
        last = self._replies.get(batch.sender)
        if last is not None and batch.number <= last.number:
            return last if batch.number == last.number else None
        settled = {}
        for key, update in batch.updates.items():
            settled[key] = one = settle(self.buckets.get(key), update)
            self.buckets[key] = one.shared
        reply = self._replies[batch.sender] = Reply(batch.number, settled)
        return reply

    def meet(self, check: StoreCheck) -> Met:
        """Decide a first check. It has no number, so it must not be sent twice: it would be charged twice.

        A bucket that is not there is made only for what is charged.
        """
        stored = self.buckets.get(check.name)
        outcome, shared = meet(stored, check)
        if stored is not None or (outcome[0] and not check.peek):
            self.buckets[check.name] = shared
        return outcome, shared
