"""A hash tag of the shared state on one node: what it has still to settle, in numbered batches, one at a time.

Where one server has all hash tags, a batch may be of several neighbours, and they are one here.

Decides nothing about checks. The rules are those of the ledger (ADR 0023): a batch is frozen, repeated until it is
acknowledged, and then the views of its buckets go on from the state that it left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.cluster.pending import Bucket, PendingCheck, Requested
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreMovingError
from ratelimitd.ledger.local_view import STALE_US
from ratelimitd.ledger.protocol import MAX_UPDATES, Batch, Reply, Sender
from ratelimitd.model import US_PER_S

if TYPE_CHECKING:
    from ratelimitd.cluster.node import Cluster

FIRST_RESEND_S: Final = 0.06
LONGEST_RESEND_S: Final = 1.0
"""A batch that was not acknowledged is sent again after so long, twice as long from time to time."""

MAX_RUNS: Final = 4_096
"""In one batch: 64 KiB, some 10 ms of the store. Only logs have so many, after an outage; one alone may have more."""

MAX_UNSETTLED: Final = 390
"""Of one hash tag: 100,000 buckets in all wait for a store that is away, about 1.5 KB each, and no more."""

MAX_KEPT_US: Final = 3_000 * US_PER_S
"""How long a batch is repeated. The store remembers the numbers of a sender for an hour after its last batch; after
that it would apply a repeated one again."""


class Partition:
    """One hash tag.

    Attributes:
        number: which one, or the first of several.
        shard: the server that holds it.
        buckets: those of its buckets that this node has a view of, by name.
    """

    __slots__ = (
        "_asked",
        "_dirty",
        "_flush_is_due",
        "_flush_next",
        "_has_forgiven",
        "_node",
        "_resends",
        "_sender",
        "_sent",
        "buckets",
        "number",
        "shard",
    )

    def __init__(self, number: int, shard: StoreServer, sender: str, node: Cluster) -> None:
        self.number = number
        self.shard = shard
        self.buckets: dict[bytes, Bucket] = {}
        self._node = node
        self._sender = Sender(sender)
        self._dirty: dict[bytes, Bucket] = {}
        self._sent: Sequence[Bucket] = ()
        self._asked = Requested()
        self._flush_is_due = self._flush_next = self._has_forgiven = False
        self._resends = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to settle."""
        return not self._dirty and self._sender.outstanding is None

    @property
    def unsettled_buckets(self) -> int:
        """Buckets with something to settle."""
        return len(self._dirty) + len(self._sent)

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the store that no more buckets should join it."""
        return self.unsettled_buckets >= MAX_UNSETTLED * self._node.store.tags_per_batch

    @property
    def oldest_us(self) -> int | None:
        """When the batch that is not acknowledged yet was frozen, on the node's clock."""
        batch = self._sender.outstanding
        return None if batch is None else batch.frozen_at_us

    def touch(self, bucket: Bucket) -> None:
        """There is something to settle of a bucket that is not dirty yet."""
        bucket.is_dirty = True
        self._dirty[bucket.name] = bucket

    def ask(self, bucket: Bucket, check: PendingCheck) -> None:
        """Let the next batch take a check to the store, at once if the last one was long enough ago."""
        self._asked.wait(bucket, check)
        if not bucket.is_dirty:
            self.touch(bucket)
        self._flush_in(0)  # not at once: all checks of this turn ride in one batch

    def give_up(self, bucket: Bucket, check: PendingCheck) -> None:
        """The store has not answered a check in time: the view decides, and pays when the store has charged it too.

        One whose caller has left is not taken to the store any more, unless it is on its way.
        """
        self._asked.withdraw(bucket, check)
        if check.answer.done():
            return
        # Meanwhile it may have been packed, and be in use again as another object.
        bucket = self.buckets.setdefault(bucket.name, bucket)
        outcome = bucket.view.check_alone(check.now_us, check.cost)
        check.charged = outcome[0]
        if outcome[0] and not bucket.is_dirty:
            self.touch(bucket)
        check.resolve(outcome)

    # Batches

    def sync(self) -> None:
        """Send what there is, unless a batch is under way: what the sync job does at its time."""
        if self._sender.outstanding is None:
            self.flush()

    def flush(self) -> None:
        """Send what there is as soon as no batch is under way and the last one was long enough ago."""
        if not self._dirty:
            return
        wait_us = self._sender.wait_us(self._node.clock.now_us())
        if wait_us is None:
            self._flush_next = True  # as soon as that one is acknowledged
            return
        if wait_us:
            self._flush_in(wait_us)
            return
        self._send_next()

    def _flush_in(self, wait_us: int) -> None:
        if self._flush_is_due:
            return
        self._flush_is_due = True
        timers = self._node.timers
        if wait_us:
            timers.call_later(wait_us / US_PER_S, self._flush_now)
        else:
            timers.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_is_due = False
        self.flush()

    def _send_next(self) -> None:
        taken = self._next_updates()
        updates = []
        for bucket in taken:
            del self._dirty[bucket.name]
            bucket.is_dirty = False
            updates.append((bucket.name, bucket.view.freeze()))
            self._asked.take(bucket)
        self._sent = taken
        self._resends, self._has_forgiven = 0, False
        self._flush_next = bool(self._dirty)  # one batch does not take them all
        self._send(self._sender.freeze(updates, self._node.clock.now_us()))

    def _next_updates(self) -> Sequence[Bucket]:
        """The buckets of the next batch: as many as it may have, and no more runs than the store takes at a time."""
        taken: list[Bucket] = []
        runs = 0
        for bucket in islice(self._dirty.values(), MAX_UPDATES):
            runs += len(bucket.view.unsent)
            if taken and runs > MAX_RUNS:
                break
            taken.append(bucket)
        return taken

    def _send(self, batch: Batch) -> None:
        try:
            self._node.store.settle(self.number, batch, partial(self._answered, batch))
        except Exception as error:  # noqa: BLE001 - it would fail each time, and hold up whatever comes behind it
            self._node.defect(error)
            self._drop(batch)

    def _answered(self, batch: Batch, reply: Reply | RateLimitdError | None) -> None:
        if isinstance(reply, Reply):
            if self._asked.are_taken or self._asked.are_waiting:
                self.shard.answered()
            else:
                self.shard.synced()
            self._acknowledged(reply)
        elif reply is None or self._node.clock.now_us() - batch.frozen_at_us > MAX_KEPT_US:
            # The store has gone on without this sender, or may have forgotten its numbers.
            self._drop(batch)
        elif isinstance(reply, StoreMovingError) and self.is_full:
            # No breaker opens for a slot that stands half moved, and what cannot be settled must not grow without end.
            self._drop(batch)
        else:
            self._failed(reply)
            if isinstance(reply, StoreCorruptError) and not self._resends:
                self._node.defect(reply)
            pause_s = min(LONGEST_RESEND_S, FIRST_RESEND_S * 2.0 ** min(self._resends, 10))
            self._resends += 1
            self._node.timers.call_later(pause_s, self._send, batch)

    def _failed(self, error: RateLimitdError) -> None:
        # A batch that takes checks along is a round trip of theirs the first time only: then they wait no more. Of
        # those that wait behind it each time is one. And where reads work, nothing but an open breaker keeps the node
        # from taking on ever more buckets that cannot be settled (I17). That the keys of one slot are on their way says
        # nothing about the server, which has others: the view decides the checks that wait when their time is over.
        first_time = not self._resends
        matters = self._asked.are_waiting or (self._asked.are_taken and first_time) or self.is_full
        if matters and not isinstance(error, StoreMovingError):
            self.shard.refused(error)
        else:
            self.shard.sync_failed(error)

    def _acknowledged(self, reply: Reply) -> None:
        self.first_word()
        for bucket in self._end_batch(reply):
            settled = reply.settled[bucket.name]
            before, tokens = bucket.view.base, bucket.view.in_flight.tokens
            bucket.view.acknowledge(settled.shared)
            if settled.grants:
                self._asked.decide(bucket, settled.grants)
            self._node.settled(bucket, tokens, before)
            self._let_go(bucket)
        self._go_on()

    def _drop(self, batch: Batch) -> None:
        """Give a batch up: it was never sent, or it is unknown whether it was applied."""
        self._asked.forget_taken()
        for bucket in self._end_batch(Reply(batch.number, {})):
            self._node.lost(bucket.view.abandon())
            self._let_go(bucket)
        self._go_on()

    def _end_batch(self, reply: Reply) -> Sequence[Bucket]:
        """Nothing is under way any more; returns the buckets of which something was."""
        self._sender.acknowledged(reply)
        sent, self._sent = self._sent, ()
        return sent

    def _go_on(self) -> None:
        if self._flush_next or self._asked.are_waiting:
            self._flush_next = False
            self.flush()

    def first_word(self) -> None:
        """The store has spoken, and nothing of it is adopted yet: after an outage, settle no more than is lacking.

        Once for each outage; and only dirty buckets have anything that is not sent.
        """
        batch, now_us = self._sender.outstanding, self._node.clock.now_us()
        if batch is None or self._has_forgiven or now_us - batch.frozen_at_us <= STALE_US:
            return
        self._has_forgiven = True
        for bucket in self._dirty.values():
            bucket.view.forgive_outage(now_us)

    def _let_go(self, bucket: Bucket) -> None:
        # One that had nothing to settle after all may have been packed, and be in use again as another object.
        if not bucket.is_cached and not bucket.is_dirty and self.buckets.get(bucket.name) is bucket:
            del self.buckets[bucket.name]


