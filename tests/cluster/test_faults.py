"""Faults of the shared state: what callers and operators see, and the recovery."""

import socket
import time

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import tokens
from tests.cluster.load import Event, bursts, steady
from tests.cluster.shared import (
    TIMEOUT_MS,
    Shared,
    down,
    health,
    is_ready,
    open_breaker,
    use_up,
)
from tests.servers import until

PAUSE_MS = 4_000
NEW_PASSWORD = "a-password-nobody-told-the-nodes"


def clients_killed(cluster, kind):
    return cluster.valkey.ask("CLIENT", "KILL", "TYPE", kind)


def password_changed(cluster):
    cluster.valkey.ask("CONFIG", "SET", "requirepass", NEW_PASSWORD)
    cluster.valkey.password = NEW_PASSWORD
    clients_killed(cluster, "normal")


def password_restored(cluster):
    cluster.valkey.ask("CONFIG", "SET", "requirepass", "")
    cluster.valkey.password = None


def each_proxy(cluster, act):
    for proxy in cluster.proxies:
        act(proxy)


def answers_late(cluster):
    each_proxy(cluster, lambda proxy: setattr(proxy.down, "latency_ms", 2 * TIMEOUT_MS))


FAULTS = {
    "killed": (lambda c: c.valkey.kill(), lambda c: c.valkey.start()),
    "hung": (lambda c: c.valkey.pause(), lambda c: c.valkey.resume()),
    "refused": (
        lambda c: each_proxy(c, lambda p: p.kill()),
        lambda c: each_proxy(c, lambda p: p.heal()),
    ),
    "silent": (
        lambda c: each_proxy(c, lambda p: p.partition()),
        lambda c: each_proxy(c, lambda p: p.heal()),
    ),
    "replies lost": (
        lambda c: each_proxy(c, lambda p: setattr(p.down, "drop", True)),
        lambda c: each_proxy(c, lambda p: p.heal()),
    ),
    "questions lost": (
        lambda c: each_proxy(c, lambda p: setattr(p.up, "drop", True)),
        lambda c: each_proxy(c, lambda p: p.heal()),
    ),
    "late by 2 s": (
        lambda c: each_proxy(c, lambda p: setattr(p.down, "latency_ms", 2_000)),
        lambda c: each_proxy(c, lambda p: p.heal()),
    ),
    "paused": (
        lambda c: c.valkey.ask("CLIENT", "PAUSE", PAUSE_MS, "ALL"),
        lambda c: c.valkey.ask("PING"),  # it ends without a command
    ),
    "read-only": (
        lambda c: c.valkey.ask("REPLICAOF", "127.0.0.1", 1),
        lambda c: c.valkey.ask("REPLICAOF", "NO", "ONE"),
    ),
    "out of memory": (
        lambda c: c.valkey.ask("CONFIG", "SET", "maxmemory", 1),
        lambda c: c.valkey.ask("CONFIG", "SET", "maxmemory", 0),
    ),
    "password changed": (password_changed, password_restored),
    "forbidden": (
        lambda c: c.valkey.ask("ACL", "SETUSER", "default", "-evalsha", "-eval", "-mget"),
        lambda c: c.valkey.ask("ACL", "SETUSER", "default", "+@all"),
    ),
    "scripts forbidden": (
        lambda c: c.valkey.ask("ACL", "SETUSER", "default", "-evalsha", "-eval"),
        lambda c: c.valkey.ask("ACL", "SETUSER", "default", "+@all"),
    ),
}


ALWAYS = {"killed", "hung", "replies lost", "read-only", "out of memory", "password changed"}
"""One fault of each kind; all others together take minutes."""

READS_WORK = {"out of memory", "scripts forbidden"}


