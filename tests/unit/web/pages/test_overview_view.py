from dataclasses import replace

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.observe.history import Sample
from ratelimitd.observe.live import NodeView, Overview
from ratelimitd.web.pages.overview_view import (
    BAD,
    GOOD,
    HIT_RATIO,
    P99,
    WARN,
    row,
    summary_of,
    view_of,
)
from ratelimitd.web.pages.rendering import NONE
from tests.unit.observe.test_live import status_of

NOW_MS = 1_700_006_400_000


def sample_of(*latencies_s, at_ms=NOW_MS, **fields):
    stats = CheckStats()
    for latency_s in latencies_s:
        stats.observe_latency(latency_s)
    return Sample(at_ms, latency_counts=tuple(stats.latency_counts), **fields)


def node_of(status=None, *, is_this=True, age_s=0.0, gone=False):
    return NodeView(status or status_of(), is_this, age_s, gone)


ILL = {
    "healthy": False,
    "shared_state_connected": False,
    "hit_ratio": 0.5,
    "hit_ratio_met": False,
    "latency_met": False,
}
"""A status of a node that meets no condition."""


def view(*nodes, total=None, history=(), on_breaker_open="", **fields):
    common = {"stale_s": None, "shares": True, "endpoints": (), "identifiers": (), "holds": ()}
    overview = Overview(total=total or sample_of(), nodes=nodes or (node_of(),), **common | fields)
    return view_of(overview, history, on_breaker_open)


def tile(view, label):
    (found,) = [one for one in view.tiles if one.label == label]
    return (found.value.replace("\u202f", " "), found.note.replace("\u202f", " "), found.tone)


def figure(row, label):
    (found,) = [one for one in row.figures if one.label == label]
    return (found.value.replace("\u202f", " "), found.tone)


def test_rates_are_current():
    shown = view(total=sample_of(allowed_per_s=1_234.5, blocked_per_s=0.5, fail_open_per_s=2.0))
    assert tile(shown, "Allowed") == ("1 234", "a second", "")
    assert tile(shown, "Blocked") == ("0.5", "a second", "")
    assert tile(shown, "Fail-open") == ("2", "a second", BAD)
    assert tile(view(), "Fail-open") == ("0", "a second", "")


def test_ratio_and_latency_cover_the_last_ten_seconds():
    history = [
        sample_of(at_ms=NOW_MS - 12_000, looked_per_s=100.0),
        sample_of(0.0015, at_ms=NOW_MS - 2_000, looked_per_s=8.0, known_per_s=6.0),
        sample_of(at_ms=NOW_MS),
    ]
    shown = view(total=history[-1], history=history)
    assert tile(shown, "Hit ratio")[0] == "75 %"
    assert tile(shown, "Latency, 99 % within")[:2] == ("2.0 ms", "half 1.5 ms, 95 % 1.9 ms")
    assert tile(view(), "Latency, 99 % within")[0] == NONE


def test_buckets_and_memory_have_units():
    shown = view(total=sample_of(buckets=12_000, memory_bytes=3 * 2**20))
    assert tile(shown, "Buckets")[0] == "12 000"
    assert tile(shown, "Memory") == ("3 MiB", "", "")
    two = view(node_of(), node_of(status_of("n2"), is_this=False))
    assert tile(two, "Memory")[1] == "of all nodes"


def test_breaker_tile_shows_the_node_that_waits_longest():
    assert tile(view(), "Breaker") == ("closed", "checks are decided as usual", GOOD)
    cut_off = view(node_of(), node_of(status_of("n2", shared_state_connected=False)))
    assert tile(cut_off, "Breaker") == (
        "closed",
        "nodes decide by what they know until it opens",
        "",
    )
    open_one = status_of("n2", breaker_state="open", retry_s=12.4)
    alone = view(node_of(open_one))
    assert tile(alone, "Breaker") == ("open", "next try in 12 s", BAD)
    half_open = status_of("n3", breaker_state="half_open", retry_s=1.0)
    several = view(*(node_of(one) for one in (status_of(), half_open, open_one)))
    assert tile(several, "Breaker") == ("open", "next try in 12 s, on n2", BAD)
    assert tile(view(node_of(half_open)), "Breaker")[0] == "half open"


