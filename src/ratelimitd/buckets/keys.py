"""The only place a bucket key is made.

A bucket belongs to (identifier type, identifier, endpoint, algorithm, window): an edit of algorithm or window starts
afresh because it leads to another key (ADR 0008, I14). In memory the key is the identifier followed by a keyed digest
of the other four, its *scope*; on disk it is a keyed digest of that, so that no identifier is ever written (ADR 0014,
0015). Keying with a secret keeps callers from constructing collisions.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from ratelimitd.model import IdentifierType, Rule

SCOPE_BYTES: Final = 9
"""72 bits tell the scopes of a node apart; with it a 38-character identifier still fits an 80-byte bytes object."""

STORED_KEY_BYTES: Final = 16
"""128 bits, as for the keys of a shared store."""

ADMIN_TOKEN_DIGEST_BYTES: Final = 4
FINGERPRINT_BYTES: Final = 8

IDENTIFIER_DIGEST_BYTES: Final = 8
"""Enough to tell the few that are shown to people apart."""

_FINGERPRINT_PERSON: Final = b"rl-nodes"
_ADMIN_TOKEN_PERSON: Final = b"rl-admin"
_IDENTIFIER_PERSON: Final = b"rl-ident"
_SCOPE_PERSON: Final = b"rl-scope"
_STORED_PERSON: Final = b"rl-stored"


class BucketKeys:
    """Makes keys under one secret (16 to 64 bytes; nodes that share state share it)."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def secret(self) -> bytes:
        """The secret, for what is written to this node's own disk."""
        return self._secret

    def rekey(self, secret: bytes) -> None:
        """Use another secret: for a node that hears of it after its start, and before it has made any key."""
        self._secret = secret

    def fingerprint(self) -> str:
        """What tells whether two nodes have one secret, and nothing of the secret itself."""
        digest = blake2b(
            digest_size=FINGERPRINT_BYTES, key=self._secret, person=_FINGERPRINT_PERSON
        )
        return digest.hexdigest()

    def admin_token_digest(self, token: str) -> str:
        """Return what tells whether two nodes have one admin token; empty for none.

        It has 32 bits, so that a copy of it confirms a guess of a weak token and never singles a strong one out.
        """
        if not token:
            return ""
        digest = blake2b(
            token.encode(),
            digest_size=ADMIN_TOKEN_DIGEST_BYTES,
            key=self._secret,
            person=_ADMIN_TOKEN_PERSON,
        )
        return digest.hexdigest()

    def scope(self, rule: Rule, endpoint: str) -> bytes:
        """What is common to the keys of all identifiers on ``endpoint`` while ``rule`` decides there.

        The endpoint is the caller's, not the rule's: buckets of the global rule are kept per endpoint. It is last
        and the other parts cannot contain the separator, so that no two scopes share a text.
        """
        text = f"{rule.identifier_type}\0{rule.algorithm}\0{rule.window_seconds}\0{endpoint}"
        return blake2b(
            text.encode(), digest_size=SCOPE_BYTES, key=self._secret, person=_SCOPE_PERSON
        ).digest()

    def stored(self, key: bytes) -> bytes:
        """The name under which the bucket of ``key`` (identifier + scope) is written."""
        return blake2b(
            key, digest_size=STORED_KEY_BYTES, key=self._secret, person=_STORED_PERSON
        ).digest()

    def identifier_digest(self, identifier: bytes, identifier_type: IdentifierType) -> str:
        """What tells an identifier from others on every node, and nothing of it to who has not the secret."""
        text = f"{identifier_type}\0".encode() + identifier
        return blake2b(
            text, digest_size=IDENTIFIER_DIGEST_BYTES, key=self._secret, person=_IDENTIFIER_PERSON
        ).hexdigest()
