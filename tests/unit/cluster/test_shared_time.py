import time

from ratelimitd.cluster.membership import SAMPLES, SharedTime
from tests.unit.cluster.world import SECOND

STORE_US = 1_700_006_400 * SECOND


class Scene:
    """A machine whose clock is an hour behind the store's."""

    def __init__(self):
        self.machine_us, self.monotonic_us = STORE_US - 3_600 * SECOND, 5 * SECOND
        self.shared_time = SharedTime(
            lambda: self.machine_us * 1_000, lambda: self.monotonic_us * 1_000
        )

    def add_sample(self, round_trip_us, error_us=0):
        """Record an answer of the store, read in the middle of the round trip or ``error_us`` later."""
        sent_us = self.monotonic_us
        self.monotonic_us += round_trip_us
        store_us = STORE_US + sent_us + round_trip_us // 2 + error_us
        self.shared_time.add_sample(store_us, sent_us, self.monotonic_us)

    @property
    def error_us(self):
        return self.shared_time.wall_us() - (STORE_US + self.monotonic_us)


def test_the_time_is_the_machines_until_the_first_answer():
    scene = Scene()
    assert not scene.shared_time.is_known
    assert scene.shared_time.wall_us() == scene.machine_us
    assert scene.shared_time.round_trip_us == 0


def test_the_default_clocks_are_those_of_the_machine():
    before_ns = time.time_ns()
    assert before_ns <= SharedTime().wall_ns()


def test_the_stores_time_advances_between_answers_regardless_of_the_machines_clock():
    scene = Scene()
    scene.add_sample(200)
    assert scene.shared_time.is_known
    scene.monotonic_us += 10 * SECOND
    scene.machine_us -= SECOND
    assert scene.error_us == 0
    assert scene.shared_time.wall_ns() == scene.shared_time.wall_us() * 1_000


def test_the_answer_with_the_shortest_round_trip_is_used():
    scene = Scene()
    scene.add_sample(20_000, error_us=9_000)
    assert scene.error_us == 9_000
    scene.add_sample(200, error_us=90)
    scene.add_sample(30_000, error_us=-14_000)
    assert scene.error_us == 90
    assert scene.shared_time.round_trip_us == 30_000


def test_old_answers_are_dropped_so_that_another_servers_clock_is_followed():
    scene = Scene()
    scene.add_sample(100)
    for _ in range(SAMPLES):
        scene.add_sample(500, error_us=SECOND)
    assert scene.error_us == SECOND
    assert scene.shared_time.round_trip_us == 500
