"""Middleware for ASGI: FastAPI, Starlette and others. Your functions take the scope.

Imports no framework. Routes of Starlette and FastAPI are recognized by their attributes (``matches``, ``routes``,
``path_format``), and matched on a copy of the scope before the application does so. For other applications the option
``endpoint`` names what is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from itertools import takewhile
from operator import is_
from typing import Any, Final, NamedTuple, cast

from ratelimitd_client import AsyncRateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.holds import HeldRequests
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import METHODS, RequestInfo

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

CHECKED: Final = frozenset({"http", "websocket"})
"""Types of scope that are checked."""
HEADED: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)
"""Messages that carry the headers of an answer."""
DECISION: Final = "ratelimitd_decision"
"""Key of the scope under which a view finds the ``Decision`` on a request that was checked."""
POLICY_VIOLATION: Final = 1008
"""Close code of a WebSocket whose handshake cannot be answered (RFC 6455 section 7.4.1); the server answers 403."""

NOTHING_INSIDE: Final = "/{path}"
"""End of the template that Starlette gives a mount, also used for a mounted application that is not a router."""

NONE, PARTIAL, FULL = 0, 1, 2
"""The values of Starlette's ``Match``; PARTIAL is a path with another method, answered 405."""

FRAMEWORKS: Final = frozenset({"starlette.routing", "fastapi.routing"})
"""Modules whose routes have a pattern in ``path_regex``, and match no path that it does not match."""

CLASS_CACHE_SIZE: Final = 64
"""Cached classes of routes; the frameworks have six."""