@pytest.mark.parametrize(
    "fault",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in FAULTS],
)
def test_a_failed_shared_state_opens_the_breakers_until_it_recovers(cluster, fault):
    begin, end = FAULTS[fault]
    endpoint = cluster.new_rule(limit=5)
    node = cluster[0]
    assert node.check(endpoint, "u").reason == pb.WITHIN_LIMIT
    errors, fail_opens = node.metric("rate_limiter_redis_errors_total"), cluster.fail_opens()
    begin(cluster)
    answer = open_breaker(node, endpoint)
    assert answer.allowed
    assert answer.remaining_tokens == 1
    assert abs(answer.reset_time - (time.time() + 60)) < 5
    assert node.check(endpoint, "u").reason == pb.FAIL_OPEN_BREAKER  # known ones, too
    assert node.metric("rate_limiter_redis_errors_total") >= errors + 5
    opens = cluster.fail_opens()
    assert opens[0] == fail_opens[0] + 2
    if (
        fault not in READS_WORK
    ):  # there the node has a view of the bucket, which decides after a timeout
        assert opens[1] >= fail_opens[1] + 4
    until(lambda: down(node), "the node says that it is cut off")
    report = health(node)
    assert report.status == pb.DEGRADED
    assert report.breaker_state in {"open", "half_open"}
    assert is_ready(node)  # a degraded node still serves
    end(cluster)
    until(lambda: not down(node), "the node is whole again")
    assert health(node).breaker_state == "closed"
    until(lambda: node.check(endpoint, "u").reason == pb.LIMIT_EXCEEDED, "the limit holds again")


@pytest.mark.parametrize("pause_s", [0.3, 0.9])
def test_a_pause_of_the_shared_state_opens_no_breaker(cluster, pause_s):
    endpoint = cluster.new_rule()
    fail_opens, _ = cluster.fail_opens()
    resumed_s = []

    def resume():
        cluster.valkey.resume()
        resumed_s.append(time.monotonic())

    misses = [
        due._replace(key=f"{pause_s}-{number}")
        for number, due in enumerate(steady(150.0, pause_s + 2.5, nodes=3))
    ]
    log = cluster.offer(
        endpoint, misses, Event(1.0, cluster.valkey.pause), Event(1.0 + pause_s, resume)
    )
    assert not log.unknown
    late = [one for one in log.entries if one.failed_open]
    assert {one.reason for one in late} == {pb.FAIL_OPEN_ERROR}
    # Checks sent later than one timeout after the resume find no backlog.
    assert all(one.sent_s < resumed_s[0] + TIMEOUT_MS / 1_000 for one in late)
    assert cluster.fail_opens()[0] == fail_opens


@pytest.mark.parametrize("messages", ["kept", "lost"])
def test_a_shared_state_with_late_answers_opens_no_breaker(cluster, messages):
    endpoint, node = cluster.new_rule(limit=5), cluster[0]
    for _ in range(4):
        assert node.check(endpoint, "u").reason == pb.WITHIN_LIMIT
    gaps = node.metric("rate_limiter_message_gaps_total")
    answers_late(cluster)
    if messages == "lost":
        clients_killed(cluster, "pubsub")
        until(
            lambda: node.metric("rate_limiter_message_gaps_total") > gaps, "the node listens again"
        )
    for number in range(8):  # until the known bucket is not in use
        assert node.check(endpoint, f"unknown-{number}").reason == pb.FAIL_OPEN_ERROR
    # The node decides known buckets by its views.
    answers = [node.check(endpoint, "u").reason for _ in range(3)]
    assert answers == [pb.WITHIN_LIMIT, pb.LIMIT_EXCEEDED, pb.LIMIT_EXCEEDED]
    assert health(node).breaker_state == "closed"


def test_a_caller_first_seen_while_answers_are_late_is_limited(cluster):
    endpoint, node = cluster.new_rule(limit=5), cluster[0]
    answers_late(cluster)
    reasons = []

    def is_denied():
        reasons.append(node.check(endpoint, "new").reason)
        return reasons[-1] == pb.LIMIT_EXCEEDED

    until(is_denied, "the caller is limited")
    # What is sent before the first answer comes is not limited: two answers' time at most.
    assert reasons.count(pb.FAIL_OPEN_ERROR) <= 6, reasons
    assert [node.check(endpoint, "new").reason for _ in range(3)] == [pb.LIMIT_EXCEEDED] * 3


def test_a_reset_reaches_a_node_with_late_answers(cluster):
    endpoint = cluster.new_rule(limit=5)
    for number in (0, 1):
        use_up(cluster[number], endpoint)
    cluster.settled()
    cluster.proxies[1].down.latency_ms = 2 * TIMEOUT_MS
    cluster[0].reset(endpoint)
    until(lambda: cluster[1].check(endpoint).allowed, "the late node knows the reset")


def test_a_node_started_while_answers_are_late_counts_the_others(cluster):
    answers_late(cluster)
    cluster.nodes.kill(1)
    cluster.nodes.start(1)
    until(
        lambda: cluster[1].metric("rate_limiter_cluster_nodes") == len(cluster.nodes),
        "the node counts the others",
    )


