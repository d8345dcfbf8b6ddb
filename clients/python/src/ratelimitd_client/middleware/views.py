"""Where the mark of a view is looked for: frameworks make functions of classes, and keep the class on the function.

Pure.
"""

from __future__ import annotations

from typing import Final

from ratelimitd_client.middleware.limited import UNMARKED, mark_of

CLASS_ATTRIBUTES: Final = ("view_class", "cls")
"""Under which names the class is kept: by Django and Flask, and by Django REST framework."""


def marked_part(view: object) -> object:
    """The function that a framework would call, or the class that it was made of, if the function has no mark."""
    if mark_of(view) is not UNMARKED:
        return view
    for name in CLASS_ATTRIBUTES:
        of_class = getattr(view, name, None)
        if isinstance(of_class, type):
            return of_class
    return view