class RateLimitMiddleware:
    """Checks each request, and each WebSocket before it is accepted.

    Args:
        app: the application.
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how requests are counted and answered.

    Raises:
        TypeError: ``limiter`` is not one for asyncio.
    """

    def __init__(
        self, app: ASGIApp, limiter: AsyncRateLimiter, options: Options[Scope] | None = None
    ) -> None:
        require_kind(limiter, asynchronous=True)
        self._app = app
        self._limiter = limiter
        self._policy = Policy(options)
        self._finder = RouteFinder()
        self._held: HeldRequests[Scope] = HeldRequests(self._policy.actual)

    @property
    def routes(self) -> list[Any]:
        """The application's routes, for a router in which this middleware is mounted."""
        return [*routes_of(self._app)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a scope; other types, such as lifespan, are passed on."""
        if scope["type"] not in CHECKED:
            await self._app(scope, receive, send)
            await self._held.finish()
            return
        info = _info_of(scope, self._find(scope))
        decision, held = await self._policy.admit_async(self._limiter, scope, info)
        if decision is None:
            await self._app(scope, receive, send)
            return
        if not decision.allowed:
            await self._deny(decision, info, scope, send)
            return
        scope[DECISION] = decision
        headers = _raw(self._policy.headers(decision))
        sending = _with_headers(send, headers) if headers else send
        if held is None:
            await self._app(scope, receive, sending)
            return
        ended = self._held.begin(scope, held)
        try:
            await self._app(scope, receive, _ending(sending, ended))
        finally:
            ended()

    def _find(self, scope: Scope) -> Found | None:
        app = scope.get("app")
        if app is not None:
            return self._finder.find(app, scope)
        # Wrapped around the application by hand, which has not put itself into the scope yet.
        root_path: object = getattr(self._app, "root_path", None)
        seen = (
            {**scope, "root_path": root_path} if root_path and isinstance(root_path, str) else scope
        )
        return self._finder.find(self._app, seen)

    async def _deny(self, decision: Decision, info: RequestInfo, scope: Scope, send: Send) -> None:
        prefix = ""
        if scope["type"] == "websocket":
            if "websocket.http.response" not in (scope.get("extensions") or {}):
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": ""})
                return
            prefix = "websocket."
        answer = self._policy.denied(decision, info.header("accept"))
        headers = _raw({**answer.headers, "Content-Length": str(len(answer.body))})
        start = {"type": f"{prefix}http.response.start", "status": answer.status}
        await send({**start, "headers": headers})
        await send({"type": f"{prefix}http.response.body", "body": answer.body})


def _info_of(scope: Scope, found: Found | None) -> RequestInfo:
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
    """Return the user that an authentication middleware before this one has put into the scope."""
    user = scope.get("user")
    if user is None or not getattr(user, "is_authenticated", False):
        return None
    for name in ("identity", "pk", "display_name"):
        try:
            found = getattr(user, name, None)
        except NotImplementedError:  # of Starlette's base class: the attribute has no value
            continue
        if found is not None and found != "":
            return str(found)
    return None


def _raw(headers: dict[str, str]) -> RawHeaders:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]


def _with_headers(send: Send, headers: RawHeaders) -> Send:
    """Return a ``send`` that adds headers to the answer, except those that the application sets."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] in HEADED:
            own: RawHeaders = list(message.get("headers") or ())
            names = {name.lower() for name, _ in own}
            added = [header for header in headers if header[0] not in names]
            message = {**message, "headers": [*own, *added]}
        return send(message)

    return sending


def _ending(send: Send, ended: Callable[[], None]) -> Send:
    """Return a ``send`` that calls ``ended`` after the end of an answer: the application may run tasks after it."""

    async def sending(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            ended()

    return sending


class Found(NamedTuple):
    """The route of a request.

    Attributes:
        template: the path with the names of its parameters, without converters, below the path of its mounts.
        view: the function, class or application that answers.
        is_full: the method matches, too, and the search ends here.
    """

    template: str
    view: object
    is_full: bool = True


_NOT_FOUND: Final = Found("", None)
"""The path is that of a mounted application which has no route for it."""


class RouteFinder:
    """Finds the routes of requests as :func:`find_route` does, and caches those of paths without parameters.

    The application has a fixed number of these. The cache is valid while the application has the same routes, and holds
    routes that depend on the path, the method and the type of the request only.
    """

    def __init__(self) -> None:
        self._routes: Sequence[Any] = ()
        self._plain: list[Any] = []
        """The routes before the first one that may depend on something else."""
        self._found: dict[tuple[str, str, str], tuple[Found, Any]] = {}
        """What was found, and the route with its view."""

    def find(self, app: object, scope: Mapping[str, Any]) -> Found | None:
        """Return the route that the application will choose; ``None`` if it will answer 404, or has no routes."""
        if scope.get("root_path"):
            return find_route(app, scope)
        routes = routes_of(app)
        if not _are_the_same(routes, self._routes):
            self._routes, self._found = routes[:], {}
            self._plain = list(takewhile(_is_plain, routes))
        asked = scope["type"], scope.get("method", ""), scope["path"]
        known = self._found.get(asked)
        if known is not None and getattr(known[1], "endpoint", None) is known[0].view:
            return known[0]
        found = find_route(app, scope)
        if found is not None and found.is_full:
            route = self._settled(found, scope)
            if route is not None:
                self._found[asked] = found, route
        return found

    def _settled(self, found: Found, scope: Mapping[str, Any]) -> Any | None:
        """Return the route to cache; ``None`` if other requests may take another, or the method is not standard."""
        path = scope["path"]
        if found.template != path or scope.get("method", "GET") not in METHODS:
            return None
        for route in self._plain:
            if (
                route.path_format == path
                and getattr(route, "endpoint", None) is found.view
                and route.matches(scope)[0].value == FULL
            ):
                return route
        return None


def _are_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether the routes are identical; equal ones may have different views."""
    return len(some) == len(others) and all(map(is_, some, others))


def find_route(app: object, scope: Mapping[str, Any]) -> Found | None:
    """Return the route that the application will choose; ``None`` if it will answer 404, or has no routes."""
    try:
        found = _search(routes_of(app), _scope_of(app, scope), "")
    except Exception:  # noqa: BLE001 - the application will raise the same for this path
        return None
    return None if found is _NOT_FOUND else found


def _scope_of(app: object, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scope as the application got it, also below a mount, which has removed its part of the path."""
    seen = dict(scope)
    router = scope.get("router")
    if router is not None and router is getattr(app, "router", None):
        seen["root_path"] = scope.get("app_root_path", scope.get("root_path", ""))
    return seen


def routes_of(app: object) -> Sequence[Any]:
    """Return the routes of an application or of a route, if it has a list of them."""
    routes: Any = getattr(app, "routes", None)
    return cast("Sequence[Any]", routes) if isinstance(routes, list | tuple) else ()


def _search(routes: Iterable[Any], scope: dict[str, Any], prefix: str) -> Found | None:
    """Return the first route that matches, else the first whose path does."""
    partial = None
    # Only outside of mounts: versions of Starlette differ in how a scope inside holds the rest of the path.
    path = None if scope.get("root_path") else scope["path"]
    for route in routes:
        if path is not None and _is_plain(route) and not route.path_regex.match(path):
            continue  # ``matches`` takes ten times as long
        found = _look_at(route, scope, prefix)
        if found is not None:
            if found.is_full:
                return found
            partial = partial or found
    return partial


def _is_plain(route: Any) -> bool:
    """Return whether a route has a pattern that decides about paths; a user's own class may use anything."""
    return getattr(route, "path_regex", None) is not None and _is_of_framework(route.__class__)


@lru_cache(CLASS_CACHE_SIZE)
def _is_of_framework(kind: type[Any]) -> bool:
    return getattr(getattr(kind, "matches", None), "__module__", "") in FRAMEWORKS


def _look_at(route: Any, scope: dict[str, Any], prefix: str) -> Found | None:
    # FastAPI keeps an included router as one route, whose candidates have whole paths.
    included = getattr(route, "effective_candidates", None)
    if included is not None:
        return _search(included(), scope, prefix)
    route = getattr(route, "starlette_route", None) or route
    match, child_scope = route.matches(scope)
    how = match.value
    if how == NONE:
        return None
    template = getattr(route, "path_format", "")  # a host has none
    inside = routes_of(route)
    if inside:
        below = prefix + template.removesuffix(NOTHING_INSIDE)
        found = _search(inside, {**scope, **child_scope}, below) or _NOT_FOUND
        return found._replace(is_full=True) if not found.is_full else found
    view = child_scope.get("endpoint")
    return Found(prefix + (template or NOTHING_INSIDE), view, is_full=how == FULL)
