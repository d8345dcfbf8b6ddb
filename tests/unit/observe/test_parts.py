"""Each metric is read from the part of a node that knows it, at the moment somebody asks."""

import asyncio

import pytest

from ratelimitd import __version__
from ratelimitd.algorithms import DECIDE
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import Metrics, NodeParts, Runtime
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.store import RuleDraft
from ratelimitd.testing import ManualClock
from tests.rule_stores import sqlite_store

RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)


class Transport:
    unary, streams, connections, http2_streams = 1, 2, 3, 4


class Parts:
    """The parts of a node, without the node."""

    def __init__(self, directory, store):
        self.clock, self.stats = ManualClock(), CheckStats()
        self.store = store
        self.table = BucketTable(100)
        self.snapshot = SnapshotLog.open(directory, self.table, b"k" * 32, self.clock)
        self.feed = RuleFeed(store, on_book=lambda _book: None)
        self.transport = None
        self.restarts = {}
        parts = NodeParts(
            stats=self.stats,
            health=Health(
                node_id="n", stats=self.stats, clock=self.clock, rules_revision=lambda: 0
            ),
            runtime=Runtime(),
            clock=self.clock,
            buckets=self.table,
            snapshot=self.snapshot,
            feed=self.feed,
            transport=lambda: self.transport,
            transport_name="native",
            in_flight=lambda: (),
            task_restarts=self.restarts,
        )
        self.metrics = Metrics(parts)

    def read(self, name):
        """The values of a metric by its labels' values; a plain number when it has no label."""
        found = {
            tuple(sample.labels.values()): sample.value
            for sample in self.metrics.samples([f"rate_limiter_{name}"])
        }
        return found.get((), found)


@pytest.fixture
async def parts(tmp_path):
    async with sqlite_store(tmp_path) as store:
        parts = Parts(tmp_path, store)
        yield parts
        await parts.snapshot.drain()


async def test_rules_are_those_of_the_feed(parts):
    assert [parts.read(name) for name in ("rules", "rules_revision", "rules_store_up")] == [0, 0, 0]
    await parts.store.create(RuleDraft("/a", "user", 1, 60, "token_bucket"), "admin@127.0.0.1")
    await parts.feed.start()
    assert [parts.read(name) for name in ("rules", "rules_revision", "rules_store_up")] == [1, 1, 1]
    parts.feed.skipped_total = 5
    assert (parts.read("rules_skipped_total"), parts.read("rules_left_out")) == (5, 0)


async def test_the_snapshot_is_as_old_as_its_last_pass(parts):
    parts.clock.advance(seconds=3.5)
    assert parts.read("snapshot_age_seconds") == 3.5
    await parts.snapshot.write_pass()
    parts.clock.advance(seconds=1)
    assert parts.read("snapshot_age_seconds") == 1
    parts.snapshot.written_bytes_total, parts.snapshot.errors_total = 6, 7
    assert parts.read("snapshot_written_bytes_total") == 6
    assert parts.read("snapshot_errors_total") == 7


async def test_buckets_are_those_of_the_table(parts):
    parts.table.evicted_total, parts.table.expired_total = 8, 9
    assert parts.read("active_buckets") == 0
    parts.table.apply(b"k", RULE, DECIDE[RULE.algorithm], parts.clock.now_us(), 1)
    assert parts.read("active_buckets") == 1
    assert parts.read("buckets_evicted_total") == 8
    assert parts.read("buckets_expired_total") == 9


async def test_a_transport_tells_once_it_is_there(parts):
    assert parts.read("connections") == {}
    parts.transport = Transport()
    assert parts.read("connections") == 3
    assert parts.read("build_info") == {(__version__, "native"): 1}


async def test_tasks_and_restarts_are_counted_as_they_come(parts):
    before, idle = parts.read("tasks"), asyncio.Event()
    task = asyncio.create_task(idle.wait())
    assert parts.read("tasks") == before + 1
    idle.set()
    await task
    parts.restarts["snapshot"] = 2
    assert parts.read("task_restarts_total") == {("snapshot",): 2}


async def test_a_node_by_itself_tells_of_no_cluster(parts):
    assert parts.read("cluster_nodes") == {}
    assert parts.read("snapshot_age_seconds") == 0
