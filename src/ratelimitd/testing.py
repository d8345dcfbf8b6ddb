"""Helpers for tests against ratelimitd: a clock that is set by hand, and a real node in the test's own process."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimitd.clock import Clock
from ratelimitd.settings.table import Settings

if TYPE_CHECKING:
    from ratelimitd.node.node import Node

_ADMIN = frozenset({"admin_token", "admin_token_file", "admin_sans", "tokens_file"})


class ManualClock:
    """A clock that only :meth:`advance` and :meth:`step` move. Implements :class:`ratelimitd.clock.Clock`."""

    __slots__ = ("_monotonic_us", "_now_us")

    def __init__(self, now_us: int = 1_700_006_400_000_000) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        """The wall time that was set, in µs since the Unix epoch."""
        return self._now_us

    def monotonic_us(self) -> int:
        """µs advanced since this clock was made."""
        return self._monotonic_us

    def remeasure(self) -> int:
        """Return 0: this clock has no error."""
        return 0

    def advance(self, *, seconds: float = 0, us: int = 0) -> None:
        """Let ``seconds`` plus ``us`` microseconds pass.

        Raises:
            ValueError: the sum is negative; use :meth:`step` to set the wall clock back.
        """
        delta_us = round(seconds * 1_000_000) + us
        if delta_us < 0:
            message = "time does not pass backwards: use step()"
            raise ValueError(message)
        self._now_us += delta_us
        self._monotonic_us += delta_us

    def step(self, us: int) -> None:
        """Set the wall clock ``us`` microseconds forward or back, without time passing."""
        self._now_us += us


@asynccontextmanager
async def running_node(*, clock: Clock | None = None, **settings: object) -> AsyncIterator[Node]:
    """Run a node that serves on free ports of 127.0.0.1, and drain it at the end.

    Args:
        clock: the node's clock; the system's if ``None``.
        settings: settings by attribute name (``admin_token="…"``), as text or as an object whose ``str`` is that text.
            Database and state directory are temporary unless given. Unless a setting grants the admin role,
            ``loopback_admin`` is ``on``, so that tests may change rules without a token.
    """
    # Imported here, because a clock needs no gRPC, SQL or HTTP.
    from ratelimitd.node.node import Node  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="ratelimitd-") as directory:
        chosen = {
            "listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "database_url": f"sqlite:///{Path(directory, 'rules.db')}",
            "state_dir": Path(directory, "state"),
            "drain_s": 1,
            **settings,
        }
        if _ADMIN.isdisjoint(settings):
            chosen.setdefault("loopback_admin", "on")
        flags = {name.upper(): str(value) for name, value in chosen.items()}
        node = Node(Settings.load({}, flags), clock=clock)
        await node.start()
        try:
            yield node
        finally:
            await node.drain()
