"""The limits of identities that are assigned to plans."""

from dataclasses import replace

import pytest

from ratelimitd.errors import CheckInvalidError
from ratelimitd.limiter import scopes as scopes_module
from ratelimitd.model import (
    INT32_MAX,
    Algorithm,
    AssignedPlan,
    Check,
    Enforcement,
    Limit,
    Match,
    Plan,
    Reason,
)
from ratelimitd.rules.assignments import Assignments
from tests.unit.limiter import nodes
from tests.unit.limiter.nodes import GRANTED, IP, NOW_S, USER, Node, Sharing, check_of


def limit_of(number, name="default", window_seconds=60):
    return Limit(
        limit=number,
        window_seconds=window_seconds,
        algorithm=Algorithm.FIXED_WINDOW,
        name=name,
    )


PRO = Plan("pro", (limit_of(100), limit_of(1_000, "day", 86_400)))
GOLD = Plan("gold", (limit_of(50),))
ORDERS = replace(nodes.ORDERS, plans=(GOLD, PRO))
TENANT = replace(ORDERS, id="tenant", identifier_type="tenant", limit=500, plans=(GOLD,))
BOTH = replace(ORDERS, id="both", identifier_type="tenant+user", limit=2)
EVERYBODY = replace(ORDERS, id="everybody", identifier_type="all", limit=400)
ACME = (("tenant", b"acme"),)


@pytest.fixture
def node():
    return Node(ORDERS)


class TestPlan:
    def test_limits_of_a_plan_replace_the_rules_own(self, node):
        assert node.check(cost=5)[:2] == (True, 5)
        node.assign("pro")
        answer = node.check()
        assert answer[:2] == (True, 94)
        assert (answer.rule, answer.limit, answer.plan) == (ORDERS, PRO.limits[0], "pro")
        judged = [(one.limit, one.remaining, one.plan) for one in answer.limits]
        assert judged == [(PRO.limits[0], 94, "pro"), (PRO.limits[1], 999, "pro")]
        assert node.check(b"bob").plan == ""
        assert not node.check(b"bob", cost=10).allowed

    def test_a_plan_of_one_limit_has_a_plain_answer(self, node):
        node.assign("gold")
        answer = node.check(cost=49)
        assert (answer[:2], answer.limits, answer.plan) == ((True, 1), (), "gold")
        assert node.check(peek=True)[:2] == (True, 0)
        denied = node.check(cost=2)
        assert (denied.reason, denied.plan) == (Reason.LIMIT_EXCEEDED, "gold")
        assert [scope.plan for _, scope in node.denied] == ["gold"]

    def test_spends_are_kept_where_name_window_and_algorithm_match(self, node):
        node.check(cost=9)
        node.assign("gold")
        assert node.check().remaining == 40
        node.assignments.remove(USER, b"ada")
        assert not node.check().allowed

    def test_an_assignment_ends_at_its_expire_time(self, node):
        node.assign("gold", expire_time=NOW_S + 5)
        node.clock.step(5_000_000 - 1)
        assert node.check().plan == "gold"
        node.clock.step(1)
        assert node.check().plan == ""

    def test_a_plan_unknown_to_the_rule_leaves_its_own_limits(self, node):
        node.assign("silver")
        answer = node.check(cost=11)
        assert (answer.allowed, answer.limit, answer.plan) == (False, ORDERS, "")
        node.assign("pro")
        node.put(replace(ORDERS, plans=()))
        assert node.check(cost=11).plan == ""

    def test_a_new_book_applies_its_plans(self, node):
        node.assign("gold")
        assert node.check(cost=20).allowed
        node.put(replace(ORDERS, plans=(Plan("gold", (limit_of(25),)),)))
        assert node.check().remaining == 4

    def test_a_plan_may_only_observe(self, node):
        observed = replace(limit_of(1), enforcement=Enforcement.OBSERVE)
        node.put(replace(ORDERS, plans=(Plan("gold", (observed,)),)))
        node.assign("gold")
        assert [node.check().allowed for _ in range(3)] == [True] * 3
        assert node.stats.would_deny == {"orders,default": [2]}

    def test_the_first_identity_of_a_combination_with_a_plan_of_the_rule_decides(self):
        node = Node(BOTH)
        node.assign("pro")
        assert node.check(also=ACME).plan == "pro"
        node.assign("silver", b"acme", "tenant")
        assert node.check(also=ACME).plan == "pro"
        node.assign("gold", b"acme", "tenant")
        assert node.check(also=ACME).plan == "gold"
        node.assign("unlimited", b"acme", "tenant")
        assert node.check(also=ACME).reason is Reason.UNLIMITED

    def test_plans_do_not_affect_a_rule_for_all_callers(self):
        node = Node(EVERYBODY)
        node.assign("pro")
        assert node.check(cost=200).plan == ""

    def test_each_rule_has_the_plan_of_its_own_identity(self):
        node = Node(ORDERS, TENANT)
        node.assign("pro")
        node.assign("gold", b"acme", "tenant")
        judged = {(one.rule.id, one.limit.name): one.plan for one in node.check(also=ACME).limits}
        assert judged == {
            ("orders", "default"): "pro",
            ("orders", "day"): "pro",
            ("tenant", "default"): "gold",
        }

    def test_scopes_by_plans_are_bounded(self, node, monkeypatch):
        monkeypatch.setattr(scopes_module, "MAX_BY_PLANS", 1)
        node.assign("gold", b"bob")
        node.assign("pro", b"eve")
        for name, plan in ((b"ada", ""), (b"bob", "gold"), (b"eve", "pro")) * 2:
            assert node.check(name).plan == plan
            assert len(node.limiter.scopes.find("/orders", USER).by_plans) == 1

    def test_scopes_by_plans_of_all_endpoints_are_bounded_together(self, node, monkeypatch):
        monkeypatch.setattr(scopes_module, "MAX_OF_PLANS", 6)
        node.put(replace(ORDERS, endpoint="*"))
        node.assign("gold", b"bob")
        endpoints = [f"/{number}" for number in range(20)]
        for endpoint in endpoints:
            for name, plan in ((b"ada", ""), (b"bob", "gold")):
                assert node.limiter.check(Check(name, USER, endpoint)).plan == plan
        kept = [node.limiter.scopes.find(endpoint, USER) for endpoint in endpoints]
        assert 0 < sum(len(one.by_plans) for one in kept) <= 6

    def test_assignments_may_be_loaded_before_the_rules(self):
        node = Node(book=False)
        node.assign("blocked")
        assert node.check().reason is Reason.FAIL_OPEN_ERROR
        node.put(ORDERS)
        assert node.check().reason is Reason.BLOCKED

    def test_types_without_assignments_are_not_looked_up(self, node):
        node.assign("pro", b"::1", IP)
        scope = node.limiter.scopes.find("/orders", USER)
        assert scope.rule is ORDERS
        node.assign("pro")
        assert node.limiter.scopes.find("/orders", USER) is not scope
        node.assignments.remove(USER, b"ada")
        assert node.limiter.scopes.find("/orders", USER).rule is ORDERS

    async def test_a_reset_affects_the_buckets_of_all_plans(self, node):
        node.assign("pro")
        node.check(cost=100)
        node.assignments.remove(USER, b"ada")
        await node.limiter.reset(b"ada", USER, "/orders")
        assert len(node.table) == 0

    def test_a_batch_is_answered_like_its_checks(self, node):
        node.assign("gold")
        node.assign("blocked", b"eve")
        names = [b"bob", b"ada", b"eve", b"ada"]
        answers = node.limiter.check_batch([Check(name, USER, "/orders") for name in names])
        assert [one.plan for one in answers] == ["", "gold", "blocked", "gold"]
        assert [one.remaining for one in answers] == [9, 49, 0, 48]

    def test_an_error_of_the_look_up_fails_open(self, node, monkeypatch):
        node.assign("gold")

        def fail(*_):
            raise RuntimeError

        monkeypatch.setattr(Assignments, "plan_of", fail)
        assert node.check().reason is Reason.FAIL_OPEN_ERROR
        assert len(node.errors) == 1


