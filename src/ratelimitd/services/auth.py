"""Authorization: whether the credentials of a call hold the role that its method requires.

Never reads a setting and never logs. Identity comes from a bearer token or from the client certificate that TLS
verified; from calling over loopback only where LOOPBACK_ADMIN is on. See ADR 0017 and ADR 0042.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

from ratelimitd.rpc.interface import Call, RpcError, StatusCode
from ratelimitd.services.errors import rich_error
from ratelimitd.services.guesses import LOGIN_COST, TokenGuesses


class Role(enum.StrEnum):
    """Role that a method requires."""

    CHECK = "check"
    READ = "read"
    ADMIN = "admin"
    OPEN = "open"


FORWARDING_HEADERS: Final = (
    "forwarded",
    "via",
    "x-forwarded",
    "x-forwarded-client-cert",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-forwarded-user",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-original-forwarded-for",
    "cf-connecting-ip",
    "fastly-client-ip",
    "fly-client-ip",
    "true-client-ip",
    "x-azure-clientip",
)
"""Headers of proxies: with any of them, the address of the peer is not that of the caller."""

_BEARER: Final = "bearer "

Requirement = Callable[[Call], None]
"""Returns, or raises ``RpcError`` for a call that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of the roles; an empty one holds none. The admin role includes the other two.

    ``loopback_admin``: callers from loopback hold the admin role while no admin token or SAN is set.
    ``admin_token_name`` tells callers where the admin token comes from.
    """

    admin_token: str = ""
    check_token: str = ""
    admin_sans: frozenset[str] = frozenset()
    check_sans: frozenset[str] = frozenset()
    loopback_admin: bool = False
    admin_token_name: str = "ADMIN_TOKEN"  # noqa: S105 -- the name of a setting

    def __repr__(self) -> str:
        """Without the credentials."""
        return "Credentials(…)"


class Access:
    """Checks roles for one set of credentials; ``guesses`` slows callers with wrong tokens."""

    def __init__(self, credentials: Credentials, guesses: TokenGuesses) -> None:
        self._guesses = guesses
        self._admin_digest = _digest(credentials.admin_token)
        self._check_digest = _digest(credentials.check_token)
        self._admin_sans = credentials.admin_sans
        self._check_sans = credentials.check_sans
        self._admin_token_name = credentials.admin_token_name
        guarded = self._admin_digest or self._admin_sans
        self._loopback_admin = credentials.loopback_admin and not guarded

    def requirement(self, role: Role) -> Requirement | None:
        """Return the guard of a role; ``None`` if no credentials are needed, which saves the check path a call."""
        if role is Role.OPEN:
            return None
        if role is Role.CHECK:
            guarded = bool(self._check_digest or self._check_sans)
            return partial(self._require, frozenset(Role), self._need(role)) if guarded else None
        if self._loopback_admin:
            return _require_loopback
        return partial(self._require, frozenset({Role.ADMIN}), self._need(role))

    def may_read(self, call: Call) -> None:
        """Refuse calls without the read role, for data that no method of the services returns.

        Raises:
            RpcError: it does not.
        """
        required = self.requirement(Role.READ)
        assert required is not None  # noqa: S101 -- the read role always needs a credential
        required(call)

    def may_administer(self, call: Call) -> None:
        """Refuse calls without the admin role, likewise.

        Raises:
            RpcError: it does not.
        """
        required = self.requirement(Role.ADMIN)
        assert required is not None  # noqa: S101 -- no more is administering
        required(call)

    def actor(self, call: Call) -> str:
        """Return the actor of an admin call for the audit trail: the certificate's SAN, or role@host of the peer."""
        sans = call.peer_sans
        if sans:
            return next((san for san in sans if san in self._admin_sans), sans[0])
        return f"{Role.ADMIN}@{_host(call.peer) or 'unix'}"

    def principal(self, call: Call) -> str:
        """Return whose a call is: the certificate's name that holds a role, or the role of its token; empty if open."""
        sans = self._admin_sans | self._check_sans
        named = next((san for san in call.peer_sans if san in sans), "")
        return named or min(self._roles_of_token(call), default="")

    def _require(self, holders: frozenset[Role], need: str, call: Call) -> None:
        """Refuse calls without a role of ``holders``; ``need`` names the required credentials."""
        held = self._held(call)
        if held.isdisjoint(holders):
            raise _refusal(need, known=bool(held) or _only_certificate(call))

    def _need(self, role: Role) -> str:
        """Return the kinds of credentials that hold this role here, never their values."""
        checks = role is Role.CHECK
        tokens = ["CHECK_TOKEN"] * bool(checks and self._check_digest)
        tokens += [self._admin_token_name] * bool(self._admin_digest)
        names = ["CHECK_SANS"] * bool(checks and self._check_sans)
        names += ["ADMIN_SANS"] * bool(self._admin_sans)
        ways = [f"the bearer token {' or '.join(tokens)}"] * bool(tokens)
        ways += [f"a client certificate with a name of {' or '.join(names)}"] * bool(names)
        return f"this call needs the {role} role: {', or '.join(ways) or 'no credential that holds it is set'}"

    def holds_admin_token(self, call: Call) -> bool:
        """Return whether the token that somebody entered into a form is the admin token.

        Raises:
            RpcError: too many wrong tokens came from the caller's address.
        """
        return Role.ADMIN in self._roles_of_token(call, LOGIN_COST)

    def _roles_of_token(self, call: Call, cost: int = 1) -> set[Role]:
        """Return the roles of the call's token; it is compared with both tokens, in constant time."""
        token = _bearer(call)
        if not token or not (self._admin_digest or self._check_digest):
            return set()
        self._guesses.admit(call, cost)
        given = _digest(token)
        held = set()
        if hmac.compare_digest(given, self._admin_digest or _NO_DIGEST):
            held.add(Role.ADMIN)
        if hmac.compare_digest(given, self._check_digest or _NO_DIGEST):
            held.add(Role.CHECK)
        if held:
            self._guesses.right(call)
        else:
            self._guesses.wrong(call, cost)
        return held

    def _held(self, call: Call) -> set[Role]:
        """Return the roles of the call's credentials.

        Raises:
            RpcError: too many wrong tokens came from the caller's address.
        """
        held = self._roles_of_token(call)
        sans = call.peer_sans
        if not self._admin_sans.isdisjoint(sans):
            held.add(Role.ADMIN)
        if not self._check_sans.isdisjoint(sans):
            held.add(Role.CHECK)
        return held


