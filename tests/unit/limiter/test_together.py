"""Checks of one request: all are charged, or none is."""

from dataclasses import replace

import pytest

from ratelimitd.errors import BreakerOpenError
from ratelimitd.limiter.together import Together
from ratelimitd.model import INT32_MAX, Reason
from tests.unit.limiter.nodes import (
    AWAY,
    EVERYWHERE,
    FAIL_OPEN,
    GRANTED,
    ORDERS,
    REFUSED,
    SEVERAL,
    Node,
    Sharing,
    check_of,
)

NONE = "/none"
"""An endpoint of the rule ``EVERYWHERE``."""


def decide(node, *checks):
    return Together(node.limiter, checks).decide()


def left(decisions):
    return [(one.allowed, one.remaining) for one in decisions]


def counted(node):
    return node.stats.allowed_total, node.stats.blocked_total


def recording(node):
    """Return a list that gets endpoint, peek and verdict of each check that the recorder is notified of."""
    found = []

    class Recorder:
        seed, below = 0, 1 << 32

        @staticmethod
        def record(_identifier, check, _at_us, *, allowed):
            found.append((check.endpoint, check.peek, allowed))

    object.__setattr__(node.limiter, "recorder", Recorder())
    return found


class TestOwnBuckets:
    def test_all_are_charged_if_all_pass(self, node):
        assert left(decide(node, check_of(cost=4), check_of(endpoint=NONE))) == [
            (True, 6),
            (True, 2),
        ]
        assert (node.remaining(), node.remaining(endpoint=NONE)) == (6, 2)
        assert counted(node)[0] == 2

    def test_none_is_charged_if_one_is_denied(self, node):
        checks = check_of(cost=4), check_of(endpoint=NONE, cost=4)
        assert left(decide(node, *checks)) == [(True, 10), (False, 3)]
        assert counted(node) == (1, 1)
        assert (node.remaining(), node.remaining(endpoint=NONE)) == (10, 3)

    def test_a_bucket_of_several_checks_must_have_the_tokens_of_all(self):
        node = Node(replace(ORDERS, endpoint="**"), replace(ORDERS, id="c", endpoint="/c", limit=2))
        one, other = check_of(cost=5), check_of(endpoint=NONE, cost=6)
        denied = decide(node, one, other, check_of(endpoint="/c"))
        assert left(denied) == [(False, 10), (False, 10), (False, 10)]
        assert node.remaining(endpoint="/c") == 2
        assert left(decide(node, one, one)) == [(True, 0), (True, 0)]

    def test_a_sum_above_any_limit_is_denied(self):
        node = Node(replace(ORDERS, endpoint="**", limit=INT32_MAX))
        most = check_of(cost=INT32_MAX)
        assert left(decide(node, most, check_of())) == [(False, INT32_MAX)] * 2
        assert left(decide(node, most)) == [(True, 0)]

    def test_peeks_do_not_see_the_charges(self, node):
        node.check(cost=9)
        assert left(decide(node, check_of(), check_of(peek=True))) == [(True, 0), (True, 0)]

    def test_a_denied_peek_denies_the_charges(self, node):
        checks = check_of(cost=11, peek=True), check_of(endpoint=NONE)
        assert left(decide(node, *checks)) == [(False, 10), (True, 2)]
        assert node.remaining(endpoint=NONE) == 3

    def test_a_check_that_no_limit_judges_is_answered_beside_the_others(self, node):
        node.assign("unlimited", b"vip")
        assert left(decide(node, check_of(b"vip"), check_of()))[1] == (True, 9)
        node.assign("blocked", b"vip")
        blocked, other = decide(node, check_of(b"vip"), check_of())
        assert (blocked.reason, other.allowed, node.remaining()) == (Reason.BLOCKED, True, 9)

    def test_each_of_several_limits_has_its_status(self):
        node = Node(SEVERAL, EVERYWHERE)
        decision, _ = decide(node, check_of(cost=4), check_of(endpoint=NONE))
        assert [one.remaining for one in decision.limits] == [6, 8]

    def test_without_rules_all_fail_open_and_nothing_is_recorded(self):
        node = Node(book=False)
        recorded = recording(node)
        assert decide(node, check_of(), check_of(endpoint=NONE)) == [FAIL_OPEN] * 2
        assert recorded == []

    @pytest.mark.parametrize("part", ["prepare", "answer"])
    def test_an_unexpected_error_fails_open(self, node, monkeypatch, part):
        monkeypatch.setattr(node.limiter, part, None)
        assert decide(node, check_of(), check_of(endpoint=NONE)) == [FAIL_OPEN] * 2
        assert len(node.errors) == 2

    def test_an_error_of_the_buckets_fails_open(self, node, monkeypatch):
        monkeypatch.setattr(node.table, "apply_each", None)
        assert decide(node, check_of(), check_of(endpoint=NONE)) == [FAIL_OPEN] * 2

    def test_an_uncharged_check_is_recorded_as_a_peek(self, node):
        recorded = recording(node)
        decide(node, check_of(cost=4), check_of(endpoint=NONE, cost=4))
        decide(node, check_of(), check_of(endpoint=NONE), check_of(peek=True))
        assert recorded == [
            ("/orders", True, True),
            (NONE, False, False),
            ("/orders", True, True),
            ("/orders", False, True),
            (NONE, False, True),
        ]


