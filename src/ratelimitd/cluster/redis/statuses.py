"""What nodes tell of themselves, in Valkey or Redis: one expiring value for each incarnation.

All are under one hash tag, so that one server has them in a Cluster, too. They take SET, GETRANGE and EXPIRE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ratelimitd.cluster.redis.store import MEMBERS_TAG
from ratelimitd.cluster.redis.topology import Shards
from ratelimitd.errors import RateLimitdError, StoreCorruptError

_PREFIX: Final = b"rl1:{%02x}:status:" % MEMBERS_TAG

READ_BYTES: Final = 8_192
"""Of what is longer than a status may be, enough is read to see that."""

Statuses = list[bytes | None]


class RedisStatuses:
    """A :class:`ratelimitd.cluster.membership.Statuses` over ``shards``."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def put(self, incarnation: str, status: bytes, ttl_ms: int) -> None:
        """Replace the status of an incarnation. Fire and forget: a lost write only leaves the status stale."""
        command = (b"SET", status_key(incarnation), status, b"PX", ttl_ms)
        self._shards.of_tag(MEMBERS_TAG).send(command, _ignore)

    def remove(self, incarnation: str) -> None:
        """Forget an incarnation: the node has left."""
        command = (b"EXPIRE", status_key(incarnation), 0)
        self._shards.of_tag(MEMBERS_TAG).send(command, _ignore)

    def get(
        self, incarnations: Sequence[str], done: Callable[[Statuses | RateLimitdError], None]
    ) -> None:
        """Read the statuses of incarnations, at least one, in their order; ``None``: there is none.

        Of each the beginning, :data:`READ_BYTES`: a status has less, and what somebody else put there may have 512 MB.
        """
        reading = _Reading(len(incarnations), done)
        shard = self._shards.of_tag(MEMBERS_TAG)
        for place, incarnation in enumerate(incarnations):
            command = (b"GETRANGE", status_key(incarnation), 0, READ_BYTES - 1)
            shard.send(command, partial(reading.take, place))


class _Reading:
    """The replies of one question, until the last is there."""

    def __init__(self, count: int, done: Callable[[Statuses | RateLimitdError], None]) -> None:
        self._statuses: Statuses = [None] * count
        self._missing = count
        self._error: RateLimitdError | None = None
        self._done = done

    def take(self, place: int, reply: Any) -> None:
        """Keep one reply. What is no text in the store is no status, and says nothing of the others."""
        match reply:
            case bytes():
                self._statuses[place] = reply or None
            case RateLimitdError() if not isinstance(reply, StoreCorruptError):
                self._error = reply
        self._missing -= 1
        if not self._missing:
            self._done(self._error or self._statuses)


def status_key(incarnation: str) -> bytes:
    """Return the key of the status of an incarnation."""
    return _PREFIX + incarnation.encode()


def _ignore(_reply: object) -> None:
    """Ignore the reply."""
