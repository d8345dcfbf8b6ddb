"""What a view says of its own limit: a mark on the function, which the middleware reads from the route that matches.

Pure. The mark changes nothing about the function. It passes through decorators that use ``functools.wraps``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from ratelimitd_client.check import IDENTIFIER_TYPES, MAX_COST, MAX_ENDPOINT_CHARS
from ratelimitd_client.middleware.identity import IdentifierType

V = TypeVar("V", bound=Callable[..., Any])

ATTRIBUTE: Final = "__ratelimitd__"


class Mark(NamedTuple):
    """How requests for one view are counted; ``None`` stands for what the options say."""

    cost: int | Callable[[Any], int] | None = None
    endpoint: str | None = None
    exempt: bool = False
    identifier_type: IdentifierType | None = None


UNMARKED: Final = Mark()


def limited(
    *,
    cost: int | Callable[[Any], int] | None = None,
    endpoint: str | None = None,
    exempt: bool = False,
    identifier_type: IdentifierType | None = None,
) -> Callable[[V], V]:
    """Mark a view: how its requests are counted. It stands below the decorator that makes the view a route.

    Args:
        cost: tokens that a request spends, or a function of the request that says so; with 0 it is not checked.
        endpoint: what is counted in place of the route template. Views with the same share one limit.
        exempt: its requests are not checked at all.
        identifier_type: count for an identity of this type where the request has one, such as ``"ip"`` for a login.

    Raises:
        ValueError: an argument is not valid.
    """
    if isinstance(cost, int) and not 0 <= cost <= MAX_COST:
        message = f"cost must be 0 to {MAX_COST}"
        raise ValueError(message)
    if endpoint is not None and not 0 < len(endpoint) <= MAX_ENDPOINT_CHARS:
        message = f"endpoint must be 1 to {MAX_ENDPOINT_CHARS} characters"
        raise ValueError(message)
    if identifier_type is not None and identifier_type not in IDENTIFIER_TYPES:
        message = f"identifier_type must be one of {', '.join(IDENTIFIER_TYPES)}"
        raise ValueError(message)
    mark = Mark(cost, endpoint, exempt, identifier_type)

    def marked(view: V) -> V:
        setattr(view, ATTRIBUTE, mark)
        return view

    return marked


def mark_of(view: object, method: str = "") -> Mark:
    """The mark of a view; of a class with a method for each HTTP method, that one's, or else its own."""
    while isinstance(view, functools.partial):
        view = view.func
    if isinstance(view, type):
        mark = getattr(getattr(view, method.lower(), None), ATTRIBUTE, None)
        if isinstance(mark, Mark):
            return mark
    mark = getattr(view, ATTRIBUTE, None)
    return mark if isinstance(mark, Mark) else UNMARKED
