import random
import sys
from dataclasses import replace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import deciding
from ratelimitd.buckets import table as table_module
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot_format import MAX_TICK, full_after_s, pack, tick_of, unpack
from ratelimitd.buckets.table import (
    IDLE_TICKS,
    LATE_US,
    SHARD_ENTRIES,
    BucketTable,
    RestoredBuckets,
)
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm, IdentifierType, Rule
from tests.outcomes import Outcome

T = 1_700_006_400_000_000
SECOND = 1_000_000
RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
KEYS = BucketKeys(b"k" * 32)


def use(table, key, *, cost=1, now_us=T, rule=RULE):
    return Outcome._make(table.apply(key, rule, DECIDE[rule.algorithm], now_us, cost))


def look(table, key, *, cost=1, now_us=T):
    return Outcome._make(table.peek(key, RULE, DECIDE[RULE.algorithm], now_us, cost))


def key(number):
    return b"%d" % number


def keys_of(table):
    return {name for index in range(table.shard_count) for name in table.keys(index)}


def restored_of(*numbers, count=4):
    buckets = RestoredBuckets(KEYS)
    for number in numbers:
        buckets.put(KEYS.stored(key(number)), pack((count, T), RULE, 0))
    return buckets


class TestChecks:
    def test_a_denied_check_copies_no_log(self):
        rule = replace(RULE, limit=100, algorithm=Algorithm.SLIDING_WINDOW)
        table = BucketTable(10)
        for number in range(100):
            use(table, b"ada", now_us=T + number, rule=rule)
        log = table.value(b"ada")
        assert not use(table, b"ada", now_us=T + 100, rule=rule).allowed
        assert table.value(b"ada") is log
        table.tick = 7
        assert not use(table, b"ada", now_us=T + 100, rule=rule).allowed
        assert tick_of(table.value(b"ada")) == 7
        assert unpack(table.value(b"ada")) == unpack(log)

    def test_a_check_continues_from_the_state_of_its_bucket(self):
        table = BucketTable(10)
        assert [use(table, b"ada", cost=4).remaining for _ in range(3)] == [6, 2, 2]
        assert unpack(table.value(b"ada")) == (8, T)

    @pytest.mark.parametrize("algorithm", ACCOUNTS)
    def test_after_eight_years_the_tick_stops_before_it_reaches_the_window(self, algorithm):
        table, rule = BucketTable(10), replace(RULE, algorithm=algorithm)
        table.tick = MAX_TICK + 1
        use(table, b"ada", rule=rule)
        value = table.value(b"ada")
        assert (tick_of(value), full_after_s(value)) == (table.tick, 60) == (MAX_TICK, 60)

    def test_buckets_are_independent(self):
        table = BucketTable(10)
        use(table, b"ada", cost=10)
        assert use(table, b"bob").allowed
        assert len(table) == 2

    def test_a_check_that_can_never_pass_leaves_no_bucket(self):
        table = BucketTable(10)
        assert not use(table, b"ada", cost=11).allowed
        assert (len(table), table.value(b"ada")) == (0, None)

    def test_a_denied_check_counts_as_a_use_and_changes_nothing_else(self):
        table = BucketTable(10)
        use(table, b"ada", cost=10)
        table.tick = 9
        assert not use(table, b"ada").allowed
        assert unpack(table.value(b"ada")) == (10, T)
        assert tick_of(table.value(b"ada")) == 9

    def test_a_peek_stores_nothing_and_does_not_count_as_a_use(self):
        table = BucketTable(10)
        assert look(table, b"ada", cost=4).remaining == 6
        assert len(table) == 0
        use(table, b"ada", cost=4)
        before = table.value(b"ada")
        table.tick = 9
        assert [look(table, b"ada", cost=4).remaining for _ in range(2)] == [2, 2]
        assert table.value(b"ada") == before

    @pytest.mark.parametrize("algorithm", ACCOUNTS)
    @pytest.mark.parametrize("cost", [1, 4, 10, 11])
    def test_a_value_is_the_state_packed_with_window_and_tick(self, algorithm, cost):
        table, rule = BucketTable(10), replace(RULE, algorithm=algorithm, window_seconds=77)
        state = None
        for number in range(4):
            table.tick = 5 + number
            outcome = use(table, b"ada", cost=cost, now_us=T + number, rule=rule)
            assert outcome == DECIDE[algorithm](state, rule, T + number, cost)
            state = outcome.state
            packed = None if state is None else pack(state, rule, table.tick)
            assert table.value(b"ada") == packed

    def test_a_new_window_of_the_rule_is_stored_with_the_bucket(self):
        table, longer = BucketTable(10), replace(RULE, window_seconds=90)
        use(table, b"ada", cost=4)
        use(table, b"ada", rule=longer)
        assert full_after_s(table.value(b"ada")) == 90
        assert unpack(table.value(b"ada"))[0] == 5

    def test_a_check_that_raises_stores_nothing(self):
        table = BucketTable(10)
        use(table, b"ada", cost=4)
        before = table.value(b"ada")
        table.tick = 9

        def fail(*_):
            raise ZeroDivisionError

        for judge in (table.apply, table.peek):
            for name in (b"ada", b"bob"):
                with pytest.raises(ZeroDivisionError):
                    judge(name, RULE, fail, T, 1)
        assert (len(table), table.value(b"ada")) == (1, before)


