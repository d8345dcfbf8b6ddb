"""What a client asks: a check, and what a valid one is. Wrong arguments end here, before anything is sent.

Pure. The contract's own rules, so that a node has nothing to refuse: docs/protocol.md of the repository.

A check is encoded once, when it is asked. Of its fields the identifier alone differs from one check to the next: it is
put before the others, which are encoded when they are first seen. See ADR 0038.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ratelimiter.v1 import ratelimiter_pb2 as pb

MAX_BATCH: Final = 1_000
"""Most checks a node takes in one batch."""

IDENTIFIER_TYPES: Final = ("user", "ip", "api_key")
MAX_IDENTIFIER_BYTES: Final = 256
MAX_ENDPOINT_CHARS: Final = 255
MAX_COST: Final = 2**31 - 1
MAX_TIMESTAMP: Final = 2**63 - 1

KEPT_QUESTIONS: Final = 1_024
"""How many endpoints, costs and so on are kept encoded: more than an application has, and at most 3 MB."""

_FIELD_1: Final = 0x0A
_MORE: Final = 0x80
"""Of a varint: another octet follows."""

_HEADS: Final = tuple(
    bytes((_FIELD_1, size) if size < _MORE else (_FIELD_1, size % _MORE | _MORE, size // _MORE))
    for size in range(2_000)
)
"""What stands before so many bytes of field 1: the identifier in a check, a check in a batch. No check has as many."""

_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Check:
    """One question: may this identifier spend ``cost`` on this endpoint?

    Args:
        identifier: who asks: a user id, an address, an API key; 1 to 256 bytes of UTF-8.
        identifier_type: ``"user"``, ``"ip"`` or ``"api_key"``.
        endpoint: the route template (``/orders/{id}``), never the path: each path would get a bucket of its own.
        cost: tokens to spend, at least 1.
        timestamp: the caller's Unix time in s, ms, µs or ns; 0 leaves time to the node.
        peek: answer as if, spend nothing.

    Raises:
        ValueError, TypeError: an argument is not valid; its value is not in the message.
    """

    identifier: str
    identifier_type: str
    endpoint: str
    cost: int = 1
    timestamp: int = 0
    peek: bool = False

    def __post_init__(self) -> None:
        self.message()

    def message(self) -> bytes:
        """The check as the contract has it, encoded."""
        return request_of(
            self.identifier,
            self.identifier_type,
            self.endpoint,
            cost=self.cost,
            timestamp=self.timestamp,
            peek=self.peek,
        )


def request_of(
    identifier: str,
    identifier_type: str,
    endpoint: str,
    *,
    cost: int = 1,
    timestamp: int = 0,
    peek: bool = False,
) -> bytes:
    """The encoded message of a check, without the value in between; the arguments are those of :class:`Check`.

    Raises:
        ValueError, TypeError: an argument is not valid; its value is not in the message.
    """
    try:
        rest = _kept_rest_of(identifier_type, endpoint, cost, timestamp, peek)
    except TypeError:  # also of an argument that has no hash: this says which one is wrong
        rest = _rest_of(identifier_type, endpoint, cost, timestamp, peek)
    data = _identifier_bytes(identifier, identifier_type)
    return _HEADS[len(data)] + data + rest


def requests_of(checks: Iterable[Check]) -> list[bytes]:
    """Return the encoded messages of a batch.

    Raises:
        ValueError: there are more checks than a node takes.
    """
    requests = [check.message() for check in checks]
    if len(requests) > MAX_BATCH:
        message = f"a batch holds up to {MAX_BATCH} checks, not {len(requests)}"
        raise ValueError(message)
    return requests


def batch_of(requests: Iterable[bytes]) -> bytes:
    """The encoded message of several checks."""
    heads = _HEADS
    return b"".join([part for request in requests for part in (heads[len(request)], request)])


def _rest_of(  # noqa: PLR0917 - what it is kept under
    identifier_type: str,
    endpoint: str,
    cost: int,
    timestamp: int,
    peek: bool,  # noqa: FBT001 - likewise
) -> bytes:
    """All fields but the identifier."""
    problem = (
        _type_problem(identifier_type)
        or _endpoint_problem(endpoint)
        or _number_problem("cost", cost, 1, MAX_COST)
        or _number_problem("timestamp", timestamp, 0, MAX_TIMESTAMP)
    )
    if problem is not None:
        raise problem
    return pb.RateLimitRequest(
        identifier_type=identifier_type,
        endpoint=endpoint,
        tokens_requested=cost,
        timestamp=timestamp,
        peek=peek,
    ).SerializeToString()


# By their types as well: 1.0 equals 1, and is no cost.
_kept_rest_of: Final = functools.lru_cache(KEPT_QUESTIONS, typed=True)(_rest_of)


def _type_problem(identifier_type: object) -> Exception | None:
    if identifier_type not in IDENTIFIER_TYPES:
        return ValueError(f"identifier_type must be one of {', '.join(IDENTIFIER_TYPES)}")
    return None


def _identifier_bytes(identifier: object, identifier_type: str) -> bytes:
    if not isinstance(identifier, str):
        message = f"identifier must be text, not {type(identifier).__name__}"
        raise TypeError(message)
    try:
        data = identifier.encode()
    except UnicodeEncodeError:
        message = "identifier must be text that UTF-8 can carry"
        raise ValueError(message) from None
    if not 0 < len(data) <= MAX_IDENTIFIER_BYTES:
        message = f"identifier must be 1 to {MAX_IDENTIFIER_BYTES} bytes"
        raise ValueError(message)
    if identifier_type == "ip" and not _is_address(identifier):
        message = "identifier must be an IP address without a zone"
        raise ValueError(message)
    return data


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _endpoint_problem(endpoint: object) -> Exception | None:
    if not isinstance(endpoint, str):
        return TypeError(f"endpoint must be text, not {type(endpoint).__name__}")
    if not 0 < len(endpoint) <= MAX_ENDPOINT_CHARS:
        return ValueError(f"endpoint must be 1 to {MAX_ENDPOINT_CHARS} characters")
    if endpoint == "*" or _CONTROL_CHARACTER.search(endpoint):
        return ValueError("endpoint must not be * nor hold control characters")
    try:
        endpoint.encode()
    except UnicodeEncodeError:
        return ValueError("endpoint must be text that UTF-8 can carry")
    return None


def _number_problem(name: str, value: object, least: int, most: int) -> Exception | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        return ValueError(f"{name} must be {least} to {most}")
    return None
