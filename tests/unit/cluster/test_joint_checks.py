"""Checks on several shared buckets: all are charged, or none is."""

from dataclasses import replace
from typing import ClassVar

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.joint_checks import JointCheck
from ratelimitd.errors import BreakerOpenError, StoreSlowError, StoreUnavailableError
from ratelimitd.ledger import local_view
from ratelimitd.model import US_PER_S, Algorithm, Enforcement
from tests.unit.cluster.world import MS, World, limited, name_of, unwatch

USER = limited(100)
TENANT = limited(100)
SEEN = limited(10, enforcement=Enforcement.OBSERVE)
TOKENS = limited(100, algorithm=Algorithm.TOKEN_BUCKET)
LOG = limited(100, algorithm=Algorithm.SLIDING_WINDOW)


class Scene(World):
    """A node; ``a`` is a user's bucket, ``t`` the tenant's, and ``s`` one of a limit that only observes.

    ``b`` and ``l`` are of other algorithms.
    """

    RULES: ClassVar = {b"a": USER, b"t": TENANT, b"s": SEEN, b"b": TOKENS, b"l": LOG}

    def __init__(self, **options):
        super().__init__(members=2, **options)

    def charges(self, keys):
        rules = [self.RULES[bytes([key])] for key in keys]
        return [
            (bytes([key]), rule, DECIDE[rule.algorithm])
            for key, rule in zip(keys, rules, strict=True)
        ]

    def all_at_once(self, keys=b"at", cost=1):
        return self.buckets.apply_each(
            self.charges(keys), self.clock.now_us(), costs_of(keys, cost)
        )

    def peek_all(self, keys=b"at", cost=1):
        return self.buckets.peek_each(self.charges(keys), self.clock.now_us(), costs_of(keys, cost))

    def wait_all(self, keys=b"at", cost=1, remaining_s=None, *, peek=False):
        charges, now_us, costs = self.charges(keys), self.clock.now_us(), costs_of(keys, cost)
        return self.buckets.wait_all(charges, now_us, costs, remaining_s, peek=peek)

    def met(self, keys=b"at", cost=1, **options):
        answer = self.wait_all(keys, cost, **options)
        self.run(30 * MS)
        return answer.result()

    def know_all(self, keys=b"at"):
        """Bring the buckets into use on the node."""
        for key in keys:
            one = bytes([key])
            self.wait(one, rule=self.RULES[one], peek=True)
        self.run(2 * MS)
        for key in keys:
            self.peek(bytes([key]), rule=self.RULES[bytes([key])])
        unwatch(self.refresh.queue)

    def others_spend(self, key, tokens):
        """Spend on another node, and notify this one."""
        self.store.spend(key, self.RULES[key], tokens, self.clock.now_us())
        self.refresh.adopt_by_name(name_of(key), self.store.ledger.buckets[name_of(key)])

    def spent(self, keys=b"at"):
        return [self.store.spent(bytes([key])) for key in keys]


def costs_of(keys, cost):
    return [cost] * len(keys) if isinstance(cost, int) else cost


@pytest.fixture
async def scene():
    return Scene()


def verdicts(outcomes):
    return [outcome[:2] for outcome in outcomes]


async def test_a_check_within_the_shares_charges_all_buckets_at_once(scene):
    scene.know_all()
    assert verdicts(scene.all_at_once(cost=3)) == [(True, 97), (True, 97)]
    scene.settle()
    assert scene.spent() == [3, 3]


async def test_each_bucket_has_its_cost(scene):
    scene.know_all()
    assert verdicts(scene.all_at_once(cost=[3, 5])) == [(True, 97), (True, 95)]
    scene.settle()
    assert verdicts(scene.met(cost=[7, 96])) == [(True, 97), (False, 95)]
    scene.settle()
    assert (scene.spent(), scene.buckets.given_back_total) == ([3, 5], 0)


async def test_a_used_up_share_is_sent_at_once(scene):
    scene.know_all()
    scene.all_at_once(cost=25)
    scene.run(30 * MS)
    assert scene.spent() == [25, 25]


