"""The directory where a node keeps what must survive it; one node at a time.

Owns the lock and the file modes. Never knows what the files mean.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from ratelimitd.errors import StartupError

LOCK_NAME: Final = "lock"


class StateDir:
    """A locked state directory. The lock goes with the process, however it ends."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def lock(cls, path: str | Path) -> StateDir:
        """Make the directory if need be, readable by its owner alone, and take its lock.

        Raises:
            StartupError: it cannot be made, written or locked, or another node uses it.
        """
        directory = Path(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"the state directory {directory} cannot be used: {error.strerror}"
            raise StartupError(message) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock_fd)
            message = f"the state directory {directory} is in use by another node; give this one its own STATE_DIR"
            raise StartupError(message) from error
        except OSError as error:  # such as ENOLCK, of a network file system
            os.close(lock_fd)
            message = f"the state directory {directory} cannot be locked: {error.strerror}"
            raise StartupError(message) from error
        return cls(directory, lock_fd)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._lock_fd)
