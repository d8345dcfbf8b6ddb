"""Authorization: whether the credentials of a call hold the role that its method requires.

Reads no settings and writes no logs. Identity comes from a bearer token or from the verified client certificate; with
LOOPBACK_ADMIN also from calling over loopback. See ADR 0017, ADR 0042 and ADR 0059.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, sha256
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
"""Headers of proxies: with any of them, the peer's address is not the caller's."""

_BEARER: Final = "bearer "

Requirement = Callable[[Call], None]
"""Returns, or raises ``RpcError`` to refuse the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A bearer token, stored as its digest. ``name`` is empty for ADMIN_TOKEN and CHECK_TOKEN."""

    role: Role
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of the token; empty for a user without a token, whom a trusted proxy names."""
    name: str = ""
    expires_s: float = math.inf
    """Unix time from which it is refused."""
    stand_in: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Internal token with which sessions of the page call the services; never leaves the process."""


class NamedTokens:
    """The tokens of TOKENS_FILE in force; ``now_s`` is Unix time."""

    def __init__(self, now_s: Callable[[], float], tokens: Iterable[Token] = ()) -> None:
        self._now_s = now_s
        self._by_name = {token.name: token for token in tokens}
        by_digest = {token.digest: token for token in self._by_name.values() if token.digest}
        by_digest |= {digest_of(one.stand_in): one for one in self._by_name.values()}
        self._by_key = {key_of(digest): token for digest, token in by_digest.items()}
        self.have_checks = any(token.role is Role.CHECK for token in self._by_name.values())
        """Whether any token holds the check role."""
        self.guard_checks = self.have_checks
        """Whether any token ever held the check role, here or on another worker.

        Removing the last one must not open checks to all callers.
        """

    def replace(self, other: NamedTokens) -> None:
        """Put the tokens of ``other`` in force instead. Takes the same time for any number of them."""
        self._by_name, self._by_key = other._by_name, other._by_key
        self.have_checks = other.have_checks
        self.guard_checks |= other.have_checks

    def __len__(self) -> int:
        """Return the number of entries, expired ones included."""
        return len(self._by_name)

    def by_key(self, key: bytes) -> Token | None:
        """Return the token whose digest has this :func:`key_of`, unless it expired."""
        return self._unexpired(self._by_key.get(key))

    def by_name(self, name: str) -> Token | None:
        """Return the token with this name, unless it expired."""
        return self._unexpired(self._by_name.get(name))

    def session_of(self, name: str) -> tuple[bytes, str] | None:
        """Return the digest that binds a session to the token with this name, and the session's authorization value."""
        token = self.by_name(name)
        return (token.digest, f"Bearer {token.stand_in}") if token and token.digest else None

    def user_of(self, name: str) -> str | None:
        """Return the authorization value of a user named by a trusted proxy; ``None`` without such an entry.

        Entries with a token do not count: a proxy that accepts any user name must not be able to act as a program.
        """
        token = self.by_name(name)
        return f"Bearer {token.stand_in}" if token and not token.digest else None

    def _unexpired(self, token: Token | None) -> Token | None:
        return token if token and self._now_s() < token.expires_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials by role; an empty one is not set. The admin role includes the other two.

    ``loopback_admin``: callers from loopback hold the admin role while no admin token or SAN is set.
    ``admin_token_name`` names the source of the admin token to callers. ``named``: ``None`` without TOKENS_FILE.
    """

    admin_token: str = ""
    check_token: str = ""
    admin_sans: frozenset[str] = frozenset()
    check_sans: frozenset[str] = frozenset()
    loopback_admin: bool = False
    admin_token_name: str = "ADMIN_TOKEN"  # noqa: S105 -- the name of a setting
    named: NamedTokens | None = None

    def __repr__(self) -> str:
        """Return a text without the credentials."""
        return "Credentials(…)"


class Access:
    """Checks roles for one set of credentials; ``guesses`` slows callers with wrong tokens."""

    def __init__(self, credentials: Credentials, guesses: TokenGuesses) -> None:
        self._guesses = guesses
        given = ((Role.CHECK, credentials.check_token), (Role.ADMIN, credentials.admin_token))
        self._tokens = {
            key_of(token.digest): token
            for token in (Token(role=role, digest=digest_of(text)) for role, text in given if text)
        }
        self._set = {role for role, text in given if text}
        self._named = credentials.named
        self._admin_sans = credentials.admin_sans
        self._check_sans = credentials.check_sans
        self._admin_token_name = credentials.admin_token_name
        guarded = Role.ADMIN in self._set or self._admin_sans
        self._loopback_admin = credentials.loopback_admin and not guarded

    def requirement(self, role: Role) -> Requirement | None:
        """Return the guard of a role; ``None`` if it never needs credentials, which saves the check path a call."""
        if role is Role.OPEN or (self.is_open(role) and self._named is None):
            return None
        if self._loopback_admin and role is not Role.CHECK:
            return _require_loopback
        # Checks consume tokens, so the read role does not include them.
        required = partial(self._require, frozenset({role, Role.ADMIN}), self._need(role))
        return (
            partial(self._require_unless_open, role, required) if self.is_open(role) else required
        )

    def is_open(self, role: Role) -> bool:
        """Return whether calls need no credential for this role now; a changed TOKENS_FILE may require one."""
        if role is not Role.CHECK:
            return role is Role.OPEN
        guarded = Role.CHECK in self._set or self._check_sans
        return not (guarded or (self._named is not None and self._named.guard_checks))

    def demand(self, role: Role, call: Call) -> None:
        """Refuse a call without ``role``, read or admin, for data outside the services.

        Raises:
            RpcError: the call is refused.
        """
        required = self.requirement(role)
        assert required is not None  # noqa: S101 -- these roles always need a credential
        required(call)

    def actor(self, call: Call) -> str:
        """Return the actor of an admin call for the audit trail: SAN, name of the token, or role@host of the peer."""
        sans = call.peer_sans
        admin = next((san for san in sans if san in self._admin_sans), "")
        if admin:
            return admin
        token = self._token_of(call)
        if token and token.name:
            return token.name
        return (
            sans[0] if sans else f"{Role.ADMIN}@{_host(call.peer) or call.peer.partition(':')[0]}"
        )

    def principal(self, call: Call) -> str:
        """Return the principal of a call; empty without credentials.

        It is the certificate's name that holds a role, the name of the token, which outlives a replaced token, or the
        role of a token without a name.
        """
        sans = self._admin_sans | self._check_sans
        certified = next((san for san in call.peer_sans if san in sans), "")
        if certified:
            return certified
        token = self._token_of(call)
        if token is None:
            return ""
        # Unique, since no role and no SAN contains a space.
        return f"token {token.name}" if token.name else token.role

    def _require_unless_open(self, role: Role, required: Requirement, call: Call) -> None:
        if not self.is_open(role):
            required(call)

    def _require(self, holders: frozenset[Role], need: str, call: Call) -> None:
        """Refuse calls without a role of ``holders``; ``need`` names the required credentials."""
        held = self._held(call)
        if held.isdisjoint(holders):
            raise _refusal(need, known=bool(held) or _only_certificate(call))

    def _need(self, role: Role) -> str:
        """Return the kinds of credentials that hold this role on this node, not their values."""
        checks = role is Role.CHECK
        tokens = ["CHECK_TOKEN"] * (checks and Role.CHECK in self._set)
        tokens += [self._admin_token_name] * (Role.ADMIN in self._set)
        tokens += ["one of TOKENS_FILE"] * (self._named is not None)
        names = ["CHECK_SANS"] * bool(checks and self._check_sans)
        names += ["ADMIN_SANS"] * bool(self._admin_sans)
        ways = [f"the bearer token {' or '.join(tokens)}"] * bool(tokens)
        ways += [f"a client certificate with a name of {' or '.join(names)}"] * bool(names)
        return f"this call needs the {role} role: {', or '.join(ways) or 'no credential that holds it is set'}"

    def login(self, call: Call) -> str | None:
        """Return the name of the token in a login form: empty for the admin token, ``None`` if it may not log in.

        Raises:
            RpcError: too many wrong tokens came from the caller's address.
        """
        token = self._token_of(call, LOGIN_COST)
        return token.name if token and token.role in {Role.READ, Role.ADMIN} else None

    def _token_of(self, call: Call, cost: int = 1) -> Token | None:
        """Return the call's token; ``None`` if it is missing, wrong or expired."""
        text = _bearer(call)
        if not text or not (self._tokens or self._named is not None):
            return None
        key = key_of(digest_of(text))
        is_known = self._guesses.admit(call, key, cost)
        token = self._tokens.get(key)
        if token is None and self._named is not None:
            token = self._named.by_key(key)
        if token is None:
            self._guesses.wrong(call, cost)
        elif not is_known:
            self._guesses.right(call, key)
        return token

    def _held(self, call: Call) -> set[Role]:
        """Return the roles of the call's credentials.

        Raises:
            RpcError: too many wrong tokens came from the caller's address.
        """
        token = self._token_of(call)
        held = {token.role} if token else set()
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


