"""Use, packing and eviction of cached buckets; a stand-in replaces their partition."""

import gc
from itertools import pairwise
from types import SimpleNamespace

import pytest

from ratelimitd.cluster.cache import IDLE_US, MOVED_PER_STEP, BucketCache
from ratelimitd.cluster.packed import pack, unpack
from ratelimitd.cluster.pending import HASH_TAGS, Bucket
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.shared_state import SharedState
from tests.unit.cluster.world import MS, RULE, SECOND, name_of, state

UNSETTLED = [{"spends": True}, {"is_dirty": True}]
"""View of a bucket with something to settle; a bucket without spends may be in the next batch, too."""

STEP_US = 6_250
TTL_US = 300 * SECOND


class Scene:
    def __init__(self, max_entries=1_000_000, ttl_us=TTL_US):
        self.tag, self.now_us = SimpleNamespace(buckets={}, make_view=LocalView), 0
        self.cache = BucketCache(max_entries=max_entries, ttl_us=ttl_us, now_us=0)

    def add(self, key=b"a", spent=1, *, spends=False, is_dirty=False):
        base = None if spent is None else state(spent, 5)
        bucket = Bucket(key, name_of(key), self.tag, RULE, base)
        bucket.is_dirty = is_dirty
        if spends:
            bucket.view.check_alone(10, 1)
        self.cache.add(bucket)
        return bucket

    def run(self, us, *used, step_us=STEP_US):
        """Advance the clock, using the buckets of ``used`` in each step."""
        until_us = self.now_us + us
        while self.now_us < until_us:
            self.now_us += step_us
            for key in used:
                self.cache.get(key)
            self.cache.step(self.now_us)

    def packed(self, key=b"a"):
        """Return the packed state of a bucket, and keep it packed."""
        for generation in (self.cache._packed_young, self.cache._packed_old):
            if name_of(key) in generation[key[0]]:
                return unpack(generation[key[0]][name_of(key)])
        return None


@pytest.fixture
def scene():
    return Scene()


class TestInUse:
    def test_a_bucket_in_use_is_found_by_its_key_and_is_in_its_partition(self, scene):
        bucket = scene.add()
        assert bucket.is_cached
        assert scene.cache.get(b"a") is bucket
        assert scene.tag.buckets == {bucket.name: bucket}
        assert scene.cache.get(b"b") is None
        assert len(scene.cache) == 1

    def test_a_used_bucket_stays_in_use(self, scene):
        bucket = scene.add()
        scene.run(10 * IDLE_US, b"a")
        assert scene.cache.get(b"a") is bucket
        assert len(scene.cache) == 1

    def test_an_idle_bucket_is_packed_after_one_to_two_idle_periods(self, scene):
        scene.add(spent=3)
        scene.run(IDLE_US - 10 * MS)
        assert scene.packed() is None
        scene.run(IDLE_US + 20 * MS)
        assert scene.packed() == state(3, 5)
        assert scene.cache.get(b"a") is None
        assert scene.tag.buckets == {}
        assert len(scene.cache) == 1

    @pytest.mark.parametrize("unsettled", UNSETTLED)
    def test_an_unsettled_bucket_is_not_packed(self, scene, unsettled):
        bucket = scene.add(**unsettled)
        scene.run(10 * IDLE_US)
        assert scene.cache.get(b"a") is bucket

    def test_a_bucket_without_a_stored_state_is_not_packed(self, scene):
        scene.add(spent=None)
        scene.run(2 * IDLE_US + 20 * MS)
        assert len(scene.cache) == 0

    def test_one_step_moves_few_views_but_more_than_were_added(self, scene):
        for number in range(10 * MOVED_PER_STEP):
            scene.add(b"%d" % number)
        scene.now_us = IDLE_US
        scene.cache.step(scene.now_us)
        scene.cache.step(scene.now_us)
        assert len(scene.tag.buckets) == 9 * MOVED_PER_STEP
        for number in range(MOVED_PER_STEP):
            scene.add(b"more %d" % number)
        scene.cache.step(scene.now_us)
        assert len(scene.tag.buckets) == (9 + 1 - 3) * MOVED_PER_STEP
        assert len(scene.cache) == 11 * MOVED_PER_STEP


