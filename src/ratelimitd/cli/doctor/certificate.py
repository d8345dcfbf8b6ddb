"""Until when a certificate is valid, read from its DER (RFC 5280 section 4.1). Judges nothing else of it.

The standard library shows the dates of authorities only, or of a peer's certificate after a handshake.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final, NamedTuple

CERTIFICATE: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)

_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_LONG_LENGTH: Final = 0x80
_YEARS_OF_1900: Final = 50
"""A year of two digits from this on is of the last century."""

_FIELDS_BEFORE_VALIDITY: Final = 3
"""Serial number, signature algorithm and issuer."""


class _Element(NamedTuple):
    """An element of DER: its tag, its content, and what follows it."""

    tag: int
    content: bytes
    rest: bytes


def expiries(pem: str) -> list[datetime]:
    """When each certificate of a PEM text expires, in their order.

    Raises:
        ValueError: one of them is none.
    """
    return [not_after(ssl.PEM_cert_to_DER_cert(match[0])) for match in CERTIFICATE.finditer(pem)]


def not_after(der: bytes) -> datetime:
    """When a certificate expires.

    Raises:
        ValueError: it is none.
    """
    try:
        rest = _element(_element(der).content).content
        if _element(rest).tag == _VERSION:
            rest = _element(rest).rest
        for _ in range(_FIELDS_BEFORE_VALIDITY):
            rest = _element(rest).rest
        not_before = _element(_element(rest).content)
        return _time(_element(not_before.rest))
    except (IndexError, UnicodeDecodeError):
        message = "not a certificate"
        raise ValueError(message) from None


def _element(der: bytes) -> _Element:
    tag, length, start = der[0], der[1], 2
    if length & _LONG_LENGTH:
        start += length & ~_LONG_LENGTH
        length = int.from_bytes(der[2:start])
    return _Element(tag, der[start : start + length], der[start + length :])


def _time(element: _Element) -> datetime:
    text = element.content.decode("ascii")
    if element.tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _YEARS_OF_1900 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
