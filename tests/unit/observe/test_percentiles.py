import pytest

from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.observe.history import percentile_s


def counts_of(*latencies_s):
    stats = CheckStats()
    for latency_s in latencies_s:
        stats.observe_latency(latency_s)
    return stats.latency_counts


def test_without_checks_there_is_no_percentile():
    assert percentile_s(counts_of(), 0.5) is None


@pytest.mark.parametrize(("share", "expected_s"), [(0.5, 0.0015), (0.25, 0.00125), (1.0, 0.002)])
def test_within_a_bucket_checks_count_as_evenly_spread(share, expected_s):
    assert percentile_s(counts_of(*[0.0015] * 4), share) == pytest.approx(expected_s)


def test_a_percentile_is_in_the_bucket_that_holds_the_check_of_this_rank():
    counts = counts_of(*[0.00001] * 98, 0.004, 0.2)
    assert percentile_s(counts, 0.5) < LATENCY_BOUNDS_S[0]
    assert 0.002 < percentile_s(counts, 0.99) <= 0.005
    assert 0.1 < percentile_s(counts, 0.999) <= 0.25


def test_above_the_last_bound_the_bound_is_all_that_is_known():
    assert percentile_s(counts_of(7.0), 0.5) == LATENCY_BOUNDS_S[-1]
