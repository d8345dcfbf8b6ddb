"""Where the nodes of a cluster tell how they are doing, and read of each other.

Each puts its status under its own name; who is alive, and so which names there are, is known from the signs of life.
What a node that hung or was killed said last stays for a minute, so that it is seen to be gone. Never looks into a
status. See ADR 0029.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from ratelimitd.clock import Clock
from ratelimitd.errors import RateLimitdError
from ratelimitd.model import US_PER_S

KEPT_S: Final = 60
"""How long the last status of a node outlives it."""

MAX_NODES: Final = 200
"""Nodes that are read of, so that a store full of names costs no more than this; those alive come first."""


class Statuses(Protocol):
    """Where statuses are kept."""

    def put(self, incarnation: str, status: bytes, ttl_ms: int) -> None:
        """Replace the status of an incarnation."""

    def remove(self, incarnation: str) -> None:
        """Forget an incarnation."""

    def get(
        self,
        incarnations: Sequence[str],
        done: Callable[[list[bytes | None] | RateLimitdError], None],
    ) -> None:
        """Read the statuses of incarnations, in their order; ``done`` is called exactly once."""


class Members(Protocol):
    """Who is alive."""

    @property
    def alive(self) -> Sequence[str]:
        """The incarnations that gave a sign of life in the last seconds."""


class StatusBoard:
    """The board as the node called ``incarnation`` uses it."""

    def __init__(
        self, statuses: Statuses, members: Members, incarnation: str, clock: Clock
    ) -> None:
        self._statuses = statuses
        self._members = members
        self._incarnation = incarnation
        self._clock = clock
        self._seen_us: dict[str, int] = {}

    def note_members(self) -> None:
        """Remember who is alive; call it every few seconds, so that who is not any more is still asked for."""
        now_us = self._clock.monotonic_us()
        # Those alive last, so that they are the last to be dropped.
        for name in self._members.alive:
            self._seen_us.pop(name, None)
            self._seen_us[name] = now_us
        oldest_us = now_us - KEPT_S * US_PER_S
        kept = [(name, at_us) for name, at_us in self._seen_us.items() if at_us > oldest_us]
        self._seen_us = dict(kept[-MAX_NODES:])

    def publish(self, status: bytes) -> None:
        """Tell how this node is doing."""
        self._statuses.put(self._incarnation, status, KEPT_S * 1_000)

    async def read(self) -> Mapping[str, bytes]:
        """What the other nodes told last, by incarnation.

        Raises:
            RateLimitdError: the store did not answer in time.
        """
        self.note_members()
        names = [name for name in self._seen_us if name != self._incarnation]
        if not names:
            return {}
        answer: asyncio.Future[list[bytes | None] | RateLimitdError]
        answer = asyncio.get_running_loop().create_future()

        def take(reply: list[bytes | None] | RateLimitdError) -> None:
            if not answer.done():  # else nobody waits any more
                answer.set_result(reply)

        self._statuses.get(names, take)
        found = await answer
        if isinstance(found, RateLimitdError):
            raise found
        return {name: one for name, one in zip(names, found, strict=True) if one is not None}

    def leave(self) -> None:
        """This node ends: the others need not wonder where it is."""
        self._statuses.remove(self._incarnation)
