import pytest

from ratelimitd import counters
from ratelimitd.counters import (
    LATENCY_BOUNDS_S,
    MAX_RULE_LABELS,
    OTHER_RULES,
    CheckStats,
    RollingMax,
)


def test_everything_starts_at_zero():
    stats = CheckStats()
    totals = [getattr(stats, name) for name in CheckStats.__slots__ if name.endswith("_total")]
    assert totals == [0] * 15
    assert stats.latency_counts == [0] * (len(LATENCY_BOUNDS_S) + 1)
    assert (stats.latency_sum_s, stats.by_rule, stats.errors_by_transport) == (0.0, {}, {})


def test_the_histogram_has_edges_at_the_promise_and_at_the_alert():
    assert {0.001, 0.002} <= set(LATENCY_BOUNDS_S)
    assert sorted(set(LATENCY_BOUNDS_S)) == list(LATENCY_BOUNDS_S)


@pytest.mark.parametrize("index", range(len(LATENCY_BOUNDS_S)))
def test_a_latency_on_a_bound_is_within_it_and_one_above_is_not(index):
    stats = CheckStats()
    stats.observe_latency(LATENCY_BOUNDS_S[index])
    assert stats.latency_counts[index] == 1
    stats.observe_latency(LATENCY_BOUNDS_S[index] * 1.0001)
    assert stats.latency_counts[index + 1] == 1


def test_the_checks_of_a_batch_share_its_time():
    stats = CheckStats()
    stats.observe_latency(0.01, checks=10)
    assert stats.latency_counts[LATENCY_BOUNDS_S.index(0.001)] == 10
    assert stats.latency_sum_s == 0.01


def test_a_rule_keeps_its_counters():
    stats = CheckStats()
    counters = stats.rule_counters("a")
    counters[0] += 1
    assert stats.rule_counters("a") is counters
    assert stats.by_rule == {"a": [1, 0]}


def test_rules_beyond_the_bound_on_labels_share_one_label(monkeypatch):
    monkeypatch.setattr(counters, "MAX_FURTHER_RULES", 2)
    stats = CheckStats()
    for number in range(MAX_RULE_LABELS):
        stats.rule_counters(f"rule {number}")[0] += 1
    for name in ("a", "b", "c", "d"):
        stats.rule_counters(name)[1] += 1
    assert stats.rule_counters("rule 0") == [1, 0]
    assert [stats.counters_of(name) for name in ("a", "b", "c")] == [[0, 1], [0, 1], None]
    labels = [*stats.labelled_rules()]
    assert len(labels) == MAX_RULE_LABELS + 1
    assert (labels[0], labels[-1]) == (("rule 0", 1, 0), (OTHER_RULES, 0, 4))


def test_what_rules_without_a_label_decided_stays_counted_when_they_are_gone():
    stats = CheckStats()
    for number in range(MAX_RULE_LABELS + 2):
        stats.rule_counters(f"rule {number}")[0] += 1
    stats.forget_rules(lambda rule_id: rule_id != f"rule {MAX_RULE_LABELS}")
    assert [*stats.further_rules] == [f"rule {MAX_RULE_LABELS + 1}"]
    assert [*stats.labelled_rules()][-1] == (OTHER_RULES, 2, 0)


def test_rules_that_are_gone_release_their_labels():
    stats = CheckStats()
    for number in range(MAX_RULE_LABELS + 1):
        stats.rule_counters(f"rule {number}")[0] += 1
    stats.used_rules |= {"rule 1", "rule 2"}
    stats.forget_rules({"rule 0", "rule 1"}.__contains__)
    assert stats.used_rules == {"rule 1"}
    assert stats.by_rule == {"rule 0": [1, 0], "rule 1": [1, 0], OTHER_RULES: [1, 0]}
    stats.rule_counters("new")[1] += 1
    assert stats.by_rule["new"] == [0, 1]


def test_transport_errors_are_counted_by_cause():
    stats = CheckStats()
    for cause in ("malformed", "too_large", "malformed"):
        stats.transport_error(cause)
    assert stats.errors_by_transport == {"malformed": 2, "too_large": 1}


def test_causes_that_are_known_are_counted_from_0():
    stats = CheckStats(["malformed", "too_large"], ["cross_site"])
    stats.transport_error("malformed")
    assert stats.errors_by_transport == {"malformed": 1, "too_large": 0}
    assert stats.refused_by_web == {"cross_site": 0}


def test_checks_that_no_rule_judged_have_looked_for_no_bucket():
    stats = CheckStats()
    stats.allowed_total, stats.blocked_total = 20, 10
    assert (stats.bucket_looked_total, stats.bucket_known_total) == (30, 30)
    stats.no_rule_total, stats.fail_open_breaker_total, stats.fail_open_error_total = 1, 2, 4
    assert stats.bucket_looked_total == 23
    stats.bucket_missed_total = 5
    assert (stats.bucket_looked_total, stats.bucket_known_total) == (23, 18)


def test_requests_that_pages_refused_are_counted_by_cause():
    stats = CheckStats()
    for cause in ("cross_site", "too_large", "cross_site"):
        stats.web_refusal(cause)
    assert stats.refused_by_web == {"cross_site": 2, "too_large": 1}


def test_a_peak_is_shown_for_one_to_two_stretches():
    worst = RollingMax(10)
    assert worst.add(0, 5.0) == 5.0
    assert worst.add(9, 1.0) == 5.0
    assert worst.add(10, 2.0) == 5.0
    assert worst.add(19, 0.0) == 5.0
    assert worst.add(20, 0.0) == 2.0
    assert worst.add(30, 0.0) == 0.0


def test_a_gap_without_measurements_forgets():
    worst = RollingMax(10)
    worst.add(0, 5.0)
    assert worst.add(25, 1.0) == 1.0
