"""The use case of holds: answers, counters, holds in flight, and failing open."""

from dataclasses import replace

import pytest

from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import MIN_ENDS, STEP, Held
from ratelimitd.limiter.holder import Holder
from ratelimitd.model import (
    US_PER_S,
    Algorithm,
    Calendar,
    Check,
    Enforcement,
    Limit,
    Period,
    Reason,
    Rule,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock
from tests.unit.limiter.nodes import KEYS, NOW_S, limiter_of

RULE = Rule("r1", "/a", "user", limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
SEVERAL = Rule(
    "r2", "/b", "user", limit=10, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET,
    more=(
        Limit(limit=5, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW, name="five"),
        Limit(
            limit=2, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW, name="two",
            enforcement=Enforcement.OBSERVE,
        ),
    ),
)  # fmt: skip
SLOTS = Rule("r3", "/c", "user", limit=2, window_seconds=30, algorithm=Algorithm.CONCURRENCY)
RULES = (RULE, SEVERAL, SLOTS)


class Scene:
    """A holder on a node's own buckets, or on the given ``holds``."""

    def __init__(self, holds=None, *, rules=RULES, **bounds):
        self.clock, self.stats = ManualClock(), CheckStats()
        keys = KEYS
        table = BucketTable(100)
        self.limiter = limiter_of(self.clock, self.stats, buckets=table)
        if rules is not None:
            self.limiter.replace_book(RuleBook.of(rules, 1))
        self.holds = holds or OwnHolds(table, keys, self.clock.now_us, **bounds)
        self.holder = Holder(
            self.limiter, self.holds, keys=keys, clock=self.clock, stats=self.stats
        )
        self.numbers = iter(range(1, 1_000_000))

    async def hold(self, endpoint="/a", cost=4, *, ttl_s=60, number=None, lease=False, **fields):
        self.number = number or next(self.numbers).to_bytes(16, "big")
        check = Check(b"u", "user", endpoint, cost, **fields)
        digest = str(cost).encode()
        self.held = await self.holder.hold(
            check, self.number, digest, ttl_s * US_PER_S, lease=lease
        )
        self.cost = cost
        return self.held

    async def settle(self, actual):
        return await self.holder.settle(self.number, self.held.limits, self.cost, actual)

    async def extend(self, ttl_s):
        return await self.holder.extend(self.number, self.held.limits, ttl_s * US_PER_S)

    def in_flight(self):
        return [(one.rule.id, one.name, *one[2:]) for one in self.holder.in_flight()]


class Failing:
    """Keeps no holds; raises the given error."""

    def __init__(self, error):
        self.error = error

    async def hold(self, _):
        raise self.error


async def test_a_hold_is_answered_like_a_check_and_in_flight_until_it_is_settled():
    scene = Scene()
    held = await scene.hold()
    assert (held.decision.allowed, held.decision.remaining) == (True, 6)
    assert held.expire_us == (NOW_S + 60) * US_PER_S
    assert scene.in_flight() == [("r1", "default", 1, 4)]
    settled = await scene.settle(1)
    assert settled.known
    [status] = settled.limits
    assert (status.remaining, status.rule.id, status.limit.limit) == (9, "r1", 10)
    assert scene.in_flight() == []
    assert scene.stats.holds == {"made": 1, "settled": 1, "expired": 0, "refused": 0}
    assert scene.stats.hold_tokens == {"held": 4, "refunded": 3, "debt": 0}


async def test_a_hold_that_observing_limits_deny_is_in_flight_until_it_is_settled():
    observing = replace(RULE, limit=1, enforcement=Enforcement.OBSERVE)
    scene = Scene(rules=[observing], max_holds=1)
    for _ in range(2):
        held = await scene.hold()
        assert held.decision.allowed
        assert (scene.in_flight(), scene.stats.holds_open) == ([], 1)
        assert await scene.extend(90) == held.expire_us + 30 * US_PER_S
        settled = await scene.settle(1)
        assert (settled.known, settled.limits) == (True, [])
        assert scene.stats.holds_open == 0


@pytest.mark.parametrize("rule", [RULE, SLOTS], ids=["tokens", "slots"])
@pytest.mark.parametrize("limit", [1, 3, 20])
async def test_a_settle_reports_what_the_next_check_finds_under_an_edited_limit(rule, limit):
    scene = Scene()
    for number in (b"1" * 16, b"2" * 16):
        await scene.hold(rule.endpoint, 2, number=number)
    scene.limiter.replace_book(RuleBook.of([replace(rule, limit=limit)], 2))
    [status] = (await scene.settle(1)).limits
    decision = scene.limiter.check(Check(b"u", "user", rule.endpoint, 1))
    assert (status.limit.limit, status.allowed) == (limit, True)
    assert status.remaining - decision.allowed * (rule is RULE) == decision.remaining


async def test_a_settle_after_an_edit_of_the_window_reports_the_bucket_of_the_hold():
    scene = Scene()
    await scene.hold()
    edited = replace(RULE, limit=20, window_seconds=90)
    scene.limiter.replace_book(RuleBook.of([edited], 2))
    [status] = (await scene.settle(1)).limits
    assert (status.remaining, status.limit) == (9, edited)


async def test_repeated_calls_count_once():
    scene = Scene()
    for _ in range(3):
        await scene.hold(number=b"n" * 16)
    for _ in range(3):
        await scene.settle(6)
    with pytest.raises(CheckInvalidError, match="hold_id"):
        await scene.hold(number=b"n" * 16)
    assert scene.stats.holds == {"made": 1, "settled": 1, "expired": 0, "refused": 0}
    assert scene.stats.hold_tokens == {"held": 4, "refunded": 0, "debt": 2}
    assert (scene.in_flight(), scene.stats.holds_open) == ([], 0)
    with pytest.raises(HoldSettledError, match=r"^actual: .* with another number of tokens$"):
        await scene.settle(5)
    with pytest.raises(HoldSettledError, match=r"^hold: the hold was settled before$"):
        await scene.extend(5)
    with pytest.raises(CheckInvalidError, match="hold_id"):
        await scene.hold(cost=5, number=b"n" * 16)


async def test_a_hold_charges_only_the_limits_that_pass():
    scene = Scene()
    held = await scene.hold("/b", 3)
    assert held.decision.allowed
    assert [one.name for one in held.limits] == ["default", "five"]
    assert sorted(scene.in_flight()) == [("r2", "default", 1, 3), ("r2", "five", 1, 3)]
    denied = await scene.hold("/b", 3)
    assert (denied.decision.allowed, denied.limits, denied.expire_us) == (False, (), 0)
    assert len(scene.in_flight()) == 2


@pytest.mark.parametrize(("endpoint", "cost", "most"), [("/a", 11, 10), ("/b", 6, 5)])
async def test_a_cost_above_an_enforced_limit_is_refused(endpoint, cost, most):
    with pytest.raises(CheckInvalidError, match=f"tokens_requested: is above the limit of {most}"):
        await Scene().hold(endpoint, cost)


async def test_a_hold_that_no_limit_judges_holds_nothing():
    scene = Scene()
    held = await scene.hold("/none")
    assert (held.decision.reason, held.limits, held.expire_us) == (Reason.NO_RULE, (), 0)
    assert scene.in_flight() == []


async def test_without_rules_a_hold_fails_open():
    held = await Scene(rules=None).hold()
    assert held.decision.reason is Reason.FAIL_OPEN_ERROR


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailableError("away"), Reason.FAIL_OPEN_ERROR),
        (BreakerOpenError(5), Reason.FAIL_OPEN_BREAKER),
        (ZeroDivisionError(), Reason.FAIL_OPEN_ERROR),
    ],
    ids=["away", "open", "defect"],
)
async def test_a_hold_fails_open_when_the_store_fails(error, reason):
    scene = Scene(Failing(error))
    held = await scene.hold()
    assert (held.decision.allowed, held.decision.reason, held.limits) == (True, reason, ())


