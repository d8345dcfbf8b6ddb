import random

import pytest

from ratelimitd.buckets import table
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import RestoredBuckets

KEYS = BucketKeys(b"k" * 32)


def restored_of(values):
    buckets = RestoredBuckets(KEYS)
    for key, value in values.items():
        buckets.put(KEYS.stored(key), value)
    return buckets


def contents(buckets):
    return dict(item for index in range(buckets.shard_count) for item in buckets.items(index))


def test_a_bucket_is_found_by_its_key():
    buckets = restored_of({b"ada": 1, b"bob": 2})
    assert (len(buckets), buckets.get(b"ada"), buckets.get(b"eve")) == (2, 1, None)


def test_a_bucket_is_taken_once():
    buckets = restored_of({b"ada": 1})
    assert buckets.take(b"ada") == 1
    assert buckets.take(b"ada") is None
    assert len(buckets) == 0


def test_a_later_value_replaces_an_earlier_one():
    buckets = restored_of({b"ada": 1})
    buckets.put(KEYS.stored(b"ada"), 2)
    assert (len(buckets), buckets.get(b"ada")) == (1, 2)


def test_a_discarded_bucket_is_gone_and_discarding_it_again_is_no_error():
    buckets = restored_of({b"ada": 1, b"bob": 2})
    buckets.discard(KEYS.stored(b"ada"))
    buckets.discard(KEYS.stored(b"ada"))
    assert (len(buckets), buckets.get(b"ada")) == (1, None)


def test_every_bucket_can_be_dropped():
    buckets = restored_of({bytes([number]): number for number in range(50)})
    for left in reversed(range(50)):
        buckets.drop_any()
        assert len(buckets) == left == len(contents(buckets))


def test_sweeps_drop_expired_buckets_of_every_shard(monkeypatch):
    monkeypatch.setattr(table, "RESTORED_SHARDS", 4)
    buckets = restored_of({bytes([number]): number for number in range(100)})
    dropped = [buckets.sweep(lambda value: value % 2 == 1) for _ in range(4)]
    assert min(dropped) > 0
    assert sum(dropped) == 50
    assert sorted(contents(buckets).values()) == list(range(0, 100, 2))
    assert len(buckets) == 50
    assert [buckets.sweep(lambda value: True) for _ in range(8)][4:] == [0] * 4
    assert len(buckets) == 0


def test_a_map_replaces_every_value_and_drops_those_mapped_to_none():
    buckets = restored_of({bytes([number]): number for number in range(100)})
    buckets.map(lambda value: value * 2 if value < 30 else None)
    assert sorted(contents(buckets).values()) == list(range(0, 60, 2))
    assert len(buckets) == 30


@pytest.mark.parametrize("shards", [1, 7, 2_048])
def test_the_length_is_correct_after_any_operations(monkeypatch, shards):
    monkeypatch.setattr(table, "RESTORED_SHARDS", shards)
    rng, buckets = random.Random(shards), RestoredBuckets(KEYS)
    actions = {
        "put": lambda key: buckets.put(KEYS.stored(key), rng.randint(0, 99)),
        "discard": lambda key: buckets.discard(KEYS.stored(key)),
        "take": buckets.take,
        "sweep": lambda key: buckets.sweep(lambda value: value % 5 == 0),
        "drop": lambda key: len(buckets) and buckets.drop_any(),
    }
    for _ in range(1_000):
        action = rng.choice(["put", "put", *actions])
        actions[action](bytes([rng.randint(0, 99)]))
        assert len(buckets) == len(contents(buckets))
