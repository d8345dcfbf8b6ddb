"""The page token of ListRateLimits: where the next page starts, sealed so that only our own tokens are taken.

Pure. A token is bound to the filters it was made under, and holds on every node that shares the key.
"""

from __future__ import annotations

import base64
import hmac
from hashlib import blake2b
from typing import Final, NamedTuple

from ratelimitd.errors import FieldViolation, RuleInvalidError

SEAL_BYTES: Final = 16

# No endpoint or identifier type contains a control character, so this one parts them.
_PART: Final = "\x00"


class ListQuery(NamedTuple):
    """The filters of a listing; empty = all."""

    endpoint: str
    identifier_type: str


class Position(NamedTuple):
    """The last rule of a page: the next page starts behind it."""

    endpoint: str
    identifier_type: str


def page_token(position: Position, query: ListQuery, key: bytes) -> str:
    """The token that continues ``query`` behind ``position``. ``key`` is 1 to 64 bytes."""
    text = _PART.join(position).encode()
    return base64.urlsafe_b64encode(_seal(text, query, key) + text).decode().rstrip("=")


def position_of(token: str, query: ListQuery, key: bytes) -> Position:
    """Where a token says to go on.

    Raises:
        RuleInvalidError: it is not a token that was made with this key for this query.
    """
    try:
        padding = "=" * (-len(token) % 4)
        sealed = base64.b64decode(token.encode("ascii") + padding.encode(), b"-_", validate=True)
        endpoint, identifier_type = sealed[SEAL_BYTES:].decode().split(_PART)
        position = Position(endpoint, identifier_type)
        # Made anew and compared whole: base64 can spell the same bytes in several ways, and only one is ours.
        if hmac.compare_digest(token, page_token(position, query, key)):
            return position
    except ValueError:
        pass
    violation = FieldViolation("page_token", "must be a token of the page before, with its filters")
    raise RuleInvalidError(violation)


def _seal(text: bytes, query: ListQuery, key: bytes) -> bytes:
    bound = _PART.join(query).encode("utf-8", "surrogateescape")
    keyed = blake2b(key=key, digest_size=SEAL_BYTES, person=b"page token")
    keyed.update(len(bound).to_bytes(4, "big") + bound + text)
    return keyed.digest()