async def test_a_denial_by_a_view_charges_nothing_and_reports_the_other_buckets(scene):
    scene.know_all()
    scene.others_spend(b"t", 100)
    requests = len(scene.store.requests)
    user, tenant = scene.all_at_once(cost=3)
    assert (user[:2], user[3], tenant[:2]) == ((True, 100), 0, (False, 0))
    scene.settle()
    assert (scene.spent(), len(scene.store.requests)) == ([0, 100], requests)
    assert scene.view().is_clean


async def test_a_denied_bucket_is_queued_for_refresh(scene):
    scene.know_all()
    scene.others_spend(b"t", 100)
    scene.all_at_once()
    assert len(scene.refresh.queue) == 1


async def test_each_bucket_of_a_peek_is_queued_for_refresh_once(scene):
    scene.know_all()
    for _ in range(2):
        scene.peek_all()
    assert len(scene.refresh.queue) == 2


async def test_unknown_buckets_are_requested_together_and_the_check_waits_for_all(scene):
    assert scene.all_at_once() is None
    answer = scene.wait_all(cost=3)
    assert scene.store.asked("first_check") == [name_of(b"a"), name_of(b"t")]
    assert not answer.done()
    scene.run(2 * MS)
    assert verdicts(answer.result()) == [(True, 97), (True, 97)]
    assert scene.spent() == [3, 3]
    assert scene.stats.bucket_missed_total == 1


async def test_a_check_is_answered_before_its_caller_stops_waiting(scene):
    scene.know_all(b"t")
    scene.others_spend(b"t", 99)
    scene.store.mode = "deaf"
    answer = scene.wait_all(remaining_s=0.012)
    scene.run(9 * MS - 1)
    assert not answer.done()
    scene.run(1)
    unknown, known = answer.result()
    assert isinstance(unknown, StoreSlowError)
    assert known[0]


async def test_charges_of_a_denied_check_are_refunded(scene):
    scene.store.spend(b"t", TENANT, 99, scene.clock.now_us())
    assert verdicts(scene.met(cost=3)) == [(True, 100), (False, 1)]
    assert scene.spent() == [0, 99]
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (3, 0)
    assert scene.store.ledger.buckets[name_of(b"a")].refunded == 3
    scene.settle()
    assert scene.all_at_once(b"a", 20)[0][:2] == (True, 80)


