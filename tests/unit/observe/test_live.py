import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.cluster.node import SharedStateStatus
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.observe import live
from ratelimitd.observe.denials import TOP, TOP_UNMATCHED, Denials, DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.health import Health
from ratelimitd.observe.history import SAMPLE_S, SPANS, Sample
from ratelimitd.observe.live import SILENT_S, STATUSES_PER_ITERATION, STEPS_UNSEEN, Live, live_of
from ratelimitd.observe.metrics import NodeParts, Runtime
from ratelimitd.observe.node_status import (
    MAX_ENDPOINT,
    BusyRule,
    NodeStatus,
    decode,
    encode,
    names_within,
    sealed_names,
)
from ratelimitd.testing import ManualClock

KEYS = BucketKeys(b"k" * 16)


def status_of(node_id: str = "n1", *, at_ms=0, allowed_per_s=1.0, **fields) -> NodeStatus:
    common: dict[str, Any] = {
        "version": "0.1.0",
        "grpc_address": "10.0.0.1:9090",
        "http_address": "",
        "rules_revision": 7,
        "healthy": True,
        "shared_state_connected": True,
        "hit_ratio": 1.0,
        "hit_ratio_met": True,
        "average_latency_ms": 0.0,
        "latency_met": True,
        "error_rate": 0.0,
        "breaker_state": "closed",
        "retry_s": 0.0,
        "sync_lag_s": 0.0,
        "clock_error_s": 0.0,
        "excess_ratio": 0.0,
        "excess_bound_ratio": 0.0,
        "admin_token_digest": "",
    }
    sample = Sample(at_ms, allowed_per_s=allowed_per_s)
    return NodeStatus(node_id=node_id, sample=sample, **common | fields)


class Board:
    """The statuses of other nodes; ``error``: the store is unavailable; ``hangs``: it never answers."""

    def __init__(self):
        self.found, self.published, self.reads, self.error, self.noted = {}, [], 0, None, 0
        self.hangs = False

    def note_members(self):
        self.noted += 1

    def publish(self, status):
        self.published.append(status)

    async def read(self):
        self.reads += 1
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        return self.found


class Scene:
    def __init__(self, *, alone=False):
        self.clock, self.stats = ManualClock(), CheckStats()
        self.board = None if alone else Board()
        self.healthy = True
        self.denials = Denials(self.stats, digest=lambda name, _: name.hex())
        self.live = Live(
            lambda sample: replace(status_of(healthy=self.healthy), sample=sample),
            self.denials,
            self.board,
            self.clock,
            next_sample=lambda: Sample(self.now_ms, allowed_per_s=1.0),
            is_healthy=lambda: self.healthy,
            seal=KEYS,
        )

    @property
    def now_ms(self):
        return self.clock.now_us() // 1_000

    def other(self, node_id="n2", age_s=0, **fields):
        octets = encode(status_of(node_id, at_ms=self.now_ms - round(age_s * 1_000), **fields))
        self.board.found[f"{node_id}/{age_s}"] = octets

    async def steps(self, count=1):
        for _ in range(count):
            self.clock.advance(seconds=SAMPLE_S)
            await self.live.step()

    def deny(self, name, endpoint="/a"):
        self.stats.blocked_total += 1
        self.denials.record((name, SimpleNamespace(endpoint=endpoint, identifier_type="user")))
        self.denials.fold()


@pytest.fixture
def scene():
    return Scene()


def ids_of(overview):
    return [node.status.node_id for node in overview.nodes]


async def test_single_node_shows_itself():
    scene = Scene(alone=True)
    await scene.steps(3)
    await scene.live.refresh()
    overview = scene.live.overview()
    assert ids_of(overview) == ["n1"]
    assert overview.stale_s is None
    assert not overview.shares
    assert overview.total == overview.nodes[0].status.sample
    assert [sample.at_ms for sample in scene.live.history(SPANS["15m"])] == [
        scene.now_ms - 4_000,
        scene.now_ms - 2_000,
        scene.now_ms,
    ]


