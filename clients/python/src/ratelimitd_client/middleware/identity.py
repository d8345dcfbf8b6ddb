"""Who is counted: an identifier and its type, as limits have them.

Pure. What does not fit into a check is counted under its hash, so that no caller escapes by being long.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from ratelimitd_client.check import IDENTIFIER_TYPES, MAX_IDENTIFIER_BYTES
from ratelimitd_client.middleware.client_address import address_of

IdentifierType = Literal["user", "ip", "api_key"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request is counted for.

    One that is empty, or of type ``"ip"`` and no address, is no identity: the request counts as if there were none.
    It is no error, since it may be what a caller has sent, who must not be let through for it.

    Args:
        identifier: a user id, an address or an API key. Longer than 256 bytes, its SHA-256 is sent.
        identifier_type: ``"user"``, ``"ip"`` or ``"api_key"``: which of the rules hold.

    Raises:
        ValueError, TypeError: an argument is not valid; its value is not in the message.
    """

    identifier: str
    identifier_type: IdentifierType = "user"

    def __post_init__(self) -> None:
        if self.identifier_type not in IDENTIFIER_TYPES:
            message = f"identifier_type must be one of {', '.join(IDENTIFIER_TYPES)}"
            raise ValueError(message)
        _require_text(self.identifier)
        if self.identifier_type == "ip":
            address = address_of(self.identifier)
            object.__setattr__(self, "identifier", "" if address is None else str(address))
        elif not fits_plainly(self.identifier):
            object.__setattr__(self, "identifier", fitting(self.identifier))

    @property
    def is_nobody(self) -> bool:
        """Whether there is nothing to count it under."""
        return not self.identifier


def fits_plainly(text: str) -> bool:
    """Whether it is seen at a glance that a check can carry it, as it is of nearly all."""
    return len(text) <= MAX_IDENTIFIER_BYTES and text.isascii()


def fitting(text: str) -> str:
    """The text itself if a check can carry it, else ``sha256:`` and its hash."""
    # A server may make a text of octets that are no UTF-8; whatever it made of them is hashed.
    octets = text.encode(errors="surrogatepass")
    if len(octets) <= MAX_IDENTIFIER_BYTES and (text.isascii() or _is_utf8(octets)):
        return text
    return f"sha256:{hashlib.sha256(octets).hexdigest()}"


def _require_text(identifier: object) -> None:
    if not isinstance(identifier, str):
        message = f"identifier must be text, not {type(identifier).__name__}"
        raise TypeError(message)


def _is_utf8(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True
