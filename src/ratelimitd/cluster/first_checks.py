"""The first checks of buckets that a node does not know: the store decides them, and says what the buckets are then.

Most of these buckets are asked for once. So what is learnt of one is packed at once; it becomes a view when it is asked
for again, or when there is something to look after. See ADR 0032.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ratelimitd.clock import Clock
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Gossip
from ratelimitd.cluster.pending import Bucket, PendingCheck, SharedStore
from ratelimitd.cluster.sync import Partition, RefreshQueue
from ratelimitd.counters import CheckStats
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import Met, SharedState, StoreCheck
from ratelimitd.model import Outcome


class FirstChecks:
    """The first checks of one node that are on their way.

    ``hear`` takes what the store says of a bucket that is in use after all, ``decide`` a check that came for a bucket
    while it was met.
    """

    def __init__(
        self,
        *,
        store: SharedStore,
        tags: Sequence[Partition],
        cache: BucketCache,
        clock: Clock,
        stats: CheckStats,
        news: Gossip,
        rereading: RefreshQueue,
        hear: Callable[[Bucket, SharedState], None],
        decide: Callable[[Bucket, PendingCheck], None],
    ) -> None:
        self._store = store
        self._tags = tags
        self._cache = cache
        self._clock = clock
        self._stats = stats
        self._news = news
        self._rereading = rereading
        self._hear = hear
        self._decide = decide
        self._waiting: dict[bytes, list[PendingCheck]] = {}

    def wait(
        self, key: bytes, name: bytes, question: PendingCheck, *, is_counted: bool = True
    ) -> None:
        """Send the first check of an unknown bucket to the store; further ones wait for it."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(question)
            return
        self._waiting[key] = [question]
        fields = name, question.rule, question.now_us, question.cost, question.peek
        # To call the class itself takes 0.5 µs longer.
        self._store.meet(
            tuple.__new__(StoreCheck, fields), partial(self._met, key, name, is_counted)
        )

    def _met(
        self,
        key: bytes,
        name: bytes,
        is_counted: bool,  # noqa: FBT001 - bound by position
        met: Met | RateLimitdError,
    ) -> None:
        questions = self._waiting.pop(key)
        tag = self._tags[name[0]]
        if isinstance(met, RateLimitdError):
            tag.shard.failed(met)
            for question in questions:
                question.tell(met)
            return
        tag.shard.met()
        outcome, shared = met
        first = questions[0]
        self._stats.bucket_missed_total += is_counted and not first.answer.done()
        first.tell(outcome)
        is_noteworthy = not first.peek and _is_noteworthy(first, outcome)
        bucket = tag.buckets.get(name)
        if bucket is not None:  # made while the breaker was open
            self._hear(bucket, shared)
        elif is_noteworthy or len(questions) > 1:
            bucket = Bucket(key, name, tag, first.rule, shared)
        else:
            self._cache.put_packed(name, shared)
            return
        if not bucket.is_cached:
            self._cache.add(bucket)
        if is_noteworthy:
            self._note(bucket, is_denied=not outcome[0])
        for question in questions[1:]:
            try:
                self._decide(bucket, question)
            except Exception as error:  # noqa: BLE001 - the checks behind it must be answered
                question.fail(error)

    def _note(self, bucket: Bucket, *, is_denied: bool) -> None:
        if not is_denied:
            self._news.settled(bucket, None)
        elif not bucket.is_denied:
            self._rereading.denied(bucket, self._clock.monotonic_us())


def _is_noteworthy(question: PendingCheck, outcome: Outcome) -> bool:
    """Whether a bucket is to be read again, for a check of it was denied, or may have crossed into its last half."""
    left, half = outcome[1], question.rule.limit // 2
    return not outcome[0] or left <= half <= left + question.cost
