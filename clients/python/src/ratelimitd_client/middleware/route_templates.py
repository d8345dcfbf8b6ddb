r"""One notation for the routes of all frameworks: ``/orders/{id}``, so that one rule holds for an API wherever it runs.

Pure. What a framework knows of a parameter beside its name (``<int:id>``, ``(?P<id>\d+)``) says nothing of a limit.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

REMEMBERED: Final = 1_024
"""How many routes are remembered with their template."""

_CONVERTER: Final = re.compile(r"<(?:[^<>:]*:)?\s*([^<>:]+?)\s*>")
"""``<id>``, ``<int:id>``, ``<int(min=1):id>``."""

_GROUP: Final = re.compile(r"(?<!\\)\((?:\?P<(\w+)>|(?!\?))")
"""Where a group of a regular expression begins that is a parameter, named or not."""

_NO_TEXT: Final = re.compile(r"\\[AbBZ]|(?<!\\)[\^$]")
"""What a regular expression says of a place and not of a text."""


@lru_cache(REMEMBERED)
def of_flask(rule: str) -> str:
    """The template of a rule of Werkzeug's."""
    return _CONVERTER.sub(r"{\1}", rule)


@lru_cache(REMEMBERED)
def of_django(route: str) -> str:
    """The template of a route of Django's, whether of ``path()``, of ``re_path()`` or one included in the other."""
    if _is_expression(route):
        route = _NO_TEXT.sub("", _without_groups(route)).replace("\\", "")
    return "/" + _CONVERTER.sub(r"{\1}", route).lstrip("/")


def _is_expression(route: str) -> bool:
    return "(" in route or _NO_TEXT.search(route) is not None


def _without_groups(expression: str) -> str:
    """The expression with a name, or nothing, in braces in the place of each outermost group that is a parameter."""
    parts, at = [], 0
    while found := _GROUP.search(expression, at):
        parts += [expression[at : found.start()], f"{{{found[1] or ''}}}"]
        at = _end_of_group(expression, found.end())
    return "".join([*parts, expression[at:]])


def _end_of_group(expression: str, at: int) -> int:
    """Where the group ends that was opened before ``at``."""
    depth, escaped = 1, False
    for place in range(at, len(expression)):
        character = expression[place]
        if not escaped:
            depth += (character == "(") - (character == ")")
        if not depth:
            return place + 1
        escaped = character == "\\" and not escaped
    return len(expression)
