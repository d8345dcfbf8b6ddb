"""Checks of the shared state, its topology and each of its servers, and of the rule database."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ratelimitd.cli.doctor.finding import Finding, ok, problem, warning
from ratelimitd.cluster.membership import MAX_NODES
from ratelimitd.cluster.redis.cluster_topology import CLUSTER_SLOTS, Map, map_of
from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.connection import (
    REDIRECTIONS,
    Connection,
    Handshake,
    Refused,
    ask,
    code_of,
    error_of,
    hand_over,
)
from ratelimitd.cluster.redis.link import LinkOptions, ask_once, connect
from ratelimitd.cluster.redis.sentinel import ASK_S, Sentinels
from ratelimitd.cluster.redis.store import MAX_STATUS_BYTES, MEMBERS_KEY, MEMBERS_TAG, status_key
from ratelimitd.cluster.redis.topology import ClientTls
from ratelimitd.errors import (
    RateLimitdError,
    SchemaOlderError,
    StartupError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.model import RESERVED_PLANS, US_PER_S, types_within
from ratelimitd.observe.node_status import decode
from ratelimitd.rules.last_good import BOOK_FILE, REMEDY, LastGoodBook
from ratelimitd.settings import urls
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import RedisUrl, Server, TopologyKind, parse_redis_url

if TYPE_CHECKING:
    from ratelimitd.rules.sql.inspection import Contents

OLDEST: Final = (7, 0)

ROUNDS: Final = 8
"""Measured round trips, after a first one to warm up."""

MAX_SKEW_S: Final = 1.0

FULL: Final = 0.8
"""Share of ``maxmemory`` from which a server counts as nearly full."""

_SCRIPT: Final = Script(b"#!lua\nreturn 1")
_CLUSTER_URL: Final = "the server is part of a Cluster: use redis+cluster:// in REDIS_URL"
_UNREACHABLE: Final = "check REDIS_URL, the server, and the network between"
_BAD_LOGIN: Final = re.compile(r"\banswered (NOAUTH|WRONGPASS)\b")
_LOGIN: Final = (
    "put the server's user and password into REDIS_URL, percent-encoded: redis://USER:PASSWORD@…, without a user"
    " redis://:PASSWORD@…"
)
_PERMISSIONS: Final = "docs/cluster.md has the line that creates the user"


class Asked(NamedTuple):
    """A server: its name in findings, a connection to it, and one of its hash tags."""

    name: str
    connection: Connection
    tag: int = 0
    is_cluster: bool = False


async def check_server(
    asked: Asked, timeout_ms: int, *, wall_s: Callable[[], float], monotonic_s: Callable[[], float]
) -> list[Finding]:
    """Check a connected server; the last finding says if it stopped answering."""
    found: list[Finding] = []
    try:
        if asked.tag == MEMBERS_TAG:
            found += await _check_admin_tokens(asked)
        found += await _check_permissions(asked)
        found += await _check_times(asked, timeout_ms, wall_s=wall_s, monotonic_s=monotonic_s)
        found += await _check_configuration(asked)
        # Last: a subscribed connection accepts no other command.
        found.append(await _check_listening(asked))
    except RateLimitdError as error:
        found.append(explained(asked.name, error))
    return found


async def _check_permissions(asked: Asked) -> list[Finding]:
    found: list[Finding] = []
    missing = []
    for name, command in _commands(asked):
        try:
            await ask(asked.connection, *command)
        except Refused as refused:
            if code_of(str(refused)) == "NOPERM":
                missing.append(name)
                continue
            what, remedy = f"{name}: {error_of(str(refused))}", _remedy(name, str(refused))
            found.append(problem(asked.name, what, remedy))
            break
    if missing:
        what = f"the user may not run: {', '.join(missing)}"
        found.append(problem(asked.name, what, f"grant them; {_PERMISSIONS}"))
    return found or [ok(asked.name, "the user may run every command that a node needs")]


def _commands(asked: Asked) -> Iterator[tuple[str, Sequence[bytes | int | str]]]:
    """Yield the commands that nodes use, directly or in scripts, by the name of the permission."""
    own = secrets.token_hex(8)
    value, members = (f"rl1:{{{asked.tag:02x}}}:doctor:{own}:{kind}" for kind in "vm")
    yield "script|load", ("SCRIPT", "LOAD", _SCRIPT.text)
    yield "set", ("SET", value, "1", "PX", 1_000)
    yield "get", ("GET", value)
    yield "mget", ("MGET", value)
    yield "getrange", ("GETRANGE", value, 0, 0)
    yield "expire", ("EXPIRE", value, 1)
    yield "evalsha", ("EVALSHA", _SCRIPT.sha, 1, value)
    yield "zadd", ("ZADD", members, 1, "m")
    yield "expire", ("EXPIRE", members, 1)
    yield "zrange", ("ZRANGE", members, 0, -1)
    yield "zremrangebyscore", ("ZREMRANGEBYSCORE", members, "-inf", 0)
    yield "zrem", ("ZREM", members, "m")
    yield "time", ("TIME",)
    if asked.is_cluster:
        yield "spublish", ("SPUBLISH", _channel(asked), "")
    else:
        yield "publish", ("PUBLISH", _channel(asked), "")


async def _check_listening(asked: Asked) -> Finding:
    verb = "SSUBSCRIBE" if asked.is_cluster else "SUBSCRIBE"
    try:
        await ask(asked.connection, verb, _channel(asked))
    except Refused as refused:
        what = f"{verb.lower()} of channels that begin with rl1: – {error_of(str(refused))}"
        return problem(asked.name, what, f"grant it; {_PERMISSIONS}")
    return ok(asked.name, "nodes can hear each other")


async def _check_times(
    asked: Asked, timeout_ms: int, *, wall_s: Callable[[], float], monotonic_s: Callable[[], float]
) -> list[Finding]:
    rounds: list[tuple[float, float]] = []
    for _ in range(1 + ROUNDS):
        began_s = monotonic_s()
        try:
            seconds, micros = await ask(asked.connection, "TIME")
        except Refused:
            return []  # reported with the permissions
        took_s = monotonic_s() - began_s
        store_s = int(seconds) + int(micros) / US_PER_S
        rounds.append((took_s, store_s - (wall_s() - took_s / 2)))
    best_s, skew_s = min(rounds[1:])
    worst_ms = max(took_s for took_s, _ in rounds[1:]) * 1_000
    what = f"round trip {best_s * 1_000:.2f} to {worst_ms:.2f} ms"
    if worst_ms > timeout_ms:
        remedy = "move node and server closer together, or raise REDIS_TIMEOUT_MS"
        what += f", longer than REDIS_TIMEOUT_MS ({timeout_ms})"
        speed = warning(asked.name, what, remedy)
    else:
        speed = ok(asked.name, f"{what}, of {timeout_ms} ms that a check may wait")
    if abs(skew_s) <= MAX_SKEW_S:
        return [speed, ok(asked.name, f"clocks differ by {abs(skew_s) * 1_000:.1f} ms")]
    what = (
        f"its clock is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    )
    remedy = "run a time service (chrony) on both; nodes use the server's clock"
    return [speed, warning(asked.name, what, remedy)]


async def _check_configuration(asked: Asked) -> list[Finding]:
    try:
        info = await ask(asked.connection, "INFO")
    except Refused:
        what = "version and memory not checked: the user may not run INFO, which nodes do not need"
        return [ok(asked.name, what)]
    return [*judged(asked.name, _pairs(info), is_cluster=asked.is_cluster)]


def judged(name: str, info: Mapping[str, str], *, is_cluster: bool) -> Iterator[Finding]:
    """Yield findings from a server's answer to INFO."""
    version = info.get("valkey_version") or info.get("redis_version", "")
    # In Valkey, the compatible version of Redis.
    compatible = info.get("redis_version", "0")
    product = info.get("server_name", "redis")
    if tuple(map(int, re.findall("[0-9]+", compatible)[:2])) < OLDEST:
        yield problem(name, f"{product} {version} is too old", "Valkey, or Redis 7.0 or later")
    else:
        yield ok(name, f"{product} {version}")
    if info.get("redis_mode") == "cluster" and not is_cluster:
        yield problem(name, "it is part of a Cluster", _CLUSTER_URL)
    yield from _memory(name, info)


