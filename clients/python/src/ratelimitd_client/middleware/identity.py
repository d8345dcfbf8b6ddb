"""The identities that a request is counted for. Pure. See ADR 0035 and ADR 0046."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ratelimitd_client.check import MAX_ALSO, MAX_IDENTIFIER_BYTES, require_text, require_type
from ratelimitd_wire.addresses import address_of


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request is counted for.

    An identity that is empty, or of type ``"ip"`` without an address, counts as none. That is no error, since a caller
    may have sent it, and must not be let through for it.

    Args:
        identifier: a user id, an address or an API key. If it is longer than 256 bytes, its SHA-256 is sent.
        identifier_type: ``"user"``, ``"ip"``, ``"api_key"`` or a type that the nodes declare: selects the rules that
            apply.

    Raises:
        ValueError, TypeError: an argument is not valid. The message does not contain its value.
    """

    identifier: str
    identifier_type: str = "user"

    def __post_init__(self) -> None:
        require_type(self.identifier_type)
        identifier = require_text("identifier", self.identifier)
        if self.identifier_type == "ip":
            address = address_of(identifier)
            object.__setattr__(self, "identifier", "" if address is None else str(address))
        elif len(identifier) > MAX_IDENTIFIER_BYTES or not identifier.isascii():
            object.__setattr__(self, "identifier", _fitting(identifier))

    @property
    def is_empty(self) -> bool:
        """Whether the identity is empty."""
        return not self.identifier


Identities: TypeAlias = Mapping[str, str | None] | Iterable[Identity]
"""Who else a request is counted for: identifiers by their type, where ``None`` counts as empty, or objects."""


def identifiers_by_type(given: object) -> dict[str, str]:
    """Return the identities that a function for ``identities`` returned, as a check takes them: type → identifier.

    Empty ones are left out, and the first of each type counts.

    Raises:
        ValueError, TypeError: ``given`` is something else, or too many. The message does not contain its value.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        given = [Identity("" if given[kind] is None else given[kind], kind) for kind in given]
    found: dict[str, str] = {}
    for identity in given if isinstance(given, Iterable) else (given,):
        if not isinstance(identity, Identity):
            what = type(identity).__name__
            message = f"identities must return a mapping or Identity objects, not {what}"
            raise TypeError(message)
        if not identity.is_empty:
            found.setdefault(identity.identifier_type, identity.identifier)
    if len(found) > MAX_ALSO:
        message = f"identities must return at most {MAX_ALSO}"
        raise ValueError(message)
    return found


def _fitting(text: str) -> str:
    """Return the text if a check can carry it, else ``sha256:`` and its hash."""
    try:
        if len(text.encode()) <= MAX_IDENTIFIER_BYTES:
            return text
    except UnicodeEncodeError:  # a server may have decoded octets that are not UTF-8
        pass
    return f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
