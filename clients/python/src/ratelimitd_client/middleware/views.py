"""Where the mark of a view is looked for: frameworks make functions of classes, and keep the class on the function.

Pure.
"""

from __future__ import annotations

from typing import Final

from ratelimitd_client.middleware.limited import ATTRIBUTE, UNMARKED, Mark, mark_of

CLASS_ATTRIBUTES: Final = ("view_class", "cls")
"""Under which names Django and Flask keep the class, and Django REST framework that of a view set."""

ACTIONS_ATTRIBUTE: Final = "actions"
"""Under which name Django REST framework keeps what a view set calls for each HTTP method: ``{"get": "list"}``."""


class _Action:
    """What a view set calls for a method, marked as it and its class are together."""

    def __init__(self, mark: Mark) -> None:
        setattr(self, ATTRIBUTE, mark)


def marked_part(view: object, method: str = "") -> object:
    """The function that a framework would call, or the class that it was made of, if the function has no mark."""
    if mark_of(view) is not UNMARKED:
        return view
    for name in CLASS_ATTRIBUTES:
        of_class = getattr(view, name, None)
        if isinstance(of_class, type):
            return _action_of(view, of_class, method) or of_class
    return view


def _action_of(view: object, of_class: type[object], method: str) -> _Action | None:
    actions = getattr(view, ACTIONS_ATTRIBUTE, None)
    if not isinstance(actions, dict):
        return None
    # As elsewhere, HEAD is answered by what answers GET.
    name = actions.get(method.lower()) or (actions.get("get") if method == "HEAD" else None)
    mark = mark_of(getattr(of_class, str(name), None))
    return None if mark is UNMARKED else _Action(mark.over(mark_of(of_class)))
