"""Middleware for gRPC servers of ``grpc.aio``. Your functions are given the :class:`Call`."""

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
from ratelimitd_client.middleware.grpc_call import (
    DENIED,
    Behaviour,
    Call,
    Handler,
    arrival_of,
    call_of,
    details_of,
    handler_of,
    heed,
    tell,
)
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options


class RateLimitInterceptor(grpc.aio.ServerInterceptor):
    """As :class:`ratelimitd_client.middleware.grpc_server.RateLimitInterceptor`, for ``grpc.aio.server()``.

    Handlers may be coroutines, asynchronous generators, or functions that block, which gRPC calls in threads.

    Args:
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how calls are counted and answered. The endpoint is the full name of the method.

    Raises:
        TypeError: ``limiter`` is none for asyncio.
    """

    def __init__(self, limiter: AsyncRateLimiter, options: Options[Call] | None = None) -> None:
        require_kind(limiter, asynchronous=True)
        self._limiter = limiter
        self._guard = Guard(options)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the question before the handler of a method."""
        given = await continuation(handler_call_details)
        if given is None:  # no such method: gRPC says so itself
            return None
        handler = handler_of(given)
        return handler.with_behaviour(self._checked(handler, handler_call_details))

    def _checked(self, handler: Handler, details: grpc.HandlerCallDetails) -> Behaviour:
        """The behaviour with the question before it, of the same kind: gRPC looks at what it is."""
        behaviour = handler.behaviour

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._ask(call_of(details, context), behaviour, context)
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        async def coroutine(request: Any, context: Any) -> Any:
            await self._ask(call_of(details, context), behaviour, context)
            return await behaviour(request, context)

        if inspect.isasyncgenfunction(behaviour):
            return generator
        if inspect.iscoroutinefunction(behaviour):
            return coroutine
        return self._checked_in_a_thread(handler, details)

    def _checked_in_a_thread(self, handler: Handler, details: grpc.HandlerCallDetails) -> Behaviour:
        """The same for a behaviour that blocks."""
        behaviour, loop = handler.behaviour, asyncio.get_running_loop()

        def ask(context: Any) -> None:
            asking = self._decision(call_of(details, context), behaviour)
            decision = asyncio.run_coroutine_threadsafe(asking, loop).result()
            heed(self._guard, decision, context)

        # gRPC calls this one in the loop's own thread. It waits nowhere: its body runs where gRPC asks for its answers.
        def stream(request: Any, context: Any) -> Iterator[Any]:
            ask(context)
            yield from behaviour(request, context)

        def single(request: Any, context: Any) -> Any:
            ask(context)
            return behaviour(request, context)

        return stream if handler.given.response_streaming else single

    async def _ask(self, call: Call, behaviour: Behaviour, context: Any) -> None:
        """Ask whether a call may proceed; end it if not, by what gRPC raises for that."""
        decision = await self._decision(call, behaviour)
        if decision is not None:
            tell(self._guard, decision, context)
            if not decision.allowed:
                await context.abort(DENIED, details_of(self._guard, decision))

    async def _decision(self, call: Call, behaviour: Behaviour) -> Decision | None:
        return await self._guard.decide_async(self._limiter, call, arrival_of(call, behaviour))
