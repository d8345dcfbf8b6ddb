"""The Connect protocol for unary calls, in JSON and binary: an answer is a body, an error is a status and JSON.

Follows https://connectrpc.com/docs/protocol with two exceptions: unknown fields in JSON are refused, and a body that is
too long is 413, one in an unknown encoding 415. Does not compress answers. Independent of the methods. See ADR 0030.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.any_pb2 import Any as PackedDetail
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from starlette.datastructures import Headers
from starlette.responses import Response

from ratelimitd.rpc.interface import MAX_MESSAGE_BYTES, RpcError, StatusCode
from ratelimitd.rpc.messages import (
    PREFIX_BYTES,
    MessageReader,
    framed,
    parse_timeout_s,
    status_fields,
)
from ratelimitd.web.api import json_messages
from ratelimitd.web.api.http_call import BodyTooLargeError, EncodingUnsupportedError, uncompressed
from ratelimitd.web.api.json_messages import RunStep, json_of, message_from_json


@dataclass(frozen=True, slots=True)
class Types:
    """The messages of one method."""

    request: type[Message]
    answer: type[Message]


JSON: Final = "application/json"
PROTO: Final = "application/proto"

BODY_STATUS: Final[Mapping[type, int]] = MappingProxyType(
    {BodyTooLargeError: 413, EncodingUnsupportedError: 415}
)
"""Statuses for unreadable bodies. Connect maps every RESOURCE_EXHAUSTED to 429 and UNIMPLEMENTED to 501; its clients
evaluate the code in the body."""

HTTP_STATUS: Final[Mapping[StatusCode, int]] = MappingProxyType(
    {
        StatusCode.CANCELLED: 499,
        StatusCode.UNKNOWN: 500,
        StatusCode.INVALID_ARGUMENT: 400,
        StatusCode.DEADLINE_EXCEEDED: 504,
        StatusCode.NOT_FOUND: 404,
        StatusCode.ALREADY_EXISTS: 409,
        StatusCode.PERMISSION_DENIED: 403,
        StatusCode.RESOURCE_EXHAUSTED: 429,
        StatusCode.FAILED_PRECONDITION: 400,
        StatusCode.ABORTED: 409,
        StatusCode.OUT_OF_RANGE: 400,
        StatusCode.UNIMPLEMENTED: 501,
        StatusCode.INTERNAL: 500,
        StatusCode.UNAVAILABLE: 503,
        StatusCode.DATA_LOSS: 500,
        StatusCode.UNAUTHENTICATED: 401,
    }
)
"""The mapping that Connect specifies."""

_CODES: Final = {code: code.name.lower() for code in StatusCode} | {
    StatusCode.CANCELLED: "canceled"
}
"""gRPC's names in lower case, except the one that Connect spells differently."""

_VERSION: Final = "1"
_MAX_TIMEOUT_DIGITS: Final = 10


def details_of(error: RpcError) -> Sequence[Any]:
    """Return the details of an error."""
    return status_pb2.Status.FromString(error.details).details


def retry_after(details: Iterable[Any]) -> dict[str, str]:
    """Return the header ``Retry-After`` for these details of an error, if they have a delay."""
    retry = error_details_pb2.RetryInfo()
    if any(detail.Unpack(retry) for detail in details):
        return {"Retry-After": str(retry.retry_delay.seconds)}
    return {}


class Connect:
    """Base of the two codecs."""

    max_body_bytes = MAX_MESSAGE_BYTES

    def timeout_s(self, headers: Headers) -> float | None:
        """Read ``Connect-Timeout-Ms``; also verifies the protocol version."""
        if headers.get("connect-protocol-version", _VERSION) != _VERSION:
            message = f"Connect-Protocol-Version must be {_VERSION}"
            raise RpcError(StatusCode.INVALID_ARGUMENT, message)
        text = headers.get("connect-timeout-ms")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > _MAX_TIMEOUT_DIGITS:
            message = f"Connect-Timeout-Ms must be up to {_MAX_TIMEOUT_DIGITS} digits"
            raise RpcError(StatusCode.INVALID_ARGUMENT, message)
        return int(text) / 1_000

    def failure(self, error: RpcError) -> Response:
        """Return an HTTP status for the code, and a body with code, text and details."""
        content: dict[str, Any] = {"code": _CODES[error.code], "message": error.message}
        details = details_of(error)
        headers = retry_after(details)
        if details:
            content["details"] = [*map(_detail, details)]
        if error.code is StatusCode.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = "Bearer"
        if isinstance(error, EncodingUnsupportedError):
            headers["Accept-Encoding"] = "gzip"
        status = BODY_STATUS.get(type(error)) or HTTP_STATUS[error.code]
        return Response(json.dumps(content) + "\n", status, headers, JSON)

    def _uncompressed(self, body: bytes, headers: Headers) -> bytes:
        encoding = headers.get("content-encoding", "identity")
        return uncompressed(body, encoding, self.max_body_bytes)


