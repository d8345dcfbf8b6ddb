"""Checks of one turn of the event loop, in as few calls of a script as may be.

A call costs the server as much as three checks in it do (ADR 0041): many are cheap together, and dear alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreMovingError
from ratelimitd.ledger.shared_state import StoreCheck
from ratelimitd.sharedstate.encoding import checks_request
from ratelimitd.sharedstate.link import Link
from ratelimitd.sharedstate.request import tell
from ratelimitd.sharedstate.script import Script
from ratelimitd.sharedstate.shards import Shards

CHECKS_PER_CALL: Final = 100
"""Checks in one script call: as many as a batch may have updates, about 1 ms of the store; more only for long logs."""

CHECKS_PER_WEIGHT: Final = 3
"""As many of a call cost the server what a call costs it."""

Answer = TypeVar("Answer")


class Combiner(Generic[Answer]):
    """The checks that one script decides.

    ``read`` makes an answer to each of some checks of the reply to their call, in their order, or raises
    ``StoreCorruptError``.
    """

    def __init__(
        self,
        shards: Shards,
        script: Script,
        read: Callable[[Sequence[StoreCheck], Any], Sequence[Answer | RateLimitdError]],
    ) -> None:
        self._shards = shards
        self._script = script
        self._read = read
        self._call_soon = asyncio.get_running_loop().call_soon
        self._checks: list[StoreCheck] = []
        self._dones: list[Callable[[Answer | RateLimitdError], None]] = []
        self._links: set[Link] = set()
        """To servers that something was sent to, and has not left."""
        self._under_way = 0
        self._come_alone = False
        """Whether the last check was the only one of its turn, and of its round trip."""

    def add(self, check: StoreCheck, done: Callable[[Answer | RateLimitdError], None]) -> None:
        """Let a check leave with the others of this turn; at once, where there have not been any."""
        if self._come_alone and not self._under_way and not self._checks:
            self._send([check], [done])
            self._flush()
            return
        if not self._checks:
            self._call_soon(self._leave)
        self._checks.append(check)
        self._dones.append(done)

    def _leave(self) -> None:
        checks, self._checks = self._checks, []
        dones, self._dones = self._dones, []
        self._come_alone = len(checks) == 1 and not self._under_way
        if self._shards.is_cluster:
            self._send_by_tag(checks, dones)
        else:
            self._send_all(checks, dones)
        self._flush()

    def _flush(self) -> None:
        """Let all that was sent leave: the turn in which it came is over, and to wait for another would take 5 µs."""
        for link in self._links:
            link.flush()
        self._links.clear()

    def _send_by_tag(
        self,
        checks: Sequence[StoreCheck],
        dones: Sequence[Callable[[Answer | RateLimitdError], None]],
    ) -> None:
        """All keys of a call have to be of one slot in a Cluster."""
        places: dict[int, list[int]] = {}
        for place, check in enumerate(checks):
            places.setdefault(check.name[0], []).append(place)
        for of_tag in places.values():
            self._send_all([checks[place] for place in of_tag], [dones[place] for place in of_tag])

    def _send_all(
        self,
        checks: Sequence[StoreCheck],
        dones: Sequence[Callable[[Answer | RateLimitdError], None]],
    ) -> None:
        for start in range(0, len(checks), CHECKS_PER_CALL):
            end = start + CHECKS_PER_CALL
            self._send(checks[start:end], dones[start:end])

    def _send(
        self,
        checks: Sequence[StoreCheck],
        dones: Sequence[Callable[[Answer | RateLimitdError], None]],
    ) -> None:
        try:
            keys, arguments = checks_request(checks)
        except Exception as error:  # noqa: BLE001 - a defect, and nobody must wait for ever for it
            defect = StoreCorruptError(f"checks cannot be sent: {error}")
            self._call_soon(self._tell, dones, [defect] * len(dones))
            return
        link = self._shards.of_tag(checks[0].name[0])
        self._under_way += 1
        weight = 1 + len(checks) // CHECKS_PER_WEIGHT
        link.run(self._script, keys, arguments, partial(self._answered, checks, dones), weight)
        self._links.add(link)

    def _answered(
        self,
        checks: Sequence[StoreCheck],
        dones: Sequence[Callable[[Answer | RateLimitdError], None]],
        reply: Any,
    ) -> None:
        self._under_way -= 1
        if isinstance(reply, StoreMovingError) and len(checks) > 1:
            # A slot is being moved, and some of its keys are there: each by itself is answered, or redirected.
            for check, done in zip(checks, dones, strict=True):
                self._send([check], [done])
            self._flush()
            return
        answers: Sequence[Answer | RateLimitdError]
        if isinstance(reply, RateLimitdError):
            answers = [reply] * len(checks)
        else:
            try:
                answers = self._read(checks, reply)
            except StoreCorruptError as error:
                answers = [error] * len(checks)
        self._tell(dones, answers)

    @staticmethod
    def _tell(
        dones: Sequence[Callable[[Answer | RateLimitdError], None]],
        answers: Sequence[Answer | RateLimitdError],
    ) -> None:
        for done, answer in zip(dones, answers, strict=True):
            tell(done, answer)