@pytest.mark.parametrize("enforcement", [Enforcement.ENFORCE, Enforcement.OBSERVE])
async def test_an_open_breaker_that_denies_denies_holds_by_enforced_limits_only(enforcement):
    scene = Scene(Failing(BreakerOpenError(5)), rules=[replace(RULE, enforcement=enforcement)])
    scene.limiter.breaker_denies = True
    held = await scene.hold()
    assert held.decision.reason is Reason.FAIL_OPEN_BREAKER
    assert held.decision.allowed is (enforcement is Enforcement.OBSERVE)


async def test_a_hold_beyond_the_maximum_is_refused_and_counted():
    scene = Scene(max_holds=1)
    await scene.hold(cost=1)
    with pytest.raises(HoldsFullError, match="1 holds in flight"):
        await scene.hold(cost=1)
    assert scene.stats.holds["refused"] == 1


async def test_slots_can_be_held_but_not_leased():
    scene = Scene()
    held = await scene.hold("/c", 500)
    assert held.expire_us == (NOW_S + 30) * US_PER_S
    with pytest.raises(CheckInvalidError, match="lease"):
        await scene.hold("/c", lease=True)
    assert (await scene.hold("/a", lease=True)).decision.allowed


async def test_a_hold_ends_at_its_time_unless_it_is_extended():
    scene = Scene()
    await scene.hold(cost=1, ttl_s=10)
    scene.clock.advance(seconds=5)
    await scene.hold(cost=2, ttl_s=10)
    assert await scene.extend(100) == (NOW_S + 105) * US_PER_S
    scene.clock.advance(seconds=20)
    assert scene.in_flight() == [("r1", "default", 1, 2)]
    assert scene.stats.holds["expired"] == 1
    scene.clock.advance(seconds=100)
    assert scene.in_flight() == []
    assert scene.stats.holds["expired"] == 2
    with pytest.raises(HoldEndedError):
        await scene.settle(0)
    with pytest.raises(HoldEndedError):
        await scene.extend(5)