class ConnectJson(Connect):
    """Bodies are JSON."""

    def __init__(self, bounds: json_messages.Bounds = json_messages.USUAL) -> None:
        self._bounds = bounds
        self.max_body_bytes = bounds.body_bytes

    async def message_of(
        self, body: bytes, headers: Headers, types: Types, run_step: RunStep
    ) -> bytes:
        """Parse strictly: see :mod:`ratelimitd.web.api.json_messages`."""
        text = self._uncompressed(body, headers)
        message = await message_from_json(text, types.request, run_step, self._bounds)
        return message.SerializeToString()

    async def answer(self, message: bytes, types: Types, run_step: RunStep) -> Response:
        """Write every field under its contract name."""
        return Response(await json_of(types.answer.FromString(message), run_step), media_type=JSON)


class ConnectProto(Connect):
    """Bodies are serialised messages; the services validate their content."""

    async def message_of(
        self, body: bytes, headers: Headers, _types: Types, _run_step: RunStep
    ) -> bytes:
        """Return the body unchanged."""
        return self._uncompressed(body, headers)

    async def answer(self, message: bytes, _types: Types, _run_step: RunStep) -> Response:
        """Return the message unchanged."""
        return Response(message, media_type=PROTO)


def _detail(detail: PackedDetail) -> dict[str, object]:
    """Return a detail in Connect's format, with a readable copy under ``debug``."""
    shown = MessageToDict(detail, preserving_proto_field_name=True)
    del shown["@type"]
    return {
        "type": detail.TypeName(),
        "value": b64encode(detail.value).rstrip(b"=").decode(),
        "debug": shown,
    }


GRPC_WEB: Final = "application/grpc-web"
GRPC_WEB_PROTO: Final = "application/grpc-web+proto"

TRAILERS: Final = 0x80
"""Flag of the last frame, which holds trailers as an HTTP/1.1 header block."""

_OK: Final = RpcError(StatusCode.OK, "")


class GrpcWeb:
    """Bodies are one framed message; answers are one framed message and a frame of trailers."""

    max_body_bytes = MAX_MESSAGE_BYTES + PREFIX_BYTES

    def timeout_s(self, headers: Headers) -> float | None:
        """Read ``grpc-timeout``."""
        text = headers.get("grpc-timeout")
        if text is None:
            return None
        try:
            return parse_timeout_s(text.encode("latin-1"))
        except ValueError:
            message = "grpc-timeout must be up to 8 digits and a unit"
            raise RpcError(StatusCode.INVALID_ARGUMENT, message) from None

    async def message_of(
        self, body: bytes, headers: Headers, _types: Types, _run_step: RunStep
    ) -> bytes:
        """Return the only message of the body."""
        reader = MessageReader(MAX_MESSAGE_BYTES)
        # Parse at most two: a body of zeros would be 800,000 messages and block the event loop for as many µs.
        parts = [*islice(reader.feed(body), 2)]
        if len(parts) != 1 or reader.unfinished_bytes:
            text = "the body must be one message behind its flag and its length"
            raise RpcError(StatusCode.INVALID_ARGUMENT, text)
        [part] = parts
        encoding = headers.get("grpc-encoding", "identity") if part.compressed else "identity"
        return uncompressed(part.content, encoding, MAX_MESSAGE_BYTES)

    async def answer(self, message: bytes, _types: Types, _run_step: RunStep) -> Response:
        """Return the message with the trailers of an OK status."""
        return Response(framed(message) + _trailers(_OK), media_type=GRPC_WEB_PROTO)

    def failure(self, error: RpcError) -> Response:
        """Return trailers only, in the body, which scripts can read in every browser."""
        return Response(_trailers(error), media_type=GRPC_WEB_PROTO)


UnaryProtocol = ConnectJson | ConnectProto | GrpcWeb
"""The wire format of a call and its answer. A timeout of ``None`` is no limit; a malformed timeout raises ``RpcError``,
a malformed message that or ``InvalidInputError``."""


def _trailers(error: RpcError) -> bytes:
    block = b"".join(b"%b: %b\r\n" % field for field in status_fields(error))
    return bytes((TRAILERS,)) + len(block).to_bytes(PREFIX_BYTES - 1, "big") + block