def test_a_batch_settled_before_the_probe_does_not_keep_the_breaker_open(tmp_path):
    recovery_s, jitter_s, watch_s = 3, 0.5, 1.0
    with Shared(tmp_path, "--breaker-recovery-s", str(recovery_s), count=1) as shared:
        node, endpoint = shared[0], shared.new_rule(limit=2)
        assert node.check(endpoint, "u").reason == pb.WITHIN_LIMIT
        shared.valkey.pause()
        assert node.check(endpoint, "u").reason == pb.WITHIN_LIMIT  # after it asked and waited
        open_breaker(node, endpoint)
        opened_s = time.monotonic()
        shared.valkey.resume()
        shared.settled()
        assert health(node).breaker_state == "open", "the batch came after the probe"
        until(lambda: health(node).breaker_state == "closed", "the breaker is closed")
        assert time.monotonic() - opened_s < recovery_s + jitter_s + watch_s
        assert node.check(endpoint, "u").reason == pb.LIMIT_EXCEEDED


def exact(cluster, endpoint, log):
    """Assert that the shared state was charged once for all that was allowed. The limit must be out of reach."""
    assert not log.unknown
    for key in log.keys:
        of_key = log.of(key)
        stored = cluster.stored(endpoint, key)
        # A check whose answer the node did not get may or may not have been charged.
        errors = sum(entry.reason == pb.FAIL_OPEN_ERROR for entry in of_key.entries)
        least = tokens(of_key.admitted)
        assert least <= stored <= least + errors, of_key.reasons


def test_all_checks_are_answered_while_the_shared_state_is_restarted(cluster):
    endpoint = cluster.new_rule()
    before = cluster.fail_opens()
    log = cluster.load(
        endpoint, 5.0, Event(1.0, cluster.valkey.kill), Event(2.0, cluster.valkey.start)
    )
    assert not log.unknown
    assert log.reasons.keys() <= {"WITHIN_LIMIT", "FAIL_OPEN_BREAKER", "FAIL_OPEN_ERROR"}
    counted = log.reasons.get("FAIL_OPEN_BREAKER", 0), log.reasons.get("FAIL_OPEN_ERROR", 0)
    after = cluster.fail_opens()
    assert (after[0] - before[0], after[1] - before[1]) == counted
    cluster.heal()
    assert cluster.load(endpoint, 0.5).reasons.keys() == {"WITHIN_LIMIT"}


@pytest.mark.parametrize("fault", ["silent", "refused", "late by 2 s"])
def test_a_fault_at_one_node_does_not_affect_the_others(cluster, fault):
    endpoint = cluster.new_rule()
    proxy, others = cluster.proxies[0], cluster.proxies[1:]
    cluster.proxies = [proxy]
    FAULTS[fault][0](cluster)
    cluster.proxies = [proxy, *others]
    open_breaker(cluster[0], endpoint)
    for node in (cluster[1], cluster[2]):
        assert {node.check(endpoint, f"u{n}").reason for n in range(20)} == {pb.WITHIN_LIMIT}
        assert health(node).shared_state_connected


def test_flushed_scripts_are_reloaded_without_failed_checks(cluster):
    endpoint = cluster.new_rule()
    flushes = [Event(0.2 * n, lambda: cluster.valkey.ask("SCRIPT", "FLUSH")) for n in range(5)]
    log = cluster.load(endpoint, 1.5, *flushes)
    assert log.reasons.keys() == {"WITHIN_LIMIT"}
    exact(cluster, endpoint, log)


def test_charges_without_an_acknowledgement_are_charged_once(cluster):
    endpoint = cluster.new_rule()

    def cut():
        for proxy in cluster.proxies:
            proxy.down.cut_after_bytes = 0

    log = cluster.load(endpoint, 3.0, *(Event(0.3 * n, cut) for n in range(9)))
    cluster.heal()
    assert sum(proxy.accepted for proxy in cluster.proxies) > 9
    exact(cluster, endpoint, log)


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        ("drop", "down"),
        ("hold", "up"),
        pytest.param("drop", "up", marks=pytest.mark.long),
        pytest.param("hold", "down", marks=pytest.mark.long),
    ],
)
def test_spends_are_charged_once_while_one_direction_is_lost(cluster, way, fault):
    endpoint = cluster.new_rule()

    def begin():
        setattr(getattr(cluster.proxies[0], way), fault, True)

    log = cluster.load(endpoint, 3.0, Event(0.5, begin), Event(1.5, cluster.proxies[0].heal))
    cluster.heal()
    exact(cluster, endpoint, log)


