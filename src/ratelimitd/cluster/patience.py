"""How long a check waits for the shared state, which is not for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.cluster.bucket import Bucket
from ratelimitd.cluster.question import Question
from ratelimitd.cluster.store import Timers
from ratelimitd.model import US_PER_S


class _Wait(NamedTuple):
    until_us: int
    bucket: Bucket
    question: Question


class Patience:
    """The checks that wait, all for ``answer_s``, so in the order of time; one timer for all.

    ``give_up`` is called for each that was not answered in time, and for each whose caller has left.
    """

    def __init__(
        self,
        clock: Clock,
        timers: Timers,
        answer_s: float,
        give_up: Callable[[Bucket, Question], None],
    ) -> None:
        self._clock = clock
        self._timers = timers
        self._answer_s = answer_s
        self._give_up = give_up
        self._waits: deque[_Wait] = deque()

    def wait_for(self, bucket: Bucket, question: Question) -> None:
        """A check waits from now on."""
        if not self._waits:
            self._timers.call_later(self._answer_s, self._look)
        until_us = self._clock.monotonic_us() + round(self._answer_s * US_PER_S)
        self._waits.append(_Wait(until_us, bucket, question))

    def _look(self) -> None:
        now_us = self._clock.monotonic_us()
        try:
            self._give_up_late(now_us)
        finally:
            # Whatever went wrong with one, the others must not wait for ever.
            if self._waits:
                wait_us = max(0, self._waits[0].until_us - now_us)
                self._timers.call_later(wait_us / US_PER_S, self._look)

    def _give_up_late(self, now_us: int) -> None:
        while self._waits:
            until_us, bucket, question = self._waits[0]
            is_answered = question.answer.done()
            if until_us > now_us and not is_answered:
                return
            self._waits.popleft()
            if not is_answered or question.answer.cancelled():
                self._give_up(bucket, question)
