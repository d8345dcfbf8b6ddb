from types import SimpleNamespace

import pytest

from ratelimitd.cluster.store_servers import Breakers
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.testing import ManualClock
from ratelimitd_wire.breaker import State
from tests.unit.cluster.world import SECOND, FakeStore, ManualTimers

AWAY = StoreUnavailableError("no answer")


class Scene:
    """Two servers, each with two of four hash tags."""

    def __init__(self):
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.store = FakeStore(self.timers)
        self.store.mode = "held"
        self.store.server_of_tag = ["one", "two", "one", "two"]
        self.luck = 0.5
        self.breakers = Breakers(
            self.store,
            self.clock,
            self.timers,
            stats=CheckStats(),
            failures=2,
            recovery_s=30,
            random=lambda: self.luck,
        )
        self.tags = [SimpleNamespace(number=n, server=self.breakers.of_tag(n)) for n in range(4)]

    def open(self, tag):
        for _ in range(2):
            self.tags[tag].server.failed(AWAY)
            self.timers.run()

    def probes(self, seconds=0):
        """Advance the clock, and return the hash tags that are probed."""
        self.clock.advance(seconds=seconds)
        known = len(self.store.asked("probe"))
        self.breakers.watch(self.tags)
        return self.store.asked("probe")[known:]


@pytest.fixture
def scene():
    return Scene()


def test_each_server_has_one_breaker(scene):
    first, second = scene.tags[0].server, scene.tags[1].server
    assert [tag.server for tag in scene.tags] == [first, second, first, second]
    scene.open(0)
    assert [tag.server.is_open for tag in scene.tags] == [True, False, True, False]


def test_the_state_is_that_of_the_worst_breaker(scene):
    assert scene.breakers.state is State.CLOSED
    scene.open(0)
    assert scene.breakers.state is State.OPEN
    scene.probes(31)
    assert scene.breakers.state is State.HALF_OPEN
    scene.open(1)
    assert scene.breakers.state is State.OPEN


def test_retry_after_is_that_of_the_last_open_breaker(scene):
    assert scene.breakers.retry_after_us == 0
    scene.open(0)
    scene.clock.advance(seconds=10)
    assert scene.breakers.retry_after_us == 20.25 * SECOND
    scene.open(1)
    assert scene.breakers.retry_after_us == 30.25 * SECOND


def test_an_open_breaker_is_probed_once_after_its_recovery_time_and_jitter(scene):
    scene.open(0)
    assert scene.probes() == []
    assert scene.probes(30.2) == []
    assert len(scene.probes(0.1)) == 1
    assert scene.probes() == []
    assert len(scene.probes(1)) == 1  # the first had no result


def test_a_server_without_a_connection_is_probed_once_it_is_connected(scene):
    scene.open(0)
    scene.store.disconnected.add("one")
    assert scene.probes(60) == []
    assert scene.breakers.state is State.OPEN
    scene.store.disconnected.clear()
    assert len(scene.probes()) == 1


@pytest.mark.parametrize(("error", "is_open"), [(None, False), (AWAY, True)])
def test_a_probe_closes_or_reopens_the_breaker(scene, error, is_open):
    scene.open(0)
    scene.probes(31)
    scene.store.held_one().done(error)
    assert scene.tags[0].server.is_open == is_open


def test_moved_tags_are_followed_and_a_server_without_tags_is_dropped(scene, caplog):
    scene.open(0)
    scene.store.server_of_tag[0] = scene.store.server_of_tag[2] = "three"
    scene.breakers.watch(scene.tags)
    assert [tag.server.name for tag in scene.tags] == ["three", "two", "three", "two"]
    assert scene.tags[0].server is scene.tags[2].server
    assert scene.breakers.state is State.CLOSED
    [_, left] = caplog.messages
    assert left.startswith("shared state at one: it holds no buckets any more")


def test_a_probe_goes_to_the_server_of_its_breaker_after_tags_moved(scene):
    scene.open(0)
    scene.store.server_of_tag[0] = "two"
    assert scene.probes(31) == [2]


def test_a_moved_tag_uses_the_breaker_of_its_new_server(scene):
    scene.open(1)
    scene.store.server_of_tag[0] = "two"
    scene.breakers.watch(scene.tags)
    assert [tag.server.is_open for tag in scene.tags] == [True, True, False, True]


def test_nodes_whose_breakers_opened_together_probe_at_different_times(scene):
    scene.luck = 0.0
    scene.open(0)
    scene.luck = 0.9
    scene.open(1)
    first, second = (scene.tags[n].server.open_error().retry_after_us for n in range(2))
    assert (first, second) == (30 * SECOND, 30_450_000)
