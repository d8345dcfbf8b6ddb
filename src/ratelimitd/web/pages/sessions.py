"""Sessions of logged-in visitors, and the tokens in their forms. Stores nothing per session: the cookie holds it all.

A session is a signed cookie whose key is derived from the admin token: every node with that token accepts it, and a new
token ends all sessions. A session opened with a token of TOKENS_FILE also ends with that token. Without an admin token
there are no sessions, and forms are bound to a random cookie. A login link carries a signed code that opens one
session. See ADR 0028, ADR 0042 and ADR 0059.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final, NamedTuple

from itsdangerous import BadSignature, URLSafeSerializer
from starlette.datastructures import Headers

from ratelimitd.settings.urls import reachable
from ratelimitd_wire.addresses import ClientAddresses

SESSION_S: Final = 8 * 3600
"""Lifetime of a session from its login, used or not."""

LINK_S: Final = 30
"""Lifetime of a login link, which works once. It is printed at the start, and stdout may be stored anywhere."""

NONCE_BYTES: Final = 16
MAX_COOKIE_CHARS: Final = 512

_SALT: Final = "ratelimitd page session"
_LINK_SALT: Final = "ratelimitd login link"
_USER_SALT: Final = b"ratelimitd page user "
_FORM_KEY: Final = b"ratelimitd page forms"


SessionOf = Callable[[str], tuple[bytes, str] | None]
"""Maps the name of a token to its digest and the credentials of its sessions for the services; ``None`` if not in
force."""


def no_session(_name: str) -> None:
    """Return ``None``: the :data:`SessionOf` without TOKENS_FILE."""


class Session(NamedTuple):
    """A login: ``nonce`` differs for each. ``expired``: it was valid and has ended.

    ``authorization`` holds the credentials for the services.
    """

    nonce: str
    expired: bool
    authorization: str = ""


UserOf = Callable[[str], str | None]
"""Maps a user name to the credentials of its requests for the services; ``None`` if unknown."""


class ProxyUsers:
    """Users that trusted proxies name in ``header``; disabled if empty. See ADR 0060.

    ``trusted_proxies`` are addresses and networks; a peer without an address is never one of them.
    """

    def __init__(
        self, header: str = "", trusted_proxies: Iterable[str] = (), user_of: UserOf = no_session
    ) -> None:
        self._header = header
        self._proxies = ClientAddresses(trusted_proxies)
        self._user_of = user_of

    def sends_header(self, headers: Headers) -> bool:
        """Return whether a request has the header."""
        return bool(self._header) and any(headers.getlist(self._header))

    def trusts(self, peer: str) -> bool:
        """Return whether the peer with this address may name users."""
        return bool(peer) and self._proxies.trusts(peer)

    def find(self, headers: Headers) -> tuple[str, str] | None:
        """Return the user that a trusted proxy names, and the credentials for the services; ``None`` if unknown.

        If a proxy adds its header to one sent by the caller, two users are named, so neither counts.
        """
        values = headers.getlist(self._header)
        authorization = self._user_of(values[0]) if len(values) == 1 else None
        return (values[0], authorization) if authorization else None


class Sessions:
    """Opens and recognises sessions. ``now_s`` is Unix time."""

    def __init__(
        self,
        admin_token: str,
        now_s: Callable[[], float],
        session_of: SessionOf = no_session,
    ) -> None:
        self._admin_token = admin_token
        self._now_s = now_s
        self._session_of = session_of
        self._key = admin_token.encode() or secrets.token_bytes(32)
        self._signed = _signer(self._key, _SALT)
        self._links = _signer(self._key, _LINK_SALT)
        self._used_links: dict[str, float] = {}
        """Nonces of used links and their expiry. Only holders of the admin token can make it grow."""

    @property
    def possible(self) -> bool:
        """Return whether login is possible: an admin token is set."""
        return bool(self._admin_token)

    def nonce(self) -> str:
        """Return a random, unguessable text."""
        return secrets.token_hex(NONCE_BYTES)

    def link_code(self, host: str) -> str:
        """Return the code of a login link for ``host``, a ``HOST:PORT``."""
        return str(self._links.dumps([self.nonce(), int(self._now_s()) + LINK_S, host]))

    def opened_by(self, code: str, host: str) -> bool:
        """Return whether the code of a link may open a session for a request to ``host``; consumes the code if so."""
        if not self.possible or len(code) > MAX_COOKIE_CHARS:
            return False
        try:
            nonce, expires_at_s, made_for = self._links.loads(code)
        except BadSignature:
            return False
        now_s = self._now_s()
        self._used_links = {one: at_s for one, at_s in self._used_links.items() if now_s < at_s}
        if host != made_for or now_s >= expires_at_s or nonce in self._used_links:
            return False
        self._used_links[nonce] = expires_at_s
        return True

    def open(self, name: str = "") -> str:
        """Return the cookie of a new session for the token of this name; empty is the admin token."""
        bound = [name, self._mark(name)] if name else []
        return str(self._signed.dumps([self.nonce(), int(self._now_s()) + SESSION_S, *bound]))

    def read(self, cookie: str) -> Session | None:
        """Return the session of a cookie; ``None`` if the signature is not ours."""
        if not self.possible or len(cookie) > MAX_COOKIE_CHARS:
            return None
        try:
            nonce, expires_at_s, *bound = self._signed.loads(cookie)
        except BadSignature:
            return None
        authorization = f"Bearer {self._admin_token}"
        if bound:
            name, mark = bound
            found = self._session_of(name)
            if found is None or mark != self._mark(name):
                return Session(nonce, expired=True)
            authorization = found[1]
        expired = self._now_s() >= expires_at_s
        return Session(nonce, expired, "" if expired else authorization)

    def _mark(self, name: str) -> str:
        """Return the mark that binds a session to the current token of ``name``.

        Keyed, because the cookie is not encrypted: an attacker with a copy could otherwise test token guesses offline.
        """
        found = self._session_of(name)
        digest = b"" if found is None else found[0]
        return hmac.new(self._admin_token.encode(), digest, sha256).hexdigest()[:32]

    def user_nonce(self, name: str) -> str:
        """Return the nonce of forms for a user named by a proxy. Keyed: other sites could otherwise compute it."""
        return hmac.new(self._key, _USER_SALT + name.encode(), sha256).hexdigest()[
            : 2 * NONCE_BYTES
        ]

    def form_token(self, nonce: str) -> str:
        """Return the CSRF token of a visitor's forms, derived from the cookie.

        Independent of the admin token: a visitor of the login form could otherwise test guesses offline.
        """
        return hmac.new(_FORM_KEY, nonce.encode("utf-8", "surrogatepass"), sha256).hexdigest()


def _signer(key: bytes, salt: str) -> URLSafeSerializer:
    return URLSafeSerializer(
        key, salt=salt, signer_kwargs={"key_derivation": "hmac", "digest_method": sha256}
    )


def login_link(scheme: str, http_address: str, admin_token: str, now_s: float) -> str:
    """Return the address that logs in its first visitor, within :data:`LINK_S` of ``now_s``, Unix time."""
    host = reachable(http_address)
    code = Sessions(admin_token, lambda: now_s).link_code(host)
    return f"{scheme}://{host}/login?code={code}"
