"""Where the mark of a view is looked for: frameworks make functions of classes, and keep the class on the function.

Pure.
"""

from __future__ import annotations

from typing import Final

from ratelimitd_client.middleware.limited import UNMARKED, mark_of

CLASS_ATTRIBUTE: Final = "view_class"
"""Under which name Django and Flask keep the class."""


def marked_part(view: object) -> object:
    """The function that a framework would call, or the class that it was made of, if the function has no mark."""
    if mark_of(view) is not UNMARKED:
        return view
    of_class = getattr(view, CLASS_ATTRIBUTE, None)
    return of_class if isinstance(of_class, type) else view
