"""Middleware for ASGI: FastAPI, Starlette, and whatever else speaks it. Your functions are given the scope.

Imports no framework. The route template is found on Starlette's and FastAPI's routes; elsewhere the option ``endpoint``
says what is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final

from ratelimitd_client import AsyncRateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.asgi_routes import Found, RouteFinder, routes_of
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

CHECKED: Final = frozenset({"http", "websocket"})
"""The types of scope that are requests of a caller."""
HEADED: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
"""The messages that carry the headers of an answer."""
DECISION: Final = "ratelimitd_decision"
"""Where a view finds in the scope how its request was decided, if it was checked."""
POLICY_VIOLATION: Final = 1008
"""Why a WebSocket is closed where its request cannot be answered (RFC 6455, 7.4.1); a server makes 403 of it."""


class RateLimitMiddleware:
    """Checks each request, and each WebSocket before it is accepted.

    Args:
        app: the application.
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how requests are counted and answered.

    Raises:
        TypeError: the limiter is one that blocks, or none.
    """

    def __init__(
        self, app: ASGIApp, limiter: AsyncRateLimiter, options: Options[Scope] | None = None
    ) -> None:
        require_kind(limiter, asynchronous=True)
        self._app = app
        self._limiter = limiter
        self._guard = Guard(options)
        self._finder = RouteFinder()

    @property
    def routes(self) -> list[Any]:
        """The application's own: what this and the application are mounted in together looks for them here."""
        return [*routes_of(self._app)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it; other scopes, such as the lifespan, are passed on."""
        if scope["type"] not in CHECKED:
            await self._app(scope, receive, send)
            return
        arrival = _arrival(scope, self._find(scope))
        decision = await self._guard.decide_async(self._limiter, scope, arrival)
        if decision is None:
            await self._app(scope, receive, send)
        elif decision.allowed:
            scope[DECISION] = decision
            headers = _raw(self._guard.headers(decision))
            await self._app(scope, receive, _with_headers(send, headers) if headers else send)
        else:
            await self._deny(decision, arrival, scope, send)

    def _find(self, scope: Scope) -> Found | None:
        app = scope.get("app")
        if app is not None:
            return self._finder.find(app, scope)
        # Put around the application by hand: what it will say of itself in the scope is not there yet.
        root_path: object = getattr(self._app, "root_path", None)
        seen = (
            {**scope, "root_path": root_path} if root_path and isinstance(root_path, str) else scope
        )
        return self._finder.find(self._app, seen)

    async def _deny(
        self, decision: Decision, arrival: RequestInfo, scope: Scope, send: Send
    ) -> None:
        prefix = ""
        if scope["type"] == "websocket":
            if "websocket.http.response" not in (scope.get("extensions") or {}):
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": ""})
                return
            prefix = "websocket."
        answer = self._guard.denied(decision, arrival.header("accept"))
        headers = _raw({**answer.headers, "Content-Length": str(len(answer.body))})
        start = {"type": f"{prefix}http.response.start", "status": answer.status}
        await send({**start, "headers": headers})
        await send({"type": f"{prefix}http.response.body", "body": answer.body})


def _arrival(scope: Scope, found: Found | None) -> RequestInfo:
    lines: Iterable[tuple[bytes, bytes]] = scope["headers"]

    def header(name: str) -> Sequence[str]:
        sought = name.encode("latin-1")
        return [value.decode("latin-1") for key, value in lines if key == sought]

    client = scope.get("client")
    return RequestInfo(
        scope.get("method", "GET"),
        None if found is None else found.template,
        None if found is None else found.view,
        lambda: _user_of(scope),
        client[0] if client else None,
        header,
    )


def _user_of(scope: Scope) -> str | None:
    """The user whom an authentication middleware before this one has put into the scope."""
    user = scope.get("user")
    if user is None or not getattr(user, "is_authenticated", False):
        return None
    for name in ("identity", "pk", "display_name"):
        try:
            found = getattr(user, name, None)
        except (
            NotImplementedError
        ):  # Starlette's base class raises it for what a user does not have
            continue
        if found is not None and found != "":
            return str(found)
    return None


def _raw(headers: dict[str, str]) -> RawHeaders:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]


def _with_headers(send: Send, headers: RawHeaders) -> Send:
    """Adds headers to the answer; one that the application sends itself stays as it is."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] in HEADED:
            own: RawHeaders = list(message.get("headers") or ())
            names = {name.lower() for name, _ in own}
            added = [header for header in headers if header[0] not in names]
            message = {**message, "headers": [*own, *added]}
        return send(message)

    return sending