class TestRemoving:
    def test_a_removed_bucket_starts_afresh(self):
        table = BucketTable(10)
        use(table, b"ada", cost=10)
        table.remove(b"ada")
        assert len(table) == 0
        assert use(table, b"ada").remaining == 9

    def test_removing_a_missing_bucket_is_no_error(self):
        table = BucketTable(10)
        assert table.remove(b"ada") is None
        assert len(table) == 0

    def test_a_bucket_that_is_put_back_has_its_state_and_counts_as_used(self):
        table = BucketTable(10)
        use(table, b"ada", cost=7)
        value = table.remove(b"ada")
        table.tick = 9
        table.put_back(b"ada", value)
        assert unpack(table.value(b"ada")) == (7, T)
        assert tick_of(table.value(b"ada")) == 9
        assert len(table) == 1

    def test_putting_a_bucket_back_drops_its_later_spends(self):
        table = BucketTable(10)
        use(table, b"ada", cost=7)
        value = table.remove(b"ada")
        use(table, b"ada", cost=1)
        table.put_back(b"ada", value)
        assert unpack(table.value(b"ada")) == (7, T)
        assert len(table) == 1

    def test_putting_back_keeps_the_bound(self):
        table = BucketTable(1)
        use(table, b"ada")
        value = table.remove(b"ada")
        use(table, b"bob")
        table.put_back(b"ada", value)
        assert len(table) == len(keys_of(table)) == 1


class TestBound:
    @pytest.mark.parametrize("max_entries", [1, 2, 7, SHARD_ENTRIES, SHARD_ENTRIES + 1, 2_000])
    def test_a_flood_of_new_keys_stays_within_the_bound(self, max_entries):
        table = BucketTable(max_entries)
        for number in range(3 * max_entries + 50):
            use(table, key(number))
            assert len(table) <= max_entries
        assert len(table) == len(keys_of(table))
        assert table.evicted_total == 3 * max_entries + 50 - len(table)
        assert len(table) >= max_entries * 0.85

    @pytest.mark.parametrize("seed", range(5))
    def test_random_operations_keep_the_bound_and_the_count(self, seed, monkeypatch):
        monkeypatch.setattr(table_module, "RESTORED_SHARDS", 8)
        rng = random.Random(seed)
        max_entries = rng.choice([1, 5, 60, 700])
        table, now_us, removed = BucketTable(max_entries), T, {}
        table.adopt(restored_of(*range(rng.randint(0, 2 * max_entries))))
        for _ in range(4_000):
            name = key(rng.randint(0, 3 * max_entries))
            action = rng.random()
            if action < 0.8:
                use(table, name, now_us=now_us)
            elif action < 0.85:
                removed[name] = table.remove(name)
            elif action < 0.9 and removed:
                name, value = removed.popitem()
                if value is not None:
                    table.put_back(name, value)
            elif action < 0.95:
                table.sweep(now_us, rng.randint(1, 3))
            else:
                now_us += rng.randint(0, 20) * SECOND
                table.tick += rng.randint(0, 3)
            assert len(table) <= max_entries
        adopted = len(table._restored) if table._restored else 0
        assert len(table) == len(keys_of(table)) + adopted

    def test_the_least_recently_used_buckets_are_evicted_first(self):
        table = BucketTable(100)
        for number in range(100):
            table.tick = number + 1
            use(table, key(number))
        table.tick = 200
        for number in range(50):  # the older half is used again
            use(table, key(number))
        use(table, b"new")
        assert table.evicted_total == 10
        assert keys_of(table) == {key(number) for number in range(100)} - {
            key(number) for number in range(50, 60)
        } | {b"new"}

    def test_a_new_bucket_replaces_the_only_one_of_a_table_of_one(self):
        table = BucketTable(1)
        use(table, b"ada")
        table.tick += 1
        use(table, b"bob")
        assert keys_of(table) == {b"bob"}

    def test_evictions_round_robin_over_shards_drop_about_the_oldest_buckets(self):
        table = BucketTable(3_000)
        for number in range(3_000):
            table.tick = number // 10 + 1
            use(table, key(number))
        for number in range(3_000, 3_300):
            table.tick = number // 10 + 1
            use(table, key(number))
        gone = {key(number) for number in range(3_300)} - keys_of(table)
        assert len(gone) >= 300
        assert gone <= {key(number) for number in range(1_000)}

    def test_eviction_frees_the_memory_of_a_shard(self):
        table = BucketTable(SHARD_ENTRIES)
        for number in range(SHARD_ENTRIES * 20):
            use(table, key(number))
        (shard,) = table._shards
        assert sys.getsizeof(shard) <= sys.getsizeof(dict.fromkeys(range(682)))

    def test_an_empty_shard_is_skipped(self):
        table = BucketTable(SHARD_ENTRIES + 1)
        assert table.shard_count == 2
        crowd = [name for name in map(key, range(5_000)) if hash(name) % 2 == 1]
        for name in crowd[: SHARD_ENTRIES + 2]:
            use(table, name)
        assert len(table) <= SHARD_ENTRIES + 1
        assert table.evicted_total > 0


