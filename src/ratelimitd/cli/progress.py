"""A bar, or a sign of life, for work that takes a while: on stderr where that is a terminal, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LONG: Final = 100
"""Work of fewer steps is over before anybody reads a bar."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield what to call after each of ``total`` steps; the bar is gone at the end of the block."""
    if total < LONG or not sys.stderr.isatty():
        yield lambda: None
        return
    # 50 ms to import, where there is something to wait for anyway.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something goes on until the end of the block, where nobody knows how long it takes."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True).status(what):
        yield