class TestUnlimited:
    def test_an_unlimited_identity_is_not_charged(self, node):
        node.assign("unlimited")
        answer = node.check(cost=1_000)
        assert answer[:5] == (True, INT32_MAX, 0, 0, Reason.UNLIMITED)
        assert (answer.rule, answer.limit, answer.plan) == (ORDERS, None, "unlimited")
        assert len(node.table) == 0
        assert (node.stats.allowed_total, node.stats.unlimited_total) == (1, 1)
        assert node.stats.bucket_looked_total == 0

    def test_unlimited_is_reported_where_no_rule_applies(self, node):
        node.assign("unlimited")
        answer = node.check(endpoint="/carts")
        assert (answer.reason, answer.rule) == (Reason.UNLIMITED, None)

    def test_other_identities_of_the_check_are_judged(self):
        node = Node(ORDERS, TENANT, EVERYBODY)
        node.assign("unlimited")
        answer = node.check(cost=400, also=ACME)
        assert (answer.allowed, answer.rule) == (True, EVERYBODY)
        assert [(one.rule.id, one.reason) for one in answer.limits] == [
            ("everybody", Reason.WITHIN_LIMIT),
            ("tenant", Reason.WITHIN_LIMIT),
            ("orders", Reason.UNLIMITED),
        ]
        assert answer.limits[-1][1:4] == (INT32_MAX, 0, 0)
        assert answer.limits[-1][6:] == (None, "unlimited")
        assert node.check(also=ACME).rule is EVERYBODY

    def test_a_judging_rule_and_a_passed_over_rule_are_both_reported(self):
        node = Node(ORDERS, TENANT)
        node.assign("unlimited", b"acme", "tenant")
        answer = node.check(also=ACME)
        assert [one.reason for one in answer.limits] == [Reason.WITHIN_LIMIT, Reason.UNLIMITED]

    def test_all_passed_over_rules_are_reported(self):
        node = Node(ORDERS, replace(ORDERS, id="overall", endpoint="**"))
        node.assign("unlimited")
        answer = node.check()
        assert [one.rule.id for one in answer.limits] == ["orders", "overall"]


