"""Holds on a node's own buckets by their definition, in exact fractions: charges are replayed with what they cost.

Slow and obvious: the oracle of the tests. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ratelimitd.errors import (
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
)
from ratelimitd.model import INT32_MAX, Algorithm, Enforcement, Limit

GRACE = 60


@dataclass(frozen=True)
class Charge:
    """Tokens that were charged ``at`` a time, under a limit, by a check or by a hold."""

    at: Fraction
    tokens: int
    limit: Limit
    number: bytes | None = None


@dataclass
class ModelBucket:
    """One bucket: what was charged to it since it was fresh. Slots are charges of holds that have not ended."""

    charges: list[Charge] = field(default_factory=list)

    def at(self, now):
        """The effective time of a check: never before the latest charge."""
        return max([now, *[charge.at for charge in self.charges]])

    def spent(self, now, limit):
        """Tokens that are missing ``now``, more than the capacity if there is a debt."""
        at = self.at(now)
        if limit.algorithm is Algorithm.SLIDING_WINDOW:
            start = at - limit.window_seconds
            return Fraction(sum(one.tokens for one in self.charges if one.at > start))
        spent, before = Fraction(0), None
        for charge in [*self.charges, Charge(at, 0, limit)]:
            if before is not None:
                if changes_numbers(before.limit, charge.limit):
                    spent = min(spent, Fraction(charge.limit.capacity))
                spent = max(Fraction(0), spent - refill(charge.limit, before.at, charge.at))
            spent += charge.tokens
            before = charge
        return spent

    def answer(self, now, limit, cost):
        """(allowed, remaining, reset_time, retry_after, reason) of a check."""
        at, spent, capacity = self.at(now), self.spent(now, limit), limit.capacity
        allowed = spent + cost <= capacity
        after = self
        if allowed:
            after = ModelBucket([*self.charges, Charge(at, cost, limit)])
            spent += cost
        remaining = max(0, math.floor(capacity - spent))
        reset = math.ceil(after.full_at(at, limit, spent))
        if allowed:
            retry = 0 if remaining else wait(after.free_at(at, limit, 1) - now)
            return True, remaining, reset, retry, "WITHIN_LIMIT"
        if cost > capacity:
            return False, remaining, reset, limit.window_seconds, "COST_EXCEEDS_LIMIT"
        return False, remaining, reset, wait(after.free_at(at, limit, cost) - now), "LIMIT_EXCEEDED"

    def full_at(self, at, limit, spent):
        """When all tokens are there, if none is charged."""
        if limit.algorithm is Algorithm.TOKEN_BUCKET:
            return at + spent * limit.window_seconds / limit.limit
        if limit.algorithm is Algorithm.FIXED_WINDOW:
            return window_after(at, limit, spent)
        return (
            at
            if not spent
            else max(one.at for one in self.charges if one.tokens) + limit.window_seconds
        )

    def free_at(self, at, limit, cost):
        """When ``cost`` tokens are there; of a fixed window, when a later one begins."""
        if limit.algorithm is Algorithm.TOKEN_BUCKET:
            lacking = self.spent(at, limit) + cost - limit.capacity
            return at + lacking * limit.window_seconds / limit.limit
        if limit.algorithm is Algorithm.FIXED_WINDOW:
            return window_after(at, limit, self.spent(at, limit) + cost - limit.limit)
        leave_at = sorted(one.at + limit.window_seconds for one in self.charges if one.tokens)
        return next(
            then for then in leave_at if then > at and self.spent(then, limit) + cost <= limit.limit
        )

    def charge(self, now, limit, cost, number=None):
        self.charges.append(Charge(self.at(now), cost, limit, number))

    def settle(self, number, actual):
        self.charges = [
            replace(one, tokens=actual, number=None) if one.number == number else one
            for one in self.charges
        ]

    def holds(self):
        return [one.number for one in self.charges if one.number is not None]


def changes_numbers(before, after):
    return (before.limit, before.capacity) != (after.limit, after.capacity)


def window_after(at, limit, lacking):
    """Return the start of the window by which at least one window, and ``lacking`` tokens, have come."""
    windows = max(1, math.ceil(lacking / limit.limit))
    return (at // limit.window_seconds + windows) * limit.window_seconds


def refill(limit, start, end):
    """Tokens that come between two times; those of a fixed window at once, with the next window."""
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        return (end - start) * limit.limit / limit.window_seconds
    return (end // limit.window_seconds - start // limit.window_seconds) * limit.limit


def wait(seconds):
    return min(max(1, math.ceil(seconds)), INT32_MAX)


@dataclass
class ModelHold:
    digest: bytes
    end: Fraction
    last: Fraction | float
    cost: int
    recorded: dict
    charged: list
    actual: int | None = None


class HoldModel:
    """The buckets and the holds of one node, by name."""

    def __init__(self):
        self.buckets = {}
        self.slots = {}
        """Name → number → end."""
        self.held = {}

    def bucket(self, name):
        return self.buckets.setdefault(name, ModelBucket())

    def ends(self, name, clock):
        return sorted(end for end in self.slots.get(name, {}).values() if end > clock)

    def judge(self, name, limit, cost, now, clock):  # noqa: PLR0917
        if limit.algorithm is not Algorithm.CONCURRENCY:
            return self.bucket(name).answer(now, limit, cost)
        free = limit.limit - len(self.ends(name, clock))
        answer = self.answer_of_slots(name, limit, clock)
        return (
            (True, *answer[1:], "WITHIN_LIMIT")
            if free > 0
            else (False, *answer[1:], "LIMIT_EXCEEDED")
        )

    def answer_of_slots(self, name, limit, clock):
        ends = self.ends(name, clock)
        free = limit.limit - len(ends)
        reset = math.ceil(ends[-1] if ends else clock)
        return True, max(0, free), reset, 0 if free > 0 else wait(ends[-free] - clock)

    def judge_all(self, charges, cost, now, clock):
        """The answers to a check on several limits; of one that is denied, what the others have."""
        answers = [self.judge(*one, cost, now, clock) for one in charges]
        denied = any(
            not answer[0] and limit.enforcement is Enforcement.ENFORCE
            for (_, limit), answer in zip(charges, answers, strict=True)
        )
        if denied:
            answers = [
                self.there(*one, now, clock) if answer[0] else answer
                for one, answer in zip(charges, answers, strict=True)
            ]
        return denied, answers

    def there(self, name, limit, now, clock):
        """What a bucket has, as of a check that costs nothing."""
        if limit.algorithm is Algorithm.CONCURRENCY:
            return (*self.answer_of_slots(name, limit, clock)[:3], 0, "WITHIN_LIMIT")
        bucket = self.bucket(name)
        at, spent = bucket.at(now), bucket.spent(now, limit)
        remaining = max(0, math.floor(limit.capacity - spent))
        return True, remaining, math.ceil(bucket.full_at(at, limit, spent)), 0, "WITHIN_LIMIT"

    def check(self, charges, cost, now, clock):
        denied, answers = self.judge_all(charges, cost, now, clock)
        if not denied:
            for (name, limit), answer in zip(charges, answers, strict=True):
                if answer[0] and limit.algorithm is not Algorithm.CONCURRENCY:
                    self.bucket(name).charge(now, limit, cost)
        return answers

    def hold(self, number, digest, charges, cost, ttl, now, clock):  # noqa: PLR0917
        self.forget(clock)
        known = self.held.get(number)
        if known is not None:
            if known.digest != digest or known.actual is not None or known.end <= clock:
                raise CheckInvalidError
            return [*known.recorded.values()], known.end
        denied, answers = self.judge_all(charges, cost, now, clock)
        if denied:
            return answers, 0
        last, charged = math.inf, []
        for (name, limit), answer in zip(charges, answers, strict=True):
            if answer[0]:
                charged.append(name)
                if limit.algorithm is Algorithm.CONCURRENCY:
                    last = min(last, clock + limit.window_seconds)
        end = min(clock + ttl, last)
        recorded = {}
        for (name, limit), answer in zip(charges, answers, strict=True):
            recorded[name] = answer
            if not answer[0]:
                continue
            if limit.algorithm is Algorithm.CONCURRENCY:
                self.slots.setdefault(name, {})[number] = end
                recorded[name] = (*self.answer_of_slots(name, limit, clock), "WITHIN_LIMIT")
            else:
                self.bucket(name).charge(now, limit, cost, number)
        self.held[number] = ModelHold(digest, end, last, cost, recorded, charged)
        return [recorded[name] for name, _ in charges], end

    def settle(self, number, actual, clock):
        """Return whether the hold is known, and whether it is settled now."""
        self.forget(clock)
        hold = self.held.get(number)
        if hold is None:
            return False, False
        if hold.actual is None:
            if hold.end <= clock:
                raise HoldEndedError
            hold.actual = actual
            for name in hold.charged:
                self.bucket(name).settle(number, actual)
                self.slots.get(name, {}).pop(number, None)
            return True, True
        if hold.actual != actual:
            raise HoldSettledError
        return True, False

    def extend(self, number, ttl, clock):
        self.forget(clock)
        hold = self.held.get(number)
        if hold is None:
            return None
        if hold.actual is not None:
            raise HoldSettledError
        if hold.end <= clock:
            raise HoldEndedError
        hold.end = max(hold.end, min(clock + ttl, hold.last))
        for name in hold.charged:
            if number in self.slots.get(name, {}):
                self.slots[name][number] = hold.end
        return hold.end

    def reset(self, name):
        self.buckets.pop(name, None)
        self.slots.pop(name, None)

    def forget(self, clock):
        for number in [one for one, hold in self.held.items() if hold.end + GRACE <= clock]:
            hold = self.held.pop(number)
            for name in hold.charged:
                self.bucket(name).settle(number, hold.cost)  # its number may be that of another
