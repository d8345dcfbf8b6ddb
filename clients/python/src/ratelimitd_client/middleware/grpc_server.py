"""Middleware for gRPC servers with threads. Your functions are given the :class:`Call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from ratelimitd_client import RateLimiter
from ratelimitd_client.middleware.grpc_call import Call, arrival_of, call_of, handler_of, heed
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options


class RateLimitInterceptor(grpc.ServerInterceptor):
    """Checks each call before its handler runs; a stream once, when it begins.

    A denied call ends with RESOURCE_EXHAUSTED and ``retry-after`` in its trailing metadata. The metadata of an allowed
    call tells of the limit, unless the handler sets its own.

    Args:
        limiter: a client that blocks, or a fake. The caller closes it.
        options: how calls are counted and answered. The endpoint is the full name of the method.

    Raises:
        TypeError: ``limiter`` is none that blocks, or ``identify`` is a coroutine function.
    """

    def __init__(self, limiter: RateLimiter, options: Options[Call] | None = None) -> None:
        require_kind(limiter, options, asynchronous=False)
        self._limiter = limiter
        self._guard = Guard(options)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the question before the handler of a method."""
        given = continuation(handler_call_details)
        if given is None:  # no such method: gRPC says so itself
            return None
        handler = handler_of(given)

        # Who calls is known only here, from the context.
        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            call = call_of(handler_call_details, context)
            arrival = arrival_of(call, handler.behaviour)
            heed(self._guard, self._guard.decide(self._limiter, call, arrival), context)
            return handler.behaviour(request, context)

        return handler.with_behaviour(checked)