class TestExpiry:
    def test_a_bucket_is_dropped_late_us_after_it_has_expired(self):
        table = BucketTable(10)
        use(table, b"ada", cost=10)
        table.sweep(T + 60 * SECOND + LATE_US - 1, 1)
        assert len(table) == 1
        table.sweep(T + 60 * SECOND + LATE_US, 1)
        assert (len(table), table.expired_total, table.evicted_total) == (0, 1, 0)

    @pytest.mark.parametrize(("burst", "full_after_s"), [(5, 30), (11, 66), (100, 600)])
    def test_a_bucket_with_a_burst_is_kept_until_the_burst_is_refilled(self, burst, full_after_s):
        """I12."""
        table = BucketTable(10)
        rule = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, burst=burst)
        assert use(table, b"ada", cost=burst, rule=rule).allowed
        table.sweep(T + full_after_s * SECOND + LATE_US - 1, 1)
        assert len(table) == 1
        assert (
            use(table, b"ada", now_us=T + full_after_s * SECOND - 1, cost=burst, rule=rule).allowed
            is False
        )
        table.sweep(T + full_after_s * SECOND + LATE_US, 1)
        assert len(table) == 0

    def test_several_buckets_of_a_check_store_their_time_to_full(self):
        table = BucketTable(10)
        rule = replace(RULE, algorithm=Algorithm.TOKEN_BUCKET, burst=100)
        charges = [(name, rule, DECIDE[rule.algorithm]) for name in (b"a", b"b")]
        for _ in range(2):  # new buckets, then existing ones
            table.apply_each(charges, T, [1] * len(charges))
            assert [full_after_s(table.value(name)) for name, _, _ in charges] == [600, 600]

    def test_a_sweep_continues_where_the_last_one_ended(self):
        table = BucketTable(3 * SHARD_ENTRIES)
        for number in range(300):
            use(table, key(number))
        sizes = []
        for _ in range(4):
            table.sweep(T + 3600 * SECOND, 1)
            sizes.append(len(table))
        assert sizes[0] > sizes[1] > sizes[2] == sizes[3] == 0

    def test_a_sweep_over_too_many_shards_visits_each_once(self):
        table = BucketTable(10)
        use(table, b"ada")
        table.sweep(T + 3600 * SECOND, 1_000)
        assert (len(table), table.expired_total) == (0, 1)

    def test_a_sweep_drops_restored_buckets(self, monkeypatch):
        monkeypatch.setattr(table_module, "RESTORED_SHARDS", 2)
        table = BucketTable(50)
        table.adopt(restored_of(*range(20)))
        table.sweep(T, 1)
        assert len(table) == 20
        for _ in range(2):
            table.sweep(T + 3600 * SECOND, 1)
        assert (len(table), table.expired_total) == (0, 20)

    @pytest.mark.parametrize(
        ("changes", "kept_ticks"),
        [
            ({"window_seconds": 60}, IDLE_TICKS),
            ({"window_seconds": 1_800}, IDLE_TICKS),
            ({"window_seconds": 5_000}, 10_000),
            ({"algorithm": Algorithm.TOKEN_BUCKET, "burst": 1_000}, 12_000),
        ],
    )
    def test_with_callers_time_only_unused_buckets_expire(self, changes, kept_ticks):
        """I12: max(3600 s, twice the time to full)."""
        table = BucketTable(10, callers_time=True)
        table.tick = 5
        use(table, b"ada", rule=replace(RULE, **changes), now_us=1)
        table.tick = 5 + kept_ticks - 1
        table.sweep(T, 1)
        assert len(table) == 1
        table.tick += 1
        table.sweep(0, 1)
        assert (len(table), table.expired_total) == (0, 1)

    def test_a_denied_check_postpones_expiry_with_callers_time(self):
        table = BucketTable(10, callers_time=True)
        use(table, b"ada", cost=10)
        table.tick = IDLE_TICKS
        assert not use(table, b"ada").allowed
        table.tick = 2 * IDLE_TICKS - 1
        table.sweep(T, 1)
        assert len(table) == 1


