"""Slow, silent, stalled and old peers, with a manual clock."""

import pytest

from ratelimitd.http2.errors import Cause
from ratelimitd.rpc.interface import TransportLimits
from ratelimitd.rpc.keepalive import Action, Keepalive, Snapshot, Step

LIMITS = TransportLimits(
    keepalive_interval_ms=60_000,
    keepalive_timeout_ms=20_000,
    stall_timeout_ms=20_000,
    max_connection_age_ms=1_000_000,
    max_connection_age_grace_ms=60_000,
)
NOTHING = Action(Step.NOTHING)


@pytest.fixture
def lifetime():
    return Keepalive(LIMITS, 0.0, 0.0)


def sight(received=0, *, owes=None, progress=0, paused=False):
    return Snapshot(owes, progress, received, paused)


def test_a_silent_peer_is_pinged_then_timed_out(lifetime):
    assert lifetime.look(sight(1), 1) == NOTHING
    assert lifetime.look(sight(1), 60) == NOTHING
    assert lifetime.look(sight(1), 61) == Action(Step.PING)
    assert lifetime.look(sight(1), 80) == NOTHING
    assert lifetime.look(sight(1), 81) == Action(Step.END, Cause.KEEPALIVE_TIMEOUT)


def test_received_octets_restart_the_silence_timer(lifetime):
    assert lifetime.look(sight(0), 60) == Action(Step.PING)
    assert lifetime.look(sight(1), 79) == NOTHING
    assert lifetime.look(sight(1), 138) == NOTHING
    assert lifetime.look(sight(1), 139) == Action(Step.PING)


@pytest.mark.parametrize(
    "owes", [Cause.SLOW_PREFACE, Cause.SLOW_HEADERS, Cause.STALLED_WINDOW, Cause.SETTINGS_TIMEOUT]
)
def test_a_connection_that_waits_too_long_for_input_ends_with_the_cause(lifetime, owes):
    assert lifetime.look(sight(1, owes=owes), 5) == NOTHING
    assert lifetime.look(sight(2, owes=owes), 24) == NOTHING
    assert lifetime.look(sight(3, owes=owes), 25) == Action(Step.END, owes)


def test_progress_or_another_cause_restarts_the_stall_timer(lifetime):
    assert lifetime.look(sight(1, owes=Cause.STALLED_WINDOW), 5) == NOTHING
    assert lifetime.look(sight(2, owes=Cause.STALLED_WINDOW, progress=1), 24) == NOTHING
    assert lifetime.look(sight(3, owes=Cause.SLOW_HEADERS, progress=1), 43) == NOTHING
    assert lifetime.look(sight(4, owes=Cause.SLOW_HEADERS, progress=1), 62) == NOTHING
    assert lifetime.look(sight(5), 63) == NOTHING


def test_a_peer_that_does_not_read_ends_with_stalled_window(lifetime):
    assert lifetime.look(sight(1, paused=True), 5) == NOTHING
    assert lifetime.look(sight(1, paused=True), 25) == Action(Step.END, Cause.STALLED_WINDOW)


def test_an_old_connection_gets_one_goaway_and_ends_after_the_grace(lifetime):
    assert lifetime.look(sight(1), 999) == NOTHING
    assert lifetime.look(sight(2), 1_000) == Action(Step.GO_AWAY)
    assert lifetime.look(sight(3), 1_059) == NOTHING
    assert lifetime.look(sight(4), 1_060) == Action(Step.END)


@pytest.mark.parametrize(("jitter", "age_s"), [(-1, 900), (1, 1_100)])
def test_maximum_ages_vary_by_a_tenth(jitter, age_s):
    lifetime = Keepalive(LIMITS, 0.0, jitter)
    assert lifetime.look(sight(1), age_s - 1) == NOTHING
    assert lifetime.look(sight(2), age_s) == Action(Step.GO_AWAY)
