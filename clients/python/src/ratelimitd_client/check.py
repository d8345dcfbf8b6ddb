"""Checks, their validation and their encoding. Pure. The rules are those of docs/protocol.md of the repository.

A check is encoded once. Of its fields only the identifier differs between most checks: it is written first, and the
encoding of the others is cached. See ADR 0038.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ratelimiter.v1 import ratelimiter_pb2 as pb

MAX_BATCH: Final = 1_000
"""Most checks a node takes in one batch."""

NO_IDENTITIES: Final[Mapping[str, str]] = MappingProxyType({})
"""No further identities."""

MAX_ALSO: Final = 7
MAX_IDENTIFIER_BYTES: Final = 256
MAX_ENDPOINT_CHARS: Final = 255
MAX_COST: Final = 2**31 - 1
MAX_TIMESTAMP: Final = 2**63 - 1
MAX_WAIT_S: Final = 60.0
MS_PER_S: Final = 1_000
MAX_TTL_S: Final = 3_600
MAX_TIMEOUT_S: Final = 3_600
MAX_HOLD_ID: Final = 64

PEEK: Final = pb.RateLimitRequest(peek=True).SerializeToString()
"""Makes a peek of an encoded check that it is appended to."""

CACHE_SIZE: Final = 1_024
"""Cached encodings of endpoint, cost and so on: more than an application has, and at most 3 MB."""

_FIELD_1: Final = 0x0A
_MORE: Final = 0x80
"""The bit of a varint's octet that announces another."""

