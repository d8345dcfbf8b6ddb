from dataclasses import replace

import pytest

from ratelimitd.cluster.accuracy import STRETCH_US, Accuracy, promised_excess
from ratelimitd.cluster.pending import Bucket
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.shared_state import Update
from ratelimitd.model import Algorithm
from tests.ledger_model import settle
from tests.unit.cluster.world import NO_TAG, SECOND, limited, name_of, state

NOW_US = 1_700_006_400 * SECOND
RULE = limited(100)


@pytest.fixture
def stats():
    return CheckStats()


@pytest.fixture
def accuracy(stats):
    return Accuracy(stats)


def a_bucket(spent=None):
    base = None if spent is None else state(spent, NOW_US, limit=100)
    return Bucket(b"a", name_of(b"a"), NO_TAG, RULE, base)


def test_a_bucket_that_is_not_overdrawn_is_exact(accuracy):
    accuracy.settled(a_bucket(100), 7, None, NOW_US)
    accuracy.settled(a_bucket(), 7, None, NOW_US)
    assert (accuracy.over_admitted_total, accuracy.worst_excess(NOW_US)) == (0, 0.0)


def test_tokens_beyond_the_capacity_count_as_over_admitted_up_to_those_charged_here(accuracy):
    accuracy.settled(a_bucket(103), 7, None, NOW_US)
    assert (accuracy.over_admitted_total, accuracy.worst_excess(NOW_US)) == (3, 0.03)
    accuracy.settled(a_bucket(120), 5, None, NOW_US)
    assert (accuracy.over_admitted_total, accuracy.worst_excess(NOW_US)) == (8, 0.2)


def test_an_excess_over_a_lowered_limit_is_not_over_admitted(accuracy):
    higher = replace(RULE, algorithm=Algorithm.SLIDING_WINDOW, limit=200)
    lower = replace(higher, limit=100, revision=RULE.revision + 1)
    before = settle(None, Update(higher, 0, ((NOW_US, 130),))).shared
    bucket = Bucket(b"a", name_of(b"a"), NO_TAG, lower, settle(before, Update(lower, 0)).shared)
    accuracy.settled(bucket, 7, before, NOW_US)
    assert (accuracy.over_admitted_total, accuracy.worst_excess(NOW_US)) == (0, 0.0)
    base = settle(before, Update(lower, 0, ((NOW_US, 4),))).shared
    accuracy.settled(Bucket(b"a", name_of(b"a"), NO_TAG, lower, base), 7, before, NOW_US)
    assert (accuracy.over_admitted_total, accuracy.worst_excess(NOW_US)) == (4, 0.04)


def test_a_batch_without_charges_counts_nothing(accuracy):
    accuracy.settled(a_bucket(190), 0, None, NOW_US)
    assert accuracy.worst_excess(NOW_US) == 0.0


def test_the_largest_promise_covers_the_same_period_as_the_worst_excess(accuracy):
    assert accuracy.largest_promise(NOW_US, 1.5) == 1.5
    assert accuracy.largest_promise(NOW_US + STRETCH_US, 0.5) == 1.5
    assert accuracy.largest_promise(NOW_US + 2 * STRETCH_US, 0.5) == 0.5


def test_the_worst_excess_is_forgotten_after_two_minutes(accuracy):
    accuracy.settled(a_bucket(103), 7, None, NOW_US)
    assert accuracy.worst_excess(NOW_US + STRETCH_US) == 0.03
    assert accuracy.worst_excess(NOW_US + 2 * STRETCH_US) == 0.0


def test_the_counts_of_a_view_are_added_once(accuracy, stats):
    bucket = a_bucket()
    bucket.view.forgiven, bucket.view.false_positives = 5, 2
    accuracy.take_counts(bucket)
    accuracy.settled(bucket, 0, None, NOW_US)
    assert (accuracy.forgiven_total, stats.false_positives_total) == (5, 2)
    bucket.view.forgiven = -3  # they were charged after all
    accuracy.take_counts(bucket)
    assert accuracy.forgiven_total == 2


def test_the_promise_grows_with_nodes_round_trip_and_skew():
    assert promised_excess(0.51, 1, 0, 0) == pytest.approx(0.51)
    assert promised_excess(0.51, 4, 1_000, 2_000) == pytest.approx(0.51 + 4 * 0.005)
