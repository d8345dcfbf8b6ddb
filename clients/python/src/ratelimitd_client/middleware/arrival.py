"""A request as far as every framework can tell of it: what the parts that all middlewares share are given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple


class RequestInfo(NamedTuple):
    """A request that has arrived. What takes work is a function, called only when it is needed."""

    method: str
    route: str | None
    """The template of the route that matches, without parameters (``/orders/{id}``); ``None`` if none does."""
    view: object
    """The function or class that would answer, for the mark on it; ``None`` if there is none."""
    user: Callable[[], str | None]
    """The id of the user whom the framework has authenticated."""
    peer: str | None
    """The address of who is connected; ``None`` or empty for a Unix socket."""
    header: Callable[[str], Sequence[str]]
    """The values of a header, one for each line of it, in order; the name is given in lower case."""
    load_user: Callable[[], Awaitable[str | None]] | None = None
    """In place of ``user``, where that is awaited."""
