from ratelimitd.counters import CheckStats
from ratelimitd.observe.health import WINDOW_S, RollingWindow, Totals

SECOND_US = 1_000_000


def checks(number):
    return Totals(checks=number)


def test_totals_are_taken_from_the_counters():
    stats = CheckStats()
    stats.allowed_total, stats.blocked_total = 5, 2
    stats.fail_open_breaker_total, stats.fail_open_error_total = 1, 2
    stats.bucket_missed_total = 1
    stats.observe_latency(0.003, checks=2)
    assert Totals.of(stats) == Totals(7, 3, 4, 3, 2, 0.003)


def test_before_a_minute_has_passed_everything_since_the_start_counts():
    window = RollingWindow(0, checks(10))
    for second in range(1, 31):
        window.sample(second * SECOND_US, checks(10 + second))
    assert window.growth(30 * SECOND_US, checks(45)) == checks(35)


def test_after_a_minute_only_the_last_minute_counts():
    window = RollingWindow(0, checks(0))
    for second in range(1, 201):
        window.sample(second * SECOND_US, checks(second))
    assert window.growth(200 * SECOND_US, checks(200)) == checks(WINDOW_S)


def test_between_two_samples_the_window_is_up_to_one_interval_longer():
    window = RollingWindow(0, checks(0))
    for second in range(1, 101):
        window.sample(second * SECOND_US, checks(second))
    assert window.growth(100_500_000, checks(100)) == checks(60)
    assert window.growth(100_999_999, checks(100)) == checks(60)


def test_a_pause_in_sampling_loses_nothing():
    window = RollingWindow(0, checks(0))
    window.sample(SECOND_US, checks(1))
    window.sample(500 * SECOND_US, checks(2))
    assert window.growth(500 * SECOND_US, checks(7)) == checks(6)


def test_traffic_of_more_than_a_minute_ago_is_forgotten_without_new_samples():
    window = RollingWindow(0, checks(0))
    window.sample(SECOND_US, checks(100))
    assert window.growth(2 * SECOND_US, checks(100)) == checks(100)
    assert window.growth((WINDOW_S + 1) * SECOND_US, checks(100)) == checks(0)


def test_samples_kept_are_bounded_by_the_window():
    window = RollingWindow(0, checks(0))
    for second in range(1, 1001):
        window.sample(second * SECOND_US, checks(second))
    assert len(window._samples) == WINDOW_S + 1