async def test_holds_from_before_the_restart_are_counted_without_their_limits():
    scene, before = Scene(), Scene()
    await before.hold(cost=2)
    await before.settle(0)
    for number in range(3):
        await before.hold(cost=2, ttl_s=10 + number)
    before.holds.change_all()
    changes = before.holds.changes(100)
    scene.holds.restore({(kind, name): value for kind, name, value in changes})
    scene.holder.resume(scene.holds.open_holds())
    assert (scene.stats.holds_open, scene.in_flight()) == (3, [])
    scene.number, scene.held, scene.cost = before.number, before.held, 2
    await scene.extend(100)
    scene.clock.advance(seconds=60)
    assert scene.in_flight() == []
    assert (scene.stats.holds_open, scene.stats.holds["expired"]) == (1, 2)
    await scene.settle(1)
    assert (scene.stats.holds_open, scene.stats.holds["settled"]) == (0, 1)


async def test_an_unknown_hold_is_reported_as_unknown():
    scene = Scene()
    await scene.hold()
    scene.number = b"?" * 16
    assert not (await scene.settle(1)).known
    assert await scene.extend(5) is None
    assert scene.stats.holds["settled"] == 0


async def test_statuses_of_deleted_rules_are_left_out():
    scene = Scene()
    await scene.hold("/b", 2)
    scene.limiter.replace_book(RuleBook.of((RULE,), 2))
    assert scene.in_flight() == []
    settled = await scene.settle(1)
    assert (settled.known, settled.limits) == (True, [])
    await scene.hold("/a", 2)
    renamed = Rule(
        "r1", "/a", "user", limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW,
        name="other",
    )  # fmt: skip
    scene.limiter.replace_book(RuleBook.of((renamed,), 2))
    assert (await scene.settle(1)).limits == []


class Silent:
    """Makes holds without an outcome for any bucket."""

    async def hold(self, hold):
        names = [KEYS.stored(key) for key, _, _ in hold.charges]
        return Held(names, [None] * len(names), hold.now_us + hold.ttl_us)


@pytest.mark.parametrize("endpoint", ["/a", "/b"])
async def test_a_hold_fails_open_without_an_answer_for_a_bucket(endpoint):
    held = await Scene(Silent()).hold(endpoint, 1)
    assert (held.decision.reason, held.limits) == (Reason.FAIL_OPEN_ERROR, [])


DAILY = Rule(
    "r4", "/d", "user", limit=10, window_seconds=86_400, algorithm=Algorithm.FIXED_WINDOW,
    calendar=Calendar(Period.DAY, "UTC"),
    more=(Limit(limit=20, window_seconds=2_592_000, algorithm=Algorithm.FIXED_WINDOW, name="two"),),
)  # fmt: skip


@pytest.mark.parametrize("rule", [DAILY, replace(DAILY, more=())], ids=["two limits", "one"])
async def test_a_hold_repeated_in_the_next_calendar_window_gets_its_first_answer(rule):
    scene = Scene(rules=(rule,))
    scene.clock.advance(seconds=86_400 - NOW_S % 86_400 - 2)
    first = await scene.hold("/d", number=b"n" * 16)
    scene.clock.advance(seconds=4)
    again = await scene.hold("/d", number=b"n" * 16)
    assert again == first
    assert (first.decision.remaining, scene.stats.fail_open_error_total) == (6, 0)
    settled = await scene.settle(1)
    assert [one.remaining for one in settled.limits] == [10, 19][: len(first.limits)]
    assert (scene.stats.holds["made"], scene.stats.hold_tokens["refunded"]) == (1, 3)


@pytest.mark.parametrize("actual", [1, 30])
async def test_a_settle_after_the_calendar_window_reports_a_fresh_window(actual):
    scene = Scene(rules=(DAILY,))
    midnight_s = NOW_S - NOW_S % 86_400 + 86_400
    scene.clock.advance(seconds=midnight_s - NOW_S - 2)
    await scene.hold("/d")
    scene.clock.advance(seconds=4)
    (daily, _) = (await scene.settle(actual)).limits
    assert daily[:4] == (True, 10, midnight_s + 86_400, 0)


