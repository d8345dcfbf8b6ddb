"""A node's side of one hash tag: collects unsettled spends and sends them in numbered batches, one at a time.

If one server holds all hash tags, several adjacent tags share one batch and one ``Partition``.

Decides no checks. Follows the rules of the ledger (ADR 0023): a batch is frozen and repeated until it is acknowledged;
then the views of its buckets continue from the state that it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from ratelimitd.cluster.packed import HEAD_MASK, SPENT_SHIFT, Packed, unpack
from ratelimitd.cluster.pending import Bucket, PendingCheck, Requested
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreMovingError
from ratelimitd.ledger.cold import plenty
from ratelimitd.ledger.local_view import STALE_US
from ratelimitd.ledger.protocol import MAX_UPDATES, Batch, ColdSpend, Reply, Sender
from ratelimitd.ledger.shared_state import Settled
from ratelimitd.model import US_PER_S

if TYPE_CHECKING:
    from ratelimitd.cluster.node import Cluster

FIRST_RESEND_S: Final = 0.06
LONGEST_RESEND_S: Final = 1.0
"""Pause before an unacknowledged batch is sent again; doubled each time."""

MAX_RUNS: Final = 4_096
"""Limit of runs in a batch: 64 KiB, some 10 ms of the store. Only logs reach it, after an outage; one bucket may exceed
it.
"""

MAX_UNSETTLED: Final = 390
"""Limit per hash tag of buckets that wait for an unavailable store; 100,000 in all, of about 1.5 KB each."""

MAX_KEPT_US: Final = 3_000 * US_PER_S
"""How long a batch is repeated. The store remembers the numbers of a sender for an hour after its last batch; a batch
repeated after that would be applied twice.
"""


class Partition:
    """One hash tag.

    Attributes:
        number: its number, or that of the first of several.
        server: the store server that holds it.
        buckets: its buckets with a view, by name.
        cold: spends of buckets without a view, by name, that no batch contains.
        make_view: the class of its views.
        most_cold: limit of cold spends; further buckets get views.
    """

    __slots__ = (
        "_asked",
        "_dirty",
        "_flush_is_due",
        "_flush_next",
        "_has_forgiven",
        "_node",
        "_outage_end_us",
        "_resends",
        "_sender",
        "_sent",
        "_sent_cold",
        "_unforgiven",
        "buckets",
        "cold",
        "make_view",
        "most_cold",
        "number",
        "server",
    )

    def __init__(self, number: int, server: StoreServer, sender: str, node: Cluster) -> None:
        self.number = number
        self.server = server
        self.buckets: dict[bytes, Bucket] = {}
        self.cold: dict[bytes, ColdSpend] = {}
        self._sent_cold: dict[bytes, ColdSpend] = {}
        self.make_view = node.make_view
        self.most_cold = MAX_UNSETTLED * node.store.tags_per_batch
        self._node = node
        self._sender = Sender(sender)
        self._dirty: dict[bytes, Bucket] = {}
        self._sent: Sequence[Bucket] = ()
        self._asked = Requested()
        self._flush_is_due = self._flush_next = self._has_forgiven = False
        self._resends = 0
        self._unforgiven: list[bytes] = []
        """Names of cold spends from before the end of an outage, at ``_outage_end_us``."""
        self._outage_end_us = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to settle."""
        return not (self._dirty or self.cold) and self._sender.outstanding is None

    @property
    def unsettled_buckets(self) -> int:
        """Buckets with something to settle."""
        return len(self._dirty) + len(self._sent) + len(self.cold) + len(self._sent_cold)

    @property
    def is_full(self) -> bool:
        """Whether the limit of unsettled buckets is reached, so that no more should be added."""
        return self.unsettled_buckets >= MAX_UNSETTLED * self._node.store.tags_per_batch

    @property
    def oldest_us(self) -> int | None:
        """Time at which the unacknowledged batch was frozen, by the node's clock."""
        batch = self._sender.outstanding
        return None if batch is None else batch.frozen_at_us

    def touch(self, bucket: Bucket) -> None:
        """Mark a bucket as dirty: it has something to settle."""
        bucket.is_dirty = True
        self._dirty[bucket.name] = bucket

    def bucket(self, name: bytes) -> Bucket | None:
        """Return the bucket of a name if it has a view; one with a cold spend gets its view now."""
        bucket = self.buckets.get(name)
        if bucket is None and (name in self.cold or name in self._sent_cold):
            return self._warm(name)
        return bucket

    @property
    def names(self) -> Iterable[bytes]:
        """Names of its buckets that have a view or a cold spend."""
        return (*self.buckets, *self.cold, *self._sent_cold)

    def _warm(self, name: bytes) -> Bucket:
        spent = self.cold.pop(name, None)
        in_flight = spent is None
        if spent is None:
            spent = self._sent_cold.pop(name)
        bucket = self._with_view(name, spent, in_flight=in_flight)
        if in_flight:
            self._sent = (*self._sent, bucket)
        else:
            if self._unforgiven:
                bucket.view.forgive_outage(self._outage_end_us)
            self.touch(bucket)
        self.buckets[name] = bucket
        self._node.cache.cold -= 1
        return bucket

    def _with_view(self, name: bytes, spent: ColdSpend, *, in_flight: bool) -> Bucket:
        bucket = Bucket(b"", name, self, spent.rule, unpack(spent.base))
        bucket.view.resume(spent, in_flight=in_flight)
        return bucket

    def ask(self, bucket: Bucket, check: PendingCheck) -> None:
        """Add a check to the next batch, which is sent as soon as the interval since the last one allows."""
        self._asked.wait(bucket, check)
        if not bucket.is_dirty:
            self.touch(bucket)
        self._flush_in(0)  # deferred: all checks of this iteration share one batch

    def give_up(self, bucket: Bucket, check: PendingCheck) -> None:
        """Decide a check by the view after a timeout; corrected with ``view.pay`` if the store has charged it, too."""
        was_sent = not self._asked.withdraw(bucket, check)
        if check.is_answered:
            return
        # It may have been packed and unpacked as another object meanwhile: use that one.
        bucket = self.bucket(bucket.name) or self.buckets.setdefault(bucket.name, bucket)
        outcome = bucket.view.check_alone(check.now_us, check.cost)
        check.charged = outcome[0]
        if outcome[0]:
            if was_sent:
                bucket.view.was_decided_alone(check.ask)
            if not bucket.is_dirty:
                self.touch(bucket)
        check.resolve(outcome)

    # Batches

    def sync(self) -> None:
        """Send what is unsettled, unless a batch is in flight; called by the sync job."""
        if self._sender.outstanding is None:
            self.flush()

    def flush(self) -> None:
        """Send what is unsettled as soon as no batch is in flight and the last one was long enough ago."""
        if not self._dirty and not self.cold:
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
        self._forgive_cold(max(0, MAX_UPDATES - len(self._dirty)))
        taken = self._next_updates()
        updates = []
        for bucket in taken:
            del self._dirty[bucket.name]
            bucket.is_dirty = False
            updates.append((bucket.name, bucket.view.freeze()))
            self._asked.take(bucket)
        self._sent = taken
        if not self._unforgiven:
            self._take_cold(MAX_UPDATES - len(taken))
        self._resends, self._has_forgiven = 0, False
        self._flush_next = bool(self._dirty or self.cold)  # more than one batch takes
        # A copy: a bucket that gets a view is removed from the cold spends in flight.
        cold = self._sent_cold.copy()
        self._send(self._sender.freeze(updates, self._node.clock.now_us(), cold))

    def _next_updates(self) -> Sequence[Bucket]:
        """Return the buckets of the next batch, within ``MAX_UPDATES`` and ``MAX_RUNS``."""
        taken: list[Bucket] = []
        runs = 0
        for bucket in islice(self._dirty.values(), MAX_UPDATES):
            runs += len(bucket.view.unsent)
            if taken and runs > MAX_RUNS:
                break
            taken.append(bucket)
        return taken

    def _take_cold(self, most: int) -> None:
        """Move at most ``most`` cold spends into the batch."""
        if len(self.cold) <= most:
            self._sent_cold, self.cold = self.cold, {}
            return
        self._sent_cold = dict(islice(self.cold.items(), most))
        for name in self._sent_cold:
            del self.cold[name]

    def _send(self, batch: Batch) -> None:
        try:
            self._node.store.settle(self.number, batch, partial(self._answered, batch))
        except Exception as error:  # noqa: BLE001 - a retry would fail again and block later batches
            self._node.defect(error)
            self._drop(batch)

    def _answered(self, batch: Batch, reply: Reply | RateLimitdError | None) -> None:
        if isinstance(reply, Reply):
            if self._asked.are_taken or self._asked.are_waiting:
                self.server.answered()
            else:
                self.server.synced()
            self._acknowledged(reply)
        elif reply is None or self._node.clock.now_us() - batch.frozen_at_us > MAX_KEPT_US:
            # The store has applied a later batch of this sender, or may have forgotten its numbers.
            self._drop(batch)
        elif isinstance(reply, StoreMovingError) and self.is_full:
            # A half-moved slot opens no breaker, and unsettled spends must stay bounded.
            self._drop(batch)
        else:
            self._failed(reply)
            if isinstance(reply, StoreCorruptError) and not self._resends:
                self._node.defect(reply)
            pause_s = min(LONGEST_RESEND_S, FIRST_RESEND_S * 2.0 ** min(self._resends, 10))
            self._resends += 1
            self._node.timers.call_later(pause_s, self._send, batch)

    def _failed(self, error: RateLimitdError) -> None:
        # Only the first failure of a batch affects its checks: afterwards they have timed out. Each failure affects
        # checks that wait for the next batch. If reads work but settling fails, only an open breaker keeps the node
        # from loading more buckets that it cannot settle (I17).
        first_time = not self._resends
        matters = self._asked.are_waiting or (self._asked.are_taken and first_time) or self.is_full
        if matters:
            self.server.refused(error)
        else:
            self.server.sync_failed(error)

    def _acknowledged(self, reply: Reply) -> None:
        self.forgive_outage()
        if self._sent_cold:
            self._settled_cold(reply.cold)
        for bucket in self._end_batch(reply):
            settled = reply.settled.get(bucket.name)
            if settled is None:  # it was cold when the batch was sent
                settled = Settled(unpack(reply.cold[bucket.name]), ())
            before, tokens = bucket.view.base, bucket.view.in_flight_tokens
            bucket.view.acknowledge(settled.shared)
            if settled.grants:
                shared = None if self._resends else settled.shared
                self._asked.decide(bucket, settled.grants, shared)
            self._node.settled(bucket, tokens, before)
            self.drop_if_settled(bucket)
        self._go_on()

    def _settled_cold(self, states: Mapping[bytes, Packed]) -> None:
        sent = self._end_cold()
        if len(sent) != len(states):  # some have a view by now
            states = {name: states[name] for name in sent}
        unusual, rule, most = {}, None, 0
        for (name, spent), packed in zip(sent.items(), states.values(), strict=True):
            if spent[0] is not rule:
                rule = spent[0]
                most = plenty(rule)
            # Inlined: most states have the generation, revision and limit of before, and plenty is left.
            if (
                type(packed) is not int
                or (packed ^ spent[1]) & HEAD_MASK
                or packed >> SPENT_SHIFT > most
            ):
                unusual[name] = self._accounted(name, spent, packed)
        self._node.cache.end_cold({**states, **unusual} if unusual else states)

    def _accounted(self, name: bytes, spent: ColdSpend, packed: Packed) -> Packed:
        """Account for the state after a cold spend through a temporary view; return the newest known state."""
        bucket = self._with_view(name, spent, in_flight=True)
        before = bucket.view.base
        bucket.view.acknowledge(unpack(packed))
        self._node.settled(bucket, spent.cost, before)
        is_older = bucket.view.base is before
        return spent.base if is_older else packed

    def _drop(self, batch: Batch) -> None:
        """Abandon a batch that was never sent, or that may or may not have been applied."""
        self._asked.forget_taken()
        lost = self._end_cold()
        if lost:
            self._node.lost(sum([spent.cost for spent in lost.values()]))
            self._node.cache.end_cold({name: spent.base for name, spent in lost.items()})
        for bucket in self._end_batch(Reply(batch.number, {})):
            self._node.lost(bucket.view.abandon())
            self.drop_if_settled(bucket)
        self._go_on()

    def _end_batch(self, reply: Reply) -> Sequence[Bucket]:
        """End the batch in flight; return its buckets."""
        self._sender.acknowledged(reply)
        sent, self._sent = self._sent, ()
        return sent

    def _end_cold(self) -> Mapping[bytes, ColdSpend]:
        """End the cold spends in flight; return them by name."""
        sent, self._sent_cold = self._sent_cold, {}
        return sent

    def _go_on(self) -> None:
        if self._flush_next or self._asked.are_waiting:
            self._flush_next = False
            self.flush()

    def forgive_outage(self) -> None:
        """Forgive spends that have refilled during an outage; called on the first reply, before its states are adopted.

        Runs once per outage; only dirty buckets have unsent spends.
        """
        batch, now_us = self._sender.outstanding, self._node.clock.now_us()
        if batch is None or self._has_forgiven or now_us - batch.frozen_at_us <= STALE_US:
            return
        self._has_forgiven = True
        for bucket in self._dirty.values():
            bucket.view.forgive_outage(now_us)
        self._unforgiven, self._outage_end_us = [*self.cold], now_us

    def _forgive_cold(self, most: int) -> None:
        """Forgive the next cold spends of an outage, at most as many as the next batch takes: each gets a view."""
        for name in self._unforgiven[:most]:
            self.bucket(name)
        del self._unforgiven[:most]

    def drop_if_settled(self, bucket: Bucket) -> None:
        """Drop a bucket that is not in use once it is settled."""
        if bucket.is_cached or not bucket.is_settled:
            return
        # One without spends may have been packed and unpacked as another object.
        if self.buckets.get(bucket.name) is bucket:
            del self.buckets[bucket.name]
