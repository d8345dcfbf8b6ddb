"""What a client asks: a check, and what a valid one is. Wrong arguments end here, before anything is sent.

Pure. The contract's own rules, so that a node has nothing to refuse: docs/protocol.md of the repository.
"""

from __future__ import annotations

import ipaddress
import re
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

    def message(self) -> pb.RateLimitRequest:
        """The check as the contract has it."""
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
) -> pb.RateLimitRequest:
    """The message of a check, without the value in between; the arguments are those of :class:`Check`.

    Raises:
        ValueError, TypeError: an argument is not valid; its value is not in the message.
    """
    problem = (
        _identifier_problem(identifier, identifier_type)
        or _endpoint_problem(endpoint)
        or _number_problem("cost", cost, 1, MAX_COST)
        or _number_problem("timestamp", timestamp, 0, MAX_TIMESTAMP)
    )
    if problem is not None:
        raise problem
    return pb.RateLimitRequest(
        identifier=identifier,
        identifier_type=identifier_type,
        endpoint=endpoint,
        tokens_requested=cost,
        timestamp=timestamp,
        peek=peek,
    )


def _identifier_problem(identifier: object, identifier_type: object) -> Exception | None:
    if identifier_type not in IDENTIFIER_TYPES:
        return ValueError(f"identifier_type must be one of {', '.join(IDENTIFIER_TYPES)}")
    if not isinstance(identifier, str):
        return TypeError(f"identifier must be text, not {type(identifier).__name__}")
    try:
        size = len(identifier.encode())
    except UnicodeEncodeError:
        return ValueError("identifier must be text that UTF-8 can carry")
    if not 0 < size <= MAX_IDENTIFIER_BYTES:
        return ValueError(f"identifier must be 1 to {MAX_IDENTIFIER_BYTES} bytes")
    if identifier_type == "ip" and not _is_address(identifier):
        return ValueError("identifier must be an IP address without a zone")
    return None


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
    if not isinstance(value, int):
        return TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        return ValueError(f"{name} must be {least} to {most}")
    return None
