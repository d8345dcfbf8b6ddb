"""``ratelimitd top``: a live view of a node in the terminal."""

from __future__ import annotations

from ratelimitd.cli.top.command import top

__all__ = ["top"]
