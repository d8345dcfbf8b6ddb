"""Encodes a check for other rate limiters, and decodes their answers.

Every message requests one token of one key, under a limit that no run reaches. Field numbers are those of Envoy's
``rls.proto``, of ``gubernator.proto`` and ``throttlecrab.proto``.
"""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from bench.scripts import CHECK, Scenario, alike, identifier
from bench.servers import ENDPOINT, LIMIT, WINDOW_SECONDS
from ratelimitd.services.envoy import METHOD
from ratelimitd.services.wire_format import varint
from ratelimiter.v1 import ratelimiter_pb2 as pb

KEY: Final = identifier(42)
OK, OVER_LIMIT = 1, 2
"""Envoy's codes."""
CURRENT_LIMIT = 2
"""Number of the field."""
UINT32_MAX: Final = 2**32 - 1
LONG_SECONDS: Final = 86_400_000
"""A refill of ``LIMIT`` slow enough not to matter in a run; throttlecrab's numbers have 32 bits."""


class NotAllowedError(Exception):
    """The answer does not allow the check; the text describes it."""


class Protocol(NamedTuple):
    """One method of a server. ``remaining`` reads the tokens left from an answer, ``None`` if it has none.

    A server that does not report remaining tokens must answer OVER_LIMIT to ``too_many``, which proves that it has a
    limit.
    """

    path: bytes
    message: bytes
    allowed: re.Pattern[bytes]
    """Matches the start of the DATA of an answer that allows: the message's length, then its first field."""
    remaining: Callable[[bytes], int | None]
    refill: float = 0.0
    """Tokens per second."""
    too_many: bytes = b""


def fields(message: bytes) -> dict[int, Any]:
    """Return the fields of a message by number: integers and bytes; of a repeated field, the last."""
    # Iterable, contrary to its stub.
    unknown: Any = UnknownFieldSet(Empty.FromString(message))
    return {field.field_number: field.data for field in unknown}


def _message(*values: str | bytes | int) -> bytes:
    """Encode a message with the fields 1, 2, 3 and so on."""
    parts = []
    for number, value in enumerate(values, 1):
        octets = value.encode() if isinstance(value, str) else value
        if isinstance(octets, int):
            parts += [varint(number << 3), varint(octets)]
        else:
            parts += [varint(number << 3 | 2), varint(len(octets)), octets]
    return b"".join(parts)


def _of_ours(answer: bytes) -> int:
    message = pb.RateLimitResponse.FromString(answer)
    if not message.allowed or message.reason != pb.WITHIN_LIMIT:
        raise NotAllowedError(message)
    return message.remaining_tokens


def _of_limitador(answer: bytes) -> None:
    if fields(answer).get(1) != OK:
        raise NotAllowedError(fields(answer))


def _of_envoy(answer: bytes) -> int:
    _of_limitador(answer)
    status = fields(fields(answer).get(2, b""))
    if not status.get(CURRENT_LIMIT):
        what = f"no limit is in force for the domain {ENDPOINT} and the key user"
        raise NotAllowedError(what)
    return int(status.get(3, 0))


def _of_gubernator(answer: bytes) -> int:
    response = fields(fields(answer).get(1, b""))
    if not response or response.keys() & {1, 5}:  # status, error
        raise NotAllowedError(response)
    return int(response.get(3, 0))


def _of_throttlecrab(answer: bytes) -> int:
    if fields(answer).get(1) != 1:
        raise NotAllowedError(fields(answer))
    return int(fields(answer).get(3, 0))


def _envoy_request(hits: int) -> bytes:
    """The only entry is an identity, so that on our node the endpoint is the domain."""
    return _message(ENDPOINT, _message(_message("user", KEY)), hits)


_OURS: Final = pb.RateLimitRequest(identifier=KEY, identifier_type="user", endpoint=ENDPOINT)
_GUBERNATOR: Final = _message(ENDPOINT, KEY, 1, LIMIT * 1_000, WINDOW_SECONDS * 1_000)
_THROTTLECRAB: Final = _message(KEY, LIMIT, LIMIT, LONG_SECONDS, 1)
_REFILL: Final = LIMIT / WINDOW_SECONDS
_ENVOY: Final = METHOD.encode(), _envoy_request(1)
_FIRST_IS_1: Final = re.compile(rb"\0.{4}\x08\x01", re.DOTALL)
"""``allowed = true``, or Envoy's OK."""
_FIRST_IS_A_LIMIT: Final = re.compile(rb"\0.{4}\x0a(?:[\0-\x7f]|[\x80-\xff].)\x10", re.DOTALL)
"""gubernator's UNDER_LIMIT is 0 and therefore omitted; an error has no limit."""

# fmt: off
PROTOCOLS: Final = {
    "ratelimitd": Protocol(CHECK, _OURS.SerializeToString(), _FIRST_IS_1, _of_ours, _REFILL),
    "ratelimitd-envoy": Protocol(*_ENVOY, _FIRST_IS_1, _of_envoy, _REFILL),
    "envoy-ratelimit": Protocol(*_ENVOY, _FIRST_IS_1, _of_envoy),
    "limitador": Protocol(*_ENVOY, _FIRST_IS_1, _of_limitador, too_many=_envoy_request(UINT32_MAX)),
    "gubernator": Protocol(
        b"/pb.gubernator.V1/GetRateLimits", _message(_GUBERNATOR), _FIRST_IS_A_LIMIT, _of_gubernator
    ),
    "throttlecrab": Protocol(
        b"/throttlecrab.RateLimiter/Throttle", _THROTTLECRAB, _FIRST_IS_1, _of_throttlecrab, LIMIT / LONG_SECONDS
    ),
}
# fmt: on
SCENARIOS: Final[dict[str, Scenario]] = {
    name: alike(protocol.path, protocol.message, protocol.allowed)
    for name, protocol in PROTOCOLS.items()
}
