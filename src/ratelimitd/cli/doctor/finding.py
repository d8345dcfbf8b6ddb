"""The result of one check. Never contains a secret: findings are printed, and pasted into reports."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import importlib.util
import os
import resource
import ssl
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.model import IdentifierType
from ratelimitd.node.admin_token import FILE_NAME, read_admin_token
from ratelimitd.rpc.acceptor import RESERVED, demand_free
from ratelimitd.rpc.interface import TransportLimits
from ratelimitd.settings.parsing import UNMATCHED, WHY_UNMATCHED, Address
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import reachable


class Level(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A node works, but may cause trouble later."""
    PROBLEM = "problem"
    """A node would not start, or not work as configured."""


class Finding(NamedTuple):
    """``area`` is a setting or a component, ``what`` the observation, ``remedy`` the action; empty without one."""

    area: str
    level: Level
    what: str
    remedy: str = ""


def ok(area: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(area, Level.OK, what)


def warning(area: str, what: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(area, Level.WARNING, what, remedy)


def problem(area: str, what: str, remedy: str) -> Finding:
    """Return a problem."""
    return Finding(area, Level.PROBLEM, what, remedy)


ANSWER_S: Final = 1.0
"""Longest wait for the answer of a listener."""

MAX_ANSWER: Final = 4_096

QUESTION: Final = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

SIGNS: Final = (b"rate_limiter_requests_allowed_total", b"This port speaks gRPC over HTTP/2 only")
"""Parts of a node's answer to that request on its HTTP and gRPC ports."""


def check_open_files() -> Iterator[Finding]:
    """Check the number of possible connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TransportLimits().max_connections + RESERVED
    if hard != resource.RLIM_INFINITY and hard < wanted:
        what = f"at most {hard}: room for {max(1, hard - RESERVED)} connections"
        yield warning(
            "open files", what, f"LimitNOFILE={wanted} in the unit, or ulimit -n {wanted}"
        )
    else:
        limit = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
        yield ok("open files", limit)


def check_event_loop() -> Iterator[Finding]:
    """Check whether the fast event loop is installed."""
    if importlib.util.find_spec("uvloop") is None:
        yield warning("event loop", "asyncio's default: about half as fast", "pip install uvloop")
    else:
        yield ok("event loop", "uvloop")


async def check_ports(settings: Settings) -> list[Finding]:
    """Check the ports of the node: free, or in use by a running one."""
    is_ours = _running(settings) == str(settings.listen)
    found = [
        await _port(
            "LISTEN",
            settings.listen,
            tls=settings.tls_cert is not None,
            is_silent=settings.tls_client_ca is not None or settings.transport != "native",
            is_ours=is_ours,
        )
    ]
    if settings.http_listen is not None:
        found.append(await _port("HTTP_LISTEN", settings.http_listen, tls=settings.http_tls))
    if settings.spoe_listen is not None:
        found.append(
            await _port(
                "SPOE_LISTEN", settings.spoe_listen, tls=False, is_silent=True, is_ours=is_ours
            )
        )
    return found


async def _port(
    name: str,
    address: Address,
    *,
    tls: bool,
    is_silent: bool = False,
    is_ours: bool = False,
) -> Finding:
    """``tls``: a node answers HTTP/1.1 over TLS. ``is_silent``: it sends no text. ``is_ours``: known to be the node."""
    try:
        await demand_free(str(address))
    except StartupError as error:
        reason = str(error).rpartition(": ")[2]
        answer = b"" if is_ours else await _answer(address, tls=tls)
        if is_ours or any(sign in answer for sign in SIGNS):
            return ok(name, f"{address}: a ratelimitd listens there")
        if is_silent and reason == os.strerror(errno.EADDRINUSE):
            what = f"{address} is in use, by this node or another process"
            return warning(name, what, "fine if it is this node: see `ratelimitd health`")
        remedy = f"stop what listens there, or choose another {name}"
        return problem(name, f"cannot listen on {address}: {reason}", remedy)
    chosen = "a free port is picked" if address.port == 0 else "free"
    return ok(name, f"{address}: {chosen}")


AREA: Final = "rules"

MAX_NAMED: Final = 5
"""Endpoints without a rule that the finding names."""

ANYBODY: Final = "192.0.2.1"
"""An identifier of any type, to ask which rules judge."""


async def check_unmatched(settings: Settings) -> list[Finding]:
    """Check for endpoints with traffic but no rule, if the node runs here without TLS.

    Calls, and sends the admin token to, only the node that holds the state directory.
    """
    token = None
    try:
        listens_at = StateDir.address_in(settings.state_dir, made_token=False)
    except PermissionError as error:
        what = f"cannot list the endpoints without a rule: {settings.state_dir}: {error.strerror}"
        remedy = "run it as the node's user, or set STATE_DIR to an absolute path"
        return [warning(AREA, what, remedy)]
    except OSError:  # reported separately
        return []
    with contextlib.suppress(StartupError):  # reported separately
        token = settings.admin_token or read_admin_token(settings.state_dir / FILE_NAME, own=False)
    if not listens_at or settings.tls_cert is not None:
        return []
    # Imports gRPC, which takes 50 ms.
    import grpc  # noqa: PLC0415

    try:
        endpoints, missed = await asyncio.to_thread(
            _without_rules, reachable(listens_at), token, settings
        )
    except grpc.RpcError as error:
        what = f"cannot list the endpoints without a rule: {error.code().name}"
        return [ok(AREA, f"{what}; `ratelimitd rules unmatched` asks the node")]
    remedy = "spell both the same; endpoints are compared byte for byte"
    found = [warning(AREA, what, remedy) for what in missed]
    if UNMATCHED in endpoints:
        found.append(warning(AREA, WHY_UNMATCHED, "docs/proxies.md#under-what"))
    if not endpoints:
        return [*found, ok(AREA, "every check of the last minutes had a rule")]
    named = ", ".join(endpoints[:MAX_NAMED])
    more = f" and {len(endpoints) - MAX_NAMED} more" if len(endpoints) > MAX_NAMED else ""
    what = f"checks without a rule are all allowed: {named}{more}"
    remedy = "ratelimitd rules unmatched; ratelimitd explain names similar rules"
    return [*found, warning(AREA, what, remedy)]


def _running(settings: Settings) -> str:
    """Return the address of the running node that holds the state directory; empty without one."""
    with contextlib.suppress(OSError):  # reported separately
        return StateDir.address_in(settings.state_dir, made_token=False)
    return ""


def _without_rules(
    target: str, token: str | None, settings: Settings
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the endpoints without a rule, and what hides of templates whose rule is misspelled: ``*`` judges them."""
    from ratelimitd_client import NodeClient  # noqa: PLC0415 - as above
    from ratelimiter.v1 import ratelimiter_pb2 as pb  # noqa: PLC0415

    templates = settings.auth_endpoints
    first, *more = dict.fromkeys([*settings.auth_identifiers.values(), IdentifierType.IP])
    also = [pb.Identity(identifier_type=kind, identifier=ANYBODY) for kind in more]
    missed = []
    with NodeClient(target, token=token, timeout_s=ANSWER_S) as client:
        unmatched = [one.endpoint for one in client.unmatched()]
        for template in templates:
            check = pb.RateLimitRequest(
                identifier_type=first, identifier=ANYBODY, also=also, endpoint=template
            )
            found = client.explain(check)
            near = [one for one in found.nearest if one.endpoint not in templates]
            if near and found.answer.reason != pb.NO_RULE:
                what = f"that of {near[0].endpoint} {near[0].why}"
                missed.append(f"{template} of AUTH_ENDPOINTS has no rule of its own; {what}")
    return unmatched, missed


async def _answer(address: Address, *, tls: bool) -> bytes:
    """Return the first bytes of the answer, empty without one. Accepts any certificate, since it sends no secret."""
    context = ssl.create_default_context() if tls else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
            try:
                writer.write(QUESTION)
                return await reader.readexactly(MAX_ANSWER)
            except asyncio.IncompleteReadError as end:
                return end.partial
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
