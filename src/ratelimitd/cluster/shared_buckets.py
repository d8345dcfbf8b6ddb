"""Checks on buckets that nodes share: by the node's own view where that may be, else by the shared state.

Never fails open: it says that it cannot decide, and the limiter knows what that means. See ADR 0026.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from ratelimitd.algorithms import Decide
from ratelimitd.clock import Clock
from ratelimitd.cluster.accuracy import Accuracy
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.first_checks import FirstChecks
from ratelimitd.cluster.gossip import Gossip, reset_buckets
from ratelimitd.cluster.pending import Bucket, Deadlines, PendingCheck, SharedStore, Timers
from ratelimitd.cluster.sync import Partition, RefreshQueue
from ratelimitd.counters import CheckStats
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import Outcome, Rule

REREADS_PER_STEP: Final = 32

MAX_NAMES: Final = 1_000
"""Names that are remembered: as many as there are checks in the longest batch, each of which asks for its twice."""


class Membership(Protocol):
    """Who is alive."""

    count: int
    """Nodes, with this one."""


class SharedBuckets:
    """The shared buckets of one node.

    ``stored_name`` makes the name in the store of a key. ``answer_s`` is how long a check waits for the store before
    the node's own view decides it. ``decides_alone``: while a breaker is open, checks are decided by what the node
    itself knows, and answered with ``BreakerOpenError`` otherwise.
    """

    def __init__(
        self,
        *,
        store: SharedStore,
        tags: Sequence[Partition],
        cache: BucketCache,
        stored_name: Callable[[bytes], bytes],
        clock: Clock,
        timers: Timers,
        stats: CheckStats,
        membership: Membership,
        news: Gossip,
        accuracy: Accuracy,
        answer_s: float,
        decides_alone: bool = False,
    ) -> None:
        self._store = store
        self._tags = tags
        self._cache = cache
        self._stored_name = stored_name
        self._clock = clock
        self._membership = membership
        self._news = news
        self._accuracy = accuracy
        self._decides_alone = decides_alone
        self._new_future = asyncio.get_running_loop().create_future
        self._rereading = RefreshQueue()
        self._meetings = FirstChecks(
            store=store,
            tags=tags,
            cache=cache,
            clock=clock,
            stats=stats,
            news=news,
            rereading=self._rereading,
            hear=self._hear,
            decide=self._decide,
        )
        self._names: dict[bytes, bytes] = {}
        self._doubted: list[bytes] = []
        self._unsynced: Iterator[int] = iter(())
        self._patience = Deadlines(clock, timers, answer_s, self._give_up)
        self.asked_total = 0
        """Checks that the shared state has been asked to decide."""
        self.late_total = 0
        """Of those: decided by the node's view, for the answer was late."""

    # The limiter's questions

    def apply(
        self, key: bytes, rule: Rule, _decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Judge and charge a check by the node's view; ``None``: the shared state is to decide.

        Raises:
            BreakerOpenError: it is to decide, and is not asked now.
        """
        # The usual case spelled out, here and in _by_view: each call less is 50 ns of a check's 1,500.
        bucket = self._cache.young.get(key)
        if bucket is None:
            bucket = self._cache.get(key) or self._known(key, self._name_of(key), rule)
            if bucket is None:
                return None
        view, tag = bucket.view, bucket.tag
        if view.rule is not rule:
            self._note_rule(bucket, rule)
        if tag.shard.is_open:
            if self._decides_alone:
                return self._alone(bucket, now_us, cost)
            raise tag.shard.open_error()
        members = self._membership.count
        outcome = view.check(now_us, members, cost)
        if outcome is None or not outcome[0]:
            return self._not_allowed(bucket, outcome)
        if not bucket.is_dirty:
            tag.touch(bucket)
        if view.unsent.tokens * members >= view.shared_out and view.is_due(now_us, members):
            tag.flush()
        return outcome

    def peek(
        self,
        key: bytes,
        rule: Rule,
        _decide: Decide,
        now_us: int,
        cost: int,
        *,
        is_counted: bool = True,  # noqa: ARG002 - a miss counts when the store has decided it
    ) -> Outcome | None:
        """Judge a check by the node's view, and charge nothing."""
        bucket = self._cache.get(key) or self._known(key, self._name_of(key), rule)
        if bucket is None:
            return None
        if bucket.view.rule is not rule:
            self._note_rule(bucket, rule)
        if bucket.tag.shard.is_open and not self._decides_alone:
            raise bucket.tag.shard.open_error()
        return bucket.view.peek(now_us, cost)

    def wait(
        self,
        key: bytes,
        rule: Rule,
        now_us: int,
        cost: int,
        *,
        peek: bool,
        is_counted: bool = True,
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Let the shared state decide a check."""
        question = PendingCheck(rule, now_us, cost, peek=peek, answer=self._new_future())
        bucket = self._cache.get(key)
        if bucket is None:
            name = self._name_of(key)
            bucket = self._known(key, name, rule)
            if bucket is None:
                self._meetings.wait(key, name, question, is_counted=is_counted)
                return question.answer
        self._decide(bucket, question)
        return question.answer

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Rule]) -> None:
        """Let buckets start afresh, on every node.

        Raises:
            StoreUnavailableError: not known to be done.
        """
        names, now_us = [*map(self._stored_name, keys)], self._clock.now_us()
        await reset_buckets(self._store, names, rules, self._was_reset, now_us=now_us)

    def _was_reset(self, name: bytes, shared: SharedState) -> None:
        self.heard(name, shared)
        self._news.was_reset(name)

    # What comes from the store

    def heard(self, name: bytes, shared: SharedState) -> None:
        """A state came from the store, by whatever way."""
        tag = self._tags[name[0]]
        bucket = tag.buckets.get(name)
        if bucket is None:
            self._cache.forget_packed(name)
            return
        self._hear(bucket, shared)

    def doubt(self, name: bytes) -> None:
        """Somebody says that a bucket is another now, but not which: read it again, if this node knows it."""
        tag = self._tags[name[0]]
        bucket = tag.buckets.get(name)
        if bucket is None:
            self._cache.forget_packed(name)
        else:
            self._store.read(name, bucket.view.rule, partial(self._cleared_up, bucket))

    def _cleared_up(self, bucket: Bucket, shared: SharedState | RateLimitdError | None) -> None:
        self._hear(bucket, shared)
        if isinstance(shared, RateLimitdError) and not bucket.tag.shard.is_open:
            # The message is not repeated: until it is settled, the bucket would be stale.
            self._doubted.append(bucket.name)

    def resync(self) -> None:
        """Messages of other nodes may have been lost: drop packed buckets, and read those in use again in steps."""
        self._cache.forget_all_packed()
        self._unsynced = iter(range(len(self._tags)))

    def step(self) -> None:
        """Do the periodic work in small steps: pack idle buckets, read doubted and denied ones again."""
        self._doubt_next_tags()
        for _ in range(min(REREADS_PER_STEP, len(self._doubted))):
            self.doubt(self._doubted.pop())
        now_us = self._clock.monotonic_us()
        self._cache.step(now_us)
        for bucket, times in self._rereading.due(now_us, REREADS_PER_STEP):
            if bucket.tag.shard.is_open:
                self._rereading.looked(bucket, times, now_us, is_news=False)
            else:
                done = partial(self._looked, bucket, times)
                self._store.read(bucket.name, bucket.view.rule, done)

    def _doubt_next_tags(self) -> None:
        """Doubt the buckets in use of the next hash tags after a :meth:`resync`, one tag at a time."""
        while len(self._doubted) < REREADS_PER_STEP:
            number = next(self._unsynced, None)
            if number is None:
                return
            # Packed since the resync from a state that is as doubtful.
            self._cache.forget_packed_of(number)
            tag = self._tags[number]
            if tag.number == number:  # else it is one of several that share a sender
                self._doubted += tag.buckets

    def _looked(
        self, bucket: Bucket, times: int, shared: SharedState | RateLimitdError | None
    ) -> None:
        before = bucket.view.base
        self._hear(bucket, shared)
        is_news = bucket.view.base is not before
        self._rereading.looked(bucket, times, self._clock.monotonic_us(), is_news=is_news)

    def _hear(self, bucket: Bucket, shared: SharedState | RateLimitdError | None) -> None:
        """What was read of a bucket that this node knows; of one that is full nothing is."""
        if isinstance(shared, SharedState):
            bucket.tag.first_word()
            bucket.view.hear(shared)
            self._accuracy.take_counts(bucket)

    # Deciding

    def _name_of(self, key: bytes) -> bytes:
        """The name in the store of a bucket that is not in use: asked for up to three times by a check that waits."""
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            name = self._names[key] = self._stored_name(key)
        return name

    def _known(self, key: bytes, name: bytes, rule: Rule) -> Bucket | None:
        """A bucket that is not in use, but known: packed, or evicted before everything was settled."""
        tag = self._tags[name[0]]
        bucket = tag.buckets.get(name)
        if bucket is None:
            if tag.shard.is_open and (not self._decides_alone or tag.is_full):
                raise tag.shard.open_error()
            shared = self._cache.take_packed(name)
            if shared is None and not tag.shard.is_open:
                return None
            bucket = Bucket(key, name, tag, rule, shared)
        self._cache.add(bucket)
        return bucket

    def _decide(self, bucket: Bucket, question: PendingCheck) -> None:
        if question.answer.done():
            return
        rule, now_us, cost = question.rule, question.now_us, question.cost
        if rule is not bucket.view.rule:
            self._note_rule(bucket, rule)
        outcome: Outcome | RateLimitdError | None
        if question.peek:
            outcome = bucket.view.peek(now_us, cost)
        elif not bucket.tag.shard.is_open:
            outcome = self._by_view(bucket, now_us, cost)
        elif self._decides_alone:
            outcome = self._alone(bucket, now_us, cost)
        else:
            outcome = bucket.tag.shard.open_error()
        if outcome is None:
            self._ask(bucket, question)
        else:
            question.tell(outcome)

    def _ask(self, bucket: Bucket, question: PendingCheck) -> None:
        self.asked_total += 1
        bucket.tag.ask(bucket, question)
        self._patience.wait_for(bucket, question)

    def _give_up(self, bucket: Bucket, question: PendingCheck) -> None:
        if not question.answer.done():
            self.late_total += 1
        bucket.tag.give_up(bucket, question)

    def _by_view(self, bucket: Bucket, now_us: int, cost: int) -> Outcome | None:
        view, members = bucket.view, self._membership.count
        outcome = view.check(now_us, members, cost)
        if outcome is None or not outcome[0]:
            return self._not_allowed(bucket, outcome)
        if not bucket.is_dirty:
            bucket.tag.touch(bucket)
        if view.is_due(now_us, members):
            bucket.tag.flush()
        return outcome

    def _not_allowed(self, bucket: Bucket, outcome: Outcome | None) -> Outcome | None:
        """A check was denied, or cannot be decided here."""
        if outcome is None:
            return None
        if not bucket.is_denied:
            self._rereading.denied(bucket, self._clock.monotonic_us())
        if bucket.view.knows_better and not bucket.is_dirty:
            # Nothing is spent, so that nothing else would tell the store of the new limit.
            bucket.tag.touch(bucket)
        return outcome

    @staticmethod
    def _alone(bucket: Bucket, now_us: int, cost: int) -> Outcome:
        outcome = bucket.view.check_alone(now_us, cost)
        if outcome[0] and not bucket.is_dirty:
            bucket.tag.touch(bucket)
        return outcome

    @staticmethod
    def _note_rule(bucket: Bucket, rule: Rule) -> None:
        """Checks come under another rule than the view knows: a newer one, or the view has heard of it before us."""
        view = bucket.view
        if rule.revision >= view.rule.revision:
            view.edit(rule)