def _memory(name: str, info: Mapping[str, str]) -> Iterator[Finding]:
    policy, most = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0))
    used = int(info.get("used_memory", 0))
    if policy != "noeviction":
        what = f"maxmemory-policy {policy}: a bucket that the server evicts starts full"
        yield (problem if most else warning)(name, what, "maxmemory-policy noeviction")
    elif most and used > FULL * most:
        what = f"{used / most:.0%} of maxmemory are used; a full server accepts no spends"
        yield warning(name, what, "raise maxmemory")
    else:
        yield ok(name, "nothing is evicted")


def _pairs(info: Any) -> dict[str, str]:
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _remedy(name: str, text: str) -> str:
    if name == "script|load" and code_of(text) == "ERR":
        return "is it Valkey, or Redis 7.0 or later?"
    if code_of(text) in REDIRECTIONS:
        return _CLUSTER_URL
    if code_of(text) == "OOM":
        return "raise maxmemory"
    return "docs/cluster.md lists the settings of the server"


def _channel(asked: Asked) -> str:
    return f"rl1:{{{asked.tag:02x}}}:doctor"


def explained(name: str, error: RateLimitdError) -> Finding:
    """Return the finding for a server that could not be reached or stopped answering."""
    return problem(name, str(error), _remedy_of(error, _UNREACHABLE))


