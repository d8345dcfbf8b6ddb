"""The directory where a node keeps what must survive it; one node at a time.

Owns the lock and the file modes. The lock file says where the node that holds it answers. Never knows what the other
files mean.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from ratelimitd.errors import StartupError

LOCK_NAME: Final = "lock"

MAX_ADDRESS_BYTES: Final = 300
"""A host name has at most 253 characters."""


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
        os.ftruncate(lock_fd, 0)  # a killed node leaves its address
        return cls(directory, lock_fd)

    def publish(self, address: str) -> None:
        """Write the gRPC address into the lock file, for commands on this host that use the node's own admin token."""
        os.pwrite(self._lock_fd, f"{address}\n".encode(), 0)

    @staticmethod
    def address_in(path: Path) -> str:
        """Return the address that the node running in ``path`` published; empty where none runs.

        Raises:
            OSError: there is no lock file, or it may not be read.
        """
        lock_fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            published = os.read(lock_fd, MAX_ADDRESS_BYTES).decode("ascii", "replace").strip()
            return published if published and _is_held(lock_fd) else ""
        finally:
            os.close(lock_fd)

    def close(self) -> None:
        """Give up the lock."""
        os.ftruncate(self._lock_fd, 0)
        os.close(self._lock_fd)


def _is_held(lock_fd: int) -> bool:
    """Whether another process holds the lock; tried only where one may, since the trial could get in a start's way."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
