"""The services over HTTP/1.1: paths, protocols, and ``POST /v1/check``.

Uses the gRPC method table: a handler and its guard cannot tell how they were called. Requires one of a few content
types that browsers send to other sites only after a CORS preflight. No preflight is answered, so pages of other sites
cannot reach the loopback role. See ADR 0030.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from google.protobuf.message_factory import GetMessageClass
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.interface import Methods, RpcError, UnaryHandler
from ratelimitd.web.api.connect import (
    GRPC_WEB,
    GRPC_WEB_PROTO,
    JSON,
    PROTO,
    ConnectJson,
    ConnectProto,
    GrpcWeb,
    Types,
    UnaryProtocol,
)
from ratelimitd.web.api.http_call import Requirement, body_of, handled, http_call
from ratelimitd.web.api.json_messages import WHOLE_BOOK, RunStep
from ratelimitd_wire.ratelimit_headers import ratelimit_headers
from ratelimiter.v1 import ratelimiter_pb2

DENIED = 429


class HttpCheck(ConnectJson):
    """Like Connect. ``now_s`` is the node's Unix time; ``revision`` is the revision of the ``RateLimit`` fields."""

    def __init__(self, now_s: Callable[[], float], revision: str) -> None:
        super().__init__()
        self._now_s = now_s
        self._revision = revision

    async def answer(self, message: bytes, types: Types, run_step: RunStep) -> Response:
        """Return 200 or 429, by the decision in the body; a check that was allowed unchecked is 200, too."""
        response = await super().answer(message, types, run_step)
        decision = ratelimiter_pb2.RateLimitResponse.FromString(message)
        response.headers.update(limit_fields(decision, self._now_s(), self._revision))
        if not decision.allowed:
            response.status_code = DENIED
        return response


def limit_fields(
    decision: ratelimiter_pb2.RateLimitResponse, now_s: float, revision: str
) -> dict[str, str]:
    """Return the fields of a decision: those of the rule, if one decided, and ``Retry-After`` of a denial."""
    fields = {}
    retry_after_s = decision.retry_after_seconds
    if not decision.allowed:
        fields["Retry-After"] = str(retry_after_s)
    if decision.rule_id:
        # The check may use its caller's time, which may differ greatly from ours.
        reset_s = min(max(0, math.ceil(decision.reset_time - now_s)), decision.window_seconds)
        fields |= ratelimit_headers(
            decision.rule_id,
            limit=decision.limit,
            window_s=decision.window_seconds,
            remaining=decision.remaining_tokens,
            allowed=decision.allowed,
            reset_s=reset_s,
            retry_after_s=retry_after_s,
            revision=revision,
        )
    return fields


CHECK_PATH: Final = "/v1/check"
OPENAPI_PATH: Final = "/openapi.json"

CHECK_METHOD: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimit"

_APPLY: Final = "RateLimiterConfig/ApplyRateLimits"

UNSUPPORTED: Final = 415
CLIENT_LEFT: Final = 499
"""Status for the log when the client has disconnected."""

PROTOCOLS: Final[Mapping[str, UnaryProtocol]] = MappingProxyType(
    {
        JSON: ConnectJson(),
        PROTO: ConnectProto(),
        GRPC_WEB: GrpcWeb(),
        GRPC_WEB_PROTO: GrpcWeb(),
    }
)
"""Protocols by content type. Browsers send none of these types across origins without a preflight, unlike
``text/plain`` and forms."""

WHOLE_BOOK_PROTOCOLS: Final[Mapping[str, UnaryProtocol]] = MappingProxyType(
    {**PROTOCOLS, JSON: ConnectJson(WHOLE_BOOK)}
)

_DOCUMENT: Final = Path(__file__).parent.parent / "openapi.json"
"""Written by `make proto` from the contract including its comments, which the generated classes lack."""

Translation = Callable[[Exception, str], RpcError]
"""Converts any exception in a call of this method to the error that ends the call."""


@dataclass(frozen=True, slots=True)
class _Method:
    path: str
    handler: UnaryHandler
    types: Types


class JsonApi:
    """The routes for a node's ``methods``; ``admit`` is called before a body is read."""

    def __init__(
        self,
        methods: Methods,
        *,
        admit: Requirement,
        translate: Translation,
        http_check: HttpCheck,
        queue: FairQueue,
    ) -> None:
        self._methods = {method.path: method for method in _methods_of(methods)}
        self._admit = admit
        self._translate = translate
        self._queue = queue
        self._check_protocols = {JSON: http_check}

    def routes(self) -> list[BaseRoute]:
        """Return all routes."""
        document = _DOCUMENT.read_bytes()

        async def openapi(_: Request) -> Response:
            return Response(document, media_type=JSON)

        check = self._methods[CHECK_METHOD]
        return [
            *(
                self._route(
                    path, method, WHOLE_BOOK_PROTOCOLS if path.endswith(_APPLY) else PROTOCOLS
                )
                for path, method in self._methods.items()
            ),
            self._route(CHECK_PATH, check, self._check_protocols),
            Route(OPENAPI_PATH, openapi),
        ]

    def _route(
        self, path: str, method: _Method, protocols: Mapping[str, UnaryProtocol]
    ) -> BaseRoute:
        async def answer(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0]
            protocol = protocols.get(content_type.strip().lower())
            if protocol is None:
                return _unsupported(protocols)
            try:
                return await self._answer(request, method, protocol)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except Exception as error:  # noqa: BLE001 -- the edge: any error is answered in the caller's protocol
                return protocol.failure(self._translate(error, method.path))

        return Route(path, answer, methods=["POST"])

    async def _answer(self, request: Request, method: _Method, protocol: UnaryProtocol) -> Response:
        call = http_call(request, method.path)
        self._admit(call)
        timeout_s = protocol.timeout_s(request.headers)
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        body = await body_of(request, protocol.max_body_bytes)
        run_step = partial(self._queue.run, call.peer)
        message = await protocol.message_of(body, request.headers, method.types, run_step)
        answer = await handled(
            method.handler, message, call, receive=request.receive, deadline_s=deadline_s
        )
        return await protocol.answer(answer, method.types, run_step)


def _methods_of(methods: Methods) -> Iterator[_Method]:
    """Yield the methods of the contract's services, under every path in the method table."""
    package = ratelimiter_pb2.DESCRIPTOR.package
    for name, service in ratelimiter_pb2.DESCRIPTOR.services_by_name.items():
        for method in service.methods:
            types = Types(GetMessageClass(method.input_type), GetMessageClass(method.output_type))
            for path in (f"/{package}.{name}/{method.name}", f"/{name}/{method.name}"):
                yield _Method(path, methods.unary[path], types)


def _unsupported(protocols: Mapping[str, UnaryProtocol]) -> Response:
    accepted = ", ".join(protocols)
    message = f"Content-Type must be one of {accepted}; gRPC has a port of its own"
    return JSONResponse(
        {"code": "invalid_argument", "message": message}, UNSUPPORTED, {"Accept-Post": accepted}
    )
