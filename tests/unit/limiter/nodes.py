"""Limiters with their collaborators."""

import asyncio
from dataclasses import replace

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import (
    NO_RULE_REMAINING,
    Algorithm,
    Check,
    Decision,
    IdentifierType,
    Limit,
    Reason,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

USER, IP = IdentifierType.USER, IdentifierType.IP
NOW_S = 1_700_006_400
SECOND = 1_000_000
KEYS = BucketKeys(b"k" * 32)
ORDERS = Rule(
    "orders", "/orders", USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
EVERYWHERE = Rule(
    "everywhere", "*", USER, limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
DAY = Limit(limit=12, window_seconds=86_400, algorithm=Algorithm.FIXED_WINDOW, name="day")
SEVERAL = replace(ORDERS, more=(DAY,))
NO_RULE = Decision(True, NO_RULE_REMAINING, 0, 0, Reason.NO_RULE)
FAIL_OPEN = Decision(True, 1, 0, 0, Reason.FAIL_OPEN_ERROR)
GRANTED = (True, 4, 60, 0, Reason.WITHIN_LIMIT, None)
REFUSED = (False, 0, 60, 9, Reason.LIMIT_EXCEEDED, None)
AWAY = StoreUnavailableError("no answer")


def check_of(name=b"ada", endpoint="/orders", **fields):
    return Check(name, USER, endpoint, **fields)


def limiter_of(clock=None, stats=None, timestamps="bounded", **options):
    clock, stats = clock or ManualClock(), stats or CheckStats()
    return Limiter(clock=clock, stats=stats, timestamps=timestamps, keys=KEYS, **options)


class FaultyJournal:
    """Keeps the keys to reset; runs ``meanwhile`` first, and raises if ``fails`` is set."""

    def __init__(self):
        self.resets, self.fails, self.meanwhile = [], False, lambda: None

    async def reset(self, keys):
        self.meanwhile()
        if self.fails:
            message = "the disk is full"
            raise StoreUnavailableError(message)
        self.resets.append(list(keys))


class Node:
    """A limiter with its collaborators, on its own buckets or on ``shared`` ones."""

    def __init__(self, *rules, timestamps="bounded", max_entries=100, book=True, **options):
        self.clock, self.stats, self.journal = ManualClock(), CheckStats(), FaultyJournal()
        self.errors, self.denied, self.unmatched = [], [], []
        self.table = BucketTable(max_entries, callers_time=timestamps == "caller")
        self.assignments = Assignments()
        if "shared" not in options:
            options |= {"buckets": self.table, "journal": self.journal}
        self.limiter = limiter_of(
            self.clock,
            self.stats,
            timestamps,
            on_error=self.errors.append,
            on_denied=self.denied.append,
            on_unmatched=self.unmatched.append,
            assignments=self.assignments,
            **options,
        )
        self.dry_run = DryRun(self.limiter)
        if book:
            self.put(*rules, revision=7)

    def put(self, *rules, revision=8):
        self.limiter.replace_book(RuleBook.of(rules, revision))

    def assign(self, plan, name=b"ada", kind=USER, expire_time=0):
        self.assignments.put(kind, name, plan, expire_time)

    def check(self, name=b"ada", endpoint="/orders", **fields):
        return self.limiter.check(check_of(name, endpoint, **fields))

    def remaining(self, name=b"ada", endpoint="/orders"):
        return self.check(name, endpoint, cost=2**31 - 1, peek=True).remaining

    async def reset(self, name=b"ada", endpoint="/orders"):
        await self.limiter.reset(name, USER, endpoint)


class FakeSharedBuckets:
    """Decides nothing locally unless ``at_once`` is set: each check waits for the next one of ``answers``."""

    def __init__(self):
        self.asked, self.resets, self.refreshed, self.answers = [], [], [], []
        self.at_once = None
        self.reset_error = None
        self.remaining_s = []
        self.acknowledges = asyncio.Event()
        self.acknowledges.set()

    def apply(self, _key, _rule, _decide, _now_us, _cost):
        if isinstance(self.at_once, Exception):
            raise self.at_once
        return self.at_once

    peek = apply

    def wait(self, key, rule, now_us, cost, remaining_s=None, *, peek):  # noqa: PLR0917 -- as the real one
        self.asked.append((key[:-9], rule, now_us, cost, peek))
        self.remaining_s.append(remaining_s)
        answer = asyncio.get_running_loop().create_future()
        if self.answers:
            ready = self.answers.pop(0)
            if isinstance(ready, ValueError):
                answer.set_exception(ready)
            else:
                answer.set_result(ready)
        return answer

    def apply_each(self, charges, _now_us, _costs):
        if isinstance(self.at_once, Exception):
            raise self.at_once
        return self.at_once and [self.at_once] * len(charges)

    peek_each = apply_each

    def wait_all(self, charges, now_us, costs, remaining_s=None, *, peek, is_counted=True):
        answers = [
            self.wait(key, rule, now_us, cost, remaining_s, peek=peek)
            for (key, rule, _), cost in zip(charges, costs, strict=True)
        ]
        return asyncio.ensure_future(self._all(answers))

    @staticmethod
    async def _all(answers):
        return [await answer for answer in answers]

    async def refresh(self, keys):
        self.refreshed += keys

    async def reset(self, keys, rules):
        if self.reset_error is not None:
            raise self.reset_error
        self.resets.append((keys, rules))
        await self.acknowledges.wait()


class Sharing(Node):
    """A limiter on buckets that nodes share."""

    def __init__(self, *rules, **options):
        self.shared = FakeSharedBuckets()
        super().__init__(*rules or (ORDERS,), shared=self.shared, **options)

    async def wait(self, *answers, **fields):
        """Return the answer to a check on which the shared state gives ``answers``."""
        self.shared.answers += answers
        (answer,) = await self.limiter.wait([check_of(**fields)])
        return answer
