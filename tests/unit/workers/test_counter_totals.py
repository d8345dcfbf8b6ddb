from ratelimitd.observe.metrics import HistogramSample
from ratelimitd.workers.metrics import MAX_LABELS, CounterTotals

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


def test_labels_are_bounded_and_those_in_use_stay():
    totals = CounterTotals()
    for generation in range(3):
        totals.take({BY_RULE: {f"{generation}-{n}": 1 for n in range(MAX_LABELS)} | {"kept": 1}})
        totals.process_ended()
    totals.take({BY_RULE: {"kept": 1}})
    assert totals.report() == {BY_RULE: {"kept": 4}}


def test_labels_of_one_long_lived_process_are_bounded_too():
    totals = tally_of(*({BY_RULE: {str(n): 1, "kept": n}} for n in range(3 * MAX_LABELS)))
    labels = totals.report()[BY_RULE]
    assert len(labels) <= MAX_LABELS + 1
    assert labels["kept"] == 3 * MAX_LABELS - 1
