"""Sessions of people who logged in, and the tokens in their forms. Holds nothing for each: a cookie says all.

A session is a signed cookie whose key comes from the admin token: every node with that token takes it, and a new token
ends all of them. One that a token of TOKENS_FILE opened also ends with that token. Without an admin token there are no
sessions, and forms are bound to a random cookie. A login link carries a signed code, which opens one session. See ADR
0028, ADR 0042 and ADR 0059.
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
"""A session ends that long after its login, used or not."""

LINK_S: Final = 30
"""A login link is good for that long, once. Printed at the start, it ends up wherever stdout goes."""

NONCE_BYTES: Final = 16
MAX_COOKIE_CHARS: Final = 512

_SALT: Final = "ratelimitd page session"
_LINK_SALT: Final = "ratelimitd login link"
_USER_SALT: Final = b"ratelimitd page user "
_FORM_KEY: Final = b"ratelimitd page forms"


SessionOf = Callable[[str], tuple[bytes, str] | None]
"""Maps the name of a token to its digest and to what its sessions present to the services; ``None``: none in force."""


def no_session(_name: str) -> None:
    """Know no name: the :data:`SessionOf` without TOKENS_FILE."""


class Session(NamedTuple):
    """Who logged in: ``nonce`` is different for each login. ``expired``: it was ours and has ended.

    ``authorization`` is what it presents to the services.
    """

    nonce: str
    expired: bool
    authorization: str = ""


UserOf = Callable[[str], str | None]
"""Maps the name of a user to what its requests present to the services; ``None``: there is no such user."""


class ProxyUsers:
    """Users whom trusted proxies name in ``header``; an empty one: none. See ADR 0060.

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
        """Return the user that a trusted proxy names, and what it presents to the services; ``None``: nobody known.

        A proxy that adds its header to one of the caller names two, and so nobody.
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
        key = admin_token.encode() or secrets.token_bytes(32)
        self._key = key
        self._signed = _signer(key, _SALT)
        self._links = _signer(key, _LINK_SALT)
        self._used_links: dict[str, float] = {}
        """Nonce of each link that was used → when it ends. Only who holds the admin token can make it grow."""

    @property
    def possible(self) -> bool:
        """Whether one can log in: there is an admin token."""
        return bool(self._admin_token)

    def nonce(self) -> str:
        """Return an unguessable text."""
        return secrets.token_hex(NONCE_BYTES)

    def link_code(self, host: str) -> str:
        """Return the code of a login link for ``host``, a ``HOST:PORT``."""
        return str(self._links.dumps([self.nonce(), int(self._now_s()) + LINK_S, host]))

    def opened_by(self, code: str, host: str) -> bool:
        """Whether a request to ``host`` may open a session with the code of a link; it is used up if so."""
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
        """The cookie of a new session, for the token of this name; empty is the admin token."""
        bound = [name, self._mark(name)] if name else []
        return str(self._signed.dumps([self.nonce(), int(self._now_s()) + SESSION_S, *bound]))

    def read(self, cookie: str) -> Session | None:
        """The session of a cookie; ``None`` when it is not one of ours."""
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
        """Return what binds a session to the present token of ``name``.

        Keyed, since the cookie is not encrypted: who copied it could else test guesses of the token offline.
        """
        found = self._session_of(name)
        digest = b"" if found is None else found[0]
        return hmac.new(self._admin_token.encode(), digest, sha256).hexdigest()[:32]

    def user_nonce(self, name: str) -> str:
        """Return what binds forms to a user whom a proxy names. Keyed: a page of another site could else make it."""
        return hmac.new(self._key, _USER_SALT + name.encode(), sha256).hexdigest()[
            : 2 * NONCE_BYTES
        ]

    def form_token(self, nonce: str) -> str:
        """Return the CSRF token of a visitor's forms, derived from the cookie.

        It does not depend on the admin token: a visitor of the login form could otherwise test guesses offline.
        """
        return hmac.new(_FORM_KEY, nonce.encode("utf-8", "surrogatepass"), sha256).hexdigest()


def _signer(key: bytes, salt: str) -> URLSafeSerializer:
    return URLSafeSerializer(
        key, salt=salt, signer_kwargs={"key_derivation": "hmac", "digest_method": sha256}
    )


def login_link(scheme: str, http_address: str, admin_token: str, now_s: float) -> str:
    """Return the address of a page that logs in who opens it first, within :data:`LINK_S` of ``now_s``, Unix time."""
    host = reachable(http_address)
    code = Sessions(admin_token, lambda: now_s).link_code(host)
    return f"{scheme}://{host}/login?code={code}"