def test_fragmented_replies_are_decoded(cluster):
    endpoint = cluster.new_rule()
    for proxy in cluster.proxies:
        proxy.down.slice_bytes, proxy.up.slice_bytes = 3, 5
    log = cluster.load(endpoint, 1.0)
    exact(cluster, endpoint, log)


def test_a_reset_reaches_all_nodes_although_messages_are_lost(cluster):
    endpoint = cluster.new_rule(limit=20)
    for node in cluster.nodes.served:
        use_up(node, endpoint)
    clients_killed(cluster, "pubsub")
    cluster[0].reset(endpoint)
    until(lambda: cluster[2].check(endpoint).allowed, "the other node has heard of the reset")


def test_nodes_without_messages_still_share_their_limit(cluster):
    """Spends are shared through the store; messages only announce them."""
    cluster.valkey.ask("ACL", "SETUSER", "default", "-publish", "-spublish")
    endpoint = cluster.new_rule(limit=100)
    log = cluster.offer(endpoint, bursts(60, 0.2, 2.0, nodes=3))
    assert 100 <= tokens(log.admitted) <= 150, log.reasons


def test_a_wrong_password_is_retried_slowly(cluster):
    password_changed(cluster)
    until(lambda: down(cluster[0]), "the node is cut off")
    before, since_s = cluster.proxies[0].accepted, time.monotonic()
    open_breaker(cluster[0], cluster.new_rule())
    until(lambda: time.monotonic() > since_s + 2, "two seconds have passed")
    attempts = cluster.proxies[0].accepted - before
    # Two connections, one of them for messages, each retried at most twice a second in the end.
    assert attempts <= 6 * (time.monotonic() - since_s) + 4
    assert NEW_PASSWORD not in cluster.nodes.log(0)


def test_a_foreign_endless_script_is_an_outage(cluster):
    endpoint = cluster.new_rule()
    cluster.valkey.ask("CONFIG", "SET", "busy-reply-threshold", 50)
    with socket.create_connection(("127.0.0.1", cluster.valkey.port)) as other:
        other.sendall(b"EVAL 'while true do end' 0\r\n")
        open_breaker(cluster[0], endpoint)
        cluster.valkey.ask("SCRIPT", "KILL")
    until(lambda: not down(cluster[0]), "the node is whole again")


LOADING = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
"""1 ms per key."""

FILL = "for i = 1, 5000 do redis.call('SET', 'filler:' .. i, i) end"


def test_a_loading_server_is_an_outage(cluster):
    valkey, endpoint = cluster.valkey, cluster.new_rule(limit=5)
    node = cluster[0]
    use_up(node, endpoint)
    cluster.settled()
    valkey.ask("EVAL", FILL, 0)
    valkey.ask("SAVE")
    valkey.kill()
    valkey._options += LOADING
    valkey.start()
    try:
        assert open_breaker(node, endpoint).allowed
        assert valkey.info("persistence")["loading"] == 1
        until(lambda: not down(node), "the node is whole again")
        assert node.check(endpoint, "u").reason == pb.LIMIT_EXCEEDED
    finally:
        valkey._options = valkey._options[: -len(LOADING)]
        (valkey.directory / "dump.rdb").unlink()
        valkey.ask("FLUSHALL")


def test_open_breakers_of_all_nodes_send_only_probes(cluster):
    """The breakers of all nodes open at once; until they close, each node sends occasional probes and no checks."""
    endpoint = cluster.new_rule()
    FAULTS["forbidden"][0](cluster)
    for node in cluster.nodes.served:
        open_breaker(node, endpoint)
    unsettled = cluster.nodes.metric_sum("rate_limiter_unsettled_buckets")
    cluster.valkey.ask("CONFIG", "RESETSTAT")
    log = cluster.load(endpoint, 2.0)
    told = cluster.valkey.info("commandstats")
    asked = {name: count["calls"] + count["rejected_calls"] for name, count in told.items()}
    assert log.reasons.keys() == {"FAIL_OPEN_BREAKER"}
    # Per node: a probe and a heartbeat a second; each remaining batch after 60, 120 … ms; no checks.
    assert 1 <= asked["cmdstat_evalsha"] <= 3 * (3 + 3) + 6 * unsettled, asked
