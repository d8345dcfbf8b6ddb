"""Background jobs of a node: upkeep in each tick, and garbage collection."""

import gc

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.table import SHARD_ENTRIES, BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.model import US_PER_S, Algorithm, IdentifierType, Rule
from ratelimitd.node.jobs import SWEEP_SHARDS, TICK_S, Upkeep, tidy, whole_load
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import Runtime
from ratelimitd.rules.assignments import Assignments
from ratelimitd.testing import ManualClock

RULE = Rule(
    "r", "/a", IdentifierType.USER, limit=10, window_seconds=1, algorithm=Algorithm.FIXED_WINDOW
)

ROUND = 2_500
"""Ticks to sweep all shards of the assignments."""


class WrongClock(ManualClock):
    """A clock that measures itself ``error_us`` behind the wall clock."""

    error_us = 0

    def remeasure(self):
        return self.error_us


class Fixture:
    def __init__(self, *, in_cluster=False):
        self.clock = WrongClock()
        self.stats = CheckStats()
        self.assignments = Assignments()
        self.table = BucketTable(SHARD_ENTRIES * SWEEP_SHARDS)
        self.health = Health(
            node_id="n", stats=self.stats, clock=self.clock, rules_revision=lambda: 0
        )
        self.runtime = Runtime()
        self.loop_s = 100.0
        self.upkeep = Upkeep(
            clock=self.clock,
            table=None if in_cluster else self.table,
            assignments=self.assignments,
            health=self.health,
            runtime=self.runtime,
            loop_time_s=lambda: self.loop_s,
        )


@pytest.fixture
def node():
    return Fixture()


def test_expired_buckets_are_removed(node):
    for number in range(50):
        key = b"%d" % number
        node.table.apply(key, RULE, DECIDE[RULE.algorithm], node.clock.now_us(), 1)
    node.upkeep.tick()
    assert len(node.table) == 50
    node.clock.advance(seconds=3600)
    node.upkeep.tick()
    assert (len(node.table), node.table.expired_total) == (0, 50)


def test_expired_assignments_are_removed(node):
    end_s = node.clock.now_us() // US_PER_S + 60
    node.assignments.put("user", b"a", "pro", end_s)
    node.assignments.put("user", b"b", "pro", 0)
    for _ in range(ROUND):
        node.upkeep.tick()
    assert len(node.assignments) == 2
    node.clock.advance(seconds=60)
    for _ in range(ROUND):
        node.upkeep.tick()
    assert len(node.assignments) == 1


def test_the_tick_of_the_table_counts_seconds_including_missed_ones(node):
    node.upkeep.tick()
    assert node.table.tick == 1
    node.clock.advance(seconds=0.9)
    node.upkeep.tick()
    assert node.table.tick == 1
    node.clock.advance(seconds=5.1)
    node.upkeep.tick()
    assert node.table.tick == 7


def test_a_late_tick_is_the_lag_of_the_loop(node):
    node.loop_s += TICK_S
    node.upkeep.tick()
    assert node.runtime.loop_lag_s == 0.0
    node.loop_s += TICK_S + 0.25
    node.upkeep.tick()
    assert node.runtime.loop_lag_s == pytest.approx(0.25)
    node.loop_s += TICK_S
    node.upkeep.tick()
    assert node.runtime.loop_lag_s == pytest.approx(0.25)


def test_health_is_sampled(node):
    node.stats.allowed_total = node.stats.fail_open_error_total = 10
    for _ in range(62):
        node.clock.advance(seconds=1)
        node.upkeep.sample()
    assert node.health.report().error_rate == 0.0


@pytest.mark.parametrize(
    ("error_us", "told"),
    [
        (1_000_000, ""),
        (1_500_000, "the wall clock is 1.5 s ahead of the node's clock"),
        (-1_500_000, "the wall clock is 1.5 s behind the node's clock"),
    ],
)
def test_a_clock_that_is_wrong_by_more_than_a_second_is_an_alarm(node, caplog, error_us, told):
    node.clock.error_us = error_us
    node.upkeep.sample()
    assert node.runtime.clock_error_us == error_us
    assert told in caplog.text
    assert bool(caplog.records) is bool(told)


def test_the_start_and_the_end_of_the_alarm_are_logged(node, caplog):
    for error_us in (0, 1_020_000, 1_010_000, 1_000_000, 990_000):
        node.clock.error_us = error_us
        node.upkeep.sample()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "within a second of the wall clock again" in caplog.text


def test_the_alarm_of_a_node_in_a_cluster_names_the_clock_of_the_shared_state(caplog):
    node = Fixture(in_cluster=True)
    for node.clock.error_us in (-1_500_000, 0):
        node.upkeep.sample()
    begin, end = caplog.messages
    assert begin.startswith("the shared state's clock is 1.5 s behind the node's clock")
    assert end == "the node's clock is within a second of the shared state's clock again"


@pytest.fixture(autouse=True)
def _as_it_was():
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


def test_a_book_is_not_collected_during_its_load_nor_traversed_afterwards():
    frozen = gc.get_freeze_count()
    with whole_load():
        assert not gc.isenabled()
        book = [{"rule": []} for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    assert not any(each is book for each in gc.get_objects())


def test_a_failed_load_freezes_nothing_and_collections_continue():
    frozen = gc.get_freeze_count()
    with pytest.raises(OSError), whole_load():
        raise OSError
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_tidy_collects_garbage_before_it_freezes():
    class Node:
        ended = False

        def __del__(self):
            Node.ended = True

    gc.disable()
    cycle = Node()
    cycle.itself = cycle
    del cycle
    assert not Node.ended
    frozen = gc.get_freeze_count()
    tidy()
    assert Node.ended
    assert gc.get_freeze_count() > frozen


def test_a_full_collection_is_rare_in_a_node():
    gc.set_threshold(700, 10, 10)
    tidy()
    assert gc.get_threshold() == (1_000, 10, 200)
