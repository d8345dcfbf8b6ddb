import pytest

from ratelimitd.cluster.node import SharedStateStatus
from ratelimitd.counters import CheckStats
from ratelimitd.observe.health import (
    EMBEDDED,
    MIN_CHECKS_TO_TELL,
    WINDOW_S,
    Health,
    RollingWindow,
)
from ratelimitd.observe.history import Totals
from ratelimitd.testing import ManualClock


@pytest.fixture
def stats():
    return CheckStats()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def health(stats, clock):
    return Health(node_id="n1", stats=stats, clock=clock, rules_revision=lambda: 7)


def seconds_pass(clock, health, seconds):
    for _ in range(seconds):
        clock.advance(seconds=1)
        health.sample()


def test_node_without_traffic_is_healthy(health):
    report = health.report()
    assert report.healthy
    assert report.local_cache_hit_ratio == 1.0
    assert report.average_latency_ms == 0.0
    assert report.error_rate == 0.0


def test_report_names_the_node_and_its_rules_revision(health):
    report = health.report()
    assert (report.node_id, report.rules_revision) == ("n1", 7)
    assert (report.shared_state_connected, report.breaker_state) == (True, "closed")


@pytest.mark.parametrize(("known", "healthy"), [(91, True), (90, False)])
def test_hit_ratio_must_be_above_90_percent(health, stats, known, healthy):
    stats.allowed_total, stats.bucket_missed_total = 100, 100 - known
    report = health.report()
    assert report.local_cache_hit_ratio == health.cache_hit_ratio() == known / 100
    assert report.healthy is healthy


def test_hit_ratio_of_few_checks_counts_as_met(health, stats):
    stats.allowed_total = stats.bucket_missed_total = MIN_CHECKS_TO_TELL - 1
    report = health.report()
    assert report.local_cache_hit_ratio == 0.0
    assert report.healthy
    assert report.hit_ratio_met
    stats.allowed_total = stats.bucket_missed_total = MIN_CHECKS_TO_TELL
    assert not health.report().healthy
    assert not health.report().hit_ratio_met


def test_misses_in_progress_make_no_ratio_negative(health, stats):
    stats.allowed_total, stats.bucket_missed_total = 1, 3
    assert health.cache_hit_ratio() == 0.0


def test_failed_misses_make_no_ratio_above_1(health, stats):
    health.sample()
    stats.allowed_total, stats.bucket_missed_total = 1, -3
    assert health.cache_hit_ratio() == 1.0


@pytest.mark.parametrize(("latency_s", "healthy"), [(0.001999, True), (0.002001, False)])
def test_average_latency_must_be_below_2_ms(health, stats, latency_s, healthy):
    for _ in range(MIN_CHECKS_TO_TELL):
        stats.observe_latency(latency_s)
    report = health.report()
    assert report.average_latency_ms == pytest.approx(latency_s * 1000)
    assert report.healthy is report.latency_met is healthy


def test_latency_of_few_checks_counts_as_met(health, stats):
    for _ in range(MIN_CHECKS_TO_TELL - 1):
        stats.observe_latency(0.5)
    report = health.report()
    assert report.average_latency_ms == pytest.approx(500)
    assert report.healthy
    assert report.latency_met
    stats.observe_latency(0.5)
    assert not health.report().healthy


@pytest.mark.parametrize(("errors", "healthy"), [(9, True), (10, False)])
def test_less_than_one_percent_of_checks_may_fail_open(health, stats, errors, healthy):
    stats.allowed_total, stats.blocked_total = 600, 400
    stats.fail_open_error_total = errors
    report = health.report()
    assert report.error_rate == errors / 1000
    assert report.healthy is healthy


def test_malformed_checks_are_not_errors_of_the_node(health, stats):
    stats.invalid_total = 1000
    assert health.report().healthy


def test_node_without_the_shared_state_is_degraded(stats, clock):
    status = SharedStateStatus(connected=False, breaker_state="open")
    health = Health(
        node_id="n1",
        stats=stats,
        clock=clock,
        rules_revision=lambda: 0,
        shared_state=lambda: status,
    )
    report = health.report()
    assert not report.healthy
    assert report.breaker_state == "open"
    assert health.shared_state() == status


def test_embedded_node_always_reaches_its_shared_state():
    assert SharedStateStatus(connected=True, breaker_state="closed") == EMBEDDED


def test_bad_minute_no_longer_counts_after_a_minute(health, stats, clock):
    stats.allowed_total, stats.fail_open_error_total = 10, 10
    seconds_pass(clock, health, 59)
    assert not health.report().healthy
    seconds_pass(clock, health, 2)
    assert health.report().healthy


SECOND_US = 1_000_000


def checks(number):
    return Totals(allowed=number)


def test_totals_are_taken_from_the_counters():
    stats = CheckStats()
    stats.allowed_total, stats.blocked_total = 5, 2
    stats.fail_open_breaker_total, stats.fail_open_error_total = 1, 2
    stats.bucket_missed_total = 1
    stats.observe_latency(0.003, checks=2)
    assert Totals.of(stats) == Totals(5, 2, 3, 4, 3, 0.003, tuple(stats.latency_counts))


def test_everything_since_the_start_counts_within_the_first_minute():
    window = RollingWindow(0, checks(10))
    for second in range(1, 31):
        window.sample(second * SECOND_US, checks(10 + second))
    assert window.growth(30 * SECOND_US, checks(45)) == checks(35)


def test_only_the_last_minute_counts_later():
    window = RollingWindow(0, checks(0))
    for second in range(1, 201):
        window.sample(second * SECOND_US, checks(second))
    assert window.growth(200 * SECOND_US, checks(200)) == checks(WINDOW_S)


def test_window_is_up_to_one_interval_longer_between_samples():
    window = RollingWindow(0, checks(0))
    for second in range(1, 101):
        window.sample(second * SECOND_US, checks(second))
    assert window.growth(100_500_000, checks(100)) == checks(60)
    assert window.growth(100_999_999, checks(100)) == checks(60)


def test_pause_in_sampling_loses_nothing():
    window = RollingWindow(0, checks(0))
    window.sample(SECOND_US, checks(1))
    window.sample(500 * SECOND_US, checks(2))
    assert window.growth(500 * SECOND_US, checks(7)) == checks(6)


def test_old_traffic_expires_without_new_samples():
    window = RollingWindow(0, checks(0))
    window.sample(SECOND_US, checks(100))
    assert window.growth(2 * SECOND_US, checks(100)) == checks(100)
    assert window.growth((WINDOW_S + 1) * SECOND_US, checks(100)) == checks(0)


def test_kept_samples_are_bounded_by_the_window():
    window = RollingWindow(0, checks(0))
    for second in range(1, 1001):
        window.sample(second * SECOND_US, checks(second))
    assert len(window._samples) == WINDOW_S + 1
