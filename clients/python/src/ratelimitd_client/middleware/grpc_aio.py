"""Middleware for gRPC servers of ``grpc.aio``. Your functions take the :class:`Call`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from ratelimitd_client import AsyncRateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.grpc_server import (
    Behaviour,
    Call,
    MethodHandler,
    behaviour_of,
    call_of,
    enforce,
    finish,
    info_of,
    with_behaviour,
)
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind

__all__ = ["Call", "RateLimitInterceptor"]


class RateLimitInterceptor(grpc.aio.ServerInterceptor):
    """As :class:`ratelimitd_client.middleware.grpc_server.RateLimitInterceptor`, for ``grpc.aio.server()``.

    Handlers may be coroutines, asynchronous generators, or blocking functions, which gRPC calls in threads.

    Args:
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how calls are counted and answered. The endpoint is the full name of the method.

    Raises:
        TypeError: ``limiter`` is not one for asyncio.
    """

    def __init__(self, limiter: AsyncRateLimiter, options: Options[Call] | None = None) -> None:
        require_kind(limiter, asynchronous=True)
        self._limiter = limiter
        self._policy = Policy(options)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the handler of a method, with the check before it."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers it
            return None
        return with_behaviour(handler, self._checked(handler, handler_call_details))

    def _checked(self, handler: MethodHandler, details: grpc.HandlerCallDetails) -> Behaviour:
        """Return the behaviour with the check before it, of the same kind: gRPC inspects the function."""
        behaviour = behaviour_of(handler)

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(call_of(details, context), behaviour, context)
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        async def coroutine(request: Any, context: Any) -> Any:
            await self._check(call_of(details, context), behaviour, context)
            return await behaviour(request, context)

        if inspect.isasyncgenfunction(behaviour):
            return generator
        if inspect.iscoroutinefunction(behaviour):
            return coroutine
        return self._checked_in_a_thread(handler, details)

    def _checked_in_a_thread(
        self, handler: MethodHandler, details: grpc.HandlerCallDetails
    ) -> Behaviour:
        """As :meth:`_checked`, for a blocking behaviour."""
        behaviour, loop = behaviour_of(handler), asyncio.get_running_loop()

        def check(context: Any) -> None:
            deciding = self._decision(call_of(details, context), behaviour)
            decision = asyncio.run_coroutine_threadsafe(deciding, loop).result()
            enforce(self._policy, decision, context)

        # gRPC calls it in the thread of the loop, but iterates over its answers in another: its body blocks only there.
        def stream(request: Any, context: Any) -> Iterator[Any]:
            check(context)
            yield from behaviour(request, context)

        def single(request: Any, context: Any) -> Any:
            check(context)
            return behaviour(request, context)

        return stream if handler.response_streaming else single

    async def _check(self, call: Call, behaviour: Behaviour, context: Any) -> None:
        """Check a call; abort a denied one by gRPC's exception."""
        decision = await self._decision(call, behaviour)
        if decision is not None and (denial := finish(self._policy, decision, context)):
            await context.abort(*denial)

    async def _decision(self, call: Call, behaviour: Behaviour) -> Decision | None:
        return await self._policy.decide_async(self._limiter, call, info_of(call, behaviour))
