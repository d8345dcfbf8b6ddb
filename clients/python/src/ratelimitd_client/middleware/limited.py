"""What a view says of its own limit: a mark on the function, which the middleware reads from the route that matches.

Pure. The mark changes nothing about the function. It passes through decorators that use ``functools.wraps``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Never, TypeVar

from ratelimitd_client.check import IDENTIFIER_TYPES, MAX_COST
from ratelimitd_client.middleware.endpoint import is_valid_endpoint
from ratelimitd_client.middleware.identity import IdentifierType

V = TypeVar("V", bound=Callable[..., Any])

ATTRIBUTE: Final = "__ratelimitd__"


class Mark(NamedTuple):
    """How requests for one view are counted; ``None`` stands for what marks around it say, or else the options."""

    cost: int | Callable[[Any], int] | None = None
    endpoint: str | None = None
    exempt: bool = False
    identifier_type: IdentifierType | None = None

    def over(self, other: Mark) -> Mark:
        """This mark, and what it leaves open as the other says. It alone says whether the view is exempt."""
        return Mark(
            other.cost if self.cost is None else self.cost,
            other.endpoint if self.endpoint is None else self.endpoint,
            self.exempt,
            other.identifier_type if self.identifier_type is None else self.identifier_type,
        )


UNMARKED: Final = Mark()

VALID_COST: Final = f"0 to {MAX_COST}, or a function that is no coroutine"


def is_valid_cost(value: object) -> bool:
    """Whether a view, or the options, can have this cost."""
    if callable(value):
        return not inspect.iscoroutinefunction(value)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COST


def limited(
    *misplaced: Never,
    cost: int | Callable[[Any], int] | None = None,
    endpoint: str | None = None,
    exempt: bool = False,
    identifier_type: IdentifierType | None = None,
) -> Callable[[V], V]:
    """Mark a view: how its requests are counted. It stands below the decorator that makes the view a route.

    Of several marks the outer one goes before, and of a class and its method that of the method; what it leaves open is
    as the other says.

    Args:
        misplaced: none: the others are given by their names.
        cost: tokens that a request spends, or a function of the request that says so; with 0 it is not checked.
        endpoint: what is counted in place of the route template. Views with the same share one limit.
        exempt: its requests are not checked at all.
        identifier_type: count for an identity of this type where the request has one, such as ``"ip"`` for a login.

    Raises:
        ValueError: an argument is not valid; the text names it.
        TypeError: an argument has no name, such as a limit, which only a rule of the service can be.
    """
    if misplaced:
        raise _misplaced(*misplaced)
    if cost is not None and not is_valid_cost(cost):
        message = f"cost must be {VALID_COST}"
        raise ValueError(message)
    if endpoint is not None and not is_valid_endpoint(endpoint):
        message = "endpoint must be a valid endpoint"
        raise ValueError(message)
    if identifier_type is not None and identifier_type not in IDENTIFIER_TYPES:
        message = f"identifier_type must be one of {', '.join(IDENTIFIER_TYPES)}"
        raise ValueError(message)
    given: object = exempt
    # Not whatever is true: "no" would leave the view without a limit.
    if given is not True and given is not False:
        message = "exempt must be True or False"
        raise ValueError(message)
    mark = Mark(cost, endpoint, exempt, identifier_type)

    def marked(view: V) -> V:
        setattr(view, ATTRIBUTE, mark.over(_own_mark_of(view)))
        return view

    return marked


def _misplaced(first: object, *_: object) -> TypeError:
    """What is wrong with an argument that has no name: other libraries have limits there."""
    if callable(first):
        return TypeError("limited is called above a view, such as @limited(cost=2)")
    return TypeError(
        "limited takes cost, endpoint, exempt and identifier_type, by their names, and no limit such as 5/minute:"
        " limits are rules of the service, see docs/middleware.md and `ratelimitd rules create --help`"
    )


def mark_of(view: object, method: str = "") -> Mark:
    """The mark of a view; of a class with a method for each HTTP method, that one's over its own."""
    own = _own_mark_of(view)
    if isinstance(view, functools.partial):
        return (
            own.over(mark_of(view.func, method))
            if own is not UNMARKED
            else mark_of(view.func, method)
        )
    if isinstance(view, type):
        name = method.lower()
        # Frameworks let get answer HEAD, all of it: its mark must not be passed by.
        if name == "head" and not hasattr(view, name):
            name = "get"
        of_method = _own_mark_of(getattr(view, name, None))
        if of_method is not UNMARKED:
            return of_method.over(own)
    return own


def _own_mark_of(view: object) -> Mark:
    mark = getattr(view, ATTRIBUTE, None)
    return mark if isinstance(mark, Mark) else UNMARKED
