"""A Lua script that runs in the store: its text, and the digest by which the server knows it.

The text is constant, so that servers keep one copy for ever and a node never sends it twice to one of them.
"""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Final

LIBRARY: Final = (
    "bucket.lua",
    "token_bucket.lua",
    "fixed_window.lua",
    "sliding_window.lua",
    "ledger.lua",
)
"""What every script begins with; the server has no way to load one text from another."""

SHEBANG: Final = "#!lua\n"
"""With it a server that is out of memory, or no primary, refuses a script as a whole and not at its first write."""


class Script:
    """One script; ``sha`` is the SHA-1 of ``text`` in hexadecimal, as EVALSHA takes it."""

    __slots__ = ("sha", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.sha = sha1(text, usedforsecurity=False).hexdigest().encode()


def load(name: str) -> Script:
    """The script ``name`` of the package, with all that it builds on."""
    scripts = files("ratelimitd.sharedstate") / "scripts"
    parts = [(scripts / part).read_text(encoding="utf-8") for part in (*LIBRARY, f"{name}.lua")]
    return Script((SHEBANG + "\n".join(parts)).encode())