class TestPacked:
    def test_a_packed_bucket_is_taken_once(self, scene):
        scene.add()
        scene.run(3 * IDLE_US)
        assert scene.cache.take_packed(name_of(b"a")) == state(1, 5)
        assert scene.cache.take_packed(name_of(b"a")) is None
        assert len(scene.cache) == 0

    def test_a_packed_bucket_of_the_older_generation_is_found(self, scene):
        scene.add()
        scene.run(3 * IDLE_US + TTL_US // 2)
        assert scene.cache.take_packed(name_of(b"a")) == state(1, 5)

    def test_a_bucket_is_never_packed_and_in_use_at_once(self, scene):
        scene.add()
        scene.run(3 * IDLE_US)
        scene.add(spent=8)
        assert len(scene.cache) == 1
        scene.run(3 * IDLE_US)
        assert (scene.packed(), len(scene.cache)) == (state(8, 5), 1)


class TestStale:
    def distrust(self, scene):
        for number in range(HASH_TAGS):
            scene.cache.distrust_packed(number)

    def test_a_stale_bucket_is_known_and_not_packed(self, scene):
        scene.add(spent=3)
        scene.run(3 * IDLE_US)
        bucket = scene.add(b"used")
        self.distrust(scene)
        assert len(scene.cache) == 2
        assert scene.cache.get(b"used") is bucket
        assert scene.cache.take_packed(name_of(b"a")) is None
        assert scene.cache.take_stale(name_of(b"a")) == state(3, 5)
        assert scene.cache.take_stale(name_of(b"a")) is None
        assert len(scene.cache) == 1

    def test_buckets_stay_known_however_often_they_become_stale(self, scene):
        names = [b"t%d" % number for number in range(10)]
        for number, name in enumerate(names):
            scene.cache.put_packed(name, state(number, 5))
            self.distrust(scene)
        assert len(scene.cache) == len(names)
        assert [scene.cache.take_stale(name) for name in names] == [
            state(number, 5) for number in range(len(names))
        ]
        assert len(scene.cache) == 0

    @pytest.mark.parametrize("change", ["put_packed", "add"])
    def test_a_newer_state_replaces_a_stale_one(self, scene, change):
        scene.cache.put_packed(name_of(b"a"), state(1, 5))
        self.distrust(scene)
        if change == "put_packed":
            scene.cache.put_packed(name_of(b"a"), state(2, 5))
        else:
            scene.add(spent=2)
        assert len(scene.cache) == 1
        assert scene.cache.take_stale(name_of(b"a")) is None

    @pytest.mark.parametrize("is_stale", [False, True])
    @pytest.mark.parametrize(
        ("shared", "kept"),
        [
            (None, 1),
            (state(2, 6, generation=2), 2),
            (state(2, 6, generation=1), 1),
            (state(2, 4, generation=2), 1),
        ],
        ids=["unknown", "newer", "of before a reset", "older"],
    )
    def test_a_changed_bucket_becomes_stale(self, scene, is_stale, shared, kept):
        scene.cache.put_packed(name_of(b"a"), state(1, 5, generation=2))
        if is_stale:
            self.distrust(scene)
        scene.cache.distrust(name_of(b"a"), shared)
        assert len(scene.cache) == 1
        assert scene.cache.take_packed(name_of(b"a")) is None
        assert scene.cache.take_stale(name_of(b"a")).state[0] == kept
        scene.cache.distrust(name_of(b"a"), shared)
        assert len(scene.cache) == 0

    @pytest.mark.parametrize("distrusted_us", [0, TTL_US // 2])
    def test_a_stale_bucket_expires_as_a_packed_one(self, scene, distrusted_us):
        scene.cache.put_packed(name_of(b"a"), state(1, 5))
        scene.run(distrusted_us, step_us=SECOND)
        self.distrust(scene)
        scene.run(TTL_US // 2 - distrusted_us, step_us=SECOND)
        assert len(scene.cache) == 1
        scene.run(TTL_US // 2 + SECOND, step_us=SECOND)
        assert (len(scene.cache), scene.cache.expired_total) == (0, 1)
        assert scene.cache.take_stale(name_of(b"a")) is None

    def test_stale_buckets_are_evicted_like_packed_ones(self):
        scene = Scene(max_entries=1)
        scene.cache.put_packed(name_of(b"a"), state(1, 5))
        self.distrust(scene)
        bucket = scene.add(b"b")
        scene.cache.step(0)
        assert (len(scene.cache), scene.cache.evicted_total) == (1, 1)
        assert scene.cache.get(b"b") is bucket


class TestExpiry:
    def test_a_packed_bucket_expires_after_half_to_all_of_the_time_to_live(self, scene):
        scene.add()
        scene.run(TTL_US // 2, b"a")
        scene.run(TTL_US // 2)
        assert len(scene.cache) == 1
        scene.run(TTL_US // 2 + 3 * IDLE_US)
        assert (len(scene.cache), scene.cache.expired_total) == (0, 1)

    @pytest.mark.parametrize("step_us", [STEP_US, SECOND, 60 * SECOND])
    def test_a_packed_bucket_expires_in_time_with_rare_steps(self, scene, step_us):
        scene.add()
        scene.run(TTL_US + 4 * IDLE_US + 5 * step_us, step_us=step_us)
        assert (len(scene.cache), scene.cache.expired_total) == (0, 1)

    def test_not_all_hash_tags_expire_in_one_step(self, scene):
        for number in range(HASH_TAGS):
            scene.add(bytes([number]))
        scene.run(TTL_US // 2)
        scene.run(TTL_US // 4)
        left = []
        for _ in range(round(TTL_US / STEP_US)):
            scene.run(STEP_US)
            left.append(len(scene.cache))
        assert left[-1] == 0
        assert max(before - after for before, after in pairwise(left)) <= 1

    def test_after_a_long_pause_one_generation_expires(self, scene):
        for number in range(HASH_TAGS):
            scene.add(bytes([number]))
        scene.run(3 * IDLE_US)
        scene.now_us += 10 * TTL_US
        scene.cache.step(scene.now_us)
        assert len(scene.cache) >= HASH_TAGS - 10
        scene.now_us += 10 * TTL_US
        scene.cache.step(scene.now_us)
        assert len(scene.cache) == 0


class TestEviction:
    def test_the_cache_never_exceeds_its_maximum(self):
        scene = Scene(max_entries=10)
        for number in range(100):
            scene.add(b"%d" % number)
            scene.run(STEP_US)
            assert len(scene.cache) <= 10
        left = scene.cache.evicted_total + scene.cache.expired_total
        assert left == 100 - len(scene.cache)

    def test_packed_buckets_are_evicted_first_the_older_generation_before_the_younger(self):
        scene = Scene(max_entries=4)
        scene.add(b"oldest")
        scene.run(3 * IDLE_US + TTL_US // 2)
        scene.add(b"older")
        scene.run(3 * IDLE_US)
        for number in range(4):
            scene.add(b"%d" % number)
            scene.run(STEP_US)
            gone = [name for name in (b"oldest", b"older") if scene.packed(name) is None]
            assert gone == [b"oldest", b"older"][: max(0, number - 1)]
        assert len(scene.cache) == 4

    def test_the_unused_one_of_the_buckets_in_use_is_evicted(self):
        scene = Scene(max_entries=2)
        used, _unused = scene.add(b"used"), scene.add(b"unused")
        scene.run(IDLE_US)  # starts another generation
        scene.cache.get(b"used")
        scene.add(b"new")
        scene.cache.step(scene.now_us)
        assert scene.cache.get(b"used") is used
        assert scene.cache.get(b"unused") is None
        assert len(scene.cache) == 2

    def test_a_new_bucket_is_not_evicted_before_older_ones(self):
        scene = Scene(max_entries=10)
        for number in range(12):
            scene.add(b"%d" % number)
        scene.cache.step(scene.now_us)
        scene.add(b"new")
        scene.cache.step(scene.now_us)
        assert scene.cache.get(b"new") is not None
        assert len(scene.cache) == 10

    def test_without_packed_buckets_the_longest_unused_is_evicted_first(self):
        scene = Scene(max_entries=10)
        for number in range(13):
            scene.add(b"%d" % number)
        scene.cache.step(scene.now_us)
        kept = [number for number in range(13) if scene.cache.get(b"%d" % number)]
        assert kept == [*range(3, 13)]
        assert scene.cache.evicted_total == 3

    def test_an_idle_unsettled_view_is_evicted_before_a_used_one(self):
        scene = Scene(max_entries=3)
        scene.add(b"idle", spends=True)
        scene.run(IDLE_US + 2 * STEP_US)
        scene.add(b"used")
        scene.run(IDLE_US + 2 * STEP_US, b"used")
        for name in (b"new", b"newer"):
            scene.add(name)
        scene.cache.step(scene.now_us)
        assert scene.cache.get(b"idle") is None
        assert scene.cache.get(b"used") is not None

    @pytest.mark.parametrize("unsettled", UNSETTLED)
    def test_a_bucket_evicted_before_it_is_settled_stays_in_its_partition(self, unsettled):
        scene = Scene(max_entries=1)
        dirty = scene.add(b"dirty", **unsettled)
        scene.run(IDLE_US)
        clean = scene.add(b"clean")
        scene.cache.step(scene.now_us)
        assert scene.cache.get(b"dirty") is None
        assert not dirty.is_cached
        assert scene.tag.buckets == {dirty.name: dirty, clean.name: clean}

    def test_an_evicted_bucket_can_be_put_into_use_again(self):
        scene = Scene(max_entries=1)
        dirty = scene.add(b"dirty", spends=True)
        scene.run(IDLE_US)
        scene.add(b"clean")
        scene.cache.step(scene.now_us)
        scene.cache.add(dirty)
        assert dirty.is_cached
        assert scene.cache.get(b"dirty") is dirty


# How they are packed

STATES = [
    SharedState(0, 7, 100),
    SharedState(1, 2**53, 2**31 - 1, (2**81, 2**53 - 1)),
    SharedState(2, 3, 4, b"a log"),
    SharedState(1, 2**53, 2**31 - 1, (2**81, 2**53 - 1), 2**31 - 1),
    SharedState(0, 7, 100, None, 5),
]


@pytest.mark.parametrize("shared", STATES, ids=["full", "numbers", "log", "burst", "full burst"])
def test_a_packed_state_is_unpacked_unchanged(shared):
    unpacked = unpack(pack(shared))
    assert unpacked == shared
    assert type(unpacked) is SharedState


@pytest.mark.parametrize("shared", STATES, ids=["full", "numbers", "log", "burst", "full burst"])
def test_the_garbage_collector_does_not_track_packed_states(shared):
    packed = pack(shared)
    gc.collect()
    assert not gc.is_tracked(packed)
