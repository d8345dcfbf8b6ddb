"""The composition root: creates the parts of a node, and opens and closes them in order.

Services and ports are in :mod:`ratelimitd.node.serving`; the supervisor handles signals, stdout and the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Final

from ratelimitd.backtest.recorder import TraceRecorder
from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock, SystemClock
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.membership import SharedTime
from ratelimitd.cluster.node import Cluster, SharedStateStatus
from ratelimitd.cluster.redis.opening import open_cluster
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.ledger.holds import Holds
from ratelimitd.limiter.holder import Holder
from ratelimitd.limiter.interfaces import RemoteBuckets
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import US_PER_S
from ratelimitd.node.admin_token import own_admin_token
from ratelimitd.node.jobs import SAMPLE_S, TICK_S, Upkeep
from ratelimitd.node.serving import CAUSES, Serving
from ratelimitd.node.startup import feed_of
from ratelimitd.node.tokens_file import TokensFile
from ratelimitd.observe import history, rule_traffic
from ratelimitd.observe.denials import FOLD_S, Denials
from ratelimitd.observe.health import EMBEDDED, Health
from ratelimitd.observe.live import WATCH_S, Live, live_of
from ratelimitd.observe.logs import LogContext, RulesLog
from ratelimitd.observe.metrics import Metrics, NodeParts, Runtime
from ratelimitd.observe.rule_traffic import RuleTraffic
from ratelimitd.retry import Background
from ratelimitd.rpc.interface import Server
from ratelimitd.rpc.tls import CertificateSource, TlsFiles, logged_and_counted
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import BucketKey
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleStore
from ratelimitd.services.grpc_health import GrpcHealthService
from ratelimitd.services.methods import OUR_SERVICES, names_of
from ratelimitd.settings.table import Settings
from ratelimitd.web.pages.errors import Cause
from ratelimitd.web.pages.sessions import login_link
from ratelimitd.web.parts import Readiness

if TYPE_CHECKING:
    from ratelimitd.observe.otel import OtelTracer

HTTP_END_S: Final = 0.75
"""A worker waits so much longer than for its calls until its parent has ended HTTP. With the end of its own HTTP
(STOP_GRACE_S) this must be shorter than a supervisor's OVERDUE_S."""

_log = logging.getLogger(__name__)


