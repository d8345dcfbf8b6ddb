"""Messages between nodes: which buckets run low or were reset, and that rules have changed.

Messages may be lost: their content is also in the store, where the next sync, refresh or poll finds it. So messages are
short, with at most one per bucket and sync interval. See rule 10 of ADR 0023.

    messages:  kind (1 byte) · body
    S          {name (16) · generation (4) · revision (8) · limit (4) · spent (16) · latest_us (8)} …
    D          {name (16)} …             changed buckets: nodes that have them re-read them
    R          revision of the rule book (8)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct, error
from typing import TYPE_CHECKING, Final

from ratelimitd.clock import Clock
from ratelimitd.cluster.pending import Bucket
from ratelimitd.errors import RateLimitdError, StoreOverloadedError, StoreUnavailableError
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.shared_state import SharedState, generation_at
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Limit

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.pubsub import Bus
    from ratelimitd.cluster.redis.store import RedisStore
    from ratelimitd.cluster.refresh import Refresh

MAX_PER_MESSAGE: Final = 100
"""Buckets in one message: 6 KB at most."""

NAME_BYTES: Final = 16

_STATE: Final = Struct("<16sIQIQQQ")
_REVISION: Final = Struct("<Q")
_LOW_BITS: Final = 64
_LOW_MASK: Final = (1 << _LOW_BITS) - 1


class Gossip:
    """Messages of one node to the others."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._states: dict[int, list[bytes]] = {}
        self._published: set[bytes] = set()

    def settled(self, bucket: Bucket, before: SharedState | None) -> None:
        """Publish a bucket that runs low with its new base; ``before`` was the old one."""
        after = bucket.view.base
        if after is None or bucket.name in self._published:
            return
        rule = bucket.view.rule
        if _has_half(after, rule, self._clock) or not _has_half(before, rule, self._clock):
            return
        self._published.add(bucket.name)
        packed = packed_state(bucket.name, after)
        if packed is None:
            self.was_reset(bucket.name)
        else:
            self._states.setdefault(bucket.name[0], []).append(packed)

    def was_reset(self, name: bytes) -> None:
        """Publish at once that a bucket has changed."""
        self._bus.publish(name[0], b"D" + name)

    def changed(self, name: bytes) -> None:
        """Publish that a bucket has changed, at most once per sync interval."""
        if name not in self._published:
            self._published.add(name)
            self.was_reset(name)

    def rules_changed(self, revision: int) -> None:
        """Publish at once that there is a new rule book."""
        self._bus.publish(0, b"R" + _REVISION.pack(revision))

    def publish(self) -> None:
        """Send the collected states; called once per sync interval."""
        states, self._states = self._states, {}
        self._published.clear()
        for tag, parts in states.items():
            for start in range(0, len(parts), MAX_PER_MESSAGE):
                self._bus.publish(tag, b"S" + b"".join(parts[start : start + MAX_PER_MESSAGE]))


def _has_half(shared: SharedState | None, rule: Limit, clock: Clock) -> bool:
    if shared is None:
        return True
    used = ACCOUNTS[rule.algorithm].used(shared.state, rule, clock.now_us())
    return 2 * used <= rule.capacity


def packed_state(name: bytes, shared: SharedState) -> bytes | None:
    """Encode a bucket and its state; ``None`` if it is too long for a message, or has a burst."""
    generation, revision, limit, state, burst, _ = shared
    if state is None or isinstance(state, bytes) or burst:
        return None
    # The other fields of a fixed window matter to late spends only, which the store settles.
    spent, latest_us = state[0], state[1]
    return _STATE.pack(
        name, generation, revision, limit, spent & _LOW_MASK, spent >> _LOW_BITS, latest_us
    )


def take(payload: bytes, refresh: Refresh, *, rules_changed: Callable[[], None]) -> None:
    """Apply a message of another node; ignore an unknown one."""
    kind, body = payload[:1], payload[1:]
    if kind == b"R":
        rules_changed()
    elif kind == b"D":
        for start in range(0, len(body) - NAME_BYTES + 1, NAME_BYTES):
            refresh.reread(body[start : start + NAME_BYTES])
    elif kind == b"S":
        try:
            parts = [*_STATE.iter_unpack(body)]
        except error:
            return
        for name, generation, revision, limit, low, high, latest_us in parts:
            # Validated like a value of the store: a limit of 0, or a generation that no batch can name, would stop all
            # checks.
            is_sound = generation <= INT32_MAX and max(revision, latest_us) <= MAX_TIME_US
            if is_sound and 1 <= limit <= INT32_MAX:
                spent = high << _LOW_BITS | low
                refresh.adopt_by_name(
                    name, SharedState(generation, revision, limit, (spent, latest_us))
                )


_Answer = asyncio.Future[RateLimitdError | None]

OnReset = Callable[[bytes, SharedState], None]
"""Takes the name of a bucket that was reset, and its new state."""


async def reset_buckets(
    store: RedisStore,
    names: Sequence[bytes],
    rules: Sequence[Limit],
    on_reset: OnReset,
    *,
    now_us: int,
) -> None:
    """Reset buckets to full, each with its rule; ``now_us`` is the time that all nodes share.

    ``on_reset`` is called for each bucket as soon as it is reset, even if others fail, because nodes with the former
    state must be notified in any case.

    Raises:
        StoreUnavailableError: a reset may not have been applied.
        StoreOverloadedError: at least one was not sent.
    """
    loop = asyncio.get_running_loop()
    answers: list[_Answer] = []
    least = generation_at(now_us)
    for name, rule in zip(names, rules, strict=True):
        answers.append(loop.create_future())
        store.reset(name, rule, least, partial(_answered, answers[-1], name, on_reset))
    for answer in answers:
        error = await answer
        if isinstance(error, StoreOverloadedError):
            raise error
        if error is not None:
            message = f"the bucket may not have been reset: {error}"
            raise StoreUnavailableError(message) from error


def _answered(
    answer: _Answer, name: bytes, on_reset: OnReset, shared: SharedState | RateLimitdError
) -> None:
    error = shared if isinstance(shared, RateLimitdError) else None
    if not isinstance(shared, RateLimitdError):
        on_reset(name, shared)
    if not answer.done():
        answer.set_result(error)
