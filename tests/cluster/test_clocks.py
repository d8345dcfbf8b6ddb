"""Wall clocks that are wrong, or set while nodes serve, change no caller's tokens (I8)."""

import time
from contextlib import ExitStack

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.chaos_proxy import ChaosProxy
from tests.cluster.load import Event, offer, steady
from tests.cluster.nodes import Nodes
from tests.cluster.shared import OPTIONS, use_up
from tests.servers import Valkey, until
from tests.wall_clock import WallClock

HOUR_S = 3_600
STEPS_S = (HOUR_S, -HOUR_S, 2, -2)

ERROR = "rate_limiter_clock_error_seconds"
BOUND = "rate_limiter_over_admission_bound_ratio"

LIMIT = {"limit": 20, "window_seconds": HOUR_S}
"""Token bucket with one token every three minutes, longer than a test."""
REFILL_S = 180


def is_near(figure, expected, within=1.0):
    return abs(figure - expected) < within


def true_times(node, identifier="u"):
    """Assert that a node reports the real time to a caller that has used up the limit."""
    answer = node.check("/a", identifier)
    assert answer.reason == pb.LIMIT_EXCEEDED
    assert 0 < answer.retry_after_seconds <= REFILL_S
    # Tolerates the time since the limit was used up; the clocks are off by at least 30 s.
    assert is_near(answer.reset_time, time.time() + HOUR_S, within=25)


def test_a_single_node_follows_a_set_clock_slowly_and_allows_no_more(tmp_path):
    with (
        WallClock(tmp_path) as clock,
        Nodes(tmp_path / "nodes", "", count=1, environments=[clock.environment]) as nodes,
    ):
        nodes.rule(**LIMIT)
        use_up(nodes[0], "/a")
        for step_s in (HOUR_S, -2):
            clock.set(step_s)
            until(lambda step_s=step_s: is_near(nodes[0].metric(ERROR), step_s), "it is noticed")
            true_times(nodes[0])
            assert nodes[0].check("/a", f"another {step_s}").remaining_tokens == 19
        clock.set(0)
        until(lambda: abs(nodes[0].metric(ERROR)) < 1, "it is noticed")
        told = "the wall clock is 3600.0 s ahead of the node's clock"
        assert told in nodes.log(0)


def test_nodes_of_a_cluster_use_the_shared_states_clock(tmp_path):
    with ExitStack() as stack:
        valkey = stack.enter_context(Valkey(tmp_path / "valkey"))
        clocks = [
            stack.enter_context(WallClock(tmp_path / f"clock-{number}", ahead_s))
            for number, ahead_s in enumerate((30, -30))
        ]
        environments = [clock.environment for clock in clocks]
        nodes = Nodes(tmp_path / "nodes", valkey.url, *OPTIONS, count=2, environments=environments)
        stack.enter_context(nodes)
        nodes.wait_for_members()
        nodes.rule(**LIMIT)
        for node in nodes.served:
            use_up(node, "/a")
            true_times(node)
        # Each clock until it is measured again.
        events = [
            Event(1.2 * number, lambda step_s=step_s: clocks[1].set(step_s))
            for number, step_s in enumerate(STEPS_S)
        ]
        schedule = steady(100, 1.2 * len(STEPS_S), nodes=2, keys=["u"])
        log = offer(nodes.addresses, schedule, events=events).log
        assert log.reasons.keys() == {"LIMIT_EXCEEDED"}
        for node in nodes.served:
            true_times(node)
            assert node.check("/a", f"of {node.node_id}").remaining_tokens == 19
        assert all(abs(error_s) < 1 for error_s in nodes.metric(ERROR))


def test_a_node_that_connected_late_reports_its_clock_error(tmp_path):
    with ExitStack() as stack:
        valkey = stack.enter_context(Valkey(tmp_path / "valkey"))
        clock = stack.enter_context(WallClock(tmp_path, 30))
        proxy = stack.enter_context(ChaosProxy(valkey.port))
        proxy.kill()
        nodes = Nodes(
            tmp_path / "nodes", proxy.url, *OPTIONS, count=1, environments=[clock.environment]
        )
        stack.enter_context(nodes)
        nodes.rule(**LIMIT)
        before = nodes[0].metric(BOUND)
        proxy.heal()
        until(lambda: is_near(nodes[0].metric(ERROR), -30), "it has compared its clock")
        assert nodes[0].metric(BOUND) > before + 2 * 25  # of a window of a second, 30 s apart
        until(lambda: nodes[0].metric("rate_limiter_shared_state_up") == 1.0, "it is connected")
        use_up(nodes[0], "/a")
        assert nodes[0].check("/a").reason == pb.LIMIT_EXCEEDED