def digest_of(token: str) -> bytes:
    """Return the digest under which a token is stored, here and in TOKENS_FILE."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


_KEY: Final = secrets.token_bytes(32)


def key_of(digest: bytes) -> bytes:
    """Return the key under which a token is looked up.

    The time of a comparison may reveal how far two keys agree. Keys therefore depend on a secret of the process:
    neither a caller nor a reader of TOKENS_FILE can compute the key of a guess. One look-up serves any number of
    tokens.
    """
    return blake2b(digest, key=_KEY).digest()


def _bearer(call: Call) -> str:
    header = call.metadata("authorization") or ""
    return header[len(_BEARER) :].strip() if header[: len(_BEARER)].lower() == _BEARER else ""


def _only_certificate(call: Call) -> bool:
    """Return whether the caller has a verified certificate and sent no token."""
    return bool(call.peer_sans) and call.metadata("authorization") is None


def _host(peer: str) -> str:
    """Return the host of ``ipv4:127.0.0.1:50000`` or ``ipv6:[::1]:50000``; empty for other peers."""
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
        message = f"{need}; the credentials that were sent do not grant it"
        return rich_error(StatusCode.PERMISSION_DENIED, "ROLE_MISSING", message)
    message = f"{need}; no valid one was sent"
    return rich_error(StatusCode.UNAUTHENTICATED, "CREDENTIALS_REQUIRED", message)
