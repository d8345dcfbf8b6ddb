import asyncio

import pytest

from ratelimitd.cluster import membership as membership_module
from ratelimitd.cluster.membership import BEAT_TTL_US, Membership, SharedTime
from ratelimitd.errors import (
    StartupError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.testing import ManualClock

LONG_S = 60


class Pulse:
    """Keeps heartbeats for the test to answer, or answers each with ``answer``."""

    def __init__(self):
        self.beats, self.dones, self.answer = [], [], None

    def beat(self, incarnation, ttl_us, fingerprint, done):
        self.beats.append((incarnation, ttl_us, fingerprint))
        self.dones.append(done)
        if self.answer is not None:
            asyncio.get_running_loop().call_soon(done, self.answer)


class Scene:
    def __init__(self):
        self.pulse, self.clock = Pulse(), ManualClock()
        self.fingerprint = "ours"
        self.shared_time = SharedTime(monotonic_ns=lambda: self.clock.monotonic_us() * 1_000)
        self.membership = Membership(
            self.pulse,
            "node/1",
            fingerprint=lambda: self.fingerprint,
            clock=self.clock,
            shared_time=self.shared_time,
        )

    def beat_answered(self, fingerprint="ours", names=("node/1", "other/2")):
        self.membership.beat()
        self.pulse.dones[-1]((7_000_000, fingerprint, names))


@pytest.fixture
def scene():
    return Scene()


def test_a_node_is_alone_until_the_store_reports_others(scene):
    assert (scene.membership.count, scene.membership.alive) == (1, ())
    scene.beat_answered()
    assert scene.membership.count == 2
    assert scene.membership.alive == ("node/1", "other/2")
    assert scene.pulse.beats == [("node/1", BEAT_TTL_US, "ours")]


def test_a_node_always_counts_itself(scene):
    scene.beat_answered(names=())
    assert scene.membership.count == 1


def test_members_are_kept_while_the_store_is_unavailable(scene):
    scene.beat_answered()
    scene.membership.beat()
    scene.pulse.dones[-1](StoreUnavailableError("no answer"))
    assert scene.membership.count == 2


def test_a_refusal_of_heartbeats_is_logged_once_each_time_it_begins(scene, caplog):
    for error in (
        StoreMisconfiguredError("NOPERM"),
        StoreMisconfiguredError("NOPERM"),
        StoreUnavailableError("no answer"),
        None,
        StoreCorruptError("WRONGTYPE"),
    ):
        scene.membership.beat()
        scene.pulse.dones[-1](error or (7_000_000, "ours", ("node/1",)))
    assert caplog.messages == [
        "the nodes of the cluster cannot be counted: NOPERM",
        "the nodes of the cluster cannot be counted: WRONGTYPE",
    ]


def test_an_answer_sets_the_stores_time_at_the_middle_of_the_round_trip(scene):
    scene.membership.beat()
    scene.clock.advance(us=400)
    scene.pulse.dones[-1]((7_000_000, "ours", ("node/1",)))
    assert scene.shared_time.wall_us() == 7_000_200
    assert scene.shared_time.round_trip_us == 400


def test_another_secret_is_reported_once_each_time_it_appears(scene, caplog):
    for fingerprint in ("theirs", "theirs", "ours", "theirs"):
        scene.beat_answered(fingerprint)
    assert len(caplog.messages) == 2
    assert "KEY_SECRET" in caplog.messages[0]
    assert "theirs" not in caplog.messages[0]


def test_a_node_without_its_secret_yet_reports_no_mismatch(scene, caplog):
    scene.fingerprint = ""
    scene.beat_answered("theirs")
    assert caplog.messages == []
    scene.fingerprint = "ours"
    scene.beat_answered("theirs")
    assert len(caplog.messages) == 1


def test_a_store_without_a_fingerprint_is_no_mismatch(scene, caplog):
    scene.beat_answered("")
    assert caplog.messages == []


async def test_a_node_joins_when_the_store_answers(scene):
    scene.pulse.answer = (7_000_000, "ours", ("node/1", "other/2"))
    await scene.membership.join(LONG_S)
    assert scene.membership.count == 2


async def test_a_node_with_another_secret_does_not_start(scene):
    scene.pulse.answer = (7_000_000, "theirs", ("node/1", "other/2"))
    with pytest.raises(StartupError, match="KEY_SECRET"):
        await scene.membership.join(LONG_S)


async def test_a_node_starts_without_the_store(scene):
    scene.pulse.answer = StoreUnavailableError("no answer")
    await scene.membership.join(LONG_S)
    scene.pulse.answer = None
    await scene.membership.join(0)
    assert scene.membership.count == 1
    scene.pulse.dones[-1]((7_000_000, "ours", ("node/1", "other/2")))
    assert scene.membership.count == 2  # late, but accepted


async def test_a_leaving_node_reports_its_end(scene):
    scene.pulse.answer = (7_000_000, "ours", ("other/2",))
    await scene.membership.leave()
    assert scene.pulse.beats == [("node/1", 0, "ours")]


async def test_a_node_leaves_without_an_acknowledgement(scene, monkeypatch):
    monkeypatch.setattr(membership_module, "LEAVE_S", 0)
    await scene.membership.leave()
    assert scene.pulse.beats == [("node/1", 0, "ours")]
