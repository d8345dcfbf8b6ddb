"""The live view is read from the part of a node that knows it, in every step."""

from types import SimpleNamespace

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.cluster.node import SharedStateStatus
from ratelimitd.counters import CheckStats
from ratelimitd.observe.denials import Denials
from ratelimitd.observe.health import Health
from ratelimitd.observe.live import live_of
from ratelimitd.observe.metrics import NodeParts, Runtime
from ratelimitd.observe.node_status import BusyRule, decode, names_within
from ratelimitd.testing import ManualClock


class Parts:
    """The parts of a node, without the node."""

    def __init__(self, cluster=None):
        self.stats, self.clock, self.runtime = CheckStats(), ManualClock(), Runtime()
        self.denials = Denials(self.stats, digest=lambda name, _: name.hex())
        self.shared_state = SharedStateStatus(connected=True, breaker_state="closed")
        self.buckets = {}
        parts = NodeParts(
            stats=self.stats,
            health=Health(
                node_id="n1",
                stats=self.stats,
                clock=self.clock,
                rules_revision=lambda: 7,
                shared_state=lambda: self.shared_state,
            ),
            runtime=self.runtime,
            clock=self.clock,
            feed=None,
            buckets=self.buckets,
            cluster=cluster,
            task_restarts={},
            transport=lambda: None,
            transport_name="native",
            in_flight=lambda: (),
        )
        self.live = live_of(
            parts,
            self.denials,
            addresses=lambda: ("127.0.0.1:1", "127.0.0.1:2"),
            admin_token_digest=str,
            seal=BucketKeys(b"k" * 16),
            busiest=lambda: [BusyRule("1", 2.0, 0.5)],
        )

    async def step(self):
        self.clock.advance(seconds=2)
        await self.live.step()
        return self.live.overview().this


async def test_a_node_by_itself_tells_of_its_checks_and_of_no_cluster():
    parts = Parts()
    parts.stats.allowed_total, parts.stats.bucket_missed_total = 200, 50
    parts.runtime.loop_lag_s, parts.runtime.clock_error_us = 0.25, -1_500_000
    parts.buckets["a"] = 1
    status = await parts.step()
    assert (status.node_id, status.rules_revision) == ("n1", 7)
    assert (status.grpc_address, status.http_address) == ("127.0.0.1:1", "127.0.0.1:2")
    assert (status.healthy, status.hit_ratio, status.hit_ratio_met) == (False, 0.75, False)
    assert (status.sample.allowed_per_s, status.sample.buckets) == (100.0, 1)
    assert (status.sample.loop_lag_s, status.clock_error_s) == (0.25, -1.5)
    assert status.sample.memory_bytes > 1_000_000
    assert (status.sync_lag_s, status.excess_bound_ratio) == (0.0, 0.0)
    assert status.rules == [BusyRule("1", 2.0, 0.5)]


async def test_who_was_denied_is_told_masked():
    parts = Parts()
    scope = SimpleNamespace(endpoint="/a", identifier_type="user")
    parts.denials.note((b"ada.lovelace", scope))
    parts.denials.fold()
    status = await parts.step()
    assert [one.endpoint for one in status.endpoints] == ["/a"]
    assert [(one.masked, one.name) for one in status.identifiers] == [("ada…", "")]


class Board:
    def __init__(self):
        self.published = []
        self.publish = self.published.append

    def note_members(self):
        pass

    async def read(self):
        return {}


async def test_a_node_of_a_cluster_tells_the_others_of_its_part_in_it():
    cluster = SimpleNamespace(
        board=Board(), sync_lag_s=0.5, worst_excess=0.01, promised_excess=0.51
    )
    parts = Parts(cluster)
    parts.shared_state = SharedStateStatus(connected=False, breaker_state="open", retry_s=12.0)
    await parts.step()
    told = decode(cluster.board.published[-1])
    assert (told.sync_lag_s, told.excess_ratio, told.excess_bound_ratio) == (0.5, 0.01, 0.51)
    assert told.names == ""
    assert (told.shared_state_connected, told.breaker_state, told.retry_s) == (False, "open", 12.0)


async def test_the_names_of_denied_identifiers_are_told_sealed():
    cluster = SimpleNamespace(
        board=Board(), sync_lag_s=0.5, worst_excess=0.01, promised_excess=0.51
    )
    parts = Parts(cluster)
    for name, kind in ((b"ada.lovelace", "user"), (b"sk_live_1", "api_key")):
        parts.denials.note((name, SimpleNamespace(endpoint="/a", identifier_type=kind)))
    parts.denials.fold()
    await parts.step()
    octets = cluster.board.published[-1]
    assert b"lovelace" not in octets
    names = names_within(decode(octets).names, BucketKeys(b"k" * 16))
    assert [*names.values()] == ["ada.lovelace"]
