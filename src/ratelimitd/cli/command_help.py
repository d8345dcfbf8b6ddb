"""The help text of a command: its docstring, with the lines of its example left as they are.

Never touches a docstring: reading one in the source needs no knowledge of typer's markers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

EXAMPLE: Final = "Example:"

VERBATIM: Final = "\b\n"
"""typer wraps every paragraph but those that begin with this."""


def help_of(command: Callable[..., Any]) -> str:
    """Return the help text of a command."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(
        VERBATIM + paragraph if paragraph.startswith(EXAMPLE) else paragraph
        for paragraph in paragraphs
    )
