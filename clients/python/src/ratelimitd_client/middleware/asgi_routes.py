"""Which route of a Starlette or FastAPI application a request will take, found before the application does.

Pure: runs nothing of the application but its patterns, on a copy of the scope, and remembers nothing. It knows routes
by what they offer – ``matches``, ``routes``, ``path_format`` – and so imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

NOTHING_INSIDE: Final = "/{path}"
"""How Starlette ends the template of a mount, and so ours of an application that is no router."""

NONE, PARTIAL, FULL = 0, 1, 2
"""The values of Starlette's ``Match``; PARTIAL is a path with another method, answered 405."""


FRAMEWORKS: Final = frozenset({"starlette.routing", "fastapi.routing"})
"""The modules whose routes have a pattern for the path in ``path_regex``, and match nothing without it."""

REMEMBERED: Final = 64
"""How many classes of routes are remembered; the frameworks have six."""


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


def routes_of(app: object) -> Iterable[Any]:
    """The routes of an application or of a route; none where it has none that are known."""
    routes: Any = getattr(app, "routes", None)
    return cast("Iterable[Any]", routes) if isinstance(routes, list | tuple) else ()


def _search(routes: Iterable[Any], scope: dict[str, Any], prefix: str) -> Found | None:
    """The first that matches fully, else the first that would but for the method."""
    partial = None
    # Only where nothing is mounted: what is left of the path inside, each version of Starlette writes down differently.
    path = None if scope.get("root_path") else scope["path"]
    for route in routes:
        if path is not None and _is_passed_by(route, path):
            continue
        found = _look_at(route, scope, prefix)
        if found is not None:
            if found.is_full:
                return found
            partial = partial or found
    return partial


def _is_passed_by(route: Any, path: str) -> bool:
    """Whether the pattern of a route says no: most do, and their ``matches`` takes ten times as long to say it."""
    pattern = getattr(route, "path_regex", None)
    return pattern is not None and _obeys_pattern(route.__class__) and not pattern.match(path)


@lru_cache(REMEMBERED)
def _obeys_pattern(kind: type[Any]) -> bool:
    """Whether routes of a class match no path that their pattern does not: a user's own may match by what they like."""
    return getattr(kind.matches, "__module__", "") in FRAMEWORKS


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
