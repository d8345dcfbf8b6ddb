"""Envoy's service and the holds service on one limiter with two rules."""

from itertools import count
from typing import Any

from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.limiter.holder import Holder
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import US_PER_S, Algorithm, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.convert import CONTRACT_IDENTITIES
from ratelimitd.services.convert_envoy import ALL_FIELDS
from ratelimitd.services.envoy import EnvoyService
from ratelimitd.services.holds import HoldsService
from ratelimitd.testing import ManualClock
from tests.envoy_messages import Response, request_of
from tests.unit.services.fake_call import FakeCall

USER = IdentifierType.USER
A = Rule("a", "edge/path=a", USER, limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
B = Rule("b", "edge/path=b", USER, limit=1, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
OPTIONS: Any = {"identifiers": {"user_id": "user", "a=b": "ip"}, "fields": ALL_FIELDS}


class Node:
    """A node whose principal of a call is its peer."""

    def __init__(self, clock=None):
        self.stats, self.clock, keys = CheckStats(), clock or ManualClock(), BucketKeys(b"k" * 32)
        table, now_us = BucketTable(100), self.clock.now_us
        parts = {"clock": self.clock, "stats": self.stats, "keys": keys}
        self.limiter = Limiter(buckets=table, timestamps="bounded", **parts)
        self.limiter.replace_book(RuleBook.of([A, B], 1))
        self.holds = HoldsService(
            Holder(self.limiter, OwnHolds(table, keys, now_us), **parts),
            keys,
            lambda call: call.peer,
            stats=self.stats,
            identities=CONTRACT_IDENTITIES,
            now_s=lambda: now_us() / US_PER_S,
        )
        ticks = count()
        self.service = EnvoyService(
            self.limiter,
            self.stats,
            lambda: next(ticks),
            **OPTIONS,
            holds=self.holds,
        )

    def ask(self, *descriptors, **options):
        data = request_of("edge", *descriptors, **options).SerializeToString()
        answer = self.service.should_rate_limit(data, FakeCall())
        assert isinstance(answer, bytes)
        return Response.FromString(answer)

    def left(self, descriptor):
        [status] = self.ask((descriptor, 0)).statuses
        return status.limit_remaining