def is_loopback(call: Call) -> bool:
    """Return whether the call came over loopback or a Unix socket, without a proxy."""
    if any(call.metadata(header) is not None for header in FORWARDING_HEADERS):
        return False
    if call.peer.startswith("unix"):
        return True
    try:
        address = ipaddress.ip_address(_host(call.peer))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


# Of no token: compare_digest against it is as slow as any other comparison and never true of a real digest.
_NO_DIGEST: Final = b"\x00" * sha256().digest_size


def _digest(token: str) -> bytes:
    """Return a digest, so that the comparison does not depend on the token's length; empty without a token."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest() if token else b""


def _bearer(call: Call) -> str:
    header = call.metadata("authorization") or ""
    return header[len(_BEARER) :].strip() if header[: len(_BEARER)].lower() == _BEARER else ""


def _only_certificate(call: Call) -> bool:
    """Return whether the caller has a verified certificate and sent no token."""
    return bool(call.peer_sans) and call.metadata("authorization") is None


def _host(peer: str) -> str:
    """Return the host of ``ipv4:127.0.0.1:50000`` or ``ipv6:[::1]:50000``; else an empty text."""
    scheme, _, rest = peer.partition(":")
    if scheme not in {"ipv4", "ipv6"}:
        return ""
    return rest.rpartition(":")[0].strip("[]").partition("%")[0]


def _require_loopback(call: Call) -> None:
    if not is_loopback(call):
        message = "with LOOPBACK_ADMIN on, this call is for loopback only (127.0.0.1 or ::1, no forwarding headers)"
        raise rich_error(StatusCode.PERMISSION_DENIED, "LOOPBACK_ONLY", message)


def _refusal(need: str, *, known: bool) -> RpcError:
    if known:
        message = f"{need}; the credentials that were sent do not hold it"
        return rich_error(StatusCode.PERMISSION_DENIED, "ROLE_MISSING", message)
    message = f"{need}; no valid one was sent"
    return rich_error(StatusCode.UNAUTHENTICATED, "CREDENTIALS_REQUIRED", message)