class TestSharedBuckets:
    RULES = ORDERS, replace(EVERYWHERE, limit=10)  # what is granted fits into both

    def node(self, *answers, **options):
        node = Sharing(*self.RULES, **options)
        node.shared.answers = [*answers]
        return node

    def asked(self, node):
        return [(cost, peek) for _, _, _, cost, peek in node.shared.asked]

    def test_views_decide_at_once(self):
        node = self.node()
        node.shared.at_once = GRANTED
        assert left(decide(node, check_of(), check_of(endpoint=NONE))) == [(True, 4)] * 2

    async def test_the_store_decides_all_together(self):
        node = self.node(GRANTED, REFUSED)
        answers = await decide(node, check_of(cost=2), check_of(endpoint=NONE))
        assert left(answers) == [(True, 4), (False, 0)]
        assert self.asked(node) == [(2, False), (1, False)]

    async def test_the_shared_state_is_told_how_long_the_caller_still_waits(self):
        node = self.node(REFUSED, GRANTED)
        checks = [check_of(), check_of(endpoint=NONE, peek=True)]
        await Together(node.limiter, checks, iter([0.02, 0.005]).__next__).decide()
        assert node.shared.remaining_s == [0.02, 0.005]

    async def test_a_check_without_others_is_asked_alone(self, monkeypatch):
        node = self.node(GRANTED)
        together = []  # without charges the store is never asked, and never answers
        monkeypatch.setattr(node.shared, "wait_all", lambda *asked, **_: together.append(asked))
        assert left(await decide(node, check_of())) == [(True, 4)]
        assert (self.asked(node), together) == ([(1, False)], [])

    async def test_peeks_are_asked_before_the_charges(self):
        node = self.node(REFUSED, GRANTED)
        answers = await decide(node, check_of(), check_of(endpoint=NONE, peek=True))
        assert left(answers) == [(True, 4), (False, 0)]
        assert self.asked(node) == [(1, True), (1, True)]

    async def test_charges_are_decided_at_once_after_peeks_that_had_to_wait(self, monkeypatch):
        node = self.node(GRANTED)
        monkeypatch.setattr(node.shared, "apply_each", lambda charges, *_: [GRANTED] * len(charges))
        answers = await decide(node, check_of(), check_of(endpoint=NONE, peek=True))
        assert left(answers) == [(True, 4)] * 2

    async def test_an_error_of_one_bucket_fails_open_for_its_check(self):
        node = self.node(AWAY, REFUSED)
        answers = await decide(node, check_of(), check_of(endpoint=NONE))
        assert [one.reason for one in answers] == [Reason.FAIL_OPEN_ERROR, Reason.LIMIT_EXCEEDED]

    async def test_an_unexpected_error_fails_open(self):
        node = self.node(ValueError("defect"))
        assert await decide(node, check_of(), check_of(endpoint=NONE)) == [FAIL_OPEN] * 2

    def test_an_open_breaker_denies_if_it_is_configured_to(self):
        node = self.node(breaker_denies=True)
        node.shared.at_once = BreakerOpenError(1)
        answers = decide(node, check_of(), check_of(endpoint=NONE))
        assert [one.allowed for one in answers] == [False, False]
