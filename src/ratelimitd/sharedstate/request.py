"""One command on its way to the store, and whoever waits for its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from hiredis import pack_command

from ratelimitd.sharedstate.script import Script

Done = Callable[[Any], None]
"""Takes the reply (bytes, int, list or None), or an instance of an error of :mod:`ratelimitd.errors`."""

pack: Final = cast("Callable[[tuple[bytes | int | str, ...]], bytes]", pack_command)
"""A command as the server reads it. (The library's own annotation allows commands of one word only.)"""


class Request:
    """A command, and ``done``: ``None`` once it was called."""

    __slots__ = ("asking", "done", "had_script", "packed", "redirected", "script", "weight")

    def __init__(
        self, packed: bytes, done: Done, script: Script | None = None, weight: int = 1
    ) -> None:
        self.packed = packed
        self.weight = weight
        """As how many it counts: the work of the server."""
        self.done: Done | None = done
        self.script = script
        """What it runs, if it may have to be loaded."""
        self.had_script = False
        """The server did not know the script and was sent it."""
        self.redirected = False
        """A server of a Cluster named another."""
        self.asking = False
        """That other one is about to take over the key, and answers only who says so."""

    def tell(self, reply: object) -> None:
        """Call ``done``, unless it was."""
        done, self.done = self.done, None
        if done is not None:
            tell(done, reply)


def tell(done: Done, reply: object) -> None:
    """Call ``done``. A defect of whoever asked must not cost others their replies."""
    try:
        done(reply)
    except Exception as error:  # noqa: BLE001 -- see above
        asyncio.get_running_loop().call_exception_handler(
            {"message": "what was to be done with a reply has failed", "exception": error}
        )
