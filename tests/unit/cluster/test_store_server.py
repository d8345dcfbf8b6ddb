import pytest

from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    StoreClusterDownError,
    StoreCorruptError,
    StoreMovingError,
    StoreOverloadedError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.testing import ManualClock
from ratelimitd_wire.breaker import Breaker, State
from tests.unit.cluster.world import MS, SECOND, ManualTimers

AWAY = StoreUnavailableError("no answer")
SLOW = StoreSlowError("too slow")


class Scene:
    def __init__(self):
        self.clock, self.stats = ManualClock(), CheckStats()
        self.timers = ManualTimers(self.clock)
        breaker = Breaker(self.clock.monotonic_us, failure_threshold=5, recovery_us=30 * SECOND)
        self.server = StoreServer("server:1", 7, breaker, self.clock, self.stats, self.timers)

    def fail(self, turns=1, errors=1):
        for _ in range(turns):
            for _ in range(errors):
                self.server.failed(AWAY)
            self.timers.run()


@pytest.fixture
def scene():
    return Scene()


def test_the_breaker_is_closed_at_first(scene):
    assert (scene.server.name, scene.server.tag) == ("server:1", 7)
    assert (scene.server.is_open, scene.server.state) == (False, State.CLOSED)
    assert not scene.server.begins_probe()
    assert scene.server.open_error().retry_after_us == 0


def test_a_result_is_a_failure_if_it_is_an_error(scene):
    for _ in range(5):
        scene.server.report(AWAY)
        scene.timers.run()
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (True, 5)
    scene.clock.advance(us=30 * SECOND)
    assert scene.server.begins_probe()
    scene.server.report(None)
    assert not scene.server.is_open


def test_failures_of_one_iteration_count_once(scene):
    scene.fail(turns=4, errors=100)
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (False, 4)
    scene.fail(errors=100)
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (True, 5)
    assert scene.server.state is State.OPEN


def test_late_answers_are_counted_and_do_not_open_the_breaker(scene):
    for _ in range(100):
        scene.server.failed(SLOW)
        scene.server.refused(SLOW)
        scene.timers.run()
        scene.clock.advance(us=20 * MS)
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (False, 100)
    scene.fail(turns=4)
    scene.server.first_check_succeeded()  # a late batch does not count as refused
    scene.fail(turns=4)
    assert not scene.server.is_open


def test_a_migrating_slot_is_counted_and_does_not_open_the_breaker(scene):
    moving = StoreMovingError("TRYAGAIN")
    for _ in range(100):
        scene.server.failed(moving)
        scene.server.refused(moving)
        scene.timers.run()
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (False, 100)
    scene.fail(turns=4)
    scene.server.first_check_succeeded()  # batches do not count as refused
    scene.fail(turns=4)
    assert not scene.server.is_open


def test_a_late_check_does_not_fail_the_probe(scene):
    scene.fail(turns=5)
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.server.failed(SLOW)
    assert scene.server.state is State.HALF_OPEN


def test_a_late_answer_hides_no_failure_of_the_same_iteration(scene):
    scene.fail(turns=4)
    scene.server.failed(SLOW)
    assert not scene.server.is_open
    scene.server.failed(AWAY)
    scene.timers.run()
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (True, 5)


def test_a_server_without_a_name_is_logged_without_one(scene, caplog):
    scene.server.name = ""
    scene.fail(turns=5)
    assert caplog.messages == ["shared state: the circuit breaker is open: no answer"]


def test_a_dropped_server_is_logged_only_if_its_breaker_is_open(scene, caplog):
    scene.server.left()
    assert caplog.messages == []
    scene.fail(turns=5)
    scene.server.left()
    assert caplog.messages[1:] == [
        "shared state at server:1: it no longer holds buckets; its open circuit breaker is removed"
    ]


def test_opening_and_closing_are_logged(scene, caplog):
    scene.fail(turns=7)
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.fail()
    assert caplog.messages == ["shared state at server:1: the circuit breaker is open: no answer"]
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.server.answered()
    scene.server.answered()
    assert caplog.messages[1:] == ["shared state at server:1: the circuit breaker is closed"]