_HEADS: Final = tuple(
    bytes((_FIELD_1, size) if size < _MORE else (_FIELD_1, size % _MORE | _MORE, size // _MORE))
    for size in range(4_096)
)
"""Tag and length of field 1 by its length: the identifier in a check, a check in a batch or a hold. No check is longer
than 3,412 octets."""

_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Check:
    """A request for permission to spend ``cost`` tokens of an identifier on an endpoint.

    Args:
        identifier: a user id, an address or an API key; 1 to 256 bytes of UTF-8.
        identifier_type: ``"user"``, ``"ip"``, ``"api_key"`` or a type that the nodes declare.
        endpoint: the route template (``/orders/{id}``), not the path: each path would get its own bucket.
        cost: tokens to spend, at least 1.
        timestamp: the caller's Unix time in s, ms, µs or ns; with 0 the node's time counts.
        peek: return the same decision without spending tokens.
        also: further identifiers that the request counts for, by their type; at most 7.

    Raises:
        ValueError, TypeError: an argument is not valid. The message does not contain its value.
    """

    identifier: str
    identifier_type: str
    endpoint: str
    cost: int = 1
    timestamp: int = 0
    peek: bool = False
    also: Mapping[str, str] = field(default_factory=lambda: NO_IDENTITIES, hash=False)

    def __post_init__(self) -> None:
        self.message()

    def message(self) -> bytes:
        """Return the encoded check."""
        return request_of(
            self.identifier,
            self.identifier_type,
            self.endpoint,
            cost=self.cost,
            timestamp=self.timestamp,
            peek=self.peek,
            also=self.also,
        )


def request_of(
    identifier: str,
    identifier_type: str,
    endpoint: str,
    *,
    cost: int = 1,
    timestamp: int = 0,
    peek: bool = False,
    also: Mapping[str, str] = NO_IDENTITIES,
    max_wait_s: float = 0.0,
) -> bytes:
    """Return an encoded check, without creating a :class:`Check`, whose arguments these are.

    ``max_wait_s`` is how long the caller would wait to be allowed, in seconds, at most 60.

    Raises:
        ValueError, TypeError: an argument is not valid. The message does not contain its value.
    """
    try:
        rest = _cached_rest_of(identifier_type, endpoint, cost, timestamp, peek)
    except TypeError:
        # An argument may have no hash; this call raises the error that names it.
        rest = _rest_of(identifier_type, endpoint, cost, timestamp, peek)
    data = _identifier_bytes(identifier, identifier_type)
    if also:
        rest += _also_of(identifier_type, also)
    if max_wait_s:
        rest += _max_wait_of(max_wait_s)
    return _HEADS[len(data)] + data + rest


def identities_of(also: Mapping[str, str]) -> list[pb.Identity]:
    """Return further identities as the contract's messages."""
    return [
        pb.Identity(identifier_type=kind, identifier=identifier)
        for kind, identifier in also.items()
    ]


def _also_of(identifier_type: str, also: object) -> bytes:
    """Validate and encode further identities."""
    if not isinstance(also, Mapping):
        message = f"also must be a mapping of types to identifiers, not {type(also).__name__}"
        raise TypeError(message)
    if len(also) > MAX_ALSO or identifier_type in also:
        message = f"also must be up to {MAX_ALSO} identifiers of other types"
        raise ValueError(message)
    try:
        for kind, identifier in also.items():
            require_type(kind)
            _identifier_bytes(identifier, kind)
    except (TypeError, ValueError) as error:
        message = f"also: {error}"
        raise type(error)(message) from None
    return pb.RateLimitRequest(also=identities_of(also)).SerializeToString()


def _max_wait_of(max_wait_s: float) -> bytes:
    """Validate and encode the longest wait; part of a millisecond is left out."""
    require_seconds("max_wait_s", max_wait_s, MAX_WAIT_S, or_0=True)
    return pb.RateLimitRequest(max_wait_ms=int(max_wait_s * MS_PER_S)).SerializeToString()


def requests_of(checks: Iterable[Check]) -> list[bytes]:
    """Return the encoded messages of a batch.

    Raises:
        ValueError: there are more checks than a node takes.
        TypeError: one is no :class:`Check`.
    """
    requests = [_message_of(check) for check in checks]
    if len(requests) > MAX_BATCH:
        message = f"a batch holds up to {MAX_BATCH} checks, not {len(requests)}"
        raise ValueError(message)
    return requests


def _message_of(check: object) -> bytes:
    if not isinstance(check, Check):
        message = f"checks must be of Check, not {type(check).__name__}"
        raise TypeError(message)
    return check.message()


def hold_of(request: bytes, ttl_s: int, hold_id: str, *, lease: bool = False) -> bytes:
    """Return the encoded message of a hold of an encoded check.

    Raises:
        ValueError, TypeError: an argument is not valid.
    """
    require_number("ttl_s", ttl_s, 1, MAX_TTL_S)
    require_text("hold_id", hold_id)
    if len(hold_id) > MAX_HOLD_ID or not (hold_id.isascii() and hold_id.isprintable()):
        message = f"hold_id must be at most {MAX_HOLD_ID} printable ASCII characters"
        raise ValueError(message)
    rest = pb.HoldRequest(hold_id=hold_id, ttl_seconds=ttl_s, lease=lease).SerializeToString()
    return _HEADS[len(request)] + request + rest


def batch_of(requests: Iterable[bytes]) -> bytes:
    """Return the encoded message of several checks."""
    heads = _HEADS
    return b"".join([part for request in requests for part in (heads[len(request)], request)])


def _rest_of(  # noqa: PLR0917 - the cache key
    identifier_type: str,
    endpoint: str,
    cost: int,
    timestamp: int,
    peek: bool,  # noqa: FBT001 - the cache key
) -> bytes:
    """Validate and encode all fields except the identifier."""
    require_type(identifier_type)
    _require_endpoint(endpoint)
    require_number("cost", cost, 1, MAX_COST)
    require_number("timestamp", timestamp, 0, MAX_TIMESTAMP)
    _require_bool("peek", peek)
    return pb.RateLimitRequest(
        identifier_type=identifier_type,
        endpoint=endpoint,
        tokens_requested=cost,
        timestamp=timestamp,
        peek=peek,
    ).SerializeToString()


# Typed, since 1.0 equals 1 and is not a valid cost.
_cached_rest_of: Final = functools.lru_cache(CACHE_SIZE, typed=True)(_rest_of)


def require_type(identifier_type: object) -> None:
    """Raise ValueError for what no request can name as an identifier type."""
    is_name = isinstance(identifier_type, str) and _TYPE.fullmatch(identifier_type)
    if not is_name or identifier_type == "all":
        message = "identifier_type must be user, ip, api_key or a type that the nodes declare"
        raise ValueError(message)


def _identifier_bytes(identifier: object, identifier_type: str) -> bytes:
    text = require_text("identifier", identifier)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        message = "identifier must be valid in UTF-8"
        raise ValueError(message) from None
    if not 0 < len(data) <= MAX_IDENTIFIER_BYTES:
        message = f"identifier must be 1 to {MAX_IDENTIFIER_BYTES} bytes"
        raise ValueError(message)
    if identifier_type == "ip":
        try:
            ipaddress.ip_address(text.replace("%", "no zone"))
        except ValueError:
            message = "identifier must be an IP address without a zone"
            raise ValueError(message) from None
    return data


def _require_endpoint(endpoint: object) -> None:
    endpoint = require_text("endpoint", endpoint)
    problem = None
    if not 0 < len(endpoint) <= MAX_ENDPOINT_CHARS:
        problem = f"be 1 to {MAX_ENDPOINT_CHARS} characters"
    elif endpoint in {"*", "**"} or _CONTROL_CHARACTER.search(endpoint):
        problem = "not be * or ** nor contain control characters"
    elif _SURROGATE.search(endpoint):
        problem = "be valid in UTF-8"
    if problem is not None:
        message = f"endpoint must {problem}"
        raise ValueError(message)


def require_number(name: str, value: object, least: int, most: int) -> None:
    """Raise ValueError or TypeError for what is no whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        message = f"{name} must be a whole number, not {type(value).__name__}"
        raise TypeError(message)
    if not least <= value <= most:
        message = f"{name} must be {least} to {most}"
        raise ValueError(message)


def require_seconds(name: str, value: object, most: float, *, or_0: bool = False) -> None:
    """Raise ValueError or TypeError for what is no positive number up to ``most``, nor 0 if that is valid, too."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        message = f"{name} must be a number of seconds, not {type(value).__name__}"
        raise TypeError(message)
    if not 0 <= value <= most or not (value or or_0):
        bounds = f"0 to {most:,g}" if or_0 else f"a positive number of seconds, up to {most:,g}"
        message = f"{name} must be {bounds}"
        raise ValueError(message)


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        message = f"{name} must be a bool, not {type(value).__name__}"
        raise TypeError(message)


def require_text(name: str, value: object) -> str:
    """Return the value; raise TypeError for what is no text."""
    if not isinstance(value, str):
        message = f"{name} must be text, not {type(value).__name__}"
        raise TypeError(message)
    return value


def valid_timeout_s(timeout_s: float) -> float:
    """Return the deadline.

    Raises:
        ValueError, TypeError: it is not a positive number of seconds, up to an hour.
    """
    require_seconds("timeout_s", timeout_s, MAX_TIMEOUT_S)
    return timeout_s
