"""A node that was suspended for a moment does not blame the shared state."""

import time

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.chaos_proxy import ChaosProxy
from tests.cluster.load import Event, keys, offer, steady
from tests.cluster.nodes import Nodes
from tests.cluster.shared import health
from tests.servers import Valkey

STALLS = 6
STALL_S = 0.3
TIMEOUT_MS = 100
"""Above the default, so that a busy machine causes no failure, and far below a stall."""


@pytest.mark.parametrize(
    "consistency", [pytest.param("strict", marks=pytest.mark.long), "eventual"]
)
def test_a_suspended_node_does_not_count_the_shared_state_as_slow(tmp_path, consistency):
    options = ("--consistency", consistency, "--redis-timeout-ms", str(TIMEOUT_MS))
    with (
        Valkey(tmp_path / "valkey") as valkey,
        ChaosProxy(valkey.port) as proxy,
        Nodes(tmp_path / "nodes", proxy.url, *options, count=1) as nodes,
    ):
        proxy.down.latency_ms = TIMEOUT_MS / 5  # so that requests are always in flight
        nodes.rule(limit=1_000_000, window_seconds=3_600)

        def stall():
            nodes.pause(0)
            time.sleep(STALL_S)
            nodes.resume(0)

        events = [Event(0.1 + 1.5 * STALL_S * number, stall) for number in range(STALLS)]
        # Unknown callers: every check asks the shared state.
        schedule = steady(300, 0.2 + 1.5 * STALL_S * STALLS, nodes=1, keys=keys(100_000))
        log = offer(nodes.addresses, schedule, events=events).log
        waited_s = max(entry.received_s - entry.sent_s for entry in log.entries)
        assert waited_s >= STALL_S / 2, "no check met a node that stood still"
        assert pb.FAIL_OPEN_BREAKER not in {entry.reason for entry in log.entries}
        # None, except for a busy machine. If the node blamed the server, there would be at least one per stall.
        assert nodes[0].metric("rate_limiter_redis_errors_total") < STALLS / 2, log.reasons
        assert health(nodes[0]).breaker_state == "closed"
