"""The composition root: which adapters a node is made of, in which order they open, and in which they close.

The only module that names them. Decides nothing about checks; signals, stdout and the exit code are the supervisor's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from ratelimitd.background import Background
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock, SystemClock
from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.limiter import Limiter
from ratelimitd.model import US_PER_S
from ratelimitd.observe.health import Health
from ratelimitd.observe.logs import LogContext
from ratelimitd.observe.metrics import Metrics, Readings, Runtime, SnapshotStatus
from ratelimitd.rpc.grpcio_server import GrpcioServer
from ratelimitd.rpc.interface import Methods, Server
from ratelimitd.rpc.limits import TransportLimits
from ratelimitd.rpc.native_server import NativeServer
from ratelimitd.rpc.tls import TlsFiles
from ratelimitd.rules import migrations
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.sql import SqlRuleStore
from ratelimitd.rules.store import RuleStore
from ratelimitd.seed import seed_new_book
from ratelimitd.services import grpc_health, reflection
from ratelimitd.services.auth import Access, Credentials
from ratelimitd.services.catalogue import OUR_SERVICES, guarded, names_of
from ratelimitd.services.config import ConfigService
from ratelimitd.services.grpc_health import GrpcHealthService
from ratelimitd.services.health import HealthService
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimitd.services.reflection import ReflectionService
from ratelimitd.services.status import ErrorEdge
from ratelimitd.settings import Settings
from ratelimitd.stats import CheckStats
from ratelimitd.upkeep import SAMPLE_S, TICK_S, Upkeep
from ratelimitd.web.pages import Readiness, application
from ratelimitd.web.server import HttpServer

STORED_KEY_NAME: Final = "key"
"""The store's secret that stands in for an empty KEY_SECRET."""

CLOSING_SHARE: Final = 0.3
MAX_CLOSING_S: Final = 3.0
"""What of DRAIN_S is kept for writing buckets and closing stores after the last call has ended."""

TRANSPORTS: Final = {"native": NativeServer, "grpcio": GrpcioServer}
"""By the setting TRANSPORT."""

_log = logging.getLogger(__name__)