async def test_all_nodes_are_shown_with_their_sum_and_this_one_first(scene):
    scene.other("n3", allowed_per_s=5.0)
    scene.other("n0", allowed_per_s=3.0)
    await scene.live.refresh()
    overview = scene.live.overview()
    assert ids_of(overview) == ["n1", "n0", "n3"]
    assert [node.is_this for node in overview.nodes] == [True, False, False]
    assert overview.total.allowed_per_s == 9.0
    assert len(overview.alive) == 3


async def test_each_step_publishes_the_status(scene):
    await scene.steps(2)
    assert [decode(octets).sample.at_ms for octets in scene.board.published] == [
        scene.now_ms - 2_000,
        scene.now_ms,
    ]
    assert scene.board.noted == 2


@pytest.mark.parametrize("alone", [False, True])
async def test_changed_health_is_published_before_the_next_step(alone):
    scene = Scene(alone=alone)
    await scene.steps()
    for healthy in (False, False, True):
        scene.healthy = healthy
        scene.live.watch()
    told = [] if alone else [decode(one).healthy for one in scene.board.published]
    assert told == ([] if alone else [True, False, True])


async def test_silent_node_is_shown_as_gone_and_not_counted(scene):
    scene.other("n2", age_s=SILENT_S + 1, allowed_per_s=5.0)
    await scene.live.refresh()
    overview = scene.live.overview()
    assert [node.gone for node in overview.nodes] == [False, True]
    assert overview.nodes[1].age_s == SILENT_S + 1
    assert overview.total.allowed_per_s == 1.0


async def test_status_from_the_future_does_not_count(scene):
    scene.other("n2", age_s=-60, allowed_per_s=5.0)
    await scene.live.refresh()
    [_, other] = scene.live.overview().nodes
    assert (other.gone, other.age_s) == (True, 0.0)


async def test_restarted_node_of_the_same_name_is_not_gone(scene):
    scene.other("n2", age_s=0)
    scene.other("n2", age_s=SILENT_S + 1)
    scene.other("n1", age_s=SILENT_S + 1)
    await scene.live.refresh()
    assert ids_of(scene.live.overview()) == ["n1", "n2"]


async def test_two_nodes_with_one_name_are_both_shown(scene):
    scene.other("n1", age_s=1)
    await scene.live.refresh()
    assert ids_of(scene.live.overview()) == ["n1", "n1"]


async def test_statuses_are_read_less_often_without_viewers(scene):
    await scene.steps(2 * STEPS_UNSEEN)
    assert scene.board.reads == 2


async def test_the_history_has_each_sample_although_nobody_looked(scene):
    await scene.steps(3 * STEPS_UNSEEN)
    assert len(scene.live.history(SPANS["15m"])) == 3 * STEPS_UNSEEN


async def test_statuses_are_read_in_each_step_with_a_viewer(scene):
    heard = []

    async def look():
        heard.append(scene.live.overview().total.at_ms)

    scene.live.listen(look)
    await scene.steps(3)
    assert (scene.board.reads, heard[-1]) == (3, scene.now_ms)
    scene.live.unlisten(look)
    await scene.steps(STEPS_UNSEEN - 3)
    assert (scene.board.reads, len(heard)) == (3, 3)


async def test_listeners_are_notified_of_the_end(scene):
    heard = []

    async def look():
        heard.append(scene.live.ended)

    scene.live.listen(look)
    await scene.steps()
    await scene.live.end()
    assert heard == [False, True]


async def test_opened_page_reads_statuses_unless_recent(scene):
    await scene.live.refresh()
    await scene.live.refresh()
    assert scene.board.reads == 1
    scene.clock.advance(seconds=4)
    await scene.live.refresh()
    assert scene.board.reads == 2