@pytest.mark.parametrize(
    ("setting", "told"),
    [("fail_open", "allows every check"), ("deny", "denies every check"), ("local", ""), ("", "")],
)
def test_open_breaker_shows_advice_to_use_local(setting, told):
    opened = node_of(status_of("n2", breaker_state="open"), is_this=False)
    shown = view(node_of(), opened, on_breaker_open=setting).advice
    assert told in shown
    assert ("ON_BREAKER_OPEN=local, which we recommend" in shown) is bool(told)
    assert not view(on_breaker_open=setting).advice


def test_over_admission_is_shown_beside_its_bound():
    assert tile(view(), "Over-admission") == ("none", "a single node is exact", "")
    within = status_of(excess_ratio=0.04, excess_bound_ratio=0.51)
    note = "of a limit; at most 51 % is promised"
    assert tile(view(node_of(within)), "Over-admission") == ("4 %", note, "")
    beyond = replace(within, excess_ratio=0.6)
    shown = view(node_of(within), node_of(beyond))
    assert tile(shown, "Over-admission") == ("60 %", note, BAD)
    assert figure(shown.nodes[0], "Over-admission") == ("4 % of 51 %", "")
    assert figure(shown.nodes[1], "Over-admission")[1] == BAD
    failing = view(node_of(within), total=sample_of(fail_open_per_s=1.0))
    told = f"{note}, fail-open answers left out"
    assert tile(failing, "Over-admission") == ("4 %", told, "")


def test_largest_bound_is_shown_if_all_nodes_keep_theirs():
    one, other = (status_of(excess_bound_ratio=bound) for bound in (0.51, 0.6))
    shown = tile(view(node_of(one), node_of(other)), "Over-admission")
    assert shown == ("0 %", "of a limit; at most 60 % is promised", "")


def test_exceeded_bound_precedes_a_larger_excess_within_its_bound():
    broken = status_of(excess_ratio=0.52, excess_bound_ratio=0.51)
    kept = status_of(excess_ratio=0.6, excess_bound_ratio=2.0)
    shown = tile(view(node_of(kept), node_of(broken)), "Over-admission")
    assert shown == ("52 %", "of a limit; at most 51 % is promised", BAD)


def test_four_conditions_are_shown_with_their_bounds():
    ill = node_of(status_of(**ILL, average_latency_ms=2.0, error_rate=0.01))
    [shared, known, latency, fail_open] = view(ill).conditions
    assert (shared.value, shared.met) == ("away", False)
    assert (known.value, known.wanted) == ("50\u202f%", "more than 90\u202f%")
    assert not any((known.met, latency.met, fail_open.met))
    assert all(one.met for one in view().conditions)


@pytest.mark.parametrize(
    ("ratio", "shown"), [(0.8996, "89"), (0.9, "90"), (0.886, "89"), (0.5, "50")]
)
def test_hit_ratio_below_its_bound_is_not_rounded_up_to_it(ratio, shown):
    known = view(node_of(status_of(hit_ratio=ratio, hit_ratio_met=False))).conditions[1]
    assert known.value == f"{shown}\u202f%"


@pytest.mark.parametrize(
    ("condition", "few"), [(1, {"hit_ratio": 0.5}), (2, {"average_latency_ms": 2.0})]
)
def test_condition_met_because_of_few_checks_is_marked(condition, few):
    shown = view(node_of(status_of(**few)))
    assert shown.conditions[condition].met
    assert shown.conditions[condition].wanted.endswith("once there are enough checks")
    assert not view().conditions[condition].wanted.endswith("to tell")


def test_numbers_of_healthy_and_gone_nodes_are_shown():
    assert (view().health_text, view().gone) == ("", 0)
    ill = status_of("n2", healthy=False)
    lost = node_of(status_of("n3"), is_this=False, age_s=17.2, gone=True)
    shown = view(node_of(), node_of(ill, is_this=False), lost)
    assert shown.health_text == "1 of 2 nodes are healthy"
    assert shown.gone == 1
    assert [(row.state, row.state_tone) for row in shown.nodes] == [
        ("healthy", GOOD),
        ("degraded", WARN),
        ("gone, last seen 17\u202fs ago", BAD),
    ]


