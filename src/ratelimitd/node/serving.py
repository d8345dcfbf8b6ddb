"""Services with their roles, pages, and the servers of a node's ports.

Part of the composition root: decides no checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.fair_queue import FairQueue
from ratelimitd.http2.errors import Cause
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.holder import Holder
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import US_PER_S
from ratelimitd.node.tokens_file import TokensFile
from ratelimitd.observe.live import Live
from ratelimitd.observe.metrics import Metrics, NodeParts
from ratelimitd.observe.rule_traffic import RuleTraffic
from ratelimitd.rpc.interface import Methods, Server, TransportError, TransportLimits
from ratelimitd.rpc.tls import CertificateSource, web_context
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.store import RuleStore
from ratelimitd.services import grpc_health, reflection
from ratelimitd.services.auth import Access, Credentials, NamedTokens, Role
from ratelimitd.services.config import ConfigService
from ratelimitd.services.convert import Identities
from ratelimitd.services.convert_rules import message_draft, rate_limit_of
from ratelimitd.services.envoy import SERVICE as ENVOY
from ratelimitd.services.envoy import EnvoyService
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.services.grpc_health import GrpcHealthService
from ratelimitd.services.guesses import TokenGuesses
from ratelimitd.services.health import HealthService
from ratelimitd.services.holds import HoldsService
from ratelimitd.services.methods import OUR_SERVICES, admission, guarded, traced
from ratelimitd.services.plans import PlansService
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimitd.services.reflection import ReflectionService
from ratelimitd.settings.table import Settings
from ratelimitd.web.api.forward_auth import ForwardAuth
from ratelimitd.web.api.json_api import CHECK_METHOD
from ratelimitd.web.app import application
from ratelimitd.web.pages.sessions import ProxyUsers, no_session
from ratelimitd.web.parts import Parts, Readiness
from ratelimitd.web.server import HttpServer
from ratelimitd.web.spop import SpopServer
from ratelimitd.web.worker_proxy import from_parent

if TYPE_CHECKING:
    from ratelimitd.observe.otel import OtelTracer
    from ratelimitd.rpc.grpcio_server import GrpcioServer
    from ratelimitd.rpc.server import NativeServer

TRANSPORTS: Final = ("native", "grpcio")
"""Values of the setting TRANSPORT, the default first."""

CAUSES: Final = frozenset(map(str, (*Cause, *TransportError))) - {Cause.PEER_RESET, Cause.OWNER}
"""Closed set of causes for which a transport ends a call, a stream or a connection and counts it as lost. Not included:
a caller that gave up, whose call counts as cancelled, and the node's own drain.
"""


def server_of(name: str) -> type[GrpcioServer | NativeServer]:
    """Return the :class:`ratelimitd.rpc.interface.Server` class of a transport; all take the same arguments.

    ``name`` is one of :data:`TRANSPORTS`. Imports only that transport: a native node runs without grpcio.
    """
    if name == "grpcio":
        from ratelimitd.rpc.grpcio_server import GrpcioServer  # noqa: PLC0415

        return GrpcioServer
    from ratelimitd.rpc.server import NativeServer  # noqa: PLC0415

    return NativeServer


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The services and servers of one node. ``opened`` closes the HTTP and SPOE servers when the node ends."""

    settings: Settings
    opened: AsyncExitStack
    limiter: Limiter
    holder: Holder
    store: RuleStore
    parts: NodeParts
    metrics: Metrics
    live: Live
    keys: BucketKeys
    assignments: Assignments
    rule_traffic: RuleTraffic
    grpc_health: GrpcHealthService
    tls: CertificateSource | None
    tokens: TokensFile | None
    admin_token: str
    tracer: OtelTracer | None
    readiness: Callable[[], Readiness]
    grpc_address: Callable[[], str]
    reuse_port: bool

    async def start_http(self) -> str:
        """Serve HTTP; returns ``host:port`` or the path of the socket, empty if HTTP is off."""
        settings = self.settings
        listen = settings.http_listen
        if listen is None:
            return ""
        app = application(self._web_parts())
        if self.reuse_port:
            # The parent listens on the address, and forwards requests that it does not answer.
            server = HttpServer.at(from_parent(app, settings.http_scheme), settings.http_socket)
        else:
            tls = web_context(self.tls.files) if settings.http_tls and self.tls else None
            server = HttpServer(app, *listen, tls=tls)
        self.opened.push_async_callback(server.stop)
        return await server.start()

    async def start_spop(self) -> str:
        """Serve HAProxy; returns ``host:port``, empty if that is off."""
        listen = self.settings.spoe_listen
        if listen is None:
            return ""
        server = SpopServer(self._forward_auth, *listen, reuse_port=self.reuse_port)
        self.opened.push_async_callback(server.stop)
        return await server.start()

    def grpc_server(self) -> Server:
        """Return the server of gRPC, to be started."""
        settings = self.settings
        return server_of(settings.transport)(
            self._methods,
            listen=str(settings.listen),
            stats=self.parts.stats,
            tls=self.tls,
            limits=TransportLimits(max_concurrent_rpcs=settings.max_concurrent_rpcs),
            reuse_port=self.reuse_port,
            queue=self._queue,
        )

    @cached_property
    def _queue(self) -> FairQueue:
        return FairQueue(time.monotonic)

    @cached_property
    def _edge(self) -> ErrorEdge:
        return ErrorEdge(self.parts.stats)

    def _now_s(self) -> float:
        return self.parts.clock.now_us() / US_PER_S

    @cached_property
    def _named(self) -> NamedTokens | None:
        return self.tokens.tokens if self.tokens else None

    @cached_property
    def _access(self) -> Access:
        settings = self.settings
        return Access(
            Credentials(
                admin_token=self.admin_token,
                check_token=settings.check_token,
                admin_sans=frozenset(settings.admin_sans),
                check_sans=frozenset(settings.check_sans),
                loopback_admin=settings.loopback_admin,
                admin_token_name=settings.admin_token_name,
                named=self._named,
            ),
            TokenGuesses(self.parts.stats, self.parts.clock.now_us, settings.trusted_proxies),
        )

    @cached_property
    def _methods(self) -> Methods:
        settings, access, stats = self.settings, self._access, self.parts.stats
        cluster = self.parts.cluster
        # Only local buckets support waits.
        identities = Identities.of(settings.identifier_types)._replace(wait=cluster is None)
        config = ConfigService(
            self.store,
            cluster or self.parts.feed,
            access.actor,
            types=settings.known_types,
            is_unused=lambda rule_id: rule_id not in stats.used_rules,
        )
        holds = HoldsService(
            self.holder,
            self.keys,
            access.principal,
            stats=stats,
            identities=identities,
            now_s=self._now_s,
        )
        offers = [
            RateLimiterService(
                self.limiter, stats, time.perf_counter, self._queue, identities=identities
            ).methods(),
            EnvoyService(
                self.limiter,
                stats,
                time.perf_counter,
                identifiers=settings.envoy_identifiers,
                fields=settings.envoy_fields,
                ratelimit_headers=settings.ratelimit_headers,
                identities=identities,
                holds=holds,
            ).methods(),
            config.methods(),
            PlansService(
                self.store.assignments,
                cluster or self.parts.feed,
                access.actor,
                identities=identities,
                page_key=config.page_key,
                now_s=self._now_s,
            ).methods(),
            holds.methods(),
            HealthService(
                self.limiter,
                dry_run=DryRun(self.limiter),
                report=self.parts.health.report,
                samples=self.metrics.samples,
                unmatched=self.live.unmatched,
                actor=access.actor,
                identities=identities,
            ).methods(),
            self.grpc_health.methods(),
        ]
        if settings.reflection:
            shown = (*OUR_SERVICES, ENVOY, grpc_health.SERVICE, reflection.V1, reflection.V1ALPHA)
            offers.append(ReflectionService(shown).methods())
        methods = guarded(offers, access, self._edge)
        return methods if self.tracer is None else traced(methods, self.tracer)

    @cached_property
    def _forward_auth(self) -> ForwardAuth:
        settings = self.settings
        return ForwardAuth(
            self._methods.unary[CHECK_METHOD],
            identifiers=settings.auth_identifiers,
            endpoints=settings.auth_endpoints,
            trusted_proxies=settings.trusted_proxies,
            ignored=self.parts.stats.ignored_forwarding,
            admit=admission(self._access),
            translate=self._edge.translate,
            now_s=self._now_s,
            revision=settings.ratelimit_headers,
        )

    def _web_parts(self) -> Parts:
        settings, access, feed = self.settings, self._access, self.parts.feed
        named = self._named
        return Parts(
            node_id=settings.node_name,
            points=self.metrics.points,
            readiness=self.readiness,
            grpc_address=self.grpc_address,
            hosts=settings.http_names,
            methods=self._methods,
            live=self.live,
            rule_traffic=self.rule_traffic,
            may_read=partial(access.demand, Role.READ),
            may_administer=partial(access.demand, Role.ADMIN),
            login=access.login,
            session_of=no_session if named is None else named.session_of,
            users=ProxyUsers()
            if named is None
            else ProxyUsers(settings.user_header, settings.trusted_proxies, named.user_of),
            actor=access.actor,
            admit=admission(access),
            translate=self._edge.translate,
            rate_limit_of=rate_limit_of,
            draft_of=message_draft,
            admin_token=self.admin_token,
            book=lambda: feed.book,
            assignments=self.assignments,
            audit=self.store,
            now_s=self._now_s,
            refused=self.parts.stats.web_refusal,
            ratelimit_headers=settings.ratelimit_headers,
            queue=self._queue,
            types=settings.known_types,
            on_breaker_open=settings.on_breaker_open if settings.consistency == "eventual" else "",
            auth=self._forward_auth,
            record_dir=settings.record_dir,
        )
