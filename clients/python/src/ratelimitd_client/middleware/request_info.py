r"""A request in the form that every framework can give, and the endpoints that may be made of it. Pure.

A node keeps a bucket for each endpoint of an identity, so nothing that a caller can choose freely becomes an endpoint:
neither a path nor a method. Routes have one notation in all frameworks, ``/orders/{id}``: a parameter's type or pattern
(``<int:id>``, ``(?P<id>\d+)``) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from ratelimitd_client.check import MAX_ENDPOINT_CHARS, Check

CACHE_SIZE: Final = 1_024
"""Cached endpoints, and cached routes of each framework."""

OTHER_METHOD: Final = "OTHER"

METHODS: Final = {
    # HEAD is answered by the handler of GET.
    "HEAD": "GET",
    **{
        name: name
        for name in (
            "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY", "TRACE", "CONNECT",
        )
    },
}  # fmt: skip
"""The standard methods, and what each is counted as."""

_CONVERTER: Final = re.compile(r"<(?:[^<>:]*:)?\s*([^<>:]+?)\s*>")
"""``<id>``, ``<int:id>``, ``<int(min=1):id>``."""

_GROUP: Final = re.compile(r"(?<!\\)\((?:\?P<(\w+)>|(?!\?))")
"""The begin of a group of a regular expression that is a parameter, named or not."""

_ANCHOR: Final = re.compile(r"\\[AbBZ]|(?<!\\)[\^$]")


class RequestInfo(NamedTuple):
    """A request. What takes work is a function, called only when it is needed.

    Attributes:
        method: the HTTP method.
        route: template of the matching route, such as ``/orders/{id}``; ``None`` if no route matches.
        view: the function or class that would answer, for its mark; ``None`` if there is none.
        user: returns the id of the user that the framework has authenticated.
        peer: address of the peer; ``None`` or empty for a Unix socket.
        header: returns the values of a header, one per line, in order; takes the name in lower case.
        load_user: replaces ``user`` where that has to be awaited.
    """

    method: str
    route: str | None
    view: object
    user: Callable[[], str | None]
    peer: str | None
    header: Callable[[str], Sequence[str]]
    load_user: Callable[[], Awaitable[str | None]] | None = None


def with_method(method: str, route: str) -> str:
    """Return the endpoint of one method of a route; all methods that are not standard share one."""
    return f"{METHODS.get(method, OTHER_METHOD)} {route}"


def is_valid_endpoint(text: object) -> bool:
    """Return whether a check can have this endpoint."""
    return isinstance(text, str) and len(text) <= MAX_ENDPOINT_CHARS and _is_valid(text)


@lru_cache(CACHE_SIZE)
def _is_valid(text: str) -> bool:
    try:
        Check("-", "user", text)
    except ValueError:
        return False
    return True


@lru_cache(CACHE_SIZE)
def flask_route(rule: str) -> str:
    """Return the template of a Werkzeug rule."""
    return _CONVERTER.sub(r"{\1}", rule)


@lru_cache(CACHE_SIZE)
def django_route(route: str) -> str:
    """Return the template of a Django route of ``path()``, of ``re_path()``, or of one included in the other."""
    if "(" in route or _ANCHOR.search(route):
        route = _ANCHOR.sub("", _without_groups(route)).replace("\\", "")
    return "/" + _CONVERTER.sub(r"{\1}", route).lstrip("/")


def _without_groups(expression: str) -> str:
    """Replace each outermost group that is a parameter by its name, or nothing, in braces."""
    parts, at = [], 0
    while found := _GROUP.search(expression, at):
        parts += [expression[at : found.start()], f"{{{found[1] or ''}}}"]
        at = _end_of_group(expression, found.end())
    return "".join([*parts, expression[at:]])


def _end_of_group(expression: str, at: int) -> int:
    """Return where the group ends that was opened before ``at``."""
    depth, escaped = 1, False
    for place in range(at, len(expression)):
        character = expression[place]
        if not escaped:
            depth += (character == "(") - (character == ")")
        if not depth:
            return place + 1
        escaped = character == "\\" and not escaped
    return len(expression)
