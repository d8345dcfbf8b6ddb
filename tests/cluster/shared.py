"""Nodes that share one Valkey, each through its own proxy, and their recovery from faults."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.cluster.redis.codec import state_of
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.chaos_proxy import ChaosProxy
from tests.cluster.admissions import Log
from tests.cluster.load import Due, Event, offer, steady
from tests.cluster.nodes import Nodes
from tests.servers import Valkey, until
from tests.system.process import NEVER_ENDING_S, START_S, Served

RECOVERY_S = 1
"""BREAKER_RECOVERY_S of the tests, instead of 30 s; the jitter is added."""

KEY_SECRET = "known to the tests, which look for buckets"

TIMEOUT_MS = 200
"""REDIS_TIMEOUT_MS: ten times the default, so that a busy machine is not mistaken for the tested fault."""

OPTIONS = (
    *("--breaker-recovery-s", str(RECOVERY_S)),
    *("--redis-timeout-ms", str(TIMEOUT_MS)),
    *("--key-secret", KEY_SECRET),
)


class Shared:
    """A Valkey and ``count`` nodes, each behind a proxy. ``arguments`` are those of ``serve``."""

    def __init__(self, directory: Path, *arguments: str, count: int = 3) -> None:
        self.valkey = Valkey(directory / "valkey")
        self.proxies = [ChaosProxy(self.valkey.port) for _ in range(count)]
        urls = [proxy.url for proxy in self.proxies]
        self.nodes = Nodes(directory / "nodes", urls, *OPTIONS, *arguments)
        self.settled = self.nodes.settled
        self.rules: dict[str, Rule] = {}
        """By their endpoints."""
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.valkey)
            for proxy in self.proxies:
                stack.enter_context(proxy)
            stack.enter_context(self.nodes)
            self.nodes.wait_for_members()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Served:
        return self.nodes[number]

    def new_rule(self, limit: int = 1_000_000, **fields: Any) -> str:
        """Create a rule for users on a new endpoint, and return that; by default its window never ends."""
        endpoint = f"/{next(self._numbers)}"
        kind: dict[str, Any] = {"algorithm": "fixed_window", "window_seconds": NEVER_ENDING_S}
        kind |= fields
        self.nodes.rule(endpoint=endpoint, limit=limit, **kind)
        algorithm = Algorithm(kind["algorithm"])
        window_s = kind["window_seconds"]
        self.rules[endpoint] = Rule(
            "",
            endpoint,
            IdentifierType.USER,
            limit=limit,
            window_seconds=window_s,
            algorithm=algorithm,
        )
        return endpoint

    def load(self, endpoint: str, seconds: float, *events: Event) -> Log:
        """Send checks of three users to all nodes, with events meanwhile."""
        schedule = steady(300.0, seconds, nodes=len(self.nodes), keys=("a", "b", "c"))
        return self.offer(endpoint, schedule, *events)

    def offer(self, endpoint: str, schedule: list[Due], *events: Event) -> Log:
        """Send a schedule, and wait for all answers."""
        offered = offer(self.nodes.addresses, schedule, endpoint=endpoint, events=events)
        assert offered.log.entries
        return offered.log

    def stored(self, endpoint: str, identifier: str) -> int:
        """Return a user's spends in the shared state, once everything is settled."""
        self.settled()
        return spent(self.valkey.ask, self.rules[endpoint], identifier)

    def fail_opens(self) -> tuple[int, int]:
        """Return the fail-open answers of all nodes: by an open breaker, and by errors."""
        total = self.nodes.metric_sum
        return (
            int(total("rate_limiter_fail_open_total")),
            int(total("rate_limiter_fail_open_errors_total")),
        )

    def heal(self) -> None:
        """End all faults, and wait until every node has recovered."""
        with contextlib.suppress(AssertionError):
            self.valkey.resume()
        if not self.valkey.runs:
            self.valkey.start()
        for name, value in {"maxmemory": "0", "requirepass": ""}.items():
            self.valkey.ask("CONFIG", "SET", name, value)
        self.valkey.ask("REPLICAOF", "NO", "ONE")
        self.valkey.ask("ACL", "SETUSER", "default", "on", "nopass", "+@all", "~*", "&*")
        for proxy in self.proxies:
            proxy.heal()
        for number, node in enumerate(self.nodes.served):
            if node.process.poll() is not None:
                self.nodes.start(number)
            self.nodes.resume(number)
        until(self._is_whole, "the nodes are whole again")

    def _is_whole(self) -> bool:
        return set(self.nodes.metric("rate_limiter_shared_state_up")) == {1.0} and set(
            self.nodes.metric("rate_limiter_cluster_nodes")
        ) == {float(len(self.nodes))}


def spent(ask: Callable[[str, bytes], Any], rule: Rule, identifier: str) -> int:
    """Return a user's spends in the shared state."""
    keys = BucketKeys(KEY_SECRET.encode())
    name = keys.stored(identifier.encode() + keys.scope(rule, rule.endpoint))
    shared = state_of(ask("GET", b"rl1:{%02x}:" % name[0] + name), rule)
    if shared is None:
        return 0
    return ACCOUNTS[rule.algorithm].used(shared.state, rule, int(time.time() * 1_000_000))


def use_up(node: Served, endpoint: str) -> None:
    """Send checks until a user's limit is used up."""
    until(lambda: not node.check(endpoint).allowed, "the limit is used up")


def down(node: Served) -> bool:
    """Return whether a node reports the shared state as disconnected."""
    return node.metric("rate_limiter_shared_state_up") == 0.0


def health(node: Served) -> pb.HealthResponse:
    """Return the health of a node."""
    return node.node.GetHealthStatus(Empty(), timeout=START_S)


def is_ready(node: Served) -> bool:
    """Return whether a load balancer would send it calls."""
    return httpx.get(f"http://{node.http_address}/readyz").is_success


def change_rule(node: Served, rule_id: str, **fields: Any) -> pb.RateLimit:
    """Change fields of a rule through a node."""
    request = pb.UpdateRateLimitRequest(
        rate_limit=pb.RateLimit(id=rule_id, **fields), update_mask=FieldMask(paths=list(fields))
    )
    return node.rules.UpdateRateLimit(request, timeout=START_S)


def open_breaker(node: Served, endpoint: str, identifier: str = "opener") -> pb.RateLimitResponse:
    """Check unknown users on a node until its breaker is open; returns the last answer."""
    deadline_s = time.monotonic() + START_S
    for number in itertools.count():
        answer = node.check(endpoint, f"{identifier}-{number}")
        if answer.reason == pb.FAIL_OPEN_BREAKER:
            return answer
        assert time.monotonic() < deadline_s, "the breaker does not open"
    raise AssertionError