class Node:
    """One node: built from settings, started once, drained once. ``whole_load`` is for its rule feed.

    ``reuse_port``: the node is one of several processes on the gRPC port, and serves HTTP to their parent, see
    :mod:`ratelimitd.workers`. ``may_listen`` is awaited before the node listens, when all else is open,
    and ``may_close`` before a draining node ends HTTP, for a bounded time, when its calls have ended. ``on_guard``: as
    for :class:`TokensFile`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        context: LogContext | None = None,
        whole_load: Callable[[], AbstractContextManager[None]] = nullcontext,
        reuse_port: bool = False,
        may_listen: Callable[[], Awaitable[None]] | None = None,
        may_close: Callable[[], Awaitable[None]] | None = None,
        on_guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.grpc_address = ""
        """``host:port`` that gRPC listens on, once started."""
        self.http_address = ""
        """``host:port`` that HTTP listens on, or the path of its socket, once started; empty when it is off."""
        self.spoe_address = ""
        """``host:port`` of the server for HAProxy, once started; empty when it is off."""
        self.login_link = ""
        """Opens the pages once, shortly after the start; empty unless the node made its admin token."""
        self.node_id = settings.node_name
        self.metrics: Metrics | None = None
        """Metrics of the node, once started."""
        self.stats = CheckStats(CAUSES, map(str, Cause))
        self._settings = settings
        self._admin_token = settings.admin_token
        self._shared_time = SharedTime()
        self._clock = clock or SystemClock(self._shared_time.wall_ns)
        self._context = context or LogContext(self.node_id)
        self._runtime = Runtime()
        self._task_restarts: dict[str, int] = {}
        self._cluster: Cluster | None = None
        self._keys = BucketKeys(settings.key_secret)
        self._late_key: BucketKey | None = None
        self._denials = Denials(self.stats, digest=self._keys.identifier_digest)
        self._rule_traffic = RuleTraffic(self.stats, self._clock.now_us)
        self._assignments = Assignments()
        self._recorder: TraceRecorder | None = None
        self._health = Health(
            node_id=self.node_id,
            stats=self.stats,
            clock=self._clock,
            rules_revision=lambda: self._context.rules_revision,
            shared_state=self._shared_state,
            transport=settings.transport,
        )
        self._grpc_health = GrpcHealthService(names_of(OUR_SERVICES))
        self._tracer: OtelTracer | None = None
        self._open = AsyncExitStack()
        self._server: Server | None = None
        self._limiter: Limiter | None = None
        self._whole_load = whole_load
        self._reuse_port = reuse_port
        self._may_listen = may_listen
        self._may_close = may_close
        self._close_by_s = 0.0
        """End of the wait for ``may_close``, in the loop's time, once draining."""
        self._on_guard = on_guard
        self._rules_log = RulesLog()
        self._tokens: TokensFile | None = None
        self._guard_checks = False
        self._draining = False

    async def start(self) -> None:
        """Open everything, and answer calls.

        Raises:
            StartupError: something cannot be opened; one line says what. All open parts are closed.
        """
        try:
            await self._start()
        except BaseException:
            await self._open.aclose()
            raise

    async def drain(self) -> None:
        """Stop in order: not ready, no new calls, calls in flight end, buckets are written, stores close.

        Takes at most about DRAIN_S. Idempotent.
        """
        self._draining = True
        calls_until_s = asyncio.get_running_loop().time() + self._settings.calls_s
        self._close_by_s = calls_until_s + HTTP_END_S
        self._grpc_health.drain()
        if self._server is not None:
            await self._server.stop_accepting()
        await self._open.aclose()

    def guard_checks(self) -> None:
        """Close checks to callers without a credential, as TOKENS_FILE did on another worker."""
        self._guard_checks = True
        if self._tokens is not None:
            self._tokens.tokens.guard_checks = True

    @property
    def readiness(self) -> Readiness:
        """Whether the node should receive checks: it has a rule book and is not draining."""
        if self._draining:
            return Readiness(ready=False, reason="draining")
        if self._limiter is None or self._limiter.book is None:
            return Readiness(ready=False, reason="no rules are loaded yet")
        return Readiness(ready=True)

    async def _start(self) -> None:
        settings = self._settings
        self._tracer = _open_tracer(
            settings.otel_endpoint, node_id=self.node_id, ratio=settings.otel_sample_ratio
        )
        if self._tracer is not None:
            self._open.push_async_callback(self._tracer.close)
        state_dir = StateDir.lock(settings.state_dir)
        self._open.callback(state_dir.close)
        if settings.has_own_admin_token:
            self._admin_token = own_admin_token(state_dir.path)
        if settings.tokens_file is not None:
            others = {
                self._admin_token: settings.admin_token_name,
                settings.check_token: "CHECK_TOKEN",
            }
            self._tokens = TokensFile(
                settings.tokens_file, self._now_s, others, on_guard=self._on_guard
            )
            if self._guard_checks:
                self.guard_checks()
        for warning in settings.warnings:
            _log.warning("%s", warning)
        self._recorder = self._new_recorder()
        store = SqlRuleStore(
            open_database(settings.database_url),
            clock=self._clock,
            types=settings.known_types,
            before_first_edit=lambda: feed.require_edits(),  # noqa: PLW0108 -- made after its store
        )
        self._open.push_async_callback(store.close)
        bucket_key = None if settings.key_secret else BucketKey(state_dir.path)
        feed = feed_of(
            store,
            settings,
            bucket_key,
            state_dir.path,
            on_book=self._take_book,
            assignments=self._assignments,
            whole_load=self._whole_load,
        )
        # Opened before the buckets, so that a drain closes it after them: rules can be read again, spends cannot.
        self._open.push_async_callback(feed.close)
        await feed.start()
        if bucket_key is not None and (feed.book is not None or not settings.redis_url):
            self._keys.rekey(bucket_key.use())
        else:
            # Without rules no bucket is named, and nodes that share buckets wait for their common key.
            self._late_key = bucket_key
        if settings.redis_url:
            await self._start_in_cluster(store, feed)
        else:
            await self._start_alone(store, feed)
        has_own_token = settings.has_own_admin_token
        state_dir.publish(self.grpc_address, made_token=has_own_token)
        if has_own_token and self.http_address:
            self.login_link = login_link(
                settings.http_scheme, self.http_address, self._admin_token, self._now_s()
            )

    def _now_s(self) -> float:
        return self._clock.now_us() / US_PER_S

    async def _start_alone(self, store: RuleStore, feed: RuleFeed) -> None:
        """Start with local buckets, which are kept on disk over restarts."""
        callers_time = self._settings.timestamps == "caller"
        table = BucketTable(self._settings.cache_entries, callers_time=callers_time)
        holds = OwnHolds(
            table,
            self._keys,
            self._clock.now_us,
            max_holds=self._settings.max_holds,
            max_per_bucket=self._settings.max_holds_per_bucket,
        )
        snapshot = SnapshotLog.open(
            self._settings.state_dir,
            table,
            self._keys.secret,
            self._clock,
            callers_time=callers_time,
        )
        self._open.push_async_callback(snapshot.drain)
        background = self._start_jobs(feed, table)
        background.start("snapshot", snapshot.run)
        limiter = self._new_limiter(buckets=table, journal=snapshot)
        holder = self._new_holder(limiter, holds)
        holder.resume(holds.open_holds())
        await self._serve(
            limiter, holder, store, feed, buckets=table, background=background, snapshot=snapshot
        )

    async def _start_in_cluster(self, store: RuleStore, feed: RuleFeed) -> None:
        """Start with the buckets that all nodes share."""
        self._cluster = cluster = open_cluster(
            self._settings,
            keys=self._keys,
            fingerprint=lambda: "" if self._late_key else self._keys.fingerprint(),
            clock=self._clock,
            shared_time=self._shared_time,
            stats=self.stats,
            feed=feed,
            tracer=self._tracer,
        )
        closing_s = self._settings.drain_s - self._settings.calls_s
        self._open.push_async_callback(cluster.drain, closing_s)
        await cluster.start()
        if self._shared_time.is_known and isinstance(self._clock, SystemClock):
            self._clock.anchor()  # no check was answered by this clock yet
        background = self._start_jobs(feed, None)
        cluster.start_jobs(background)
        limiter = self._new_limiter(shared=cluster.buckets)
        holder = self._new_holder(limiter, cluster.holds)
        await self._serve(
            limiter, holder, store, feed, buckets=cluster.cache, background=background
        )

    async def _serve(
        self,
        limiter: Limiter,
        holder: Holder,
        store: RuleStore,
        feed: RuleFeed,
        *,
        buckets: BucketTable | BucketCache,
        background: Background,
        snapshot: SnapshotLog | None = None,
    ) -> None:
        settings = self._settings
        tls = self._read_certificates()
        parts = NodeParts(
            stats=self.stats,
            health=self._health,
            runtime=self._runtime,
            clock=self._clock,
            feed=feed,
            buckets=buckets,
            snapshot=snapshot,
            cluster=self._cluster,
            task_restarts=self._task_restarts,
            transport=lambda: self._server.in_progress if self._server else None,
            transport_name=settings.transport,
            tls_expiry_s=tls.expiry_s if tls else dict,
            in_flight=holder.in_flight,
        )
        live = self._start_live(background, parts)
        self._limiter, self.metrics = limiter, Metrics(parts)
        if feed.book is not None:
            self._take_book(feed.book)
            self._rules_log.write()
        serving = Serving(
            settings=settings,
            opened=self._open,
            limiter=limiter,
            holder=holder,
            store=store,
            parts=parts,
            metrics=self.metrics,
            live=live,
            keys=self._keys,
            assignments=self._assignments,
            rule_traffic=self._rule_traffic,
            grpc_health=self._grpc_health,
            tls=tls,
            tokens=self._tokens,
            admin_token=self._admin_token,
            tracer=self._tracer,
            readiness=lambda: self.readiness,
            grpc_address=lambda: self.grpc_address,
            reuse_port=self._reuse_port,
        )
        self.http_address = await serving.start_http()
        if self.http_address:
            self._open.push_async_callback(self._http_may_end)
        # Ends the streams of open pages, which would delay the drain.
        self._open.push_async_callback(live.end)
        server = serving.grpc_server()
        if self._may_listen is not None:
            await self._may_listen()
        self.spoe_address = await serving.start_spop()
        self._open.push_async_callback(server.stop, self._settings.calls_s)
        self.grpc_address = await server.start()
        self._server = server

    def _read_certificates(self) -> CertificateSource | None:
        settings = self._settings
        files = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        report = logged_and_counted(self.stats.transport_error)
        return files and CertificateSource(files, report, is_grpcio=settings.transport == "grpcio")

    async def _http_may_end(self) -> None:
        if self._may_close is not None and self._draining:  # not after a failed start
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._close_by_s):
                    await self._may_close()

    def _new_limiter(
        self,
        *,
        buckets: BucketTable | None = None,
        shared: RemoteBuckets | None = None,
        journal: SnapshotLog | None = None,
    ) -> Limiter:
        return Limiter(
            buckets=buckets,
            shared=shared,
            clock=self._clock,
            stats=self.stats,
            timestamps=self._settings.timestamps,
            keys=self._keys,
            journal=journal,
            breaker_denies=self._settings.on_breaker_open == "deny",
            on_error=_report_fail_open,
            on_denied=self._denials.record,
            on_unmatched=self._denials.record_without_rule,
            assignments=self._assignments,
            recorder=self._recorder,
        )

    def _new_recorder(self) -> TraceRecorder | None:
        settings = self._settings
        if settings.record_dir is None:
            return None
        recorder = TraceRecorder(
            settings.record_dir,
            keys=self._keys,
            assignments=self._assignments,
            clock=self._clock,
            stats=self.stats,
            share=settings.record_share,
            max_bytes=settings.record_bytes,
            workers=settings.workers,
        )
        self._open.push_async_callback(recorder.drain)
        return recorder

    def _new_holder(self, limiter: Limiter, holds: Holds) -> Holder:
        return Holder(limiter, holds, keys=self._keys, clock=self._clock, stats=self.stats)

    def _shared_state(self) -> SharedStateStatus:
        return self._cluster.shared_state if self._cluster else EMBEDDED

    def _take_book(self, book: RuleBook) -> None:
        if self._limiter is None:
            return  # it gets the first book when it is created
        if self._late_key is not None:
            self._keys.rekey(self._late_key.use())
            self._late_key = None
        self._limiter.replace_book(book)
        self.stats.forget_rules(lambda rule_id: book.get(rule_id) is not None)
        self._denials.forget_matched(book)
        self._context.rules_revision = book.revision
        self._grpc_health.set_serving()
        self._rules_log.take(book.revision, len(book))

    def _start_jobs(self, feed: RuleFeed, table: BucketTable | None) -> Background:
        background = Background(self._task_restarts)
        self._open.push_async_callback(background.stop)
        background.every(SAMPLE_S, "rules log", self._rules_log.write)
        if self._recorder is not None:
            background.start("recording", self._recorder.run)
        background.start("rules", feed.run)
        if self._tokens is not None:
            background.every(SAMPLE_S, "tokens", self._tokens.reload)
        upkeep = Upkeep(
            clock=self._clock,
            table=table,
            assignments=self._assignments,
            health=self._health,
            runtime=self._runtime,
            loop_time_s=asyncio.get_running_loop().time,
        )
        background.every(TICK_S, "upkeep", upkeep.tick)
        background.every(SAMPLE_S, "sampling", upkeep.sample)
        background.every(FOLD_S, "denials", self._denials.fold)
        return background

    def _start_live(self, background: Background, parts: NodeParts) -> Live:
        live = live_of(
            parts,
            self._denials,
            addresses=lambda: (self.grpc_address, self.http_address),
            admin_token_digest=lambda: self._keys.admin_token_digest(self._admin_token),
            busiest=lambda: self._rule_traffic.busiest,
            seal=self._keys,
        )
        background.every(history.SAMPLE_S, "live view", live.step)
        background.every(rule_traffic.STEP_S, "rule traffic", self._rule_traffic.sample)
        background.every(WATCH_S, "verdict", live.watch)
        return live


def _open_tracer(endpoint: str, *, node_id: str, ratio: float) -> OtelTracer | None:
    """Return a tracer that sends to ``endpoint``, ``None`` if it is empty. Imports the library only if needed.

    Raises:
        StartupError: the library is not installed.
    """
    if not endpoint:
        return None
    try:
        from ratelimitd.observe.otel import OtelTracer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = f"OTEL_ENDPOINT needs {error.name}: pip install 'ratelimitd[otel]'"
        raise StartupError(message) from None
    return OtelTracer(endpoint, node_id=node_id, ratio=ratio)


def _report_fail_open(error: Exception) -> None:
    _log.error("a check was answered fail-open", exc_info=error)
