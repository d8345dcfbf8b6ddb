"""One server of the shared state, asked on one connection: everything that a node asks of it, on keys of its own.

Leaves nothing behind: what it writes expires within a second. Needs no permission beyond those of a node; what only
others may ask is left out where it is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ratelimitd.cli.doctor.finding import Finding, ok, problem, warning
from ratelimitd.errors import RateLimitdError
from ratelimitd.sharedstate.connection import Connection
from ratelimitd.sharedstate.login import Refused, ask
from ratelimitd.sharedstate.replies import REDIRECTIONS, code_of, error_of
from ratelimitd.sharedstate.script import Script

OLDEST: Final = (7, 0)

ROUNDS: Final = 8
"""Round trips that are measured, after a first one that warms up."""

MAX_SKEW_S: Final = 1.0

FULL: Final = 0.8
"""From so much of ``maxmemory`` on a server is nearly full."""

_US_PER_S: Final = 1_000_000
_SCRIPT: Final = Script(b"#!lua\nreturn 1")
_CLUSTER_URL: Final = "it is part of a Cluster: redis+cluster:// in REDIS_URL"
_PERMISSIONS: Final = "docs/cluster.md has the line that creates the user"


class Asked(NamedTuple):
    """What to call a server, a connection to it, and one of its hash tags."""

    name: str
    connection: Connection
    tag: int = 0
    is_cluster: bool = False


async def check_server(
    asked: Asked, timeout_ms: int, *, wall_s: Callable[[], float], monotonic_s: Callable[[], float]
) -> AsyncIterator[Finding]:
    """Everything about a server that the connection was made to."""
    async for finding in _check_permissions(asked):
        yield finding
    async for finding in _check_times(asked, timeout_ms, wall_s=wall_s, monotonic_s=monotonic_s):
        yield finding
    async for finding in _check_configuration(asked):
        yield finding
    # Last: a connection that listens may ask for nothing else.
    yield await _check_listening(asked)


async def _check_permissions(asked: Asked) -> AsyncIterator[Finding]:
    missing, failed = [], False
    for name, command in _commands(asked):
        try:
            await ask(asked.connection, *command)
        except Refused as refused:
            if code_of(str(refused)) == "NOPERM":
                missing.append(name)
                continue
            failed = True
            yield problem(
                asked.name, f"{name}: {error_of(str(refused))}", _remedy(name, str(refused))
            )
            break
    if missing:
        names = ", ".join(missing)
        yield problem(asked.name, f"the user may not run: {names}", f"grant them; {_PERMISSIONS}")
    elif not failed:
        yield ok(asked.name, "everything that a node asks is allowed")


def _commands(asked: Asked) -> Iterator[tuple[str, Sequence[bytes | int | str]]]:
    """What nodes ask, alone or in scripts, by the name that a permission has."""
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
) -> AsyncIterator[Finding]:
    rounds: list[tuple[float, float]] = []
    for _ in range(1 + ROUNDS):
        began_s = monotonic_s()
        try:
            seconds, micros = await ask(asked.connection, "TIME")
        except Refused:
            return  # told with the permissions
        took_s = monotonic_s() - began_s
        store_s = int(seconds) + int(micros) / _US_PER_S
        rounds.append((took_s, store_s - (wall_s() - took_s / 2)))
    best_s, skew_s = min(rounds[1:])
    worst_ms = max(took_s for took_s, _ in rounds[1:]) * 1_000
    what = f"round trip {best_s * 1_000:.2f} to {worst_ms:.2f} ms"
    if worst_ms > timeout_ms:
        remedy = "bring node and server together, or raise REDIS_TIMEOUT_MS"
        yield warning(asked.name, f"{what}, longer than REDIS_TIMEOUT_MS ({timeout_ms})", remedy)
    else:
        yield ok(asked.name, f"{what}, of {timeout_ms} ms that a check may wait")
    if abs(skew_s) > MAX_SKEW_S:
        what = f"its clock is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        yield warning(
            asked.name, what, "run a time service (chrony) on both; nodes go by the server's"
        )
    else:
        yield ok(asked.name, f"clocks differ by {abs(skew_s) * 1_000:.1f} ms")


async def _check_configuration(asked: Asked) -> AsyncIterator[Finding]:
    try:
        told = await ask(asked.connection, "INFO")
    except Refused:
        what = "version and memory were not looked at: the user may not run INFO, nor need nodes"
        yield ok(asked.name, what)
        return
    for finding in judged(asked.name, _pairs(told), is_cluster=asked.is_cluster):
        yield finding


def judged(name: str, info: Mapping[str, str], *, is_cluster: bool) -> Iterator[Finding]:
    """What the answer to INFO says of a server."""
    version = info.get("valkey_version") or info.get("redis_version", "")
    # Valkey says here which Redis it is like.
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
        what = f"maxmemory-policy {policy}: a bucket that the server drops is full again"
        yield (problem if most else warning)(name, what, "maxmemory-policy noeviction")
    elif most and used > FULL * most:
        what = f"{used / most:.0%} of maxmemory are used; a full server settles nothing"
        yield warning(name, what, "raise maxmemory")
    else:
        yield ok(name, "nothing is evicted")


def _pairs(told: Any) -> dict[str, str]:
    lines = told.decode(errors="replace").splitlines() if isinstance(told, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _remedy(name: str, text: str) -> str:
    if name == "script|load" and code_of(text) == "ERR":
        return "is it Valkey, or Redis 7.0 or later?"
    if code_of(text) in REDIRECTIONS:
        return _CLUSTER_URL
    if code_of(text) == "OOM":
        return "raise maxmemory"
    return "docs/cluster.md says how the server has to be set"


def _channel(asked: Asked) -> str:
    return f"rl1:{{{asked.tag:02x}}}:doctor"


def explained(name: str, error: RateLimitdError) -> Finding:
    """What it means that a server could not be reached, or answered no more."""
    return problem(name, str(error), "look at REDIS_URL, the server, and what is between")
