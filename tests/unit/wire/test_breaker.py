import random
import threading

import pytest

from ratelimitd.testing import ManualClock
from ratelimitd_wire.breaker import (
    FAILURE_THRESHOLD,
    LEASE_US,
    RECOVERY_US,
    US_PER_S,
    Breaker,
    State,
)


def opened(clock, **options):
    breaker = Breaker(clock.monotonic_us, **options)
    for _ in range(FAILURE_THRESHOLD):
        breaker.failed()
    return breaker


def probing(clock, **options):
    breaker = opened(clock, **options)
    clock.advance(us=RECOVERY_US)
    assert breaker.begin_probe()
    return breaker


def test_the_defaults_are_those_of_the_specification():
    assert FAILURE_THRESHOLD == 5
    assert RECOVERY_US == 30_000_000


def test_a_new_breaker_is_closed_and_grants_no_probe():
    clock = ManualClock()
    breaker = Breaker(clock.monotonic_us)
    clock.advance(seconds=3600)
    assert (breaker.state, breaker.allows(), breaker.retry_at_us) == (State.CLOSED, True, None)
    assert not breaker.begin_probe()


def test_the_fifth_consecutive_failure_opens_and_not_the_fourth():
    breaker = Breaker(ManualClock().monotonic_us)
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.failed()
        assert breaker.allows()
    breaker.failed()
    assert (breaker.state, breaker.allows()) == (State.OPEN, False)


def test_a_success_between_failures_resets_the_count():
    breaker = Breaker(ManualClock().monotonic_us)
    for _ in range(3):
        for _ in range(FAILURE_THRESHOLD - 1):
            breaker.failed()
        breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_the_threshold_can_be_one():
    breaker = Breaker(ManualClock().monotonic_us, failure_threshold=1)
    breaker.failed()
    assert breaker.state is State.OPEN


def test_a_probe_is_due_after_the_recovery_time_and_not_a_microsecond_earlier():
    clock = ManualClock()
    breaker = opened(clock)
    assert breaker.retry_at_us == clock.monotonic_us() + RECOVERY_US
    clock.advance(us=RECOVERY_US - 1)
    assert not breaker.begin_probe()
    clock.advance(us=1)
    assert breaker.begin_probe()
    assert breaker.state is State.HALF_OPEN


def test_setting_the_wall_clock_has_no_effect():
    clock = ManualClock()
    breaker = opened(clock)
    clock.step(10 * RECOVERY_US)
    assert not breaker.begin_probe()
    clock.step(-20 * RECOVERY_US)
    clock.advance(us=RECOVERY_US)
    assert breaker.begin_probe()


def test_half_open_grants_one_probe_at_a_time_and_no_check():
    clock = ManualClock()
    breaker = probing(clock)
    assert not breaker.allows()
    clock.advance(us=LEASE_US - 1)
    assert not breaker.begin_probe()


def test_a_probe_without_a_result_is_replaced_after_its_lease():
    clock = ManualClock()
    breaker = probing(clock)
    for _ in range(3):
        clock.advance(us=LEASE_US)
        assert breaker.begin_probe()
        assert not breaker.begin_probe()
    breaker.succeeded()
    assert breaker.allows()


def test_a_successful_probe_closes_and_resets_the_count():
    clock = ManualClock()
    breaker = probing(clock)
    breaker.succeeded()
    assert (breaker.state, breaker.retry_at_us) == (State.CLOSED, None)
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.failed()
    assert breaker.allows()


def test_failed_probes_open_for_a_second_then_twice_as_long_each_time():
    clock = ManualClock()
    breaker = probing(clock)
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        breaker.failed()
        assert breaker.state is State.OPEN
        assert breaker.retry_at_us == clock.monotonic_us() + seconds * US_PER_S
        assert not breaker.begin_probe()
        clock.advance(seconds=seconds)
        assert breaker.begin_probe()
    breaker.succeeded()
    for _ in range(FAILURE_THRESHOLD):
        breaker.failed()
    assert breaker.retry_at_us == clock.monotonic_us() + RECOVERY_US


