"""The client's breaker: its table, met by a prediction that is written without one."""

import random
import threading

import pytest

from ratelimitd_client import breaker as breaker_module
from ratelimitd_client.breaker import (
    FAILURE_THRESHOLD,
    JITTER_S,
    LEASE_S,
    RECOVERY_S,
    TRANSITIONS,
    Breaker,
    Effect,
    Input,
    State,
    jitter_s,
)
from ratelimitd_client.testing import ManualClock


def opened(clock):
    breaker = Breaker(clock, jitter_s=lambda: 0.0)
    for _ in range(FAILURE_THRESHOLD):
        breaker.failed()
    return breaker


def test_the_table_covers_what_can_happen_and_nothing_else():
    cannot = {
        (State.CLOSED, Input.DUE),
        (State.OPEN, Input.TRIPPED),
        (State.HALF_OPEN, Input.TRIPPED),
    }
    assert set(TRANSITIONS) == {(state, event) for state in State for event in Input} - cannot


def test_the_table_in_the_docstring_is_the_table():
    text = " ".join(breaker_module.__doc__.split())
    for (state, event), (then, effect) in TRANSITIONS.items():
        assert f"{state} {event} {then} {effect}" in text


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not():
    breaker = Breaker(ManualClock())
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()


def test_one_probe_at_a_time_closes_it_or_opens_it_again():
    clock = ManualClock()
    breaker = opened(clock)
    assert not breaker.begin_probe()
    clock.advance(RECOVERY_S)
    assert breaker.begin_probe()
    assert not breaker.begin_probe()
    assert not breaker.allows()
    breaker.failed()
    assert breaker.state is State.OPEN
    clock.advance(RECOVERY_S)
    assert breaker.begin_probe()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.retry_at_s is None


def test_a_probe_that_never_reports_is_replaced_when_its_lease_is_over():
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(RECOVERY_S)
    assert breaker.begin_probe()
    clock.advance(LEASE_S)
    assert breaker.begin_probe()


@pytest.mark.parametrize("report", ["succeeded", "failed"])
def test_what_was_under_way_when_it_opened_changes_nothing(report):
    clock = ManualClock()
    breaker = opened(clock)
    due_s = breaker.retry_at_s
    clock.advance(RECOVERY_S / 2)
    getattr(breaker, report)()
    assert (breaker.state, breaker.retry_at_s) == (State.OPEN, due_s)


def test_the_pause_has_jitter_drawn_for_each_opening():
    clock, drawn = ManualClock(), iter([0.01, 0.02])
    breaker = Breaker(clock, jitter_s=lambda: next(drawn))
    for _ in range(FAILURE_THRESHOLD):
        breaker.failed()
    assert breaker.retry_at_s == pytest.approx(RECOVERY_S + 0.01)
    clock.advance(RECOVERY_S + 0.01)
    assert breaker.begin_probe()
    breaker.failed()
    assert breaker.retry_at_s == pytest.approx(clock.monotonic_s() + RECOVERY_S + 0.02)
    assert all(0 <= jitter_s() <= JITTER_S for _ in range(100))


@pytest.mark.parametrize("seed", range(5))
def test_any_course_of_events_goes_as_predicted_and_every_transition_is_met(seed):
    rng, clock, met = random.Random(seed), ManualClock(), set()
    breaker = Breaker(clock, jitter_s=lambda: 0.0)
    state, failures, due_s = "closed", 0, None
    for _ in range(2_000):
        before, now_s = breaker.state, clock.monotonic_s()
        action = rng.choice(["succeeded", "failed", "failed", "failed", "begin_probe", "wait"])
        if action == "wait":
            clock.advance(rng.choice([RECOVERY_S / 2, RECOVERY_S, LEASE_S]))
        elif action == "begin_probe":
            probes = state != "closed" and now_s >= due_s
            assert breaker.begin_probe() == probes
            if probes:
                state, due_s = "half_open", now_s + LEASE_S
        else:
            getattr(breaker, action)()
            if state != "open" and action == "succeeded":
                state, failures, due_s = "closed", 0, None
            elif state != "open":
                failures += 1
                if state == "half_open" or failures >= FAILURE_THRESHOLD:
                    state, failures, due_s = "open", 0, now_s + RECOVERY_S
        met.add((before, breaker.state))
        assert (breaker.state, breaker.retry_at_s) == (state, due_s)
    assert {(at, then) for (at, _), (then, _) in TRANSITIONS.items()} <= met


def test_of_many_threads_one_sends_the_probe():
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(RECOVERY_S)
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


def test_an_effect_is_named_for_each_transition():
    assert {effect for _, effect in TRANSITIONS.values()} == set(Effect)
