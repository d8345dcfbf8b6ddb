"""Identifiers as they may be shown: enough to tell one from another, not enough to know or to use it. Pure."""

from __future__ import annotations

from typing import Final

from ratelimitd.model import IdentifierType

SHOWN_CHARACTERS: Final = 4
"""At most so many of the first characters are shown, and at most a quarter of all."""

HIDDEN: Final = "…"


def masked(identifier: bytes, identifier_type: IdentifierType) -> str:
    """The beginning of an identifier: half of an IPv4 address, two groups of an IPv6 address, else characters."""
    text = identifier.decode(errors="replace")
    if identifier_type is IdentifierType.IP:
        separator = ":" if ":" in text else "."
        return separator.join((*text.split(separator)[:2], HIDDEN))
    return text[: min(SHOWN_CHARACTERS, len(text) // 4)] + HIDDEN
