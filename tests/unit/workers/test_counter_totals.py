from ratelimitd.observe.metrics import HistogramSample
from ratelimitd.workers.metrics import MAX_LABELS, CounterTotals, forget_unused

ALLOWED = "rate_limiter_requests_allowed_total"
BY_RULE = "rate_limiter_rule_allowed_total"
LATENCY = "rate_limiter_check_latency_seconds"


def tally_of(*reports):
    totals = CounterTotals()
    for report in reports:
        totals.take(report)
    return totals


def test_a_later_report_replaces_an_earlier_one():
    assert tally_of({ALLOWED: {"": 1}}, {ALLOWED: {"": 5}}).report() == {ALLOWED: {"": 5}}


def test_gauges_and_unknown_metrics_are_not_kept():
    assert tally_of({"rate_limiter_tasks": {"": 1}, "of_tomorrow": {"": 1}}).report() == {}


def test_counters_of_a_new_process_add_to_those_of_the_dead_one():
    totals = tally_of({ALLOWED: {"": 5}})
    totals.process_ended()
    assert totals.report() == {ALLOWED: {"": 5}}
    totals.take({ALLOWED: {"": 2}})
    assert totals.report() == {ALLOWED: {"": 7}}
    totals.process_ended()
    totals.process_ended()
    totals.take({ALLOWED: {"": 1}})
    assert totals.report() == {ALLOWED: {"": 8}}


def test_histograms_of_a_new_process_add_to_those_of_the_dead_one():
    totals = tally_of({LATENCY: {"": HistogramSample((1.0,), (1, 2), 3.0)}})
    totals.process_ended()
    totals.take({LATENCY: {"": HistogramSample((1.0,), (10, 10), 0.5)}})
    assert totals.report() == {LATENCY: {"": HistogramSample((1.0,), (11, 12), 3.5)}}


def test_a_label_that_is_no_longer_reported_keeps_its_count():
    totals = tally_of({BY_RULE: {"a": 5, "b": 1}}, {BY_RULE: {"b": 2}})
    assert totals.report() == {BY_RULE: {"a": 5, "b": 2}}
    totals.process_ended()
    totals.take({BY_RULE: {"b": 1}})
    assert totals.report() == {BY_RULE: {"a": 5, "b": 3}}


def test_a_counter_that_restarts_in_the_same_process_is_added():
    totals = tally_of({BY_RULE: {"a": 5}}, {BY_RULE: {"a": 1}}, {BY_RULE: {"a": 2}})
    assert totals.report() == {BY_RULE: {"a": 7}}


def test_a_returned_report_does_not_change():
    totals = tally_of({BY_RULE: {"a": 5}})
    totals.process_ended()
    before = totals.report()
    totals.take({BY_RULE: {"a": 5}})
    assert before == {BY_RULE: {"a": 5}}


def counts(numbers, count=1):
    return {BY_RULE: {str(number): count for number in numbers}}


def test_labels_are_bounded_and_the_last_reported_ones_stay():
    totals = CounterTotals()
    for generation in range(3):
        totals.take(counts(range(generation * MAX_LABELS, (generation + 1) * MAX_LABELS - 1)))
        totals.take({BY_RULE: {"kept": 1}})
        totals.process_ended()
    totals.take({BY_RULE: {"kept": 1}})
    forget_unused([totals])
    latest = counts(range(2 * MAX_LABELS, 3 * MAX_LABELS - 1))[BY_RULE]
    assert totals.report() == {BY_RULE: latest | {"kept": 4}}


def test_labels_of_one_long_lived_process_are_bounded_too():
    totals = tally_of(*({BY_RULE: {str(n): 1, "kept": n}} for n in range(3 * MAX_LABELS)))
    forget_unused([totals])
    labels = totals.report()[BY_RULE]
    assert len(labels) == MAX_LABELS
    assert labels["kept"] == 3 * MAX_LABELS - 1


def test_a_label_is_kept_in_all_workers_while_it_is_among_the_last_of_one():
    def lives(*reports):
        totals = CounterTotals()
        for report in reports:
            totals.take(report)
            totals.process_ended()
        return totals

    later = [counts(range(life * MAX_LABELS, (life + 1) * MAX_LABELS)) for life in (1, 2)]
    restarted = lives(counts(range(20)), *later)
    other = lives(counts(range(20)), counts(range(100, 90 + MAX_LABELS)))
    forget_unused([restarted, other])
    for totals in (restarted, other):
        found = totals.report()[BY_RULE]
        assert [str(number) in found for number in (0, 9, 10, 19)] == [False, False, True, True]


def test_no_label_is_dropped_while_all_workers_together_have_no_more_than_their_bound():
    lives = [tally_of(counts(range(MAX_LABELS))), CounterTotals()]
    lives[0].process_ended()
    lives[0].take(counts(range(MAX_LABELS, 2 * MAX_LABELS)))
    forget_unused(lives)
    assert lives[0].report() == counts(range(2 * MAX_LABELS))
