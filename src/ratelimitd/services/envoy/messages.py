"""The messages of ``envoy.service.ratelimit.v3`` and the files that describe them.

Made from descriptors in a pool of their own: an application that has Envoy's API from elsewhere may run a node beside
it. As in :mod:`ratelimitd.services.wire`, text arrives as bytes and numbers are wide enough to show what was sent.
Never validates what a field means, never does I/O but to read its own file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.services.wire import WHOLE_MESSAGE

PACKAGE: Final = "envoy.service.ratelimit.v3"
SERVICE: Final = f"{PACKAGE}.RateLimitService"

MAX_REQUEST_BYTES: Final = 65_536
"""Longer requests are refused unread: 4 MiB of empty entries would take 300 MB of memory only to be refused. Envoy
sends some hundred bytes."""

_Field = descriptor_pb2.FieldDescriptorProto
_WIDER: Final = {
    _Field.TYPE_STRING: _Field.TYPE_BYTES,
    _Field.TYPE_UINT32: _Field.TYPE_UINT64,
}


class WireEntry(Protocol):
    """``RateLimitDescriptor.Entry``."""

    key: bytes
    value: bytes


class WireAddend(Protocol):
    """``google.protobuf.UInt64Value``."""

    value: int


class WireDescriptor(Protocol):
    """``RateLimitDescriptor``. Whether ``hits_addend`` was sent, ``HasField`` knows."""

    entries: Sequence[WireEntry]
    hits_addend: WireAddend
    is_negative_hits: bool

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Whether a message field was sent."""


class WireRequest(Protocol):
    """``RateLimitRequest``."""

    domain: bytes
    descriptors: Sequence[WireDescriptor]
    hits_addend: int


def files() -> Iterable[descriptor_pb2.FileDescriptorProto]:
    """The files that describe the service, each behind those it imports."""
    data = Path(__file__).with_name("descriptors.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data).file


def parse_request(data: bytes) -> WireRequest:
    """Read a ``RateLimitRequest``.

    Raises:
        InvalidInputError: it is too long, or the bytes are none.
    """
    if len(data) > MAX_REQUEST_BYTES:
        message = f"must be at most {MAX_REQUEST_BYTES} bytes"
        raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, message))
    try:
        return cast("WireRequest", _REQUEST.FromString(data))
    except DecodeError:
        violation = FieldViolation(WHOLE_MESSAGE, "the bytes are no RateLimitRequest message")
        raise InvalidInputError(violation) from None


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in files():
        for message in file.message_type:
            _widen(message)
        pool.Add(file)
    return pool


def _widen(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.type = _WIDER.get(field.type, field.type)
    for nested in message.nested_type:
        _widen(nested)


_POOL: Final = _pool()


def _message(name: str) -> type[Message]:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


_REQUEST: Final = _message("RateLimitRequest")
Response: Final[Any] = _message("RateLimitResponse")
"""``RateLimitResponse``; its texts are written as bytes."""