class TestBeforeTheRestart:
    def test_a_restored_bucket_continues_from_its_state(self):
        table = BucketTable(10)
        table.adopt(restored_of(1, 2))
        assert len(table) == 2
        assert use(table, key(1)).remaining == 5
        assert use(table, key(1)).remaining == 4
        assert (len(table), keys_of(table)) == (2, {key(1)})

    def test_a_peek_does_not_move_a_restored_bucket(self):
        table = BucketTable(10)
        table.adopt(restored_of(1))
        assert look(table, key(1)).remaining == 5
        assert look(table, key(2)).remaining == 9
        assert (len(table), keys_of(table)) == (1, set())

    def test_a_denied_check_moves_a_restored_bucket_unchanged(self):
        table = BucketTable(10)
        table.adopt(restored_of(1, count=10))
        assert not use(table, key(1)).allowed
        assert unpack(table.value(key(1))) == (10, T)

    def test_a_restored_bucket_can_be_removed_and_put_back(self):
        table = BucketTable(10)
        table.adopt(restored_of(1))
        value = table.remove(key(1))
        assert len(table) == 0
        table.put_back(key(1), value)
        assert use(table, key(1)).remaining == 5

    def test_removing_an_unknown_bucket_leaves_the_others(self):
        table = BucketTable(10)
        table.adopt(restored_of(1))
        assert table.remove(key(2)) is None
        assert len(table) == 1

    def test_the_bound_applies_to_restored_and_used_buckets_together(self):
        table = BucketTable(5)
        use(table, b"ada")
        table.adopt(restored_of(*range(20)))
        assert len(table) == 5
        assert table.value(b"ada") is not None

    def test_a_full_table_adopts_no_restored_buckets(self):
        table = BucketTable(1)
        use(table, b"ada")
        table.adopt(restored_of(1))
        assert (len(table), table.value(b"ada") is not None) == (1, True)

    def test_restored_buckets_are_evicted_before_used_ones(self):
        table = BucketTable(5)
        table.adopt(restored_of(*range(5)))
        for number in range(100, 105):
            use(table, key(number))
            assert len(table) == 5
        assert keys_of(table) == set(map(key, range(100, 105)))
        assert table.evicted_total == 5


class TestLooking:
    def test_keys_are_those_used_at_a_tick_or_later(self):
        table = BucketTable(10)
        for tick in (1, 2, 3):
            table.tick = tick
            use(table, key(tick))
        assert sorted(table.keys(0)) == [b"1", b"2", b"3"]
        assert sorted(table.keys(0, 2)) == [b"2", b"3"]
        assert table.keys(0, 4) == []

    def test_every_key_is_in_one_shard(self):
        table = BucketTable(5 * SHARD_ENTRIES)
        for number in range(500):
            use(table, key(number))
        found = [name for index in range(table.shard_count) for name in table.keys(index)]
        assert sorted(found) == sorted(map(key, range(500)))