PAUSES_US: Final = (100_000, 300_000, 700_000, 1_000_000)
"""Between two looks at a bucket; the last one holds on."""

MAX_BUCKETS: Final = 100_000
"""Denied buckets that are looked after; further ones are found again when their checks come."""


class _Look(NamedTuple):
    due_us: int
    times: int
    bucket: Bucket


class RefreshQueue:
    """The denied buckets of a node, by when they are due. ``now_us`` is monotonic."""

    def __init__(self) -> None:
        self._queues = tuple(deque[_Look]() for _ in PAUSES_US)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def denied(self, bucket: Bucket, now_us: int) -> None:
        """A check of this bucket was denied, the first one since it was last read."""
        bucket.is_denied = True
        if not bucket.is_watched and self._count < MAX_BUCKETS:
            bucket.is_watched = True
            self._later(bucket, 0, now_us)

    def due(self, now_us: int, most: int) -> list[tuple[Bucket, int]]:
        """The next buckets to be read, each with how often it was before. Each has to come back by :meth:`looked`.

        One of which no check was denied since its last look is left alone from now on.
        """
        looks: list[tuple[Bucket, int]] = []
        for queue in self._queues:
            # Each queue has one pause, so it is in the order of time.
            while queue and queue[0].due_us <= now_us and most:
                most -= 1
                _, times, bucket = queue.popleft()
                self._count -= 1
                if bucket.is_denied:
                    bucket.is_denied = False
                    looks.append((bucket, times))
                else:
                    bucket.is_watched = False
        return looks

    def looked(self, bucket: Bucket, times: int, now_us: int, *, is_news: bool) -> None:
        """It was read, or could not be: the next look comes later, but soon after news."""
        self._later(bucket, 0 if is_news else times + 1, now_us)

    def _later(self, bucket: Bucket, times: int, now_us: int) -> None:
        step = min(times, len(PAUSES_US) - 1)
        self._queues[step].append(_Look(now_us + PAUSES_US[step], times, bucket))
        self._count += 1