async def test_a_store_that_hangs_does_not_delay_the_view(scene, monkeypatch):
    scene.other("n2")
    await scene.live.refresh()
    monkeypatch.setattr(live, "READ_S", 0)
    scene.board.hangs = True
    await scene.steps(2)
    overview = scene.live.overview()
    assert (ids_of(overview), overview.stale_s) == (["n1", "n2"], 2 * SAMPLE_S)


async def test_no_node_counts_as_gone_while_the_store_is_unavailable(scene):
    scene.other("n2", allowed_per_s=5.0)
    await scene.live.refresh()
    scene.board.error = StoreUnavailableError("no answer")
    await scene.steps(5)
    overview = scene.live.overview()
    assert overview.stale_s == overview.nodes[1].age_s == 10.0
    assert (ids_of(overview), overview.nodes[1].gone) == (["n1", "n2"], False)
    assert overview.total.allowed_per_s == 1.0
    scene.board.error = None
    scene.other("n2")
    await scene.live.refresh()
    await scene.steps(5)
    assert scene.live.overview().stale_s is None


async def test_invalid_statuses_are_left_out_and_reported_once(scene, caplog):
    scene.other("n2")
    scene.board.found["n3/x"] = b"what?"
    for _ in range(2):
        await scene.live.refresh()
        scene.clock.advance(seconds=4)
    assert ids_of(scene.live.overview()) == ["n1", "n2"]
    [report] = caplog.messages
    assert report.startswith("statuses of 1 other node")


async def test_many_statuses_are_read_in_several_iterations(scene):
    for number in range(3 * STATUSES_PER_ITERATION):
        scene.other(f"m{number:03}")
    await scene.live.refresh()
    assert len(scene.live.overview().nodes) == 3 * STATUSES_PER_ITERATION + 1


async def test_denials_of_all_nodes_are_added_by_endpoint_and_identifier(scene):
    scene.deny(b"grace", "/" * 100)
    scene.deny(b"ada.lovelace", "/a")
    ada = DeniedIdentifier(b"ada.lovelace".hex(), "user", "ada…", 10.0)
    bob = DeniedIdentifier("00", "user", "bob…", 5.0)
    endpoints = [DeniedEndpoint("/" * MAX_ENDPOINT, 9.0), DeniedEndpoint("/b", 2.0)]
    for node_id in ("n2", "n3"):
        scene.other(node_id, endpoints=endpoints, identifiers=[ada, bob])
    scene.other("n4", age_s=60, endpoints=endpoints, identifiers=[ada, bob])
    await scene.live.refresh()
    overview = scene.live.overview(named=True)
    assert [(one.endpoint, round(one.per_minute)) for one in overview.endpoints] == [
        ("/" * MAX_ENDPOINT, 19),
        ("/b", 4),
        ("/a", 1),
    ]
    assert [(one.name, one.masked, round(one.per_minute)) for one in overview.identifiers] == [
        ("ada.lovelace", "ada…", 21),
        ("", "bob…", 10),
        ("grace", "g…", 1),
    ]
    assert not any(one.name for one in scene.live.overview().identifiers)


async def test_denials_fade_with_every_step(scene):
    scene.deny(b"ada.lovelace")
    [before] = scene.live.overview().endpoints
    await scene.steps(30)
    [after] = scene.live.overview().endpoints
    assert after.per_minute == pytest.approx(before.per_minute / 2)


async def test_names_come_from_every_node_with_the_same_secret(scene):
    def denied(name, seal, kind="user"):
        identifiers = [DeniedIdentifier(name.encode().hex(), kind, name[:3], 5.0, name)]
        return {"identifiers": identifiers, "names": sealed_names(identifiers, seal)}

    scene.deny(b"here")
    scene.other("n2", **denied("there", KEYS))
    scene.other("n3", **denied("stranger", BucketKeys(b"x" * 16)))
    scene.other("n4", age_s=SILENT_S + 1, **denied("gone", KEYS))
    await scene.steps()
    names = [one.name for one in scene.live.overview(named=True).identifiers]
    assert sorted(names) == ["", "here", "there"]
    assert {one.name for one in scene.live.overview().identifiers} == {""}


