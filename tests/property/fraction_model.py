"""The three algorithms as specified, in exact fractions: slow and obvious, the oracle of the tests."""

from __future__ import annotations

import math
from fractions import Fraction

INT32_MAX = 2**31 - 1  # the contract's retry_after_seconds is an int32


class Model:
    """One bucket. Times in µs; every answer is (allowed, remaining, reset_time, retry_after, reason).

    ``limit`` and ``burst`` may change between checks; spends are kept (ADR 0008).
    """

    def __init__(self, algorithm, limit, window_seconds, burst=0):
        self.algorithm, self.limit, self.window_seconds = algorithm, limit, window_seconds
        self.burst = burst
        self.window = Fraction(window_seconds)
        self.latest = None
        self.spent, self.log = Fraction(0), []

    @property
    def most(self):
        """Tokens of a full bucket."""
        return self.burst or self.limit

    def check(self, now_us, cost):
        answer, at = self.answer(now_us, cost)
        if not answer[0]:
            return answer
        self.take(at, cost)
        left = math.floor(self.left(at))
        full_at, wait_for = getattr(self, "_" + self.algorithm)(at)
        own = Fraction(now_us, 10**6)
        retry = 0 if left else min(math.ceil(wait_for(1) - own), INT32_MAX)
        return (True, left, math.ceil(full_at()), retry, "WITHIN_LIMIT")

    def answer(self, now_us, cost):
        """Return the complete answer of a denied check, else (True,); and its effective time in seconds."""
        own = Fraction(now_us, 10**6)
        at = own if self.latest is None else max(own, self.latest)
        full_at, wait_for = getattr(self, "_" + self.algorithm)(at)
        left = self.left(at)
        remaining, reset_time = max(0, math.floor(left)), math.ceil(full_at())
        if cost > self.most:
            return (False, remaining, reset_time, self.window_seconds, "COST_EXCEEDS_LIMIT"), at
        if left < cost:
            retry = min(max(1, math.ceil(wait_for(cost) - own)), INT32_MAX)
            return (False, remaining, reset_time, retry, "LIMIT_EXCEEDED"), at
        return (True,), at

    def take(self, at, cost):
        if self.algorithm == "token_bucket":
            self.spent = self.most - self.left(at) + cost
        else:
            self.log.append((at, cost))
        self.latest = at

    def left(self, at):
        """Return the tokens left; negative if the limit was lowered below the content of a window."""
        if self.algorithm == "token_bucket":
            elapsed = 0 if self.latest is None else at - self.latest
            owed = min(self.spent, Fraction(self.most))
            return self.most - max(Fraction(0), owed - elapsed * self.limit / self.window)
        if self.algorithm == "sliding_window":
            spent = sum(cost for time, cost in self.log if time > at - self.window)
        else:
            spent = sum(cost for time, cost in self.log if time // self.window == at // self.window)
        return Fraction(self.limit - spent)

    def _token_bucket(self, at):
        rate = self.limit / self.window
        return (
            lambda: at + (self.most - self.left(at)) / rate,
            lambda cost: at + (cost - self.left(at)) / rate,
        )

    def _sliding_window(self, at):
        inside = [(time, cost) for time, cost in self.log if time > at - self.window]

        def full_at():
            return max([at] + [time + self.window for time, _ in self.log])

        def wait_for(cost):
            missing = cost - self.left(at)
            for time, freed in inside:
                missing -= freed
                if missing <= 0:
                    return time + self.window
            raise AssertionError

        return full_at, wait_for

    def _fixed_window(self, at):
        end = (at // self.window + 1) * self.window
        return lambda: end, lambda _: end