def test_the_pause_after_a_failed_probe_is_at_most_the_recovery_time():
    clock = ManualClock()
    breaker = opened(clock, recovery_us=US_PER_S // 2)
    for _ in range(100):
        clock.advance(us=US_PER_S // 2)
        assert breaker.begin_probe()
        breaker.failed()
    assert breaker.retry_at_us == clock.monotonic_us() + US_PER_S // 2


def test_a_peer_that_is_expected_back_soon_is_probed_every_second():
    clock = ManualClock()
    breaker = Breaker(clock.monotonic_us)
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.failed(soon=True)
        assert breaker.allows()
    for _ in range(4):
        breaker.failed(soon=True)
        assert breaker.state is State.OPEN
        assert breaker.retry_at_us == clock.monotonic_us() + US_PER_S
        clock.advance(seconds=1)
        assert breaker.begin_probe()
    for seconds in (1, 2):  # another failure
        breaker.failed()
        assert breaker.retry_at_us == clock.monotonic_us() + seconds * US_PER_S
        clock.advance(seconds=seconds)
        assert breaker.begin_probe()
    breaker.succeeded()
    assert breaker.allows()


def test_a_peer_that_is_expected_back_soon_is_probed_after_the_recovery_time_at_the_latest():
    clock = ManualClock()
    breaker = Breaker(clock.monotonic_us, failure_threshold=1, recovery_us=US_PER_S // 2)
    breaker.failed(soon=True)
    assert breaker.retry_at_us == clock.monotonic_us() + US_PER_S // 2


@pytest.mark.parametrize("report", ["succeeded", "failed"])
def test_a_report_after_the_breaker_opened_neither_closes_nor_delays_it(report):
    clock = ManualClock()
    breaker = opened(clock)
    due_us = breaker.retry_at_us
    clock.advance(us=RECOVERY_US // 2)
    getattr(breaker, report)()
    assert (breaker.state, breaker.retry_at_us) == (State.OPEN, due_us)


def test_jitter_is_drawn_per_opening_and_not_per_lease():
    clock, drawn = ManualClock(), iter([250_000, 750_000])
    breaker = opened(clock, jitter_us=lambda: next(drawn))
    assert breaker.retry_at_us == RECOVERY_US + 250_000
    clock.advance(us=RECOVERY_US + 250_000)
    assert breaker.begin_probe()
    assert breaker.retry_at_us == clock.monotonic_us() + LEASE_US
    breaker.failed()
    assert breaker.retry_at_us == clock.monotonic_us() + US_PER_S + 750_000


class Prediction:
    """A second implementation of the breaker, to compare with."""

    def __init__(self):
        self.state, self.failures, self.due_us = "closed", 0, None
        self.pauses = []

    def report(self, now_us, succeeded):
        if self.state == "open":
            return
        self.failures = 0 if succeeded else self.failures + 1
        if succeeded:
            self.state, self.due_us = "closed", None
        elif self.state == "half_open" or self.failures >= FAILURE_THRESHOLD:
            if self.state == "closed":
                self.pauses = [RECOVERY_US, *(seconds * US_PER_S for seconds in (1, 2, 4, 8, 16))]
            pause_us = self.pauses.pop(0) if self.pauses else RECOVERY_US
            self.state, self.failures, self.due_us = "open", 0, now_us + pause_us

    def probe(self, now_us):
        if self.state == "closed" or now_us < self.due_us:
            return False
        self.state, self.due_us = "half_open", now_us + LEASE_US
        return True


@pytest.mark.parametrize("seed", range(10))
def test_any_sequence_of_events_matches_the_model_and_covers_every_transition(seed):
    rng, clock, predicted = random.Random(seed), ManualClock(), Prediction()
    breaker, met = Breaker(clock.monotonic_us), set()
    for _ in range(2_000):
        before, now_us = breaker.state, clock.monotonic_us()
        action = rng.choice(["succeeded", "failed", "failed", "failed", "begin_probe", "wait"])
        if action == "wait":
            clock.advance(us=rng.choice([1, LEASE_US - 1, LEASE_US, RECOVERY_US - 1, RECOVERY_US]))
        elif action == "begin_probe":
            assert breaker.begin_probe() == predicted.probe(now_us)
        else:
            getattr(breaker, action)()
            predicted.report(now_us, succeeded=action == "succeeded")
        met.add((before, breaker.state))
        assert (breaker.state, breaker.retry_at_us) == (predicted.state, predicted.due_us)
        assert breaker.allows() == (breaker.state == "closed")
    changes = {
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "open"),
        ("half_open", "closed"),
    }
    assert {pair for pair in met if pair[0] != pair[1]} == changes


def test_one_of_many_threads_sends_the_probe():
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(us=RECOVERY_US)
    barrier, probes = threading.Barrier(8), []

    def compete():
        barrier.wait()
        probes.append(breaker.begin_probe())

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(probes) == [False] * 7 + [True]
