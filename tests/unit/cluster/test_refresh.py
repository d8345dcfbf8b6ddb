import pytest

from ratelimitd.cluster import refresh as rereading_module
from ratelimitd.cluster.pending import Bucket
from ratelimitd.cluster.refresh import MAX_BUCKETS, PAUSES_US, RefreshQueue
from tests.unit.cluster.world import MS, NO_TAG, RULE, SECOND, name_of


def a_bucket(key=b"a"):
    return Bucket(key, name_of(key), NO_TAG, RULE, None)


@pytest.fixture
def rereading():
    return RefreshQueue()


class Denials:
    """A bucket with a denial every millisecond, and the times of its reads."""

    def __init__(self, rereading):
        self.rereading, self.bucket, self.now_us, self.looks = rereading, a_bucket(), 0, []

    def run(self, us, has_changed=lambda _us: False, is_denied=lambda _us: True):
        until_us = self.now_us + us
        while self.now_us < until_us:
            if is_denied(self.now_us) and not self.bucket.is_watched:
                self.rereading.watch(self.bucket, self.now_us)
            for bucket, times in self.rereading.due(self.now_us, 10):
                self.looks.append(self.now_us // MS)
                again = 0 if has_changed(self.now_us) else times + 1
                self.rereading.schedule(bucket, again, self.now_us)
            self.now_us += MS


def test_a_bucket_that_stays_denied_is_read_at_growing_intervals(rereading):
    denials = Denials(rereading)
    denials.run(5 * SECOND)
    assert PAUSES_US == (100 * MS, 300 * MS, 700 * MS, 1_000 * MS)
    assert denials.looks == [100, 400, 1_100, 2_100, 3_100, 4_100]


def test_a_changed_bucket_is_read_again_soon(rereading):
    denials = Denials(rereading)
    denials.run(1_500 * MS, has_changed=lambda now_us: now_us == 400 * MS)
    assert denials.looks == [100, 400, 500, 800]


def test_a_bucket_without_new_denials_is_dropped_and_can_be_queued_again(rereading):
    denials = Denials(rereading)
    denials.run(5 * SECOND, is_denied=lambda now_us: now_us in {0, 4 * SECOND})
    assert denials.looks == [100, 4_100]
    assert len(rereading) == 0
    assert not denials.bucket.is_queued


def test_a_bucket_is_watched_once_despite_many_denials(rereading):
    bucket = a_bucket()
    for now_us in range(3):
        rereading.watch(bucket, now_us)
    assert len(rereading) == 1
    assert rereading.due(SECOND, 10) == [(bucket, 0)]


def test_due_returns_at_most_the_requested_number_and_keeps_the_rest(rereading):
    buckets = [a_bucket(b"%d" % number) for number in range(5)]
    for bucket in buckets:
        rereading.watch(bucket, 0)
    assert rereading.due(SECOND, 0) == []
    looks = [rereading.due(SECOND, 2) for _ in range(4)]
    assert [len(some) for some in looks] == [2, 2, 1, 0]
    assert [bucket for some in looks for bucket, _ in some] == buckets


def test_a_step_skips_at_most_as_many_buckets_as_it_may_read(rereading):
    buckets = [a_bucket(b"%d" % number) for number in range(5)]
    for bucket in buckets:
        rereading.watch(bucket, 0)
        bucket.is_watched = bucket is buckets[4]  # the others were read for another reason
    assert [len(rereading.due(SECOND, 2)) for _ in range(3)] == [0, 0, 1]


def test_the_number_of_watched_buckets_is_bounded(rereading, monkeypatch):
    assert MAX_BUCKETS == 100_000
    monkeypatch.setattr(rereading_module, "MAX_BUCKETS", 2)
    buckets = [a_bucket(b"%d" % number) for number in range(3)]
    for bucket in buckets:
        rereading.watch(bucket, 0)
    assert len(rereading) == 2
    assert [bucket.is_queued for bucket in buckets] == [True, True, False]
    assert not buckets[2].is_watched  # its next denial tries again
