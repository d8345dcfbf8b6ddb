from ratelimitd.cluster.pending import Bucket
from tests.unit.cluster.world import NO_TAG, RULE, name_of, state


def test_a_new_bucket_has_nothing_to_settle_and_nobody_keeps_it_yet():
    base = state(3, 5)
    bucket = Bucket(b"a", name_of(b"a"), NO_TAG, RULE, base)
    assert (bucket.key, bucket.name, bucket.tag) == (b"a", name_of(b"a"), NO_TAG)
    assert bucket.view.base is base
    assert bucket.view.rule is RULE
    assert not any([bucket.is_dirty, bucket.is_denied, bucket.is_watched, bucket.is_cached])
