"""Sessions of people who logged in, and the tokens in their forms. Holds nothing for each: a cookie says all.

A session is a signed cookie whose key comes from the ADMIN_TOKEN: every node with that token takes it, and a new token
ends all of them. Without an ADMIN_TOKEN there are no sessions, and forms are bound to a random cookie. See ADR 0028.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Final, NamedTuple

from itsdangerous import BadSignature, URLSafeSerializer

SESSION_S: Final = 8 * 3600
"""A session ends that long after its login, used or not."""

NONCE_BYTES: Final = 16
MAX_COOKIE_CHARS: Final = 512

_SALT: Final = "ratelimitd page session"
_FORM_KEY: Final = b"ratelimitd page forms"


class Session(NamedTuple):
    """Who logged in: ``nonce`` is different for each login. ``expired``: it was ours and has ended."""

    nonce: str
    expired: bool


class Sessions:
    """Opens and recognises sessions. ``now_s`` is Unix time; ``random_bytes`` is there for tests."""

    def __init__(
        self,
        admin_token: str,
        now_s: Callable[[], float],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._admin_token = admin_token
        self._now_s = now_s
        self._random_bytes = random_bytes
        self._signed = URLSafeSerializer(
            admin_token or random_bytes(32),
            salt=_SALT,
            signer_kwargs={"key_derivation": "hmac", "digest_method": sha256},
        )

    @property
    def possible(self) -> bool:
        """Whether one can log in: there is an ADMIN_TOKEN."""
        return bool(self._admin_token)

    @property
    def authorization(self) -> str:
        """What somebody who logged in presents to the services."""
        return f"Bearer {self._admin_token}"

    def nonce(self) -> str:
        """A text that nobody can guess."""
        return self._random_bytes(NONCE_BYTES).hex()

    def opened_with(self, token: str) -> bool:
        """Whether this is the ADMIN_TOKEN; takes as long for any other text."""
        given, wanted = (
            sha256(text.encode("utf-8", "surrogatepass")).digest()
            for text in (token, self._admin_token)
        )
        return hmac.compare_digest(given, wanted) and self.possible

    def open(self) -> str:
        """The cookie of a new session."""
        return str(self._signed.dumps([self.nonce(), int(self._now_s()) + SESSION_S]))

    def read(self, cookie: str) -> Session | None:
        """The session of a cookie; ``None`` when it is not one of ours."""
        if not self.possible or len(cookie) > MAX_COOKIE_CHARS:
            return None
        try:
            nonce, expires_at_s = self._signed.loads(cookie)
        except BadSignature:
            return None
        return Session(nonce, expired=self._now_s() >= expires_at_s)

    def form_token(self, nonce: str) -> str:
        """What the forms of a visitor carry: only who has their cookie can have it.

        Knows nothing of the ADMIN_TOKEN: whoever sees the form to log in could else find out at home, with as many
        tries as they like, whether a guess is right.
        """
        return hmac.new(_FORM_KEY, nonce.encode("utf-8", "surrogatepass"), sha256).hexdigest()
