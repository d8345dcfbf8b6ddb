"""Keys as they are pressed, for commands that run until somebody has seen enough."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

QUIT_KEYS: Final = b"qQ\x03\x04"
"""Also what Ctrl-C and Ctrl-D are where the terminal does not act on them."""

MAX_READ: Final = 1_024


class Keyboard(NamedTuple):
    """A terminal, by its file descriptor, whose keys come as they are pressed."""

    descriptor: int

    def quit_pressed(self) -> bool:
        """Whether the quit key is among what was typed; waits until something is."""
        return bool(set(os.read(self.descriptor, MAX_READ) or QUIT_KEYS) & set(QUIT_KEYS))

    def quits_within(self, seconds: float) -> bool:
        """Whether the quit key is pressed before that time is over."""
        end_s = time.monotonic() + seconds
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            typed, _, _ = select.select([self.descriptor], [], [], left_s)
            if not typed:
                return False
            if self.quit_pressed():
                return True


@contextmanager
def single_keys() -> Iterator[Keyboard | None]:
    """Let each key be read when it is pressed, without Enter and without an echo, until the end of the block.

    ``None`` where there is no keyboard.
    """
    if not sys.stdin.isatty():
        yield None
        return
    # Not everywhere: there is no such terminal on Windows.
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
