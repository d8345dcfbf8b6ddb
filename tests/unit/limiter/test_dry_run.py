"""Dry runs and explanations charge and count nothing."""

from dataclasses import replace

import pytest

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.limiter import dry_run as dry_run_module
from ratelimitd.model import Check, Enforcement, Match, Reason
from tests.unit.limiter.nodes import (
    AWAY,
    EVERYWHERE,
    GRANTED,
    NO_RULE,
    ORDERS,
    REFUSED,
    USER,
    Node,
    Sharing,
    check_of,
)


class TestExplaining:
    """The answer that a check would get, and every rule considered."""

    TENANT = replace(ORDERS, id="tenant", identifier_type="tenant", limit=15)

    async def test_each_rule_reports_whether_it_applies(self):
        overall = replace(ORDERS, id="overall", endpoint="**", enabled=False)
        elsewhere = replace(ORDERS, id="elsewhere", endpoint="/else")
        node = Node(ORDERS, EVERYWHERE, self.TENANT, overall, elsewhere)
        decision, considered, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", 4))
        assert decision == node.check(cost=4, peek=True)
        assert [(one.rule.id, one.match, len(one.limits)) for one in considered] == [
            ("orders", Match.JUDGES, 1),
            ("everywhere", Match.OVERRIDDEN, 0),
            ("overall", Match.DISABLED, 0),
            ("tenant", Match.NOT_NAMED, 0),
        ]
        assert considered[0].limits[0][:5] == decision[:5]

    async def test_each_of_several_limits_reports_its_status(self):
        node = Node(ORDERS, self.TENANT)
        node.check(cost=9, also=(("tenant", b"t"),))
        before = node.stats.allowed_total, node.stats.blocked_total, node.stats.bucket_missed_total
        check = Check(b"ada", USER, "/orders", 4, also=(("tenant", b"t"),))
        decision, considered, *_ = await node.dry_run.explain(check)
        assert (decision.allowed, decision.rule) == (False, ORDERS)
        assert [[one.allowed for one in rule.limits] for rule in considered] == [[False], [True]]
        after = node.stats.allowed_total, node.stats.blocked_total, node.stats.bucket_missed_total
        assert (after, node.denied) == (before, [])

    async def test_an_observing_limit_lets_the_check_pass(self):
        node = Node(replace(ORDERS, enforcement=Enforcement.OBSERVE))
        node.check(cost=10)
        decision, (one,), *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert (decision.allowed, one.limits[0].allowed) == (True, False)

    async def test_a_check_without_a_rule_is_explained(self, node):
        node.put(self.TENANT)
        decision, (one,), *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert (decision, one.match) == (NO_RULE, Match.NOT_NAMED)

    async def test_without_a_book_an_explanation_is_refused(self):
        with pytest.raises(StoreUnavailableError, match="no rules are loaded"):
            await Sharing(book=False).dry_run.explain(check_of())

    async def test_a_callers_time_is_used(self, node):
        node.check(cost=10)
        later = node.clock.now_us() + 1_000_000
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", timestamp=later))
        assert decision.retry_after == 59

    async def test_a_timestamp_out_of_tolerance_is_not_counted(self, node):
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", timestamp=5))
        assert (decision.allowed, node.stats.clock_rejected_total) == (True, 0)

    async def test_shared_buckets_are_asked_for_all_rules(self):
        overall = replace(ORDERS, id="overall", endpoint="**")
        node = Sharing(ORDERS, overall)
        check = check_of(cost=3)
        node.shared.answers += [GRANTED, REFUSED]
        decision, considered, *_ = await node.dry_run.explain(check)
        assert (decision[:5], decision.rule) == (REFUSED[:5], overall)
        assert [(one.rule, one.limits[0].allowed) for one in considered] == [
            (ORDERS, True), (overall, False),
        ]  # fmt: skip
        node.shared.at_once = REFUSED
        assert (await node.dry_run.explain(check))[0][:5] == REFUSED[:5]
        assert (node.stats.allowed_total, node.stats.blocked_total) == (0, 0)
        assert [peek for *_, peek in node.shared.asked] == [True, True]

    async def test_what_a_node_knows_of_shared_buckets_is_renewed_first(self):
        node = Sharing(ORDERS, replace(ORDERS, id="overall", endpoint="**"))
        node.shared.at_once = GRANTED
        await node.dry_run.explain(check_of())
        assert [key[:3] for key in node.shared.refreshed] == [b"ada", b"ada"]

    async def test_an_unreachable_shared_state_is_an_error(self):
        node = Sharing(ORDERS)
        node.shared.answers.append(AWAY)
        with pytest.raises(StoreUnavailableError):
            await node.dry_run.explain(check_of())


class TestUsedAndNearestRules:
    """Rules that have applied to a check, and rules similar to the endpoint of a check without one."""

    async def test_a_rule_counts_as_used_when_it_applies_even_if_another_decides(self):
        everywhere = replace(EVERYWHERE, endpoint="**", limit=1_000)
        node = Node(ORDERS, everywhere, replace(ORDERS, id="carts", endpoint="/carts"))
        assert node.stats.used_rules == set()
        node.limiter.check(Check(b"ada", USER, "/orders"))
        assert node.stats.used_rules == {"orders", "everywhere"}

    async def test_an_explanation_uses_no_rule_and_creates_no_counter(self):
        node = Node(ORDERS)
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert decision.rule is ORDERS
        assert (node.stats.used_rules, node.stats.by_rule) == (set(), {})
        node.limiter.check(Check(b"ada", USER, "/orders"))
        assert node.stats.used_rules == {"orders"}

    async def test_the_nearest_rule_is_reported_for_a_check_without_a_rule(self):
        many = [replace(ORDERS, id=f"{n}", endpoint=f"/carts/{n}") for n in range(300)]
        node = Node(ORDERS, *many)
        explained = await node.dry_run.explain(Check(b"ada", USER, "/Orders/"))
        assert explained.nearest == ((ORDERS, "differs in case, differs in slashes"),)
        assert explained.decision.reason is Reason.NO_RULE

    async def test_no_nearest_rule_is_reported_for_a_check_with_its_own_rule(self):
        node = Node(ORDERS, replace(ORDERS, id="other", endpoint="/Orders"))
        assert (await node.dry_run.explain(Check(b"ada", USER, "/orders"))).nearest == ()

    async def test_only_another_spelling_is_reported_for_a_check_under_the_global_rule(self):
        every = replace(ORDERS, id="every", endpoint="*")
        node = Node(ORDERS, every, replace(ORDERS, id="below", endpoint="/orders/{id}"))
        explained = await node.dry_run.explain(Check(b"ada", USER, "/Orders"))
        assert explained.decision.rule is every
        assert explained.nearest == ((ORDERS, "differs in case"),)
        explained = await node.dry_run.explain(Check(b"ada", USER, "/orders/42"))
        assert (explained.decision.rule, explained.nearest) == (every, ())
        explained = await node.dry_run.explain(Check(b"ada", USER, "/order"))
        assert explained.nearest == ((ORDERS, "is spelled nearly the same"),)

    async def test_the_search_for_nearest_rules_is_bounded(self, monkeypatch):
        monkeypatch.setattr(dry_run_module, "MAX_CONSIDERED", 0)
        assert (await Node(ORDERS).dry_run.explain(Check(b"ada", USER, "/Orders"))).nearest == ()
