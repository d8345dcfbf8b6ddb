"""A wall clock for processes under test that can be set, as an operator or NTP sets a machine's.

The monotonic clock goes on, as it does there. It needs gcc, and a program that asks the C library for the time.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("wall_clock.c")

_NS = struct.Struct("q")
_NS_PER_S = 1_000_000_000


class WallClock:
    """The clock of the processes that are started with ``environment``; ``ahead_s`` of the machine's at first."""

    def __init__(self, directory: Path, ahead_s: float = 0.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._library = directory / "wall_clock.so"
        self._file = directory / "wall_clock"
        self._file.write_bytes(_ns(ahead_s))

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to go by this clock."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_FILE": str(self._file)}

    def __enter__(self) -> Self:
        command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", str(self._library), str(SOURCE), "-ldl"], check=True)
        with self._file.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NS.size)
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def set(self, ahead_s: float) -> None:
        """Let it be so far ahead of the machine's from now on; negative: behind."""
        self._memory[:] = _ns(ahead_s)


def _ns(seconds: float) -> bytes:
    return _NS.pack(round(seconds * _NS_PER_S))