def test_node_with_older_rules_is_marked_unless_gone():
    old, new = status_of(rules_revision=3), status_of("n2", rules_revision=4)
    shown = view(node_of(old), node_of(new, is_this=False))
    assert [figure(row, "Revision") for row in shown.nodes] == [("3", WARN), ("4", "")]
    shown = view(node_of(new), node_of(old, is_this=False, gone=True))
    assert [figure(row, "Revision")[1] for row in shown.nodes] == ["", ""]


def test_row_has_the_figures_of_its_node():
    status = replace(
        status_of(
            breaker_state="open",
            retry_s=4.0,
            hit_ratio=0.5,
            hit_ratio_met=False,
            sync_lag_s=1.5,
            clock_error_s=-3.0,
            http_address="10.0.0.1:8080",
        ),
        sample=sample_of(0.0015, fail_open_per_s=2.0, buckets=7),
    )
    [row] = view(node_of(status)).nodes
    assert (row.name, row.is_this, row.version) == ("n1", True, "0.1.0")
    assert row.addresses == "10.0.0.1:9090 · 10.0.0.1:8080"
    assert figure(row, "Breaker") == ("open, 4 s", BAD)
    assert figure(row, "Hit ratio") == ("50 %", WARN)
    assert figure(row, "Sync lag") == ("1.5 s", WARN)
    assert figure(row, "Skew") == ("−3 s", WARN)
    assert figure(row, "Fail-open") == ("2", BAD)
    assert figure(row, "Over-admission") == (NONE, "")


def test_charts_are_described_in_words():
    assert summary_of([]) == ()
    history = [
        sample_of(0.0015, allowed_per_s=30.0, looked_per_s=4.0, known_per_s=1.0, buckets=9),
        sample_of(allowed_per_s=10.0, buckets=5),
    ]
    words = dict(summary_of(history))
    assert words["Allowed"] == "now 10 a second, at most 30"
    assert words["Hit ratio"] == f"now {NONE}, at least 25\u202f%"
    assert words["Latency, 99th percentile"] == f"now {NONE}, at most 2.0\u202fms"
    assert words["Buckets"] == "now 5, at most 9"


def test_state_of_unread_nodes_is_unknown():
    other = node_of(status_of("n2"), is_this=False, age_s=14.0)
    shown = view(node_of(), other, stale_s=12.4)
    assert (shown.verdict, shown.tone, shown.stale_for) == ("UNKNOWN", WARN, "12\u202fs")
    assert shown.health_text == "the state of the other nodes has been unknown for 12\u202fs"
    assert [row.state for row in shown.nodes] == ["healthy", "not heard for 12\u202fs"]
    assert shown.gone == 0
    cut_off = node_of(status_of(healthy=False, shared_state_connected=False))
    assert view(cut_off, other, stale_s=12.4).verdict == "DEGRADED"


def test_state_is_that_of_the_worst_node_and_each_condition_names_it():
    ill = status_of("n2", **ILL, average_latency_ms=3.0, error_rate=0.2)
    shown = view(node_of(), node_of(ill, is_this=False))
    assert (shown.verdict, shown.tone) == ("DEGRADED", WARN)
    assert [one.value for one in shown.conditions] == [
        "away on n2",
        "50\u202f% on n2",
        "3\u202fms on n2",
        "20\u202f% on n2",
    ]
    assert not any(one.met for one in shown.conditions)
    whole = view(node_of(), node_of(status_of("n2"), is_this=False))
    assert (whole.verdict, whole.tone) == ("HEALTHY", GOOD)


def test_absent_values_are_not_shown_as_figures():
    [shared, _, latency, _] = view(
        node_of(status_of(average_latency_ms=0.0)), shares=False
    ).conditions
    assert (shared.value, shared.met) == ("this node's memory", True)
    assert (latency.value, latency.met) == (NONE, True)


def test_row_has_the_values_of_the_charts():
    counts = (0, 0, 0, 0, 0, 0, 4, *[0] * 8)
    sample = Sample(5, 1.23456, 2.0, 3.0, 8.0, 2.0, counts, buckets=9)
    assert row(sample) == [5, 1.235, 2.0, 3.0, 1.5, 1.95, 1.99, 0.25, 9]
    assert row(Sample(6)) == [6, 0.0, 0.0, 0.0, None, None, None, None, 0]
    assert (row(sample)[P99], row(sample)[HIT_RATIO]) == (1.99, 0.25)
