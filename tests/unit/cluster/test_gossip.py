import pytest

from ratelimitd.cluster.gossip import MAX_PER_MESSAGE, Gossip, packed_state, take
from ratelimitd.cluster.pending import Bucket
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import NO_TAG, FakeBus, limited, name_of, state

RULE = limited(100)
REVISION = (7).to_bytes(8, "little")


class Scene:
    def __init__(self):
        self.bus, self.clock = FakeBus(), ManualClock()
        self.gossip = Gossip(self.bus, self.clock)

    def settle(self, spent, before=0, key=b"a", rule=RULE):
        """Settle a batch that changes the state of a bucket."""
        now_us = self.clock.now_us()
        after = state(spent, now_us, limit=rule.limit) if isinstance(spent, int) else spent
        bucket = Bucket(key, name_of(key), NO_TAG, rule, after)
        known = None if before is None else state(before, now_us, limit=rule.limit)
        self.gossip.settled(bucket, known)
        return after

    def messages(self):
        self.gossip.publish()
        messages, self.bus.published = self.bus.published, []
        return messages


@pytest.fixture
def scene():
    return Scene()


class Hearer:
    def __init__(self):
        self.states, self.doubts, self.rule_changes = {}, [], 0

    def adopt_by_name(self, name, shared):
        self.states[name] = shared

    def reread(self, name):
        self.doubts.append(name)

    def rules_changed(self):
        self.rule_changes += 1

    def take(self, payload):
        take(payload, self, rules_changed=self.rules_changed)


@pytest.fixture
def hearer():
    return Hearer()


@pytest.mark.parametrize("before", [0, 50, None])
def test_a_bucket_that_drops_below_half_is_published(scene, hearer, before):
    after = scene.settle(51, before)
    ((tag, payload),) = scene.messages()
    assert tag == b"a"[0]
    hearer.take(payload)
    assert hearer.states == {name_of(b"a"): after}


@pytest.mark.parametrize(("before", "spent"), [(0, 50), (51, 90), (None, 10), (90, 10)])
def test_a_bucket_that_has_half_or_had_less_before_is_not_published(scene, before, spent):
    scene.settle(spent, before)
    assert scene.messages() == []


def test_a_bucket_without_a_stored_state_is_not_published(scene):
    scene.settle(None)
    assert scene.messages() == []


def test_a_bucket_is_published_once_per_interval(scene):
    for _ in range(3):
        scene.settle(51)
    assert len(scene.messages()) == 1
    scene.settle(51)
    assert len(scene.messages()) == 1


def test_a_bucket_with_a_log_is_published_by_name_at_once(scene, hearer):
    rule = limited(100, algorithm=Algorithm.SLIDING_WINDOW)
    now_us = scene.clock.now_us()
    bucket = Bucket(b"a", name_of(b"a"), NO_TAG, rule, None)
    bucket.view.check_alone(now_us, 60)
    log = bucket.view._state
    scene.settle(SharedState(0, 1, 100, log), None, rule=rule)
    ((_, payload),) = scene.bus.published
    hearer.take(payload)
    assert hearer.doubts == [name_of(b"a")]
    scene.bus.published.clear()
    assert scene.messages() == []


def test_messages_have_a_hundred_buckets_of_one_hash_tag(scene, hearer):
    keys = [b"a%d" % number for number in range(MAX_PER_MESSAGE + 1)]
    for key in (*keys, b"b"):
        scene.settle(51, key=key)
    messages = scene.messages()
    assert [tag for tag, _ in messages] == [97, 97, 98]
    assert max(len(payload) for _, payload in messages) <= 8_192
    for _, payload in messages:
        hearer.take(payload)
    assert hearer.states.keys() == {name_of(key) for key in (*keys, b"b")}


def test_a_reset_is_published_at_once(scene, hearer):
    scene.gossip.was_reset(name_of(b"a"))
    ((tag, payload),) = scene.bus.published
    hearer.take(payload)
    assert (tag, hearer.doubts) == (97, [name_of(b"a")])


def test_new_rules_are_published_at_once(scene, hearer):
    scene.gossip.rules_changed(7)
    assert scene.bus.published == [(0, b"R" + REVISION)]
    hearer.take(b"R" + REVISION)
    assert hearer.rule_changes == 1


def test_the_largest_numbers_survive_a_message(hearer):
    shared = SharedState(INT32_MAX, MAX_TIME_US, INT32_MAX, (2**100, MAX_TIME_US))
    hearer.take(b"S" + packed_state(name_of(b"a"), shared))
    assert hearer.states == {name_of(b"a"): shared}


@pytest.mark.parametrize(
    "numbers",
    [
        {"generation": INT32_MAX + 1},
        {"revision": MAX_TIME_US + 1},
        {"limit": 0},
        {"limit": INT32_MAX + 1},
        {"state": (1, MAX_TIME_US + 1)},
    ],
)
def test_impossible_states_in_a_message_are_skipped(hearer, numbers):
    sound = SharedState(1, 2, 3, (4, 5))
    messages = [(b"a", sound._replace(**numbers)), (b"b", sound)]
    hearer.take(b"S" + b"".join(packed_state(name_of(key), shared) for key, shared in messages))
    assert hearer.states == {name_of(b"b"): sound}


@pytest.mark.parametrize("kept", [None, b"a log"])
def test_states_without_numbers_are_not_packed(kept):
    assert packed_state(name_of(b"a"), SharedState(0, 1, 2, kept)) is None


def test_a_bucket_with_a_burst_is_published_by_name(scene, hearer):
    scene.settle(SharedState(0, 1, 100, (60_000_000 * 60, scene.clock.now_us()), 100), None)
    ((_, payload),) = scene.bus.published
    hearer.take(payload)
    assert hearer.doubts == [name_of(b"a")]


@pytest.mark.parametrize("payload", [b"", b"X", b"S12", b"D12", b"S" + b"\0" * 57])
def test_unknown_messages_are_ignored(hearer, payload):
    hearer.take(payload)
    assert (hearer.states, hearer.doubts, hearer.rule_changes) == ({}, [], 0)


def test_a_fixed_window_is_published_without_the_count_before(scene, hearer):
    scene.settle(SharedState(0, 1, 100, (60, scene.clock.now_us(), 20)))
    ((_, payload),) = scene.messages()
    hearer.take(payload)
    assert hearer.states == {name_of(b"a"): SharedState(0, 1, 100, (60, scene.clock.now_us()))}