@pytest.mark.parametrize(("limit", "left"), [(10, 9), (3, 2), (20, 19)])
async def test_a_settle_within_the_calendar_window_reports_it(limit, left):
    scene = Scene(rules=(DAILY,))
    await scene.hold("/d")
    scene.limiter.replace_book(RuleBook.of((replace(DAILY, limit=limit),), 2))
    (daily, _) = (await scene.settle(1)).limits
    assert daily[:4] == (True, left, NOW_S - NOW_S % 86_400 + 86_400, 0)


@pytest.mark.parametrize("rule", [DAILY, replace(DAILY, more=())], ids=["two limits", "one"])
async def test_a_repeated_hold_has_no_more_left_than_the_edited_limits(rule):
    scene = Scene(rules=(rule,))
    await scene.hold("/d", 1, number=b"n" * 16)
    lowered = replace(rule, limit=3, more=tuple(replace(one, limit=2) for one in rule.more))
    scene.limiter.replace_book(RuleBook.of((lowered,), 2))
    decision = (await scene.hold("/d", 1, number=b"n" * 16)).decision
    assert decision.remaining == 3
    assert [one.remaining for one in decision.limits] == [3, 2][: len(decision.limits)]


async def test_a_repeated_hold_is_answered_by_its_remaining_limits():
    scene = Scene(rules=(DAILY,))
    first = await scene.hold("/d", number=b"n" * 16)
    fewer = replace(DAILY, more=())
    scene.limiter.replace_book(RuleBook.of((fewer,), 2))
    again = await scene.hold("/d", number=b"n" * 16)
    assert again.decision.reason is Reason.WITHIN_LIMIT
    assert again.limits == [first.limits[0], (first.limits[1].bucket, "", "", "")]
    settled = await scene.settle(1)
    assert [one.remaining for one in settled.limits] == [9]
    scene.limiter.replace_book(RuleBook.of((DAILY,), 3))
    assert (await scene.hold("/d")).decision.limits[
        1
    ].remaining == 15  # the hold was settled there, too


async def test_a_calendar_limit_is_found_in_the_next_window_after_an_edit_of_the_others():
    scene = Scene(rules=(DAILY,))
    scene.clock.advance(seconds=86_400 - NOW_S % 86_400 - 2)
    first = await scene.hold("/d", number=b"n" * 16)
    scene.clock.advance(seconds=4)
    scene.limiter.replace_book(RuleBook.of((replace(DAILY, more=()),), 2))
    again = await scene.hold("/d", number=b"n" * 16)
    assert (again.decision.remaining, again.limits[0]) == (6, first.limits[0])


@pytest.mark.parametrize("other", [replace(SLOTS, endpoint="/d"), replace(DAILY, more=())])
async def test_a_repeated_hold_without_a_remaining_limit_is_refused(other):
    scene = Scene(rules=(replace(RULE, endpoint="/d"),))
    await scene.hold("/d", number=b"n" * 16)
    scene.limiter.replace_book(RuleBook.of((other,), 2))
    with pytest.raises(CheckInvalidError, match="hold_id: belongs to another check"):
        await scene.hold("/d", number=b"n" * 16)
    assert scene.stats.fail_open_error_total == 0


async def test_a_repeated_hold_is_not_denied_by_a_limit_that_only_observed_at_first():
    scene = Scene()
    first = await scene.hold("/b", 3, number=b"n" * 16)
    *others, two = SEVERAL.more
    enforced = replace(SEVERAL, more=(*others, replace(two, enforcement=Enforcement.ENFORCE)))
    scene.limiter.replace_book(RuleBook.of((enforced,), 2))
    again = await scene.hold("/b", 3, number=b"n" * 16)
    assert (again.decision.allowed, again.limits) == (True, first.limits)
    assert {one.limit.name for one in again.decision.limits} == {"default", "five"}


async def test_settled_holds_leave_no_state():
    scene = Scene()
    for _ in range(3 * MIN_ENDS):
        await scene.hold(cost=1, ttl_s=3_600)
        await scene.settle(0)
    assert scene.stats.holds == {
        "made": 3 * MIN_ENDS, "settled": 3 * MIN_ENDS, "expired": 0, "refused": 0,
    }  # fmt: skip
    assert scene.stats.holds_open == 0
    scene.clock.advance(seconds=3_600)
    assert scene.in_flight() == []
    assert scene.stats.holds["expired"] == 0


async def test_holds_that_end_together_are_dropped_in_steps():
    scene = Scene(rules=(replace(RULE, limit=10 * STEP),))
    for _ in range(STEP + 2):
        await scene.hold(cost=1, ttl_s=5)
    scene.clock.advance(seconds=5)
    assert scene.in_flight() == [("r1", "default", 2, 2)]
    assert scene.in_flight() == []
    assert (scene.stats.holds["expired"], scene.stats.holds_open) == (STEP + 2, 0)