class TestSeveral:
    HOUR = replace(RULE, limit=100, window_seconds=3_600, algorithm=Algorithm.SLIDING_WINDOW)

    def charge(self, table, *, cost=1, now_us=T):
        charges = [
            (b"minute", RULE, DECIDE[RULE.algorithm]),
            (b"hour", self.HOUR, DECIDE[self.HOUR.algorithm]),
        ]
        return [found[:2] for found in table.apply_each(charges, now_us, [cost] * len(charges))]

    def test_all_buckets_are_charged_or_none(self):
        table = BucketTable(10)
        assert self.charge(table, cost=4) == [(True, 6), (True, 96)]
        assert self.charge(table, cost=5) == [(True, 1), (True, 91)]
        held = {name: table.value(name) for name in keys_of(table)}
        assert self.charge(table, cost=2) == [(False, 1), (True, 91)]
        assert {name: table.value(name) for name in keys_of(table)} == held
        assert len(table) == 2

    @pytest.mark.parametrize(
        ("used", "first"), [((0, 0), 0), ((7, 0), 0), ((0, 70), 1), ((5, 50), 0), ((4, 50), 1)]
    )
    def test_the_smallest_remaining_part_of_a_capacity_is_found(self, used, first):
        table, algorithm = BucketTable(10), Algorithm.TOKEN_BUCKET
        steady = replace(RULE, algorithm=algorithm)
        rules = {b"steady": steady, b"bursting": replace(steady, burst=100)}
        for (name, rule), cost in zip(rules.items(), used, strict=True):
            use(table, b"ada" + name, cost=cost, rule=rule)
        charges = [(name, rule, DECIDE[algorithm]) for name, rule in rules.items()]
        found, outcomes = table.charge_each(b"ada", charges, T, 0)
        assert (found, [one[1] for one in outcomes]) == (first, [10 - used[0], 100 - used[1]])
        assert deciding([*rules.values()], outcomes) == first

    def test_charges_equal_those_of_the_algorithms(self):
        random_ = random.Random(18)
        charged = 0
        for _ in range(3_000):
            limits = [
                replace(
                    RULE,
                    algorithm=random_.choice([Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW]),
                    limit=random_.choice([1, 3, 10, 700]),
                    window_seconds=random_.choice([1, 7, 60]),
                    burst=random_.choice([0, 0, 2, 20]),
                )
                for _ in range(random_.randint(1, 3))
            ]
            charges = [
                (b"%d" % number, limit, DECIDE[limit.algorithm])
                for number, limit in enumerate(limits)
            ]
            table = BucketTable(10)
            states = [
                (random_.choice([0, 1, random_.randint(0, 2 * limit.capacity_units)]), T)
                if limit.algorithm is Algorithm.TOKEN_BUCKET
                else (random_.randint(0, 2 * limit.limit), T)
                for limit in limits
            ]
            for (name, limit, _), state in zip(charges, states, strict=True):
                table.take_back(name, b"ada" + name, state, limit)
            values = [table.value(b"ada" + name) for name, _, _ in charges]
            now_us = T + random_.choice([-2_000_000, 0, 1, 999_999, random_.randint(0, 70_000_000)])
            cost = random_.choice([0, 1, 1, 2, 10])
            expected = [
                decide(state, limit, now_us, cost)
                for (_, limit, decide), state in zip(charges, states, strict=True)
            ]
            found = table.charge_each(b"ada", charges, now_us, cost)
            if all(one[0] for one in expected):
                first, outcomes = found
                assert [one[:5] for one in outcomes] == [one[:5] for one in expected]
                assert first == deciding(limits, expected)
                values = [
                    pack(one[5], limit, table.tick)
                    for one, limit in zip(expected, limits, strict=True)
                ]
                charged += 1
            else:
                assert found is None
            assert [table.value(b"ada" + name) for name, _, _ in charges] == values
        assert 500 < charged < 2_500

    def test_a_denied_check_makes_no_bucket(self):
        table = BucketTable(10)
        assert self.charge(table, cost=11) == [(False, 10), (True, 100)]
        assert len(table) == 0

    def test_a_used_bucket_is_not_evicted_first(self):
        table = BucketTable(10)
        table.tick = 5
        self.charge(table)
        assert table.keys(0, since_tick=5) == [b"minute", b"hour"]
        table.tick = 6
        self.charge(table)
        assert table.keys(0, since_tick=6) == [b"minute", b"hour"]

    def test_restored_buckets_continue_and_move_to_the_table_when_charged(self):
        table, restored = BucketTable(10), RestoredBuckets(KEYS)
        restored.put(KEYS.stored(b"minute"), pack((4, T), RULE, 0))
        table.adopt(restored)
        assert self.charge(table, cost=7) == [(False, 6), (True, 100)]
        assert (len(restored), len(table)) == (1, 1)
        assert self.charge(table, cost=2) == [(True, 4), (True, 98)]
        assert (len(restored), len(table)) == (0, 2)

    def test_a_full_table_evicts(self):
        table = BucketTable(1)
        self.charge(table)
        assert (len(table), table.evicted_total) == (1, 1)