def test_a_success_resets_the_count_of_failures(scene):
    scene.fail(turns=4)
    scene.server.answered()
    scene.fail(turns=4)
    assert not scene.server.is_open


def test_a_server_that_refuses_writes_opens_its_breaker_despite_reads(scene):
    for _ in range(5):
        scene.server.first_check_succeeded()
        scene.server.refused(AWAY)
        scene.timers.run()
    assert scene.server.is_open


@pytest.mark.parametrize("write", [StoreServer.answered, StoreServer.synced])
def test_first_checks_reset_the_count_once_writes_succeed_again(scene, write):
    for _ in range(4):
        scene.server.refused(AWAY)
        scene.timers.run()
    write(scene.server)
    scene.server.first_check_succeeded()
    scene.fail(turns=4)
    assert not scene.server.is_open


def test_an_overload_of_the_node_does_not_count_as_refused_writes(scene):
    scene.server.refused(StoreOverloadedError("full"))
    scene.fail(turns=4)
    scene.server.first_check_succeeded()
    scene.fail(turns=4)
    assert not scene.server.is_open


@pytest.mark.parametrize("error", [StoreCorruptError("not ours"), StoreOverloadedError("full")])
def test_errors_that_say_nothing_about_the_server_are_ignored(scene, error):
    for _ in range(10):
        scene.server.failed(error)
        scene.server.sync_failed(error)
        scene.timers.run()
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (False, 0)


def test_failures_of_the_sync_are_counted_and_do_not_open_the_breaker(scene):
    for _ in range(10):
        scene.server.sync_failed(AWAY)
    assert (scene.server.is_open, scene.stats.shared_state_errors_total) == (False, 10)


def test_an_open_breaker_reports_its_remaining_time(scene):
    scene.fail(turns=5)
    scene.clock.advance(seconds=10)
    assert scene.server.open_error().retry_after_us == 20 * SECOND
    scene.clock.advance(seconds=30)
    assert scene.server.open_error().retry_after_us == 0


def test_an_answered_probe_closes_the_breaker(scene):
    scene.fail(turns=5)
    scene.clock.advance(seconds=29)
    assert not scene.server.begins_probe()
    scene.clock.advance(seconds=1)
    assert scene.server.begins_probe()
    assert (scene.server.is_open, scene.server.state) == (True, State.HALF_OPEN)
    assert not scene.server.begins_probe()
    scene.server.answered()
    assert (scene.server.is_open, scene.server.state) == (False, State.CLOSED)


def test_a_failed_probe_restarts_the_recovery_time(scene):
    scene.fail(turns=5)
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.fail()
    assert (scene.server.is_open, scene.server.state) == (True, State.OPEN)
    scene.clock.advance(us=SECOND - 1)
    assert not scene.server.begins_probe()
    scene.clock.advance(us=1)
    assert scene.server.begins_probe()


def test_a_server_that_waits_for_a_failover_is_probed_every_second(scene):
    for _ in range(5):
        scene.server.failed(StoreClusterDownError("CLUSTERDOWN"))
        scene.timers.run()
    for _ in range(3):
        assert scene.server.open_error().retry_after_us == SECOND
        scene.clock.advance(seconds=1)
        assert scene.server.begins_probe()
        scene.server.failed(StoreClusterDownError("CLUSTERDOWN"))
        scene.timers.run()
    assert scene.server.is_open


def test_only_a_probe_closes_an_open_breaker(scene):
    scene.fail(turns=5)
    scene.server.answered()
    assert (scene.server.is_open, scene.server.state) == (True, State.OPEN)
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.server.answered()
    assert (scene.server.is_open, scene.server.state) == (False, State.CLOSED)


def test_the_count_restarts_after_a_late_answer_and_a_probe(scene):
    scene.fail(turns=5)
    scene.server.answered()
    scene.clock.advance(seconds=30)
    assert scene.server.begins_probe()
    scene.server.answered()
    for _ in range(2):
        scene.fail(turns=4)
        assert not scene.server.is_open
        scene.server.answered()
    scene.fail(turns=5)
    assert scene.server.is_open
