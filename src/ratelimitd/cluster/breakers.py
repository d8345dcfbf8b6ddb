"""The circuit breakers of a node, one for each server of the shared state, and which hash tags each is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from ratelimitd.breaker import Breaker, State
from ratelimitd.clock import Clock
from ratelimitd.cluster.shard import Shard
from ratelimitd.cluster.store import SharedStore, Timers
from ratelimitd.cluster.tag import Tag
from ratelimitd.errors import RateLimitdError
from ratelimitd.model import US_PER_S
from ratelimitd.stats import CheckStats

JITTER_US: Final = US_PER_S // 2
"""Nodes whose breakers opened together probe apart, by up to so much."""


class Breakers:
    """The breakers; each opens after ``failures`` and is probed after ``recovery_s``. ``random`` is from 0 to 1."""

    def __init__(
        self,
        store: SharedStore,
        clock: Clock,
        timers: Timers,
        *,
        stats: CheckStats,
        failures: int,
        recovery_s: int,
        random: Callable[[], float],
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timers = timers
        self._stats = stats
        self._failures = failures
        self._recovery_us = recovery_s * US_PER_S
        self._random = random
        self._report = report
        self._shards: dict[str, Shard] = {}

    def of_tag(self, tag: int) -> Shard:
        """The server that holds a hash tag now."""
        name = self._store.shard_of(tag)
        shard = self._shards.get(name)
        if shard is None:
            breaker = Breaker(
                self._clock,
                failure_threshold=self._failures,
                recovery_us=self._recovery_us,
                jitter_us=lambda: int(self._random() * JITTER_US),
            )
            shard = Shard(name, tag, breaker, self._clock, self._stats, self._timers, self._report)
            self._shards[name] = shard
        return shard

    def watch(self, tags: Iterable[Tag]) -> None:
        """Follow hash tags that have moved, and probe the servers whose breakers want it."""
        held = {}
        for tag in tags:
            shard = tag.shard = self.of_tag(tag.number)
            shard.tag = tag.number
            held[shard.name] = shard
        for name, shard in self._shards.items():
            if name not in held:
                shard.left()
        self._shards = held
        for shard in held.values():
            # Without a connection the probe would fail, and the next one be as long away: the attempts to connect, one
            # a second at least, find out sooner that the server is back.
            if self._store.is_connected(shard.tag) and shard.begins_probe():
                self._store.probe(shard.tag, partial(_probed, shard))

    @property
    def state(self) -> State:
        """Of the worst of them."""
        states = {shard.state for shard in self._shards.values()}
        for state in (State.OPEN, State.HALF_OPEN):
            if state in states:
                return state
        return State.CLOSED

    @property
    def retry_after_us(self) -> int:
        """Until the last of those that are open is tried again; 0 while none is."""
        open_ones = [shard for shard in self._shards.values() if shard.is_open]
        return max((shard.open_error().retry_after_us for shard in open_ones), default=0)


def _probed(shard: Shard, error: RateLimitdError | None) -> None:
    if error is None:
        shard.answered()
    else:
        shard.failed(error)
