"""Callers with ever new names get no fresh bucket for an old name, and no more memory than configured."""

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.load import keys, offer, steady
from tests.cluster.shared import Shared, use_up

ENTRIES = 500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared")
    # No check may fail open, however busy the machine is.
    patient = "--redis-timeout-ms", "1000"
    with Shared(directory, "--cache-entries", str(ENTRIES), *patient, count=2) as shared:
        yield shared


def test_an_evicted_bucket_is_not_full_when_it_returns(cluster):
    endpoint = cluster.new_rule(limit=5)
    for node in cluster.nodes.served:
        use_up(node, endpoint)
    schedule = steady(500, 3.0, nodes=2, keys=keys(3_000))
    log = offer(cluster.nodes.addresses, schedule, endpoint=endpoint).log
    assert not log.unknown
    assert log.reasons.keys() <= {"WITHIN_LIMIT", "LIMIT_EXCEEDED"}  # no other caller is affected
    assert min(cluster.nodes.metric("rate_limiter_buckets_evicted_total")) > 0
    assert max(cluster.nodes.metric("rate_limiter_active_buckets")) <= ENTRIES
    for node in cluster.nodes.served:
        assert node.check(endpoint, "u").reason == pb.LIMIT_EXCEEDED
    busiest = max(log.keys, key=lambda key: len(log.of(key).entries))
    admitted = sum(entry.cost for entry in log.of(busiest).admitted)
    assert cluster.stored(endpoint, busiest) == admitted
