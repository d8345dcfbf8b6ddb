"""Several limits on a check, of one rule or of several identities."""

from dataclasses import replace

import pytest

from ratelimitd.buckets.keys import joined
from ratelimitd.model import Check, Enforcement, Reason
from tests.unit.limiter.nodes import DAY, NOW_S, ORDERS, SEVERAL, USER, Node


class TestSeveralLimits:
    @pytest.fixture
    def node(self):
        return Node(SEVERAL)

    def test_all_limits_are_charged_and_the_tightest_answers(self, node):
        answer = node.check(cost=4)
        assert (answer.allowed, answer.remaining, answer.limit) == (True, 6, SEVERAL)
        assert [(one.limit.name, one.remaining) for one in answer.limits] == [
            ("default", 6), ("day", 8),
        ]  # fmt: skip
        node.clock.advance(seconds=60)
        answer = node.check()
        assert (answer.remaining, answer.limit) == (7, DAY)
        assert [one.limit.name for one in answer.limits] == ["day", "default"]
        assert {one.rule for one in answer.limits} == {SEVERAL}

    def test_a_denied_check_charges_no_limit(self, node):
        node.check(cost=9)
        node.clock.advance(seconds=60)
        answer = node.check(cost=4)
        assert (answer.allowed, answer.limit, answer.remaining) == (False, DAY, 3)
        assert [(one.allowed, one.remaining) for one in answer.limits] == [(False, 3), (True, 10)]
        assert node.check(cost=3).allowed

    def test_a_peek_charges_no_limit(self, node):
        first = node.check(cost=4, peek=True)
        assert node.check(cost=4, peek=True) == first
        assert node.check(cost=4) == first

    def test_a_rule_counts_a_check_once(self, node):
        node.check(cost=9)
        node.check(cost=9)
        assert (node.stats.allowed_total, node.stats.blocked_total) == (1, 1)
        assert node.stats.by_rule == {"orders": [1, 1]}
        [(identifier, scope)] = node.denied
        assert (identifier, scope.rule, scope.limit) == (b"ada", SEVERAL, DAY)
        assert node.stats.bucket_looked_total == 2

    def test_a_new_number_keeps_the_spends_and_a_new_name_starts_afresh(self, node):
        node.check(cost=4)
        node.put(replace(SEVERAL, limit=5, more=(replace(DAY, name="daily"),)))
        answer = node.check(cost=1)
        assert [(one.limit.name, one.remaining) for one in answer.limits] == [
            ("default", 0), ("daily", 11),
        ]  # fmt: skip

    async def test_a_reset_affects_all_limits(self, node):
        node.check(cost=10)
        await node.reset()
        assert len(node.table) == 0
        [keys] = node.journal.resets
        assert len(keys) == 2
        assert node.check(cost=10).allowed

    def test_a_scope_has_several_limits_only_if_the_rule_has(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert [one.rule_limit for one in scope.several] == [SEVERAL, DAY]
        node.put(ORDERS)
        assert node.limiter.scopes.find("/orders", USER).several == ()

    def test_the_tolerance_of_timestamps_follows_the_shortest_window(self):
        node = Node(replace(SEVERAL, more=(replace(DAY, window_seconds=10),)))
        node.check(timestamp=NOW_S * 1_000 - 1_001)
        assert node.stats.clock_rejected_total == 1
        node.check(timestamp=NOW_S * 1_000 - 1_000)
        assert node.stats.clock_rejected_total == 1

    def test_a_denied_check_of_a_batch_leaves_all_tokens_to_the_next(self, node):
        checks = [Check(b"ada", USER, "/orders", cost) for cost in (9, 4, 1)]
        answers = node.limiter.check_batch(checks)
        assert [answer.allowed for answer in answers] == [True, False, True]
        assert [(one.limit.name, one.remaining) for one in answers[2].limits] == [
            ("default", 0), ("day", 2),
        ]  # fmt: skip

    def test_an_observing_limit_counts_the_checks_it_would_deny_and_denies_none(self):
        observed = replace(DAY, limit=3, enforcement=Enforcement.OBSERVE)
        node = Node(replace(ORDERS, more=(observed,)))
        answers = [node.check(cost=2) for _ in range(6)]
        assert [answer.allowed for answer in answers] == [True] * 5 + [False]
        assert [answer.limits[1].allowed for answer in answers] == [True, *[False] * 5]
        assert {answer.limit.name for answer in answers} == {"default"}
        # The enforced limit denied the last one.
        assert node.stats.would_deny == {"orders,day": [4]}
        assert node.stats.by_rule == {"orders": [5, 1]}

    def test_an_enforced_limit_answers_although_an_observing_one_has_less_left(self):
        node = Node(replace(ORDERS, more=(replace(DAY, limit=3, enforcement=Enforcement.OBSERVE),)))
        node.check()
        answer = node.check()
        assert (answer.limit.name, answer.remaining) == ("default", 8)
        assert [one.remaining for one in answer.limits] == [8, 1]

    def test_an_observing_rule_allows_and_reports_its_status(self):
        node = Node(replace(ORDERS, limit=3, enforcement=Enforcement.OBSERVE))
        answers = [node.check(cost=2) for _ in range(2)]
        assert [answer[:5] for answer in answers] == [
            (True, 1, NOW_S + 60, 0, Reason.WITHIN_LIMIT),
            (True, 1, NOW_S + 60, 0, Reason.WITHIN_LIMIT),
        ]
        assert [answer.limits for answer in answers] == [(), ()]
        assert node.stats.would_deny == {"orders,default": [1]}

    def test_enforcing_an_observing_limit_keeps_its_spends(self):
        node = Node(replace(ORDERS, more=(replace(DAY, enforcement=Enforcement.OBSERVE),)))
        node.check(cost=9)
        node.put(replace(ORDERS, name="day", limit=12, window_seconds=86_400))
        assert node.check(cost=3).remaining == 0
        assert not node.check().allowed


class TestSeveralIdentities:
    """A check counts for each of its identities, and for all callers."""

    TENANT = replace(ORDERS, id="tenant", identifier_type="tenant", limit=15)
    BOTH = replace(ORDERS, id="both", identifier_type="tenant+user", limit=2)
    EVERYBODY = replace(ORDERS, id="everybody", identifier_type="all", limit=18)
    OVERALL = replace(ORDERS, id="overall", endpoint="**", limit=12)
    ACME, OTHER = (("tenant", b"acme"),), (("tenant", b"other"),)

    def judged(self, answer):
        return [one.rule.id for one in answer.limits]

    def test_rules_of_all_identities_and_combinations_judge_a_check(self):
        node = Node(ORDERS, self.TENANT, self.BOTH, self.EVERYBODY, self.OVERALL)
        answer = node.check(also=(*self.ACME, ("ip", b"::1")))
        assert self.judged(answer) == ["both", "orders", "overall", "tenant", "everybody"]
        assert self.judged(node.check()) == ["orders", "overall", "everybody"]

    def test_a_check_that_one_rule_denies_charges_no_identity(self):
        node = Node(ORDERS, self.TENANT, self.EVERYBODY)
        assert node.check(b"ada", cost=9, also=self.ACME).allowed
        denied = node.check(b"bob", cost=7, also=self.ACME)
        assert (denied.allowed, denied.rule, denied.remaining) == (False, self.TENANT, 6)
        assert node.check(b"bob", cost=9, also=self.OTHER).allowed
        assert node.check(b"bob", also=self.OTHER).rule is self.EVERYBODY

    def test_a_combination_has_a_bucket_of_its_own(self):
        node = Node(self.BOTH)
        for user, tenant in ((b"ada", b"acme"), (b"ada", b"other"), (b"bob", b"acme")):
            asked = [node.check(user, also=(("tenant", tenant),)).allowed for _ in range(3)]
            assert asked == [True, True, False]
        assert node.check(b"ada").reason is Reason.NO_RULE
        turned = Check(b"acme", "tenant", "/orders", also=((USER, b"ada"),))
        assert not node.limiter.check(turned).allowed

    def test_a_rule_for_all_endpoints_has_one_bucket(self):
        node = Node(self.OVERALL)
        assert [node.check(endpoint=f"/{number}").remaining for number in range(3)] == [11, 10, 9]

    def test_a_rule_for_all_callers_has_one_bucket_on_each_endpoint(self):
        node = Node(replace(self.EVERYBODY, endpoint="*"))
        assert [node.check(name).remaining for name in (b"ada", b"bob")] == [17, 16]
        assert node.check(endpoint="/else").remaining == 17

    def test_a_disabled_rule_does_not_apply(self):
        node = Node(
            ORDERS, replace(self.EVERYBODY, enabled=False), replace(self.OVERALL, enabled=False)
        )
        assert node.check().limits == ()

    async def test_a_reset_affects_one_bucket(self):
        node = Node(ORDERS, self.BOTH, self.EVERYBODY, self.OVERALL)
        node.check(also=self.ACME)
        for kind, identifier, endpoint, rule in (
            ("tenant+user", joined([b"acme", b"ada"]), "/orders", self.BOTH),
            ("all", b"", "/orders", self.EVERYBODY),
            (USER, b"ada", "**", self.OVERALL),
        ):
            assert await node.limiter.reset(identifier, kind, endpoint) == (rule,)
        answer = node.check(cost=2, also=self.ACME)
        assert {one.rule.id: one.remaining for one in answer.limits} == {
            "both": 0, "orders": 7, "everybody": 16, "overall": 10,
        }  # fmt: skip

    def test_a_denial_is_reported_with_the_identifier_of_the_bucket(self):
        node = Node(
            replace(ORDERS, limit=3), replace(self.BOTH, limit=1), replace(self.EVERYBODY, limit=4)
        )
        for _ in range(2):
            node.check(also=self.ACME)
        node.check(cost=3)
        node.check(b"bob", cost=3)
        node.check(b"eve")
        assert [(identifier, scope.rule.id) for identifier, scope in node.denied] == [
            (joined([b"acme", b"ada"]), "both"), (b"ada", "orders"), (b"", "everybody"),
        ]  # fmt: skip

    def test_a_batch_is_answered_in_order_where_identifiers_share_a_bucket(self):
        eve, ada = (Check(name, USER, "/orders", 10, also=self.ACME) for name in (b"eve", b"ada"))
        for node in (Node(self.TENANT), Node(replace(self.EVERYBODY, limit=10))):
            answers = node.limiter.check_batch([eve, ada])
            assert [answer.allowed for answer in answers] == [True, False]