def _remedy_of(error: RateLimitdError, otherwise: str) -> str:
    """Return what to do if a server refuses the login, and ``otherwise`` for any other error."""
    return _LOGIN if _BAD_LOGIN.search(str(error)) else otherwise


AREA: Final = "REDIS_URL"

CLIENT_NAME: Final = "ratelimitd:doctor"

ANSWER_S: Final = 2.0


async def check_shared_state(settings: Settings) -> list[Finding]:
    """Check the shared state of the settings, if any."""
    if not settings.redis_url:
        return [_own_state(settings)]
    url = parse_redis_url(settings.redis_url)
    try:
        tls = ClientTls(url.tls) if url.tls is not None else None
    except RateLimitdError as error:
        what = str(error).removeprefix(f"{AREA}: ")
        return [problem(AREA, what, "put a PEM file there that the node may read")]
    found: list[Finding] = []
    servers: dict[Server, int] = {}
    """Each with one of its hash tags."""
    if url.topology is TopologyKind.CLUSTER:
        found += await _cluster(url, tls, servers)
    elif url.topology is TopologyKind.SENTINEL:
        found += await _sentinels(url, tls, servers)
    else:
        servers[url.servers[0]] = 0
    for server, tag in servers.items():
        found += await _server(server, tag, url=url, tls=tls, timeout_ms=settings.redis_timeout_ms)
    return found


def check_answer_without(settings: Settings) -> Iterator[Finding]:
    """Report how checks are answered while the shared state is unavailable, where that is configurable."""
    answer = settings.on_breaker_open
    if settings.redis_url and settings.consistency == "eventual" and answer != "local":
        does = "allowed" if answer == "fail_open" else "denied"
        what = f"{answer}: while the shared state is down every check is {does}; local would keep limiting"
        yield ok("ON_BREAKER_OPEN", what)


def _own_state(settings: Settings) -> Finding:
    """Report where limits are stored without REDIS_URL."""
    if settings.workers == 1:
        return ok(AREA, "not set: limits are held in this node's memory")
    from ratelimitd.workers.private_store import PrivateStore  # noqa: PLC0415 - as slow to import as a node

    try:
        store = PrivateStore.of(settings)
    except StartupError as error:
        setting, _, what = str(error).partition(": ")
        return problem(setting, what, "docs/operations.md#several-processes-on-one-port")
    what = f"not set: the workers share a private Valkey in {store.directory}, of at most {store.max_bytes >> 20} MiB"
    return ok(AREA, f"{what}; nodes on several machines need a REDIS_URL to share limits")


