"""A node for tests: the real services, limiter, store and feed behind a real server on a free port."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.holder import Holder
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import US_PER_S
from ratelimitd.node.serving import server_of
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import MetricSample
from ratelimitd.rpc.interface import Server
from ratelimitd.rpc.tls import CertificateSource, TlsFiles, logged_and_counted
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.services.auth import Credentials
from ratelimitd.services.config import ConfigService
from ratelimitd.services.convert import CONTRACT_IDENTITIES
from ratelimitd.services.convert_envoy import ALL_FIELDS
from ratelimitd.services.envoy import SERVICE as ENVOY
from ratelimitd.services.envoy import EnvoyService
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.services.grpc_health import SERVICE as GRPC_HEALTH
from ratelimitd.services.grpc_health import GrpcHealthService
from ratelimitd.services.health import HealthService
from ratelimitd.services.holds import HoldsService
from ratelimitd.services.methods import OUR_SERVICES, guarded, names_of
from ratelimitd.services.plans import PlansService
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimitd.services.reflection import V1, V1ALPHA, ReflectionService
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as pb_grpc
from tests.access import access_of
from tests.rule_stores import sqlite_store

ENVOY_IDENTIFIERS = {"remote_address": "ip", "user_id": "user", "api_key": "api_key"}


def check(**fields):
    """A check of a user, unless ``fields`` differ."""
    return pb.RateLimitRequest(
        **{"identifier": "u", "identifier_type": "user", "endpoint": "/a", **fields}
    )


@dataclass
class Node:
    """A running node and its parts, which tests inspect but do not replace."""

    address: str
    server: Server
    limiter: Limiter
    stats: CheckStats
    clock: ManualClock
    store: SqlRuleStore
    feed: RuleFeed
    grpc_health: GrpcHealthService
    edge: ErrorEdge
    channel: grpc.aio.Channel

    @property
    def checks(self):
        return pb_grpc.RateLimiterStub(self.channel)

    @property
    def config(self):
        return pb_grpc.RateLimiterConfigStub(self.channel)

    @property
    def plans(self):
        return pb_grpc.RateLimiterPlansStub(self.channel)

    @property
    def holds(self):
        return pb_grpc.RateLimiterHoldsStub(self.channel)

    @property
    def health(self):
        return pb_grpc.RateLimiterHealthStub(self.channel)

    async def raw(self, path: str, data: bytes, **options) -> bytes:
        """Call a method with any bytes."""
        method: Any = self.channel.unary_unary(path)  # bytes in, bytes out: not in the stub
        answer: bytes = await method(data, timeout=10, **options)
        return answer

    async def outcome(
        self, path: str, data: bytes, **options
    ) -> tuple[grpc.StatusCode, bytes | str]:
        """Return the status of a call, and its answer or the status's text."""
        try:
            return grpc.StatusCode.OK, await self.raw(path, data, **options)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""

    async def rule(self, endpoint: str = "/a", identifier_type: str = "user", **fields):
        """Create a rule of 10 a minute, unless ``fields`` differ."""
        rule = {"limit": 10, "window_seconds": 60, "algorithm": "fixed_window", **fields}
        message = pb.RateLimit(endpoint=endpoint, identifier_type=identifier_type, **rule)
        return await self.config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=message))

    def fail_opens(self) -> tuple[int, int]:
        return self.stats.fail_open_breaker_total, self.stats.fail_open_error_total


async def _nothing():
    return ()


@asynccontextmanager
async def running_node(
    directory: Path,
    *,
    credentials: Credentials | None = None,
    listen="127.0.0.1:0",
    busy_timeout_s: float = 2.0,
    transport: str = "native",
    perf_counter_s: Callable[[], float] = time.perf_counter,
    store_options: Mapping[str, Any] | None = None,
    tls: TlsFiles | None = None,
    **options,
) -> AsyncIterator[Node]:
    """A node with its database in ``directory`` and a manual clock; ``options`` go to its server."""
    clock, stats, assignments = ManualClock(), CheckStats(), Assignments()
    keys = BucketKeys(b"k" * 32)
    table = BucketTable(10_000)
    limiter = Limiter(
        buckets=table,
        clock=clock,
        stats=stats,
        timestamps="bounded",
        keys=keys,
        assignments=assignments,
    )
    holder = Holder(
        limiter, OwnHolds(table, keys, clock.now_us), keys=keys, clock=clock, stats=stats
    )
    async with sqlite_store(
        directory, clock=clock, busy_timeout_s=busy_timeout_s, **(store_options or {})
    ) as store:
        feed = RuleFeed(store, on_book=limiter.replace_book, assignments=assignments)
        await feed.start()
        access = access_of(credentials or Credentials(loopback_admin=True), stats)
        edge = ErrorEdge(stats)
        grpc_health = GrpcHealthService(names_of(OUR_SERVICES))
        health = Health(
            node_id="node-1",
            stats=stats,
            clock=clock,
            rules_revision=lambda: feed.book.revision if feed.book else 0,
        )
        config = ConfigService(store, feed, access.actor)
        holds = HoldsService(
            holder,
            keys,
            access.principal,
            stats=stats,
            identities=CONTRACT_IDENTITIES,
            now_s=lambda: clock.now_us() / US_PER_S,
        )
        offers = (
            RateLimiterService(limiter, stats, perf_counter_s, FairQueue(time.monotonic)),
            EnvoyService(
                limiter,
                stats,
                perf_counter_s,
                identifiers=ENVOY_IDENTIFIERS,
                fields=ALL_FIELDS,
                holds=holds,
            ),
            config,
            PlansService(
                store.assignments,
                feed,
                access.actor,
                identities=CONTRACT_IDENTITIES,
                page_key=config.page_key,
                now_s=lambda: clock.now_us() / US_PER_S,
            ),
            holds,
            HealthService(
                limiter,
                dry_run=DryRun(limiter),
                report=health.report,
                samples=lambda _names: [MetricSample("rate_limiter_active_buckets", "gauge", 1.0)],
                unmatched=_nothing,
                actor=access.actor,
            ),
            grpc_health,
            ReflectionService((*OUR_SERVICES, ENVOY, GRPC_HEALTH, V1, V1ALPHA)),
        )
        methods = guarded((offer.methods() for offer in offers), access, edge)
        report = logged_and_counted(stats.transport_error)
        source = tls and CertificateSource(tls, report, is_grpcio=transport == "grpcio")
        server: Server = server_of(transport)(
            methods, listen=listen, stats=stats, tls=source, **options
        )
        address = await server.start()
        grpc_health.set_serving()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Node(
                    address, server, limiter, stats, clock, store, feed, grpc_health, edge, channel
                )
        finally:
            await server.stop(0)
            await feed.close()
