"""The shared state: which servers REDIS_URL leads to, in which topology, and each of them looked at."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from typing import Final

from ratelimitd.cli.doctor.finding import Finding, ok, problem, warning
from ratelimitd.cli.doctor.store_server import Asked, check_server, explained
from ratelimitd.cluster.status_board import MAX_NODES
from ratelimitd.errors import RateLimitdError, StoreCorruptError, StoreUnavailableError
from ratelimitd.observe.node_status import decode
from ratelimitd.settings import Settings
from ratelimitd.sharedstate.cluster_map import Map, map_of
from ratelimitd.sharedstate.cluster_shards import CLUSTER_SLOTS
from ratelimitd.sharedstate.connecting import ask_once, connect
from ratelimitd.sharedstate.connection import Connection
from ratelimitd.sharedstate.link import LinkOptions
from ratelimitd.sharedstate.login import Greeting, Refused, ask, hand_over
from ratelimitd.sharedstate.sentinel import ASK_S, Sentinels
from ratelimitd.sharedstate.statuses import READ_BYTES, status_key
from ratelimitd.sharedstate.store import MEMBERS_KEY, MEMBERS_TAG
from ratelimitd.sharedstate.tls import client_context
from ratelimitd.sharedstate.url import RedisUrl, Server, Topology, parse_redis_url

AREA: Final = "REDIS_URL"

CLIENT_NAME: Final = "ratelimitd:doctor"

ANSWER_S: Final = 2.0


async def check_shared_state(settings: Settings) -> AsyncIterator[Finding]:
    """Look at what the settings name, if anything."""
    if not settings.redis_url:
        yield ok(AREA, "not set: limits are held in this node's memory")
        return
    url = parse_redis_url(settings.redis_url)
    try:
        tls = client_context(url.tls) if url.tls is not None else None
    except RateLimitdError as error:
        what = str(error).removeprefix(f"{AREA}: ")
        yield problem(AREA, what, "put a PEM file there that the node may read")
        return
    servers: dict[Server, int] = {}
    """Each with one of its hash tags."""
    if url.topology is Topology.CLUSTER:
        async for finding in _cluster(url, tls, servers):
            yield finding
    elif url.topology is Topology.SENTINEL:
        async for finding in _sentinels(url, tls, servers):
            yield finding
    else:
        servers[url.servers[0]] = 0
    for server, tag in servers.items():
        async for finding in _server(
            server, tag, url=url, tls=tls, timeout_ms=settings.redis_timeout_ms
        ):
            yield finding


async def _server(
    server: Server, tag: int, *, url: RedisUrl, tls: ssl.SSLContext | None, timeout_ms: int
) -> AsyncIterator[Finding]:
    is_cluster = url.topology is Topology.CLUSTER
    name = f"store {server}"
    try:
        connection = await connect(
            server,
            Greeting(url.login, url.database, CLIENT_NAME, wants_primary=not is_cluster),
            tls,
            lambda: Connection(hand_over, lambda _error: None, timeout_s=ANSWER_S),
        )
    except RateLimitdError as error:
        yield explained(name, error)
        return
    asked = Asked(name, connection, tag, is_cluster)
    try:
        if tag == MEMBERS_TAG:
            async for finding in _check_admin_tokens(asked):
                yield finding
        findings = check_server(asked, timeout_ms, wall_s=time.time, monotonic_s=time.monotonic)
        async for finding in findings:
            yield finding
    except RateLimitdError as error:
        yield explained(name, error)
    finally:
        connection.drop(StoreUnavailableError("looked at"))


async def _check_admin_tokens(asked: Asked) -> AsyncIterator[Finding]:
    """Whether the nodes that run have one admin token: a login or a command line for one then works for all."""
    digests = set()
    try:
        for name in await ask(asked.connection, "ZRANGE", MEMBERS_KEY, 0, MAX_NODES - 1):
            key = status_key(name.decode(errors="replace"))
            octets = await ask(asked.connection, "GETRANGE", key, 0, READ_BYTES - 1)
            with contextlib.suppress(StoreCorruptError):
                digests.add(decode(octets).admin_token_digest)
    except Refused:
        return  # told with the permissions
    if len(digests) > 1:
        what = f"the nodes of this cluster have {len(digests)} different admin tokens"
        yield warning("ADMIN_TOKEN", what, "give all nodes one ADMIN_TOKEN_FILE")
    elif digests:
        yield ok("ADMIN_TOKEN", "the nodes of this cluster have the same admin token")


async def _sentinels(
    url: RedisUrl, tls: ssl.SSLContext | None, servers: dict[Server, int]
) -> AsyncIterator[Finding]:
    options = LinkOptions(ASK_S, Greeting(client_name=CLIENT_NAME), tls)
    primaries: set[Server] = set()
    for sentinel in url.servers:
        one = RedisUrl(url.topology, (sentinel,), service=url.service, sentinel_login=url.sentinel_login)  # fmt: skip
        name = f"sentinel {sentinel}"
        try:
            primary = await Sentinels(one, options).primary()
        except RateLimitdError as error:
            remedy = "start it, or take it out of REDIS_URL; look at the service's name and sentinel_password"
            yield warning(name, str(error), remedy)
        else:
            yield ok(name, f"says that {primary} is the primary")
            primaries.add(primary)
            servers[primary] = 0
    if not primaries:
        yield problem(AREA, "no sentinel names a primary", "see above")
    elif len(primaries) > 1:
        remedy = "wait for the failover to end, and look again"
        yield problem(AREA, "the sentinels do not agree on the primary", remedy)


async def _cluster(
    url: RedisUrl, tls: ssl.SSLContext | None, servers: dict[Server, int]
) -> AsyncIterator[Finding]:
    greeting = Greeting(url.login, 0, CLIENT_NAME, wants_primary=False)
    found: Map | None = None
    for seed in url.servers:
        try:
            reply = await ask_once(seed, greeting, tls, *CLUSTER_SLOTS)
            found = map_of(reply, seed)
        except (StoreUnavailableError, StoreCorruptError) as error:
            remedy = "start it, or take it out of REDIS_URL; is it part of a Cluster?"
            yield warning(f"store {seed}", str(error), remedy)
    if found is None:
        yield problem(AREA, "no server tells which of them has which keys", "see above")
        return
    for tag, server in enumerate(found):
        if server is not None:
            servers.setdefault(server, tag)
    missing = found.count(None)
    if missing:
        what = f"{missing} of {len(found)} hash tags have no server: their checks are not limited together"
        yield problem(AREA, what, "cluster_state: see CLUSTER INFO; give the slots to a server")
    else:
        yield ok(AREA, f"a Cluster of {len(servers)} primaries, all slots served")