async def _server(
    server: Server, tag: int, *, url: RedisUrl, tls: ClientTls | None, timeout_ms: int
) -> list[Finding]:
    is_cluster = url.topology is TopologyKind.CLUSTER
    name = f"store {server}"
    try:
        connection = await connect(
            server,
            Handshake(url.login, url.database, CLIENT_NAME, wants_primary=not is_cluster),
            tls,
            lambda: Connection(hand_over, lambda _error: None, timeout_s=ANSWER_S),
        )
    except RateLimitdError as error:
        return [explained(name, error)]
    asked = Asked(name, connection, tag, is_cluster)
    try:
        return await check_server(asked, timeout_ms, wall_s=time.time, monotonic_s=time.monotonic)
    finally:
        connection.drop(StoreUnavailableError("looked at"))


async def _check_admin_tokens(asked: Asked) -> list[Finding]:
    """Check that running nodes have the same admin token, so that a login or a command works on all of them."""
    digests = set()
    try:
        for name in await ask(asked.connection, "ZRANGE", MEMBERS_KEY, 0, MAX_NODES - 1):
            key = status_key(name.decode(errors="replace"))
            octets = await ask(asked.connection, "GETRANGE", key, 0, MAX_STATUS_BYTES - 1)
            with contextlib.suppress(StoreCorruptError):
                digests.add(decode(octets).admin_token_digest)
    except Refused:
        return []  # reported with the permissions
    if len(digests) > 1:
        what = f"the nodes of this cluster have {len(digests)} different admin tokens"
        return [warning("ADMIN_TOKEN", what, "give all nodes one ADMIN_TOKEN_FILE")]
    what = "the nodes of this cluster have the same admin token"
    return [ok("ADMIN_TOKEN", what)] if digests else []


async def _sentinels(
    url: RedisUrl, tls: ClientTls | None, servers: dict[Server, int]
) -> list[Finding]:
    found: list[Finding] = []
    options = LinkOptions(ASK_S, Handshake(client_name=CLIENT_NAME), tls)
    primaries: set[Server] = set()
    for sentinel in url.servers:
        one = RedisUrl(url.topology, (sentinel,), service=url.service, sentinel_login=url.sentinel_login)  # fmt: skip
        name = f"sentinel {sentinel}"
        try:
            primary = await Sentinels(one, options).primary()
        except RateLimitdError as error:
            remedy = "start it, or take it out of REDIS_URL; check the service's name and sentinel_password"
            found.append(warning(name, str(error), remedy))
        else:
            found.append(ok(name, f"says that {primary} is the primary"))
            primaries.add(primary)
            servers[primary] = 0
    if not primaries:
        found.append(problem(AREA, "no sentinel names a primary", "see above"))
    elif len(primaries) > 1:
        remedy = "wait for the failover to end, and run doctor again"
        found.append(problem(AREA, "the sentinels do not agree on the primary", remedy))
    return found


async def _cluster(
    url: RedisUrl, tls: ClientTls | None, servers: dict[Server, int]
) -> list[Finding]:
    found: list[Finding] = []
    handshake = Handshake(url.login, 0, CLIENT_NAME, wants_primary=False)
    slots: Map | None = None
    for seed in url.servers:
        try:
            reply = await ask_once(seed, handshake, tls, *CLUSTER_SLOTS)
            slots = map_of(reply, seed)
        except (StoreUnavailableError, StoreCorruptError) as error:
            remedy = "start it, or take it out of REDIS_URL; is it part of a Cluster?"
            found.append(warning(f"store {seed}", str(error), _remedy_of(error, remedy)))
    if slots is None:
        return [*found, problem(AREA, "no server returns the slots of the Cluster", "see above")]
    for tag, server in enumerate(slots):
        if server is not None:
            servers.setdefault(server, tag)
    if missing := slots.count(None):
        what = f"{missing} of {len(slots)} hash tags have no server: their checks are not limited together"
        remedy = "cluster_state: see CLUSTER INFO; give the slots to a server"
        return [*found, problem(AREA, what, remedy)]
    return [*found, ok(AREA, f"a Cluster of {len(servers)} primaries, all slots served")]


DATABASE_AREA = "DATABASE_URL"

MAX_NAMED: Final = 10
"""Plans and types that a finding names."""


