"""What nodes tell of themselves, in Valkey or Redis: one value for each incarnation, which expires by itself.

All are under one hash tag, so that one command reads them in a Cluster, too. They take SET, MGET and EXPIRE, which
nodes need anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ratelimitd.errors import RateLimitdError, StoreCorruptError
from ratelimitd.sharedstate.shards import Shards
from ratelimitd.sharedstate.store import MEMBERS_TAG

_PREFIX: Final = b"rl1:{%02x}:status:" % MEMBERS_TAG

Statuses = list[bytes | None]

_NO_STATUSES: Final = StoreCorruptError("the reply to a reading of statuses is none")


class RedisStatuses:
    """A :class:`ratelimitd.cluster.status_board.Statuses` over ``shards``."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def put(self, incarnation: str, status: bytes, ttl_ms: int) -> None:
        """Replace the status of an incarnation. That it did not arrive shows by itself: it gets old."""
        command = (b"SET", _key(incarnation), status, b"PX", ttl_ms)
        self._shards.of_tag(MEMBERS_TAG).send(command, _ignore)

    def remove(self, incarnation: str) -> None:
        """Forget an incarnation: the node has left."""
        command = (b"EXPIRE", _key(incarnation), 0)
        self._shards.of_tag(MEMBERS_TAG).send(command, _ignore)

    def get(
        self, incarnations: Sequence[str], done: Callable[[Statuses | RateLimitdError], None]
    ) -> None:
        """Read the statuses of incarnations, at least one, in their order; ``None``: there is none."""
        command = (b"MGET", *map(_key, incarnations))
        answer = partial(_answer, done, len(incarnations))
        self._shards.of_tag(MEMBERS_TAG).send(command, answer)


def _key(incarnation: str) -> bytes:
    return _PREFIX + incarnation.encode()


def _ignore(_reply: object) -> None:
    """Nobody waits for it."""


def _answer(done: Callable[[Statuses | RateLimitdError], None], count: int, reply: Any) -> None:
    match reply:
        case list() if len(reply) == count:
            done([one if isinstance(one, bytes) else None for one in reply])
        case RateLimitdError():
            done(reply)
        case _:
            done(_NO_STATUSES)