@pytest.mark.parametrize(
    ("key", "spent", "until_full_s"), [(b"b", 0, 0), (b"b", 10, 360), (b"l", 0, 0)]
)
async def test_a_denied_check_reports_the_reset_time_of_another_bucket_without_its_charge(
    scene, key, spent, until_full_s
):
    scene.store.spend(b"t", TENANT, 99, scene.clock.now_us())
    if spent:
        scene.store.spend(key, scene.RULES[key], spent, scene.clock.now_us())
    now_s = -(-scene.clock.now_us() // US_PER_S)
    [other, _] = scene.met(key + b"t", cost=3)
    assert other[:3] == (True, 100 - spent, now_s + until_full_s)


async def test_a_check_denied_by_a_known_bucket_reports_the_reset_time_of_an_unknown_one(scene):
    scene.know_all(b"t")
    scene.others_spend(b"t", 100)
    [other, _] = scene.met(b"bt", cost=3)
    assert other[:3] == (True, 100, -(-scene.clock.now_us() // US_PER_S))


async def test_views_reserve_tokens_while_a_bucket_near_its_limit_is_requested(scene):
    scene.know_all()
    scene.others_spend(b"t", 99)
    scene.store.mode = "held"
    answer = scene.wait_all()
    scene.run()
    view = scene.view(b"a")
    assert (view.reserved, view.unsent.tokens, view.is_clean) == (1, 0, False)
    (batch,) = [request.subject for request in scene.store.held]
    assert [*batch.updates] == [name_of(b"t")]
    scene.store.held_one().answer()
    scene.run()
    assert verdicts(answer.result()) == [(True, 99), (True, 0)]
    assert (view.reserved, view.unsent.tokens) == (0, 1)


async def test_reserved_tokens_are_released_after_a_denial(scene):
    scene.know_all()
    scene.others_spend(b"t", 99)
    scene.store.spend(b"t", TENANT, 1, scene.clock.now_us())
    assert verdicts(scene.met()) == [(True, 100), (False, 0)]
    assert scene.view(b"a").is_clean
    scene.settle()
    assert scene.spent() == [0, 100]


async def test_one_charge_is_refunded_when_both_buckets_are_near_their_limits(scene):
    scene.know_all()
    scene.others_spend(b"a", 98)
    scene.others_spend(b"t", 98)
    scene.store.spend(b"t", TENANT, 2, scene.clock.now_us())
    assert verdicts(scene.met(cost=2)) == [(True, 2), (False, 0)]
    scene.settle()
    assert scene.spent() == [98, 100]
    assert scene.view(b"a").base.refunded == 2


async def test_the_views_decide_a_check_after_a_timeout(scene):
    scene.know_all()
    scene.others_spend(b"t", 99)
    scene.store.mode = "held"
    answer = scene.wait_all()
    scene.run(21 * MS)
    assert verdicts(answer.result()) == [(True, 99), (True, 0)]
    assert scene.buckets.late_total == 1


async def test_a_charge_by_a_view_after_a_timeout_stays_when_another_bucket_denies(scene):
    scene.know_all()
    scene.others_spend(b"a", 98)
    scene.others_spend(b"t", 99)
    scene.store.mode = "held"
    answer = scene.wait_all()
    scene.run()
    user, tenant = sorted(scene.store.held, key=lambda one: [*one.subject.updates])
    scene.store.spend(b"t", TENANT, 1, scene.clock.now_us())
    tenant.answer()
    assert not answer.done()
    scene.run(21 * MS)
    assert verdicts(answer.result()) == [(True, 2), (False, 0)]
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (0, 1)
    user.answer()


async def test_an_unknown_bucket_is_only_peeked_at_when_a_known_one_denies(scene):
    scene.know_all(b"t")
    scene.others_spend(b"t", 100)
    assert scene.all_at_once() is None
    assert verdicts(scene.met(cost=3)) == [(True, 100), (False, 0)]
    assert scene.spent() == [0, 100]
    assert scene.buckets.given_back_total == 0
    assert verdicts(scene.all_at_once(cost=3)) == [(True, 100), (False, 0)]


@pytest.mark.parametrize("rule", [USER, TOKENS, LOG])
async def test_a_cost_above_an_unknown_enforced_limit_charges_no_other_bucket(scene, rule):
    scene.RULES = {**Scene.RULES, b"a": replace(rule, limit=2)}
    answer = scene.wait_all(cost=3)
    scene.run(MS)
    assert scene.spent(b"t") == [0]
    scene.run(MS)
    assert verdicts(answer.result()) == [(False, 2), (True, 100)]
    assert scene.buckets.given_back_total == 0


async def test_a_cost_above_an_observing_limit_is_charged_to_the_others(scene):
    assert verdicts(scene.met(b"ts", cost=11)) == [(True, 89), (False, 10)]
    assert scene.spent(b"t") == [11]


async def test_a_bucket_near_its_limit_is_not_requested_when_another_denies(scene):
    scene.know_all()
    scene.others_spend(b"a", 99)
    scene.others_spend(b"t", 100)
    assert verdicts(scene.all_at_once()) == [(True, 1), (False, 0)]
    assert scene.buckets.asked_total == 0


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_peek_charges_nothing(scene, is_known):
    if is_known:
        scene.know_all()
        assert verdicts(scene.peek_all(cost=3)) == [(True, 97), (True, 97)]
    else:
        assert scene.peek_all() is None
        assert verdicts(scene.met(cost=3, peek=True)) == [(True, 97), (True, 97)]
    scene.store.spend(b"t", TENANT, 100, scene.clock.now_us())
    if not is_known:
        scene.lose_messages()
        assert verdicts(scene.met(cost=3, peek=True)) == [(True, 100), (False, 0)]
    scene.settle()
    assert scene.spent() == [0, 100]


# Limits that only observe


async def test_after_a_gap_what_the_buckets_had_left_decides_if_the_store_is_late(scene):
    scene.know_all()
    scene.all_at_once(cost=[10, 20])
    scene.settle()
    scene.pack()
    scene.lose_messages()
    scene.store.mode = "deaf"
    assert verdicts(scene.met(cost=[10, 60])) == [(True, 80), (True, 20)]
    assert verdicts(scene.met(cost=[10, 21])) == [(True, 80), (False, 20)]
    scene.store.mode = "up"
    scene.settle()
    assert scene.spent() == [20, 80]


async def test_an_observing_limit_is_charged_with_the_others_and_denies_nothing(scene):
    scene.know_all(b"as")
    assert verdicts(scene.all_at_once(b"as", 2)) == [(True, 98), (True, 8)]
    scene.settle()
    scene.others_spend(b"s", 8)
    assert verdicts(scene.all_at_once(b"as", 2)) == [(True, 96), (False, 0)]
    scene.settle()
    assert scene.spent(b"as") == [4, 10]


async def test_an_observing_limit_is_refunded_when_the_check_is_denied(scene):
    scene.store.spend(b"t", TENANT, 100, scene.clock.now_us())
    assert verdicts(scene.met(b"st")) == [(True, 10), (False, 0)]
    scene.settle()
    assert scene.spent(b"st") == [0, 100]


# Buckets that cannot be reached


@pytest.mark.parametrize("breaker_denies", [False, True])
@pytest.mark.parametrize("known", [b"at", b""])
async def test_an_open_breaker_charges_nothing_and_returns_errors(known, breaker_denies):
    scene = Scene(breaker_denies=breaker_denies)
    scene.know_all(known)
    scene.open_breaker()
    requests = len(scene.store.requests)
    assert scene.all_at_once() is None
    outcomes = scene.met()
    assert [type(outcome) for outcome in outcomes] == [BreakerOpenError, BreakerOpenError]
    assert len(scene.store.requests) == requests


async def test_an_unanswered_bucket_does_not_deny_and_the_others_are_charged(scene):
    scene.know_all(b"t")
    scene.store.mode = "down"
    user, tenant = scene.met()
    assert (type(user), tenant[:2]) == (StoreUnavailableError, (True, 99))
    scene.store.mode = "up"
    scene.settle()
    assert scene.spent() == [0, 1]


async def test_an_open_breaker_may_deny():
    scene = Scene(breaker_denies=True)
    scene.know_all(b"t")
    scene.buckets.errors_that_deny = (*scene.buckets.errors_that_deny, StoreUnavailableError)
    scene.store.mode = "down"
    user, tenant = scene.met()
    assert (type(user), tenant[:2]) == (StoreUnavailableError, (True, 100))
    scene.store.mode = "up"
    scene.settle()
    assert scene.spent() == [0, 0]


async def test_a_node_that_decides_alone_charges_all_or_none():
    scene = Scene(decides_alone=True)
    scene.know_all()
    scene.open_breaker()
    assert verdicts(scene.all_at_once(cost=60)) == [(True, 40), (True, 40)]
    assert verdicts(scene.all_at_once(cost=60)) == [(False, 40), (False, 40)]
    views = [scene.view(key) for key in (b"a", b"t")]
    assert [view.unsent.tokens + view.in_flight_tokens for view in views] == [60, 60]


async def test_refunds_beyond_a_bound_are_counted_as_kept(scene, monkeypatch):
    monkeypatch.setattr(local_view, "MAX_REFUNDS", 0)
    scene.store.spend(b"t", TENANT, 99, scene.clock.now_us())
    assert not scene.met(cost=3)[1][0]
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (0, 3)


async def test_charges_that_cannot_be_refunded_are_counted(scene):
    scene.store.spend(b"t", TENANT, 100, scene.clock.now_us())
    scene.store.mode = "held"
    answer = scene.wait_all(cost=3)
    user, tenant = scene.store.held
    user.answer()
    scene.open_breaker()
    tenant.answer()
    scene.run()
    assert verdicts(answer.result()) == [(True, 100), (False, 0)]
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (0, 3)


async def test_a_bucket_evicted_while_tokens_are_reserved_is_found_again():
    scene = Scene(max_entries=2)
    scene.know_all()
    scene.others_spend(b"t", 99)
    scene.store.mode = "held"
    answer = scene.wait_all()
    scene.run()
    request = scene.store.held_one()
    scene.cache._max_entries = 0
    scene.cache.step(scene.clock.monotonic_us())
    request.answer()
    scene.run()
    assert verdicts(answer.result()) == [(True, 99), (True, 0)]
    scene.store.mode = "up"
    scene.settle()
    assert scene.spent() == [1, 100]


async def test_a_bucket_evicted_without_a_charge_is_dropped():
    scene = Scene(max_entries=2)
    scene.know_all()
    scene.others_spend(b"t", 99)
    scene.store.mode = "held"
    scene.wait_all()
    scene.run()
    request = scene.store.held_one()
    scene.store.spend(b"t", TENANT, 1, scene.clock.now_us())
    scene.cache._max_entries = 0
    scene.cache.step(scene.clock.monotonic_us())
    request.answer()
    scene.run()
    assert scene.tags[ord("a")].buckets == {}


async def test_a_charge_of_a_bucket_evicted_since_is_refunded():
    scene = Scene(max_entries=2)
    scene.store.spend(b"t", TENANT, 100, scene.clock.now_us())
    scene.store.mode = "held"
    answer = scene.wait_all(cost=3)
    scene.run()
    user, tenant = scene.store.held
    user.answer()
    scene.run()
    assert scene.spent() == [3, 100]
    scene.cache._max_entries = 0
    scene.cache.step(scene.clock.monotonic_us())
    assert len(scene.cache) == 0
    scene.store.mode = "up"
    tenant.answer()
    scene.run(30 * MS)
    assert verdicts(answer.result()) == [(True, 100), (False, 0)]
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (3, 0)
    assert scene.spent() == [0, 100]


async def test_a_check_whose_caller_left_charges_all_buckets_or_none(scene):
    answer = scene.wait_all(cost=3)
    answer.cancel()
    scene.run(30 * MS)
    assert scene.spent() == [3, 3]


async def test_a_defect_is_reported_and_leaves_nothing_reserved(scene, monkeypatch):
    scene.know_all(b"t")

    def fails(*_args):
        raise ZeroDivisionError

    monkeypatch.setattr(scene.store, "first_check", fails)
    user, tenant = scene.met()
    assert (type(user), tenant[:2]) == (ZeroDivisionError, (True, 99))
    assert scene.view(b"t").reserved == 0


async def test_a_defect_at_the_end_is_raised(scene, monkeypatch):
    answer = scene.wait_all()
    monkeypatch.setattr(scene.buckets, "errors_that_deny", None)
    scene.run(30 * MS)
    with pytest.raises(TypeError):
        answer.result()


async def test_a_check_that_has_to_wait_reserves_nothing(scene):
    scene.know_all()
    scene.others_spend(b"t", 99)
    assert scene.all_at_once() is None
    assert scene.view(b"a").is_clean


async def test_checks_during_a_first_check_are_decided_by_its_result(scene):
    answers = [scene.wait_all(cost=cost) for cost in (3, 4)]
    scene.run(30 * MS)
    assert [verdicts(answer.result()) for answer in answers] == [
        [(True, 97), (True, 97)], [(True, 93), (True, 93)],
    ]  # fmt: skip
    scene.settle()
    assert scene.spent() == [7, 7]


async def test_checks_are_charged_before_earlier_ones_are_settled(scene):
    scene.know_all()
    assert [scene.all_at_once()[0][1] for _ in range(3)] == [99, 98, 97]
    scene.settle()
    assert scene.spent() == [3, 3]


async def test_a_newer_rule_is_applied(scene):
    scene.know_all()
    scene.RULES = {**scene.RULES, b"t": replace(TENANT, limit=50, revision=2)}
    assert verdicts(scene.all_at_once(cost=3)) == [(True, 97), (True, 47)]


async def test_a_part_is_decided_once(scene):
    charges = scene.charges(b"a")
    joint = JointCheck(
        scene.buckets, scene.timers, charges, scene.clock.now_us(), [1] * len(charges), peek=False
    )
    joint.start(answer := scene.buckets._new_future())
    (waiting,) = scene.buckets._first_checks[b"a"]
    scene.run(2 * MS)
    waiting.resolve(StoreUnavailableError("late"))
    assert verdicts(answer.result()) == [(True, 99)]


async def test_a_defect_of_one_view_releases_the_tokens_of_the_others(scene, monkeypatch):
    scene.know_all()
    monkeypatch.setattr(scene.view(b"t"), "_decide", None)
    with pytest.raises(TypeError):
        scene.all_at_once()
    assert scene.view(b"a").is_clean