async def check_database(settings: Settings) -> list[Finding]:
    """Check the rule database of the settings."""
    # SQLAlchemy and Alembic take about 300 ms to import; other commands do without.
    from ratelimitd.rules.sql.inspection import inspect  # noqa: PLC0415

    url = urls.parse_database_url(settings.database_url)
    try:
        contents = await inspect(settings.database_url)
    except StoreMisconfiguredError as error:
        return [problem(DATABASE_AREA, str(error), "fix the URL, or the permissions of its user")]
    except (StoreUnavailableError, StartupError) as error:
        return [_unusable(error, url, settings)]
    if not contents.revision and _had_rules(settings):
        return [_lost(url)]
    what = f"{url.place}: {contents.rules} rules, revision {contents.revision}, can be written"
    remedy = "ratelimitd rules apply -f rules.yaml; until then every check is allowed"
    found = [ok(DATABASE_AREA, what) if contents.rules else warning(DATABASE_AREA, what, remedy)]
    found += _assignment_findings(contents, settings.known_types)
    named = {part for kind in contents.types for part in types_within(kind)}
    if undeclared := named.difference(settings.known_types):
        kinds = ", ".join(sorted(undeclared))
        what = f"rules for {kinds} have no effect: no request can name an identifier type that is not declared"
        remedy = (
            f"add {kinds} to IDENTIFIER_TYPES of serve and of this command, or delete the rules"
        )
        found.append(warning(DATABASE_AREA, what, remedy))
    return found


def _unusable(error: RateLimitdError, url: urls.DatabaseUrl, settings: Settings) -> Finding:
    what, upgrade = str(error), "ratelimitd db upgrade"
    if upgrade not in what:
        return problem(DATABASE_AREA, what, f"look at {url.place}")
    is_own_file = isinstance(url, urls.SqliteFile) and (
        not url.path.exists() or os.access(url.path, os.W_OK)
    )
    if isinstance(error, SchemaOlderError):
        if is_own_file:
            remedy = "back it up first; serve upgrades it at its start, and there is no downgrade"
            return warning(DATABASE_AREA, what, remedy)
    elif _had_rules(settings):
        return _lost(url)
    elif is_own_file:
        return ok(DATABASE_AREA, f"{url.place} will be made")
    return problem(DATABASE_AREA, what, upgrade)


def _lost(url: urls.DatabaseUrl) -> Finding:
    what = f"{url.place} is missing or empty: serve limits by {BOOK_FILE}, and refuses edits"
    return problem(DATABASE_AREA, what, REMEDY)


def _had_rules(settings: Settings) -> bool:
    """Return whether the node, or one of its workers, refuses a database that was never edited."""
    paths = [settings.state_dir]
    if settings.workers > 1:
        paths = [*map(settings.state_dir_of, range(settings.workers))]
    return any(LastGoodBook(path).was_edited() for path in paths)


def _assignment_findings(contents: Contents, types: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about the assigned plans; none without assignments."""
    if not contents.assigned:
        return
    yield ok(DATABASE_AREA, f"{sum(contents.assigned.values())} identities are assigned to plans")
    unnamed, undeclared = Counter[str](), Counter[str]()
    for (kind, plan), number in contents.assigned.items():
        if plan not in {*RESERVED_PLANS, *contents.plans}:
            unnamed[plan] += number
        if kind not in types:
            undeclared[kind] += number
    if unnamed:
        what = f"no rule names {_counted(unnamed)}: the rules' own limits hold for these identities"
        remedy = "add the plan to rules, or assign another (ratelimitd plans list --plan …)"
        yield warning(DATABASE_AREA, what, remedy)
    if undeclared:
        what = f"assignments of {_counted(undeclared)} have no effect: the type is not declared"
        remedy = "add the type to IDENTIFIER_TYPES, also to unassign them"
        yield warning(DATABASE_AREA, what, remedy)


def _counted(numbers: Counter[str]) -> str:
    most = [f"{name} ({number})" for name, number in numbers.most_common(MAX_NAMED)]
    more = len(numbers) - len(most)
    return ", ".join(most) + (f" and {more} more" if more else "")