class Node:
    """One node: built from settings, started once, drained once."""

    def __init__(
        self, settings: Settings, *, clock: Clock | None = None, context: LogContext | None = None
    ) -> None:
        self.grpc_address = ""
        """``host:port`` that gRPC listens on, once started."""
        self.http_address = ""
        """``host:port`` that HTTP listens on, once started; empty when it is off."""
        self.node_id = settings.node_name
        self.stats = CheckStats()
        self._settings = settings
        self._clock = clock or SystemClock()
        self._context = context or LogContext(self.node_id)
        self._runtime = Runtime()
        self._task_restarts: dict[str, int] = {}
        self._callers_time = settings.timestamps == "caller"
        self._table = BucketTable(
            settings.cache_entries, self.stats, callers_time=self._callers_time
        )
        self._health = Health(
            node_id=self.node_id,
            stats=self.stats,
            clock=self._clock,
            rules_revision=lambda: self._context.rules_revision,
        )
        self._grpc_health = GrpcHealthService(names_of(OUR_SERVICES))
        self._edge = ErrorEdge()
        self._open = AsyncExitStack()
        self._server: Server | None = None
        self._limiter: Limiter | None = None
        self._draining = False

    async def start(self) -> None:
        """Open everything, and answer calls.

        Raises:
            StartupError: something cannot be opened; whatever was open is closed again. One line says what.
        """
        try:
            await self._start()
        except StoreUnavailableError as error:
            await self._open.aclose()
            raise StartupError(str(error)) from error
        except BaseException:
            await self._open.aclose()
            raise

    async def drain(self) -> None:
        """Stop in order: not ready, no new calls, calls in flight end, buckets are written, stores close.

        Takes at most about DRAIN_S. Idempotent.
        """
        self._draining = True
        self._grpc_health.drain()
        if self._server is not None:
            await self._server.stop_accepting()
        await self._open.aclose()

    @property
    def readiness(self) -> Readiness:
        """Whether checks should come here: there is a rule book, and the node is not on its way out."""
        if self._draining:
            return Readiness(ready=False, reason="draining")
        if self._limiter is None or self._limiter.book is None:
            return Readiness(ready=False, reason="no rules are loaded yet")
        return Readiness(ready=True)

    async def _start(self) -> None:
        settings = self._settings
        state_dir = StateDir.lock(settings.state_dir)
        self._open.callback(state_dir.close)
        store = await self._open_store()
        key_secret = settings.key_secret or await store.secret(STORED_KEY_NAME)
        snapshot = SnapshotLog.open(
            state_dir.path,
            self._table,
            key_secret,
            self._clock,
            callers_time=self._callers_time,
            report=_warn,
        )
        self._open.push_async_callback(snapshot.drain)
        for report in snapshot.reports:
            _log.warning("%s", report)
        self._limiter = Limiter(
            buckets=self._table,
            clock=self._clock,
            stats=self.stats,
            timestamps=settings.timestamps,
            key_secret=key_secret,
            journal=snapshot,
            on_error=_report_fail_open,
        )
        feed = RuleFeed(
            store,
            on_book=partial(self._take_book, self._limiter),
            last_good=LastGoodBook(state_dir.path, report=_warn),
            report=_warn,
        )
        self._open.push_async_callback(feed.close)
        await feed.start()
        metrics = self._metrics(snapshot, feed)
        await self._start_background(snapshot)
        await self._start_http(metrics)
        await self._start_grpc(self._methods(self._limiter, store, feed, metrics))

    async def _open_store(self) -> RuleStore:
        settings = self._settings
        await migrations.upgrade(settings.database_url)
        store = SqlRuleStore(settings.database_url, clock=self._clock)
        self._open.push_async_callback(store.close)
        if settings.rules_file is not None:
            written = await seed_new_book(store, settings.rules_file)
            if written:
                _log.info("seeded the new rule book with %d rules", written)
        return store

    def _take_book(self, limiter: Limiter, book: RuleBook) -> None:
        limiter.replace_book(book)
        self._context.rules_revision = book.revision
        self._grpc_health.set_serving()
        if len(book):
            _log.info("rules in force: %d", len(book))
        else:
            _log.warning("no rules: every check is allowed")

    def _metrics(self, snapshot: SnapshotLog, feed: RuleFeed) -> Metrics:
        clock, table = self._clock, self._table

        def snapshot_status() -> SnapshotStatus:
            age_us = clock.monotonic_us() - snapshot.last_pass_us
            return SnapshotStatus(
                age_us / US_PER_S, snapshot.written_bytes_total, snapshot.errors_total
            )

        return Metrics(
            Readings(
                stats=self.stats,
                health=self._health,
                runtime=self._runtime,
                active_buckets=lambda: len(table),
                evicted_total=lambda: table.evicted_total,
                expired_total=lambda: table.expired_total,
                rules=lambda: len(feed.book or ()),
                rules_revision=lambda: self._context.rules_revision,
                rules_skipped_total=lambda: feed.skipped_total,
                rules_connected=lambda: feed.connected,
                snapshot=snapshot_status,
                unexpected_total=lambda: self._edge.unexpected_total,
                task_restarts=lambda: {**self._task_restarts, "rules": feed.crashes_total},
            )
        )

    def _methods(
        self, limiter: Limiter, store: RuleStore, feed: RuleFeed, metrics: Metrics
    ) -> Methods:
        settings = self._settings
        access = Access(
            Credentials(
                admin_token=settings.admin_token,
                check_token=settings.check_token,
                admin_sans=frozenset(settings.admin_sans),
                check_sans=frozenset(settings.check_sans),
            )
        )
        offers = [
            RateLimiterService(limiter, self.stats, time.perf_counter).methods(),
            ConfigService(store, feed, access.actor).methods(),
            HealthService(
                limiter, report=self._health.report, samples=metrics.samples, actor=access.actor
            ).methods(),
            self._grpc_health.methods(),
        ]
        if settings.reflection:
            shown = (*OUR_SERVICES, grpc_health.SERVICE, reflection.V1, reflection.V1ALPHA)
            offers.append(ReflectionService(shown).methods())
        return guarded(offers, access, self._edge)

    async def _start_background(self, snapshot: SnapshotLog) -> None:
        background = Background(self._task_restarts)
        self._open.push_async_callback(background.stop)
        upkeep = Upkeep(
            clock=self._clock,
            table=self._table,
            health=self._health,
            runtime=self._runtime,
            loop_time_s=asyncio.get_running_loop().time,
        )
        background.every(TICK_S, "upkeep", upkeep.tick)
        background.every(SAMPLE_S, "sampling", upkeep.sample)
        background.start("snapshot", snapshot.run)

    async def _start_http(self, metrics: Metrics) -> None:
        listen = self._settings.http_listen
        if listen is None:
            return
        app = application(
            metrics=metrics,
            readiness=lambda: self.readiness,
            grpc_address=lambda: self.grpc_address,
            hosts={listen.host, *self._settings.http_hosts},
        )
        server = HttpServer(app, *listen)
        self._open.push_async_callback(server.stop)
        self.http_address = await server.start()

    async def _start_grpc(self, methods: Methods) -> None:
        settings = self._settings
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        transport = TRANSPORTS[settings.transport]
        server = transport(
            methods,
            listen=str(settings.listen),
            stats=self.stats,
            tls=tls,
            limits=TransportLimits(max_concurrent_rpcs=settings.max_concurrent_rpcs),
        )
        closing_s = min(MAX_CLOSING_S, CLOSING_SHARE * settings.drain_s)
        self._open.push_async_callback(server.stop, settings.drain_s - closing_s)
        self.grpc_address = await server.start()
        self._server = server


def _warn(line: str) -> None:
    _log.warning("%s", line)


def _report_fail_open(error: Exception) -> None:
    _log.error("a check was answered fail-open", exc_info=error)
