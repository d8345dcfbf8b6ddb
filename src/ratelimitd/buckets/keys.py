"""Makes the keys of buckets.

A bucket belongs to (identifier type, identifiers, endpoint, algorithm, window, name of the limit). An edit of algorithm
or window therefore leads to another key and a fresh bucket (ADR 0008, I14), and so does each window of a calendar. In
memory the key is the identifier followed by a keyed digest of the other parts, its *scope*. On disk it is a keyed
digest of that, so that no identifier is written (ADR 0014, 0015). The secret prevents callers from constructing
collisions.
"""

from __future__ import annotations

import hmac
import operator
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from ratelimitd.model import DEFAULT_LIMIT, Limit, Rule

SCOPE_BYTES: Final = 9
"""72 bits distinguish the scopes of a node; a 38-character identifier still fits an 80-byte object."""

STORED_KEY_BYTES: Final = 16
"""128 bits, as for the keys of a shared store."""

ADMIN_TOKEN_DIGEST_BYTES: Final = 4
FINGERPRINT_BYTES: Final = 8

IDENTIFIER_DIGEST_BYTES: Final = 8
"""Enough to distinguish the few identifiers that are displayed."""

TRACE_KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 16
SEAL_BYTES: Final = NONCE_BYTES + TAG_BYTES

_LENGTH_BYTES: Final = 2

_FINGERPRINT_PERSON: Final = b"rl-nodes"
_ADMIN_TOKEN_PERSON: Final = b"rl-admin"
_IDENTIFIER_PERSON: Final = b"rl-ident"
_SCOPE_PERSON: Final = b"rl-scope"
_STORED_PERSON: Final = b"rl-stored"
_TRACE_PERSON: Final = b"rl-trace"
_STREAM_PERSON: Final = b"rl-seal-stream"
_TAG_PERSON: Final = b"rl-seal-tag"


def joined(identifiers: Sequence[bytes]) -> bytes:
    """Join a combination into one identifier, unique among combinations of the same length."""
    if len(identifiers) == 1:
        return identifiers[0]
    return b"".join(len(one).to_bytes(_LENGTH_BYTES, "big") + one for one in identifiers)


def taken_apart(identifier: bytes, count: int) -> Sequence[bytes]:
    """Return the ``count`` identifiers of a joined one."""
    if count == 1:
        return (identifier,)
    identifiers = []
    while identifier:
        end = _LENGTH_BYTES + int.from_bytes(identifier[:_LENGTH_BYTES], "big")
        identifiers.append(identifier[_LENGTH_BYTES:end])
        identifier = identifier[end:]
    return identifiers


class BucketKeys:
    """Makes keys with one secret of 16 to 64 bytes; nodes that share state have the same one."""

    __slots__ = ("_new_stored", "_secret")

    def __init__(self, secret: bytes) -> None:
        self.rekey(secret)

    @property
    def secret(self) -> bytes:
        """The secret, for files on this node's own disk."""
        return self._secret

    def rekey(self, secret: bytes) -> None:
        """Replace the secret, before the first key is made."""
        self._secret = secret
        # A copy takes half the time of a new hash, which first processes the secret.
        self._new_stored = blake2b(
            digest_size=STORED_KEY_BYTES, key=secret, person=_STORED_PERSON
        ).copy

    def fingerprint(self) -> str:
        """Return a digest that nodes with the same secret share, and that does not reveal it."""
        return self._digest(_FINGERPRINT_PERSON, b"", FINGERPRINT_BYTES).hex()

    def admin_token_digest(self, token: str) -> str:
        """Return a digest that nodes with the same secret and admin token share; empty without a token.

        32 bits: it can confirm a guess of a weak token, and does not identify a strong one.
        """
        if not token:
            return ""
        return self._digest(_ADMIN_TOKEN_PERSON, token.encode(), ADMIN_TOKEN_DIGEST_BYTES).hex()

    def seal(self, text: bytes) -> bytes:
        """Encrypt a text for nodes with the same secret; the result is :data:`SEAL_BYTES` longer."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = self._masked(text, nonce)
        return nonce + hidden + self._tag(nonce + hidden)

    def unseal(self, sealed: bytes) -> bytes | None:
        """Return the text sealed by a node with the same secret; ``None`` if it is not such a text or was changed."""
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if len(sealed) < SEAL_BYTES or not hmac.compare_digest(tag, self._tag(body)):
            return None
        return self._masked(body[NONCE_BYTES:], body[:NONCE_BYTES])

    def _masked(self, text: bytes, nonce: bytes) -> bytes:
        """XOR a text with a key stream: keyed digests of the nonce and a counter."""
        blocks = range(-(-len(text) // blake2b.MAX_DIGEST_SIZE))
        stream = b"".join(
            self._digest(_STREAM_PERSON, nonce + number.to_bytes(4, "big"), blake2b.MAX_DIGEST_SIZE)
            for number in blocks
        )
        return bytes(map(operator.xor, text, stream))

    def _tag(self, body: bytes) -> bytes:
        return self._digest(_TAG_PERSON, body, TAG_BYTES)

    def scope(
        self, rule: Rule, endpoint: str, limit: Limit | None = None, start_s: int = 0
    ) -> bytes:
        """Return the key suffix on ``endpoint`` of a limit of ``rule``, by default the first.

        The endpoint is the check's, because the global rule has a bucket for each; it is ``**`` for a rule for all
        endpoints. No part contains the separator, so no two scopes share a text. Unnamed limits keep the keys of
        releases without names. ``start_s`` is the start of a calendar window, in Unix seconds.
        """
        limit = limit or rule
        window = str(limit.window_seconds)
        if limit.calendar is not None:
            period, time_zone, anchor_day = limit.calendar
            window = f"{period} {time_zone} {anchor_day} {start_s}"
        text = f"{rule.identifier_type}\0{limit.algorithm}\0{window}\0{endpoint}"
        if limit.name != DEFAULT_LIMIT:
            text += f"\0{limit.name}"
        return self._digest(_SCOPE_PERSON, text.encode(), SCOPE_BYTES)

    def stored(self, key: bytes) -> bytes:
        """Return the name of ``key`` (identifier + scope) in files and in the shared state."""
        name = self._new_stored()
        name.update(key)
        return name.digest()

    def trace_key(self, trace: bytes) -> bytes:
        """Return the key for the digests of one trace; ``trace`` alone does not suffice to make or link them."""
        return self._digest(_TRACE_PERSON, trace, TRACE_KEY_BYTES)

    def identifier_digest(self, identifier: bytes, identifier_type: str) -> str:
        """Return a digest that nodes with the same secret share, and that reveals nothing without the secret."""
        text = f"{identifier_type}\0".encode() + identifier
        return self._digest(_IDENTIFIER_PERSON, text, IDENTIFIER_DIGEST_BYTES).hex()

    def _digest(self, person: bytes, text: bytes, size: int) -> bytes:
        return blake2b(text, digest_size=size, key=self._secret, person=person).digest()