class TestBlocked:
    def test_a_blocked_identity_is_denied_until_its_expire_time(self, node):
        node.assign("blocked", expire_time=NOW_S + 61)
        node.clock.step(500_000)
        answer = node.check(peek=True)
        assert answer[:5] == (False, 0, NOW_S + 61, 61, Reason.BLOCKED)
        assert (answer.rule, answer.limit, answer.plan) == (None, None, "blocked")
        node.clock.step(60_500_000 - 1)
        assert node.check().retry_after == 1
        node.clock.step(1)
        assert node.check().allowed

    def test_a_block_for_good_has_no_reset_time(self, node):
        node.assign("blocked")
        assert node.check()[:4] == (False, 0, 0, INT32_MAX)
        node.assign("blocked", expire_time=NOW_S + 2**32)
        assert node.check()[2:4] == (NOW_S + 2**32, INT32_MAX)

    @pytest.mark.parametrize("last", [0, NOW_S + 90])
    def test_of_several_blocked_identities_the_one_blocked_longest_decides(self, node, last):
        node.assign("blocked", expire_time=NOW_S + 60)
        node.assign("blocked", b"acme", "tenant", expire_time=last)
        other_way = Check(b"acme", "tenant", "/orders", also=((USER, b"ada"),))
        for answer in (node.check(also=ACME), node.limiter.check(other_way)):
            assert answer[2:4] == (last, 90 if last else INT32_MAX)
        assert [(who, denied.identifier_type) for who, denied in node.denied] == [
            (b"acme", "tenant")
        ] * 2

    def test_a_blocked_check_is_counted_and_reported_as_denied(self, node):
        node.assign("blocked", b"acme", "tenant")
        node.check(also=ACME)
        assert (node.stats.blocked_total, node.stats.plan_blocked_total) == (1, 1)
        assert node.stats.bucket_looked_total == 0
        [(identifier, denied)] = node.denied
        assert (identifier, *denied) == (b"acme", "/orders", "tenant")

    def test_a_block_applies_without_a_rule_and_precedes_unlimited(self, node):
        node.assign("unlimited")
        node.assign("blocked", b"acme", "tenant")
        assert node.check(endpoint="/carts", also=ACME).reason is Reason.BLOCKED
        assert node.check(also=ACME).reason is Reason.BLOCKED
        assert len(node.table) == 0

    def test_an_invalid_timestamp_of_a_blocked_identity_is_refused(self):
        node = Node(ORDERS, timestamps="caller")
        node.assign("blocked")
        with pytest.raises(CheckInvalidError):
            node.check(timestamp=-1)
        assert node.stats.blocked_total == 0


class TestSharedState:
    async def test_the_shared_state_decides_by_the_limit_of_the_plan(self):
        node = Sharing(ORDERS)
        node.assign("gold")
        assert node.check() is None
        answer = await node.wait(GRANTED)
        assert (answer.limit.limit, answer.plan) == (50, "gold")
        node.shared.answers.append(GRANTED)
        explained = await node.dry_run.explain(check_of())
        assert (explained.decision.plan, explained.plans) == (
            "gold",
            (AssignedPlan(USER, "gold", 0),),
        )

    @pytest.mark.parametrize(
        ("plan", "reason"), [("blocked", Reason.BLOCKED), ("unlimited", Reason.UNLIMITED)]
    )
    async def test_reserved_plans_need_no_shared_state(self, plan, reason):
        node = Sharing(ORDERS)
        node.assign(plan)
        assert node.check().reason is reason
        answer = await node.wait()
        assert (answer.reason, node.shared.asked) == (reason, [])


class TestExplaining:
    async def test_the_plan_and_its_expire_time_are_explained(self):
        node = Node(ORDERS, TENANT)
        node.assign("pro", expire_time=NOW_S + 9)
        node.assign("silver", b"acme", "tenant")
        check = Check(b"ada", USER, "/orders", also=ACME)
        decision, considered, plans, _ = await node.dry_run.explain(check)
        assert decision == node.limiter.check(check._replace(peek=True))
        assert [(one.rule.id, one.plan) for one in considered] == [
            ("orders", "pro"),
            ("tenant", ""),
        ]
        assert plans == (AssignedPlan(USER, "pro", NOW_S + 9), AssignedPlan("tenant", "silver", 0))

    @pytest.mark.parametrize("plan", ["unlimited", "blocked"])
    async def test_passed_over_rules_are_explained(self, node, plan):
        node.put(ORDERS, replace(ORDERS, id="star", endpoint="*"))
        node.assign(plan)
        check = check_of()
        decision, considered, *_ = await node.dry_run.explain(check)
        assert decision == node.limiter.check(check)
        assert [(one.match, one.plan, one.limits) for one in considered] == [
            (Match.PASSED_OVER, plan, ()),
            (Match.OVERRIDDEN, "", ()),
        ]
