"""What the descriptors of a request ask: each is one check.

One entry says who is limited: the first whose key is in the node's table of identifiers. The endpoint is the domain and
the other entries in their order, ``domain/key=value/…``. Without such an entry the last value says who, as an API key,
and every entry is part of the endpoint. Pure. See ADR 0033.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ratelimitd.errors import CheckInvalidError, FieldViolation
from ratelimitd.model import Check, IdentifierType
from ratelimitd.services.convert import check_of
from ratelimitd.services.envoy.messages import WireDescriptor, WireEntry, WireRequest

MAX_DESCRIPTORS: Final = 32
"""Of a request: judged at a stretch, in 0.5 to 0.7 ms. Envoy's have seldom more than three."""

MAX_ENTRIES: Final = 16
"""Of a descriptor."""

UNNAMED_TYPE: Final = IdentifierType.API_KEY
"""Whom a descriptor is about in which no entry says so."""

Identifiers = Mapping[bytes, IdentifierType]
"""Key of an entry → the type of identifier that its value is."""


@dataclass(slots=True)
class _AsCheck:
    """A descriptor as a ``RateLimitRequest`` of our own contract, so that one place says what a valid check is."""

    identifier: bytes
    identifier_type: bytes
    endpoint: bytes
    tokens_requested: int
    timestamp: int
    peek: bool


def checks_of(request: WireRequest, identifiers: Identifiers) -> list[Check]:
    """The checks that a request asks for, one for each descriptor.

    Raises:
        CheckInvalidError: names every violated field of the first descriptor that has one.
    """
    if not request.domain:
        raise CheckInvalidError(FieldViolation("domain", "must not be empty"))
    count = len(request.descriptors)
    if not 1 <= count <= MAX_DESCRIPTORS:
        message = f"must be 1 to {MAX_DESCRIPTORS} descriptors"
        raise CheckInvalidError(FieldViolation("descriptors", message))
    return [
        _check(request, descriptor, identifiers, f"descriptors[{index}]")
        for index, descriptor in enumerate(request.descriptors)
    ]


def _check(
    request: WireRequest, descriptor: WireDescriptor, identifiers: Identifiers, path: str
) -> Check:
    violations = [*_violations(descriptor, path)]
    if violations:
        raise CheckInvalidError(*violations)
    entries = descriptor.entries
    named = next((i for i, entry in enumerate(entries) if entry.key in identifiers), None)
    who = len(entries) - 1 if named is None else named
    rest = [entry for index, entry in enumerate(entries) if index != named]
    own_hits = descriptor.HasField("hits_addend")
    hits = descriptor.hits_addend.value if own_hits else request.hits_addend
    check = _AsCheck(
        identifier=entries[who].value,
        identifier_type=identifiers.get(entries[who].key, UNNAMED_TYPE).encode(),
        endpoint=_endpoint(request.domain, rest),
        tokens_requested=hits,
        timestamp=0,
        peek=own_hits and not hits,
    )
    try:
        return check_of(check)
    except CheckInvalidError as error:
        places = {
            "identifier": f"{path}.entries[{who}].value",
            "endpoint": f"{path}.entries" if rest else "domain",
            "tokens_requested": f"{path}.hits_addend" if own_hits else "hits_addend",
        }
        placed = (FieldViolation(places[field], text) for field, text in error.violations)
        raise CheckInvalidError(*placed) from None


def _violations(descriptor: WireDescriptor, path: str) -> Iterator[FieldViolation]:
    count = len(descriptor.entries)
    if not 1 <= count <= MAX_ENTRIES:
        yield FieldViolation(f"{path}.entries", f"must be 1 to {MAX_ENTRIES} entries")
        return
    for index, entry in enumerate(descriptor.entries):
        if not entry.key:
            yield FieldViolation(f"{path}.entries[{index}].key", "must not be empty")
    if descriptor.is_negative_hits:
        yield FieldViolation(f"{path}.is_negative_hits", "hits are not given back")


def _endpoint(domain: bytes, entries: Sequence[WireEntry]) -> bytes:
    return b"/".join([domain, *(entry.key + b"=" + entry.value for entry in entries)])
