"""What the protocols for unary calls over HTTP have in common: one implementation for each content type.

See ADR 0030.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message
from starlette.datastructures import Headers
from starlette.responses import Response

from ratelimitd.rpc.interface import RpcError


@dataclass(frozen=True, slots=True)
class Types:
    """The messages of one method."""

    request: type[Message]
    answer: type[Message]


class UnaryProtocol(Protocol):
    """How a call and its answer look on the wire."""

    max_body_bytes: int

    def timeout_s(self, headers: Headers) -> float | None:
        """How long the caller waits, ``None``: without end; raises ``RpcError`` when that is malformed."""

    async def message_of(self, body: bytes, headers: Headers, types: Types) -> bytes:
        """The request's message, serialised; raises ``RpcError`` or ``InvalidInputError`` when it is none."""

    async def answer(self, message: bytes, types: Types) -> Response:
        """The answer that carries this serialised message."""

    def failure(self, error: RpcError) -> Response:
        """The answer of a call that failed."""
