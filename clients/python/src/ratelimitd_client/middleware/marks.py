"""How a view is counted: a mark on it, which the middleware reads from the matching route. Pure.

The mark does not change the function, and passes through decorators that use ``functools.wraps``. Frameworks make
functions of classes and keep the class on the function, so marks are also looked for there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Never, TypeVar

from ratelimitd_client.check import MAX_COST, require_type
from ratelimitd_client.decision import OnUnavailable, require_on_unavailable
from ratelimitd_client.middleware.identity import Identities
from ratelimitd_client.middleware.request_info import is_valid_endpoint

V = TypeVar("V", bound=Callable[..., Any])

ATTRIBUTE: Final = "__ratelimitd__"

CLASS_ATTRIBUTES: Final = ("view_class", "cls")
"""Attributes in which Django and Flask, and the view sets of Django REST framework, keep the class."""

ACTIONS_ATTRIBUTE: Final = "actions"
"""Attribute in which Django REST framework keeps a view set's method per HTTP method: ``{"get": "list"}``."""


class Mark(NamedTuple):
    """How requests for a view are counted. ``None`` leaves it to the marks around this one, and then to the options."""

    cost: int | Callable[[Any], int] | None = None
    endpoint: str | None = None
    exempt: bool = False
    identifier_type: str | None = None
    identities: Callable[[Any], object] | None = None
    hold: int | Callable[[Any], int] | None = None
    settle: Callable[[Any], object] | None = None
    on_unavailable: OnUnavailable | None = None

    def over(self, other: Mark) -> Mark:
        """Return this mark with what it leaves open taken from another, so never ``exempt``."""
        return Mark._make(
            theirs if own is None else own for own, theirs in zip(self, other, strict=True)
        )


UNMARKED: Final = Mark()

VALID_COST: Final = f"0 to {MAX_COST}, or a function that is not a coroutine"


def is_valid_cost(value: object) -> bool:
    """Return whether a view or the options can have this cost."""
    if callable(value):
        return not inspect.iscoroutinefunction(value)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COST


def limited(
    *misplaced: Never,
    cost: int | Callable[[Any], int] | None = None,
    endpoint: str | None = None,
    exempt: bool = False,
    identifier_type: str | None = None,
    identities: Callable[[Any], Identities | Awaitable[Identities | None] | None] | None = None,
    hold: int | Callable[[Any], int] | None = None,
    settle: Callable[[Any], int | None] | None = None,
    on_unavailable: OnUnavailable | None = None,
) -> Callable[[V], V]:
    """Mark a view with how its requests are counted. Place it below the decorator that makes the view a route.

    An outer mark precedes an inner one, and a method's mark precedes its class's; what it leaves open is taken from the
    other.

    Args:
        misplaced: must be empty: arguments are passed by name.
        cost: tokens that a request spends, or a function of the request that returns them; with 0 it is not checked.
        endpoint: counted in place of the route template. Views with the same endpoint share one limit.
        exempt: its requests are not checked.
        identifier_type: preferred type of identity, where the request has one, such as ``"ip"`` for a login.
        identities: returns who else a request is counted for, in place of the option of this name.
        hold: as ``cost``, for a view whose requests are in flight for long, or whose cost is known when they end: so
            many tokens, and slots of a limit of concurrency, are held until the answer has ended.
        settle: returns the tokens that a request has cost, when its answer has ended; ``None``: what was held. It takes
            the request, on which the view has left what it counted.
        on_unavailable: ``"allow"`` or ``"deny"``, in place of the option of this name.

    Raises:
        ValueError: an argument is not valid; the message names it.
        TypeError: an argument has no name, such as a limit: limits are rules of the service.
    """
    if misplaced:
        raise _misplaced(*misplaced)
    if cost is not None and not is_valid_cost(cost):
        message = f"cost must be {VALID_COST}"
        raise ValueError(message)
    _require_valid_hold(hold, settle, cost)
    if endpoint is not None and not is_valid_endpoint(endpoint):
        message = "endpoint must be a valid endpoint"
        raise ValueError(message)
    if identifier_type is not None:
        require_type(identifier_type)
    function: object = identities
    if not (function is None or callable(function)):
        message = "identities must be a function"
        raise ValueError(message)
    given: object = exempt
    # A truthy value such as "no" would leave the view without a limit.
    if given is not True and given is not False:
        message = "exempt must be True or False"
        raise ValueError(message)
    if on_unavailable is not None:
        require_on_unavailable(on_unavailable)
    mark = Mark(cost, endpoint, exempt, identifier_type, identities, hold, settle, on_unavailable)

    def marked(view: V) -> V:
        setattr(view, ATTRIBUTE, mark.over(_own_mark_of(view)))
        return view

    return marked


def _require_valid_hold(hold: object, settle: object, cost: object) -> None:
    if hold is None:
        if settle is not None:
            message = "settle needs hold"
            raise ValueError(message)
        return
    if cost is not None:
        message = "cost and hold exclude each other"
        raise ValueError(message)
    if not is_valid_cost(hold):
        message = f"hold must be {VALID_COST}"
        raise ValueError(message)
    if settle is not None and (not callable(settle) or inspect.iscoroutinefunction(settle)):
        message = "settle must be a function that is not a coroutine"
        raise ValueError(message)


def _misplaced(first: object, *_: object) -> TypeError:
    """Return the error for a positional argument, where other libraries have the limit."""
    if callable(first):
        return TypeError("limited must be called, such as @limited(cost=2)")
    return TypeError(
        "limited takes cost, endpoint, exempt, identifier_type, identities, hold, settle and on_unavailable, by their"
        " names, and no limit such as 5/minute: limits are rules of the service, see docs/middleware.md and `ratelimitd"
        " rules create --help`"
    )


def mark_of(view: object, method: str = "") -> Mark:
    """Return the mark of a view. For a class with a method per HTTP method, the method's mark precedes the class's."""
    own = _own_mark_of(view)
    if isinstance(view, functools.partial):
        inner = mark_of(view.func, method)
        return inner if own is UNMARKED else own.over(inner)
    if isinstance(view, type):
        name = method.lower()
        # Frameworks answer HEAD with get(), so its mark applies.
        if name == "head" and not hasattr(view, name):
            name = "get"
        of_method = _own_mark_of(getattr(view, name, None))
        if of_method is not UNMARKED:
            return of_method.over(own)
    return own


def _own_mark_of(view: object) -> Mark:
    mark = getattr(view, ATTRIBUTE, None)
    return mark if isinstance(mark, Mark) else UNMARKED


def marked_part(view: object, method: str = "") -> object:
    """Return what carries the mark of a view: its function, or the class that the function was made of."""
    if mark_of(view) is not UNMARKED:
        return view
    for name in CLASS_ATTRIBUTES:
        of_class = getattr(view, name, None)
        if isinstance(of_class, type):
            return _action_of(view, of_class, method) or of_class
    return view


def _action_of(view: object, of_class: type[object], method: str) -> object | None:
    """Return what carries the mark of a view set's method, combined with that of its class."""
    actions = getattr(view, ACTIONS_ATTRIBUTE, None)
    if not isinstance(actions, dict):
        return None
    name = actions.get(method.lower()) or (actions.get("get") if method == "HEAD" else None)
    mark = mark_of(getattr(of_class, str(name), None))
    if mark is UNMARKED:
        return None
    return SimpleNamespace(**{ATTRIBUTE: mark.over(mark_of(of_class))})
