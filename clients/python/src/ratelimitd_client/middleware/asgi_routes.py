"""Which route of a Starlette or FastAPI application a request will take, found before the application does.

Runs nothing of the application but its patterns, on a copy of the scope. It knows routes by what they offer –
``matches``, ``routes``, ``path_format`` – and so imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from operator import is_
from typing import Any, Final, NamedTuple, cast

from ratelimitd_client.middleware.endpoint import METHODS

NOTHING_INSIDE: Final = "/{path}"
"""How Starlette ends the template of a mount, and so ours of an application that is no router."""

NONE, PARTIAL, FULL = 0, 1, 2
"""The values of Starlette's ``Match``; PARTIAL is a path with another method, answered 405."""

FRAMEWORKS: Final = frozenset({"starlette.routing", "fastapi.routing"})
"""The modules whose routes have a pattern for the path in ``path_regex``, and match nothing without it."""

KNOWN_CLASSES: Final = 64
"""How many classes of routes are known; the frameworks have six."""


class Found(NamedTuple):
    """The route of a request."""

    template: str
    """Its path with the names of its parameters, and with what it is mounted under; without converters."""
    view: object
    """The function, class or application that answers."""
    is_full: bool = True
    """Whether the search ends here: the method matches, too."""


_NOT_FOUND: Final = Found("", None)
"""What is mounted has the request, and no route for it."""


class RouteFinder:
    """Finds the routes of requests, as :func:`find_route` does, and remembers those of paths without parameters.

    Of these there are as many as the application has. What is remembered holds while the application has the same
    routes, and only of such as the path, the method and the type of the request decide about alone.
    """

    __slots__ = ("_found", "_plain", "_routes")

    def __init__(self) -> None:
        self._routes: Sequence[Any] = ()
        self._plain: list[Any] = []
        """Those of the routes before which there is none that may go by something else."""
        self._found: dict[tuple[str, str, str], tuple[Found, Any]] = {}
        """What was found, and the route that has its view."""

    def find(self, app: object, scope: Mapping[str, Any]) -> Found | None:
        """The route that the application will choose; ``None`` if it will answer 404, or has no routes at all."""
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
        """The route that all such requests take; ``None`` if it may be another, or a caller has made up its method."""
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
    """Whether these are the same routes, and not only equal ones: such may have other views."""
    return len(some) == len(others) and all(map(is_, some, others))


def find_route(app: object, scope: Mapping[str, Any]) -> Found | None:
    """The route that the application will choose; ``None`` if it will answer 404, or has no routes at all."""
    try:
        found = _search(routes_of(app), _scope_of(app, scope), "")
    except Exception:  # noqa: BLE001 - a pattern of the application fails for this path, as it will once more in a moment
        return None
    return None if found is _NOT_FOUND else found


def _scope_of(app: object, scope: Mapping[str, Any]) -> dict[str, Any]:
    """The scope as the application itself saw it, also where a mount has already taken its part of the path."""
    seen = dict(scope)
    router = scope.get("router")
    if router is not None and router is getattr(app, "router", None):
        seen["root_path"] = scope.get("app_root_path", scope.get("root_path", ""))
    return seen


def routes_of(app: object) -> Sequence[Any]:
    """The routes of an application or of a route; none where it has none that are known."""
    routes: Any = getattr(app, "routes", None)
    return cast("Sequence[Any]", routes) if isinstance(routes, list | tuple) else ()


def _search(routes: Iterable[Any], scope: dict[str, Any], prefix: str) -> Found | None:
    """The first that matches fully, else the first that would but for the method."""
    partial = None
    # Only where nothing is mounted: what is left of the path inside, each version of Starlette writes down differently.
    path = None if scope.get("root_path") else scope["path"]
    for route in routes:
        if path is not None and _is_plain(route) and not route.path_regex.match(path):
            continue  # most are: their ``matches`` takes ten times as long to say it
        found = _look_at(route, scope, prefix)
        if found is not None:
            if found.is_full:
                return found
            partial = partial or found
    return partial


def _is_plain(route: Any) -> bool:
    """Whether a route has a pattern, and matches no path that this does not: a user's own may go by what they like."""
    return getattr(route, "path_regex", None) is not None and _is_of_framework(route.__class__)


@lru_cache(KNOWN_CLASSES)
def _is_of_framework(kind: type[Any]) -> bool:
    return getattr(getattr(kind, "matches", None), "__module__", "") in FRAMEWORKS


def _look_at(route: Any, scope: dict[str, Any], prefix: str) -> Found | None:
    # FastAPI keeps a router that was included as one route, whose candidates know their whole path.
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
