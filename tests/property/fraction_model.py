"""The three algorithms as the specification words them, in exact fractions: slow, obvious, the tests' oracle."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate

INT32_MAX = 2**31 - 1  # the contract's retry_after_seconds is an int32


class Model:
    """One bucket. Times in µs; every answer is (allowed, remaining, reset_time, retry_after, reason)."""

    def __init__(self, algorithm, limit, window_seconds):
        self.algorithm, self.limit, self.window_seconds = algorithm, limit, window_seconds
        self.window = Fraction(window_seconds)
        self.latest = None
        self.tokens, self.log = Fraction(limit), []

    def check(self, now_us, cost):
        own = Fraction(now_us, 10**6)
        at = own if self.latest is None else max(own, self.latest)
        full_at, wait_for = getattr(self, "_" + self.algorithm)(at)
        left = self.left(at)
        if cost > self.limit:
            return (
                False,
                math.floor(left),
                math.ceil(full_at()),
                self.window_seconds,
                "COST_EXCEEDS_LIMIT",
            )
        if left < cost:
            retry = min(max(1, math.ceil(wait_for(cost) - own)), INT32_MAX)
            return (False, math.floor(left), math.ceil(full_at()), retry, "LIMIT_EXCEEDED")
        self.take(at, cost)
        left = math.floor(self.left(at))
        retry = 0 if left else min(math.ceil(wait_for(1) - own), INT32_MAX)
        return (True, left, math.ceil(full_at()), retry, "WITHIN_LIMIT")

    def take(self, at, cost):
        if self.algorithm == "token_bucket":
            self.tokens = self.left(at) - cost
        else:
            self.log.append((at, cost))
        self.latest = at

    def left(self, at):
        if self.algorithm == "token_bucket":
            elapsed = 0 if self.latest is None else at - self.latest
            return min(Fraction(self.limit), self.tokens + elapsed * self.limit / self.window)
        if self.algorithm == "sliding_window":
            spent = sum(cost for _, cost in self.log_after(at))
        else:
            spent = sum(cost for time, cost in self.log if time // self.window == at // self.window)
        return Fraction(self.limit - spent)

    def log_after(self, at):
        return [(time, cost) for time, cost in self.log if time > at - self.window]

    def _token_bucket(self, at):
        rate = self.limit / self.window
        return (
            lambda: at + (self.limit - self.left(at)) / rate,
            lambda cost: at + (cost - self.left(at)) / rate,
        )

    def _sliding_window(self, at):
        def wait_for(cost):
            spent = list(accumulate(freed for _, freed in self.log_after(at)))
            missing = cost - self.left(at)
            gone = next(index for index, freed in enumerate(spent) if freed >= missing)
            return self.log_after(at)[gone][0] + self.window

        return lambda: max([at] + [time + self.window for time, _ in self.log_after(at)]), wait_for

    def _fixed_window(self, at):
        end = (at // self.window + 1) * self.window
        return lambda: end, lambda _: end