async def test_endpoints_without_a_rule_are_merged_over_live_nodes(scene):
    long = "/" + "x" * 200
    for endpoint in ("/ordes", "/ordes", long):
        scene.stats.no_rule_total += 1
        scene.denials.record_without_rule(endpoint)
    scene.denials.fold()
    theirs = [DeniedEndpoint("/ordes", 1.0), DeniedEndpoint(long, 9.0), DeniedEndpoint("/c", 3.0)]
    scene.other("n2", unmatched=theirs)
    scene.other("n3", age_s=SILENT_S + 1, unmatched=[DeniedEndpoint("/gone", 9.0)])
    found = await scene.live.unmatched()
    assert [one.endpoint for one in found] == [long, "/c", "/ordes"]
    assert [round(one.per_minute, 1) for one in found] == [9.7, 3.0, 2.4]


async def test_at_most_a_hundred_endpoints_without_a_rule_are_reported(scene):
    for number in range(TOP_UNMATCHED + 10):
        scene.stats.no_rule_total += 1
        scene.denials.record_without_rule(f"/{number}")
    scene.denials.fold()
    assert len(await scene.live.unmatched()) == TOP_UNMATCHED == 100
    assert len(scene.live.overview().unmatched) == TOP


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
            tls_expiry_s=dict,
            in_flight=lambda: (),
        )
        self.live = live_of(
            parts,
            self.denials,
            addresses=lambda: ("127.0.0.1:1", "127.0.0.1:2"),
            admin_token_digest=str,
            seal=KEYS,
            busiest=lambda: [BusyRule("1", 2.0, 0.5)],
        )

    async def step(self):
        self.clock.advance(seconds=2)
        await self.live.step()
        return self.live.overview().nodes[0].status


async def test_embedded_node_reports_its_checks_and_no_cluster():
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


async def test_denied_identifiers_are_reported_masked():
    parts = Parts()
    scope = SimpleNamespace(endpoint="/a", identifier_type="user")
    parts.denials.record((b"ada.lovelace", scope))
    parts.denials.fold()
    status = await parts.step()
    assert [one.endpoint for one in status.endpoints] == ["/a"]
    assert [(one.masked, one.name) for one in status.identifiers] == [("ada…", "")]


@pytest.fixture
def cluster():
    return SimpleNamespace(board=Board(), sync_lag_s=0.5, worst_excess=0.01, promised_excess=0.51)


async def test_clustered_node_publishes_its_cluster_state(cluster):
    parts = Parts(cluster)
    parts.shared_state = SharedStateStatus(connected=False, breaker_state="open", retry_s=12.0)
    await parts.step()
    told = decode(cluster.board.published[-1])
    assert (told.sync_lag_s, told.excess_ratio, told.excess_bound_ratio) == (0.5, 0.01, 0.51)
    assert told.names == ""
    assert (told.shared_state_connected, told.breaker_state, told.retry_s) == (False, "open", 12.0)


async def test_a_change_of_health_takes_no_checks_out_of_the_samples(cluster):
    parts = Parts(cluster)
    parts.stats.allowed_total += 200
    await parts.step()
    parts.stats.allowed_total += 400
    parts.stats.bucket_missed_total += 400  # the hit ratio is too low
    parts.live.watch()
    told = decode(cluster.board.published[-1])
    assert (told.healthy, told.sample.allowed_per_s) == (False, 100.0)
    assert (await parts.step()).sample.allowed_per_s == 200.0


async def test_names_of_denied_identifiers_are_published_sealed(cluster):
    parts = Parts(cluster)
    for name, kind in ((b"ada.lovelace", "user"), (b"sk_live_1", "api_key")):
        parts.denials.record((name, SimpleNamespace(endpoint="/a", identifier_type=kind)))
    parts.denials.fold()
    await parts.step()
    octets = cluster.board.published[-1]
    assert b"lovelace" not in octets
    names = names_within(decode(octets).names, KEYS)
    assert [*names.values()] == ["ada.lovelace"]
