"""Checks on buckets that nodes share, each decided by the shared state itself: ``CONSISTENCY=strict``.

One script call decides all checks of one event-loop iteration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ratelimitd.cluster.gossip import reset_buckets
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.cluster.sync import Partition
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import STORE_TIME, StoreCheck
from ratelimitd.model import Limit, Outcome

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore


class StrictBuckets:
    """The shared buckets, decided by the store.

    ``stored_name`` returns the name in the store of a key. ``callers_time``: checks are judged at the
    caller's time instead of the store's.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        tags: Sequence[Partition],
        stored_name: Callable[[bytes], bytes],
        callers_time: bool,
    ) -> None:
        self._store = store
        self._tags = tags
        self._stored_name = stored_name
        self._callers_time = callers_time
        self._new_future = asyncio.get_running_loop().create_future
        self.asked_total = 0
        """Checks that the shared state has been asked to decide."""
        self.late_total = 0
        """Always 0: only the store decides."""

    def apply(self, *_args: object, **_options: object) -> None:
        """Return ``None``: the shared state decides every check."""

    peek = apply

    def wait(
        self,
        key: bytes,
        rule: Limit,
        now_us: int,
        cost: int,
        *,
        peek: bool,
        is_counted: bool = True,  # noqa: ARG002 - a node that knows no bucket has no misses
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Ask the shared state to decide a check."""
        answer: asyncio.Future[Outcome | RateLimitdError] = self._new_future()
        name = self._stored_name(key)
        server = self._tags[name[0]].server
        if server.is_open:
            answer.set_result(server.open_error())
            return answer
        self.asked_total += 1
        at_us = self._time_of(rule, now_us)
        check = tuple.__new__(StoreCheck, (name, rule, at_us, cost, peek))
        self._store.decide(check, partial(_decided, answer, server))
        return answer

    def _time_of(self, rule: Limit, now_us: int) -> int:
        """Return the time at which a check is judged; the node has chosen a calendar window by its own."""
        return now_us if self._callers_time or rule.calendar is not None else STORE_TIME

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Limit]) -> None:
        """Let buckets start afresh.

        Raises:
            StoreUnavailableError: not known to be done.
        """
        names = [*map(self._stored_name, keys)]
        # No node remembers a bucket here, so that any generation will do.
        await reset_buckets(self._store, names, rules, lambda _name, _shared: None, now_us=0)


def _decided(
    answer: asyncio.Future[Outcome | RateLimitdError],
    server: StoreServer,
    outcome: Outcome | RateLimitdError,
) -> None:
    if isinstance(outcome, RateLimitdError):
        server.failed(outcome)
    else:
        server.answered()
    if not answer.done():
        answer.set_result(outcome)
