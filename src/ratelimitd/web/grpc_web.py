"""gRPC-Web in binary, for unary calls: gRPC's messages and trailers in one body, for callers that see no trailers.

Follows PROTOCOL-WEB.md of grpc/grpc. Answers are not compressed. Never knows a method. See ADR 0030.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response

from ratelimitd.rpc.framing import PREFIX_BYTES, MessageReader, framed
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.limits import MAX_MESSAGE_BYTES
from ratelimitd.rpc.status_blocks import status_fields
from ratelimitd.rpc.timeouts import parse_timeout_s
from ratelimitd.web.bodies import uncompressed
from ratelimitd.web.protocols import Types

GRPC_WEB: Final = "application/grpc-web"
GRPC_WEB_PROTO: Final = "application/grpc-web+proto"

TRAILERS: Final = 0x80
"""The flag of the last frame: what it holds are trailers, as a block of HTTP/1.1."""

_OK: Final = RpcError(StatusCode.OK, "")


class GrpcWeb:
    """Bodies are a framed message, answered by another and a frame of trailers."""

    max_body_bytes = MAX_MESSAGE_BYTES + PREFIX_BYTES

    def timeout_s(self, headers: Headers) -> float | None:
        """From ``grpc-timeout``."""
        text = headers.get("grpc-timeout")
        if text is None:
            return None
        try:
            return parse_timeout_s(text.encode("latin-1"))
        except ValueError:
            message = "grpc-timeout must be up to 8 digits and a unit"
            raise RpcError(StatusCode.INVALID_ARGUMENT, message) from None

    async def message_of(self, body: bytes, headers: Headers, _types: Types) -> bytes:
        """The only message of the body."""
        reader = MessageReader(MAX_MESSAGE_BYTES)
        # Two at most: a body of zeros would be 800,000 messages, and hold everybody up for as many µs.
        parts = [*islice(reader.feed(body), 2)]
        if len(parts) != 1 or reader.unfinished_bytes:
            text = "the body must be one message behind its flag and its length"
            raise RpcError(StatusCode.INVALID_ARGUMENT, text)
        [part] = parts
        encoding = headers.get("grpc-encoding", "identity") if part.compressed else "identity"
        return uncompressed(part.content, encoding, MAX_MESSAGE_BYTES)

    async def answer(self, message: bytes, _types: Types) -> Response:
        """The message, and that all is well."""
        return Response(framed(message) + _trailers(_OK), media_type=GRPC_WEB_PROTO)

    def failure(self, error: RpcError) -> Response:
        """Trailers only. In the body, where the scripts of every browser can read them."""
        return Response(_trailers(error), media_type=GRPC_WEB_PROTO)


def _trailers(error: RpcError) -> bytes:
    block = b"".join(b"%b: %b\r\n" % field for field in status_fields(error))
    return bytes((TRAILERS,)) + len(block).to_bytes(PREFIX_BYTES - 1, "big") + block
