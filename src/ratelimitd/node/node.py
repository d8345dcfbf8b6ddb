"""The composition root: which adapters a node is made of, in which order they open, and in which they close.

The only module that names them. Decides nothing about checks; signals, stdout and the exit code are the supervisor's.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
from ratelimitd.fair_queue import FairQueue
from ratelimitd.ledger.holds import Holds
from ratelimitd.limiter.holder import Holder
from ratelimitd.limiter.interfaces import RemoteBuckets
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import US_PER_S
from ratelimitd.node.admin_token import own_admin_token
from ratelimitd.node.jobs import SAMPLE_S, TICK_S, Upkeep
from ratelimitd.node.startup import feed_of
from ratelimitd.node.tokens_file import TokensFile
from ratelimitd.node.transports import CAUSES, server_of
from ratelimitd.observe import history, rule_traffic
from ratelimitd.observe.denials import FOLD_S, Denials
from ratelimitd.observe.health import EMBEDDED, Health
from ratelimitd.observe.live import WATCH_S, Live, live_of
from ratelimitd.observe.logs import LogContext, RulesLog
from ratelimitd.observe.metrics import Metrics, NodeParts, Runtime
from ratelimitd.observe.rule_traffic import RuleTraffic
from ratelimitd.retry import Background
from ratelimitd.rpc.interface import Methods, Server, TransportLimits
from ratelimitd.rpc.tls import TlsFiles, web_context
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import BucketKey
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleStore
from ratelimitd.services import grpc_health, reflection
from ratelimitd.services.auth import Access, Credentials
from ratelimitd.services.config import ConfigService
from ratelimitd.services.convert import Identities
from ratelimitd.services.convert_rules import rate_limit_of
from ratelimitd.services.envoy import SERVICE as ENVOY
from ratelimitd.services.envoy import EnvoyOptions, EnvoyService
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.services.grpc_health import GrpcHealthService
from ratelimitd.services.guesses import TokenGuesses
from ratelimitd.services.health import HealthService
from ratelimitd.services.holds import HoldsService
from ratelimitd.services.methods import OUR_SERVICES, admission, guarded, names_of, traced
from ratelimitd.services.plans import PlansService
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimitd.services.reflection import ReflectionService
from ratelimitd.settings.table import Settings
from ratelimitd.web.api.forward_auth import AuthOptions, ForwardAuth
from ratelimitd.web.api.json_api import CHECK_METHOD
from ratelimitd.web.app import Parts, Readiness, application
from ratelimitd.web.pages.errors import Cause
from ratelimitd.web.pages.sessions import ProxyUsers, login_link, no_session
from ratelimitd.web.server import HttpServer
from ratelimitd.web.spop import SpopServer
from ratelimitd.web.worker_proxy import FromParent

if TYPE_CHECKING:
    from ratelimitd.observe.otel import OtelTracer

CLOSING_SHARE: Final = 0.3
MAX_CLOSING_S: Final = 3.0
"""What of DRAIN_S is kept for writing buckets and closing stores after the last call has ended."""

_log = logging.getLogger(__name__)


class Node:
    """One node: built from settings, started once, drained once. ``whole_load`` is for its rule feed.

    ``reuse_port``: it is one of several processes on the gRPC port, and its HTTP side is for their parent, see
    :mod:`ratelimitd.workers`. ``may_listen`` returns when it may take the port, and is asked when all else is open.
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
    ) -> None:
        self.grpc_address = ""
        """``host:port`` that gRPC listens on, once started."""
        self.http_address = ""
        """``host:port`` that HTTP listens on, or the path of its socket, once started; empty when it is off."""
        self.spoe_address = ""
        """``host:port`` that HAProxy asks at, once started; empty when it is off."""
        self.login_link = ""
        """Opens the pages once, shortly after the start; empty unless the node made its admin token."""
        self.node_id = settings.node_name
        self.metrics: Metrics | None = None
        """What it reports on itself, once started."""
        self.stats = CheckStats(CAUSES, map(str, Cause))
        self._settings = settings
        self._admin_token = settings.admin_token
        self._shared_time = SharedTime()
        self._clock = clock or SystemClock(self._shared_time.wall_ns)
        self._context = context or LogContext(self.node_id)
        self._runtime = Runtime()
        self._task_restarts: dict[str, int] = {}
        self._callers_time = settings.timestamps == "caller"
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
        self._edge = ErrorEdge(self.stats)
        self._tracer: OtelTracer | None = None
        self._open = AsyncExitStack()
        self._queue = FairQueue(time.monotonic)
        self._server: Server | None = None
        self._limiter: Limiter | None = None
        self._whole_load = whole_load
        self._reuse_port = reuse_port
        self._may_listen = may_listen
        self._rules_log = RulesLog()
        self._tokens: TokensFile | None = None
        self._draining = False

    async def start(self) -> None:
        """Open everything, and answer calls.

        Raises:
            StartupError: something cannot be opened; whatever was open is closed again. One line says what.
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

    @property
    def _closing_s(self) -> float:
        return min(MAX_CLOSING_S, CLOSING_SHARE * self._settings.drain_s)

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
            self._tokens = TokensFile(settings.tokens_file, self._now_s, others)
        for warning in settings.warnings:
            _warn(warning)
        self._recorder = self._new_recorder()
        store = SqlRuleStore(
            open_database(settings.database_url), clock=self._clock, types=settings.known_types
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
        # Before the buckets, so that a drain closes it after them: a rule book can be had again, spends cannot.
        self._open.push_async_callback(feed.close)
        await feed.start()
        if bucket_key is not None and (feed.book is not None or not settings.redis_url):
            self._keys.rekey(bucket_key.use())
        else:
            # Without rules no bucket is named; and nodes that share buckets wait for the key that all of them have.
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
        """With buckets of its own, which survive a restart on its disk."""
        table = BucketTable(self._settings.cache_entries, callers_time=self._callers_time)
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
            callers_time=self._callers_time,
        )
        self._open.push_async_callback(snapshot.drain)
        background = self._new_background(feed)
        self._start_upkeep(background, table)
        background.start("snapshot", snapshot.run)
        limiter = self._new_limiter(buckets=table, journal=snapshot)
        holder = self._new_holder(limiter, holds)
        parts = self._parts(feed, table, holder, snapshot=snapshot)
        await self._serve(limiter, holder, store, parts, live=self._start_live(background, parts))

    async def _start_in_cluster(self, store: RuleStore, feed: RuleFeed) -> None:
        """With the buckets that all nodes share."""
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
        self._open.push_async_callback(cluster.drain, self._closing_s)
        await cluster.start()
        if self._shared_time.is_known and isinstance(self._clock, SystemClock):
            self._clock.anchor()  # no check has been answered by it yet
        background = self._new_background(feed)
        self._start_upkeep(background, None)
        cluster.start_jobs(background)
        limiter = self._new_limiter(shared=cluster.buckets)
        holder = self._new_holder(limiter, cluster.holds)
        parts = self._parts(feed, cluster.cache, holder, cluster=cluster)
        await self._serve(limiter, holder, store, parts, live=self._start_live(background, parts))

    async def _serve(
        self, limiter: Limiter, holder: Holder, store: RuleStore, parts: NodeParts, *, live: Live
    ) -> None:
        feed = parts.feed
        self._limiter, self.metrics = limiter, Metrics(parts)
        if feed.book is not None:
            self._take_book(feed.book)
            self._rules_log.write()
        access = self._access()
        methods = self._methods(limiter, holder, store, feed, self.metrics, access, live)
        auth = self._forward_auth(methods, access)
        await self._start_http(
            Parts(
                node_id=self.node_id,
                metrics=self.metrics,
                readiness=lambda: self.readiness,
                grpc_address=lambda: self.grpc_address,
                hosts=self._settings.http_names,
                methods=methods,
                live=live,
                rule_traffic=self._rule_traffic,
                may_read=access.may_read,
                may_administer=access.may_administer,
                login=access.login,
                session_of=self._tokens.tokens.session_of if self._tokens else no_session,
                users=self._users(),
                actor=access.actor,
                admit=admission(access),
                translate=self._edge.translate,
                rate_limit_of=rate_limit_of,
                admin_token=self._admin_token,
                book=lambda: feed.book,
                assignments=self._assignments,
                audit=store,
                now_s=self._now_s,
                refused=self.stats.web_refusal,
                ratelimit_headers=self._settings.ratelimit_headers,
                queue=self._queue,
                types=self._settings.known_types,
                on_breaker_open=self._settings.on_breaker_open
                if self._settings.consistency == "eventual"
                else "",
                auth=auth,
                record_dir=self._settings.record_dir,
            )
        )
        # Ends the streams of open pages, which would delay the drain.
        self._open.push_async_callback(live.end)
        await self._start_spop(auth)
        await self._start_grpc(methods)

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
            on_denied=self._denials.note,
            on_unmatched=self._denials.note_without_rule,
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
        )
        self._open.push_async_callback(recorder.drain)
        return recorder

    def _new_holder(self, limiter: Limiter, holds: Holds) -> Holder:
        return Holder(limiter, holds, keys=self._keys, clock=self._clock, stats=self.stats)

    def _parts(
        self,
        feed: RuleFeed,
        buckets: BucketTable | BucketCache,
        holder: Holder,
        *,
        snapshot: SnapshotLog | None = None,
        cluster: Cluster | None = None,
    ) -> NodeParts:
        return NodeParts(
            stats=self.stats,
            health=self._health,
            runtime=self._runtime,
            clock=self._clock,
            feed=feed,
            buckets=buckets,
            snapshot=snapshot,
            cluster=cluster,
            task_restarts=self._task_restarts,
            transport=lambda: self._server.in_progress if self._server else None,
            transport_name=self._settings.transport,
            in_flight=holder.in_flight,
        )

    def _shared_state(self) -> SharedStateStatus:
        return self._cluster.shared_state if self._cluster else EMBEDDED

    def _take_book(self, book: RuleBook) -> None:
        if self._limiter is None:
            return  # it is given the first book when it is made
        if self._late_key is not None:
            self._keys.rekey(self._late_key.use())
            self._late_key = None
        self._limiter.replace_book(book)
        self.stats.forget_rules(lambda rule_id: book.get(rule_id) is not None)
        self._context.rules_revision = book.revision
        self._grpc_health.set_serving()
        self._rules_log.take(book.revision, len(book))

    def _access(self) -> Access:
        settings = self._settings
        return Access(
            Credentials(
                admin_token=self._admin_token,
                check_token=settings.check_token,
                admin_sans=frozenset(settings.admin_sans),
                check_sans=frozenset(settings.check_sans),
                loopback_admin=settings.loopback_admin,
                admin_token_name=settings.admin_token_name,
                named=self._tokens.tokens if self._tokens else None,
            ),
            TokenGuesses(self.stats, self._clock.now_us, settings.trusted_proxies),
        )

    def _users(self) -> ProxyUsers:
        settings = self._settings
        if self._tokens is None:
            return ProxyUsers()
        return ProxyUsers(
            settings.user_header, settings.trusted_proxies, self._tokens.tokens.user_of
        )

    def _methods(  # noqa: PLR0917 -- the parts that the services stand on
        self,
        limiter: Limiter,
        holder: Holder,
        store: RuleStore,
        feed: RuleFeed,
        metrics: Metrics,
        access: Access,
        live: Live,
    ) -> Methods:
        settings = self._settings
        # Waits are known to a node's own buckets only.
        identities = Identities.of(settings.identifier_types)._replace(wait=self._cluster is None)
        config = ConfigService(
            store,
            self._cluster or feed,
            access.actor,
            types=settings.known_types,
            is_unused=lambda rule_id: rule_id not in self.stats.used_rules,
        )
        holds = HoldsService(
            holder,
            self._keys,
            access.principal,
            stats=self.stats,
            identities=identities,
            now_s=self._now_s,
        )
        offers = [
            RateLimiterService(
                limiter, self.stats, time.perf_counter, self._queue, identities=identities
            ).methods(),
            EnvoyService(
                limiter,
                self.stats,
                time.perf_counter,
                EnvoyOptions.of(
                    settings.envoy_identifiers,
                    settings.envoy_fields,
                    settings.ratelimit_headers,
                    identities,
                ),
                holds=holds,
            ).methods(),
            config.methods(),
            PlansService(
                store.assignments,
                self._cluster or feed,
                access.actor,
                identities=identities,
                page_key=config.page_key,
                now_s=self._now_s,
            ).methods(),
            holds.methods(),
            HealthService(
                limiter,
                report=self._health.report,
                samples=metrics.samples,
                unmatched=live.unmatched,
                actor=access.actor,
                identities=identities,
            ).methods(),
            self._grpc_health.methods(),
        ]
        if settings.reflection:
            shown = (*OUR_SERVICES, ENVOY, grpc_health.SERVICE, reflection.V1, reflection.V1ALPHA)
            offers.append(ReflectionService(shown).methods())
        methods = guarded(offers, access, self._edge)
        return methods if self._tracer is None else traced(methods, self._tracer)

    def _new_background(self, feed: RuleFeed) -> Background:
        background = Background(self._task_restarts)
        self._open.push_async_callback(background.stop)
        background.every(SAMPLE_S, "rules log", self._rules_log.write)
        if self._recorder is not None:
            background.start("recording", self._recorder.run)
        background.start("rules", feed.run)
        if self._tokens is not None:
            background.every(SAMPLE_S, "tokens", self._tokens.reload)
        return background

    def _start_upkeep(self, background: Background, table: BucketTable | None) -> None:
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

    async def _start_http(self, parts: Parts) -> None:
        settings = self._settings
        listen = settings.http_listen
        if listen is None:
            return
        app = application(parts)
        if self._reuse_port:
            # The address is the parent's, which passes on what is not for itself.
            server = HttpServer.at(FromParent(app, settings.http_scheme), settings.http_socket)
        else:
            tls = web_context(_files_of(settings)) if settings.http_tls else None
            server = HttpServer(app, *listen, tls=tls)
        self._open.push_async_callback(server.stop)
        self.http_address = await server.start()

    def _forward_auth(self, methods: Methods, access: Access) -> ForwardAuth:
        settings = self._settings
        options = AuthOptions(
            identifiers=settings.auth_identifiers,
            endpoints=settings.auth_endpoints,
            trusted_proxies=settings.trusted_proxies,
            ignored=self.stats.ignored_forwarding,
        )
        return ForwardAuth(
            methods.unary[CHECK_METHOD],
            options,
            admit=admission(access),
            translate=self._edge.translate,
            now_s=self._now_s,
            revision=settings.ratelimit_headers,
        )

    async def _start_spop(self, auth: ForwardAuth) -> None:
        listen = self._settings.spoe_listen
        if listen is not None:
            server = SpopServer(auth, *listen, reuse_port=self._reuse_port)
            self._open.push_async_callback(server.stop)
            self.spoe_address = await server.start()

    async def _start_grpc(self, methods: Methods) -> None:
        settings = self._settings
        server = server_of(settings.transport)(
            methods,
            listen=str(settings.listen),
            stats=self.stats,
            tls=_files_of(settings),
            limits=TransportLimits(max_concurrent_rpcs=settings.max_concurrent_rpcs),
            reuse_port=self._reuse_port,
            queue=self._queue,
        )
        self._open.push_async_callback(server.stop, settings.drain_s - self._closing_s)
        if self._may_listen is not None:
            await self._may_listen()
        self.grpc_address = await server.start()
        self._server = server


def _open_tracer(endpoint: str, *, node_id: str, ratio: float) -> OtelTracer | None:
    """Return what sends traces to ``endpoint``, ``None`` if it is empty. Only then is their library imported.

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


def _files_of(settings: Settings) -> TlsFiles | None:
    return TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _warn(line: str) -> None:
    _log.warning("%s", line)


def _report_fail_open(error: Exception) -> None:
    _log.error("a check was answered fail-open", exc_info=error)
