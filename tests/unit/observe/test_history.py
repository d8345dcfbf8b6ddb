import pytest

from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.observe.history import (
    SAMPLE_S,
    SPANS,
    History,
    Sample,
    Sampler,
    folded,
    percentile_s,
    summed,
)
from ratelimitd.testing import ManualClock

NOW_MS = 1_700_006_400_000


class Node:
    def __init__(self):
        self.stats, self.clock = CheckStats(), ManualClock()
        self.sampler = Sampler(self.stats, self.clock)

    def sample(self, seconds=SAMPLE_S):
        self.clock.advance(seconds=seconds)
        return self.sampler.sample(buckets=7, memory_bytes=1_000, loop_lag_s=0.25)


@pytest.fixture
def node():
    return Node()


def test_sample_holds_rates_since_the_last_one(node):
    node.stats.allowed_total, node.stats.blocked_total = 1_000, 500
    node.sample()
    node.stats.allowed_total, node.stats.blocked_total = 1_040, 510
    node.stats.fail_open_breaker_total, node.stats.fail_open_error_total = 6, 4
    node.stats.bucket_missed_total = 10
    node.stats.observe_latency(0.0015, checks=1)
    sample = node.sample(seconds=2)
    assert sample == Sample(
        at_ms=node.clock.now_us() // 1_000,
        allowed_per_s=20.0,
        blocked_per_s=5.0,
        fail_open_per_s=5.0,
        looked_per_s=20.0,
        known_per_s=15.0,
        latency_counts=tuple(node.stats.latency_counts),
        buckets=7,
        memory_bytes=1_000,
        loop_lag_s=0.25,
    )
    assert sample.hit_ratio == 0.75
    assert sample.percentile_ms(0.5) == pytest.approx(1.5)


def test_misses_in_progress_make_no_negative_rate(node):
    node.stats.allowed_total, node.stats.bucket_missed_total = 1, 3
    assert node.sample().known_per_s == 0.0


def test_no_traffic_has_neither_ratio_nor_latency(node):
    sample = node.sample()
    assert (sample.allowed_per_s, sample.hit_ratio, sample.percentile_ms(0.99)) == (0.0, None, None)


def test_two_samples_at_one_moment_are_valid(node):
    node.sample()
    assert node.sample(seconds=0).allowed_per_s == 0.0


def test_sum_of_nodes_adds_everything_except_lags():
    counts = CheckStats().latency_counts
    one = Sample(5, 1.0, 2.0, 3.0, 4.0, 5.0, (1, *counts[1:]), 10, 100, 0.1)
    other = Sample(9, 1.5, 2.0, 3.0, 4.0, 5.0, (2, *counts[1:]), 20, 200, 0.05)
    both = Sample(9, 2.5, 4.0, 6.0, 8.0, 10.0, (3, *counts[1:]), 30, 300, 0.1)
    assert summed([one, other]) == both
    assert summed([one]) == one


def test_history_is_bounded_and_drops_the_oldest():
    history = History()
    assert [history.samples(span) for span in SPANS.values()] == [()] * len(SPANS)
    ago_s = [*range(90_000, 4_000, -240), *range(4_000, 1_000, -10), *range(1_000, -1, -2)]
    for each_s in ago_s:
        history.add(Sample(NOW_MS - each_s * 1_000))
    newest_ms = history.samples(SPANS["15m"])[-1].at_ms
    for span in SPANS.values():
        samples = history.samples(span)
        assert len(samples) == span.most
        assert samples[-1].at_ms == newest_ms
        assert samples[0].at_ms > newest_ms - span.kept_s * 1_000


def test_samples_older_than_the_span_are_omitted():
    """After a suspended machine, or in a cluster that was read at longer intervals."""
    history = History([Sample(0), Sample(100_000), Sample(950_000)])
    assert [one.at_ms for one in history.samples(SPANS["15m"])] == [100_000, 950_000]
    assert [one.at_ms for one in history.samples(SPANS["5m"])] == [950_000]


def test_coarser_sample_is_a_mean_and_is_available_before_it_is_complete():
    counts = CheckStats().latency_counts
    one = Sample(10_000, 2.0, 4.0, 6.0, 8.0, 10.0, (1, *counts[1:]), 10, 100, 0.2)
    other = Sample(12_000, 4.0, 4.0, 6.0, 8.0, 10.0, (2, *counts[1:]), 21, 200, 0.1)
    mean = Sample(12_000, 3.0, 4.0, 6.0, 8.0, 10.0, (3, *counts[1:]), 15, 150, 0.2)
    assert folded([one, other], 10) == [mean]
    last = Sample(20_000, 9.0)
    assert folded([one, other, last], 10) == [mean, last]
    assert History([one, other, last]).samples(SPANS["1h"]) == [mean, last]
    assert folded([], 10) == []


def counts_of(*latencies_s):
    stats = CheckStats()
    for latency_s in latencies_s:
        stats.observe_latency(latency_s)
    return stats.latency_counts


def test_no_checks_have_no_percentile():
    assert percentile_s(counts_of(), 0.5) is None


@pytest.mark.parametrize(("share", "expected_s"), [(0.5, 0.0015), (0.25, 0.00125), (1.0, 0.002)])
def test_percentile_interpolates_within_a_bucket(share, expected_s):
    assert percentile_s(counts_of(*[0.0015] * 4), share) == pytest.approx(expected_s)


def test_percentile_is_in_the_bucket_of_its_rank():
    counts = counts_of(*[0.00001] * 98, 0.004, 0.2)
    assert percentile_s(counts, 0.5) < LATENCY_BOUNDS_S[0]
    assert 0.002 < percentile_s(counts, 0.99) <= 0.005
    assert 0.1 < percentile_s(counts, 0.999) <= 0.25


def test_percentile_above_the_last_bound_is_that_bound():
    assert percentile_s(counts_of(7.0), 0.5) == LATENCY_BOUNDS_S[-1]
