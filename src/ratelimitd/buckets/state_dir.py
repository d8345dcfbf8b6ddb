"""The state directory of a node: its lock, its file modes, and the address published in the lock file."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from ratelimitd.errors import StartupError

LOCK_NAME: Final = "lock"

MAX_ADDRESS_BYTES: Final = 300
"""A host name has at most 253 characters."""

NOT_MADE: Final = " with another token"
"""Follows the address of a node that did not create its admin token; older commands then find no valid address."""


class StateDir:
    """A locked state directory. The process's exit releases the lock."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def lock(cls, path: str | Path) -> StateDir:
        """Create the directory if missing, readable by its owner only, and lock it.

        Raises:
            StartupError: it cannot be created, written or locked, or another node uses it.
        """
        directory = Path(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"STATE_DIR: {directory} cannot be used: {why(error)}"
            raise StartupError(message) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock_fd)
            message = f"the state directory {directory} is in use by another node; give this one its own STATE_DIR"
            raise StartupError(message) from error
        except OSError as error:  # such as ENOLCK on a network file system
            os.close(lock_fd)
            message = f"the state directory {directory} cannot be locked: {error.strerror}"
            raise StartupError(message) from error
        os.ftruncate(lock_fd, 0)  # a killed node leaves its address
        return cls(directory, lock_fd)

    def publish(self, address: str, *, made_token: bool) -> None:
        """Write the gRPC address into the lock file, for commands on this host.

        ``made_token``: the node created the admin token in the directory, which these commands may use.

        Raises:
            StartupError: it cannot be written, such as on a full disk.
        """
        published = f"{address}{'' if made_token else NOT_MADE}\n".encode()
        try:
            os.pwrite(self._lock_fd, published, 0)
        except OSError as error:
            message = f"the state directory {self.path} cannot be written: {error.strerror}"
            raise StartupError(message) from error

    @staticmethod
    def address_in(path: Path, *, made_token: bool) -> str:
        """Return the address published by the node running in ``path``; empty if none runs.

        ``made_token``: also empty if the node did not create the admin token in the directory, which an earlier start
        may have left. A relative ``path`` depends on the working directory, so this user must own its lock file.

        Raises:
            OSError: the lock file is missing or not readable, or the path is relative and another user owns it.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if not path.is_absolute():
            flags |= os.O_NOFOLLOW
        lock_fd = os.open(path / LOCK_NAME, flags)
        try:
            if not path.is_absolute() and os.fstat(lock_fd).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "belongs to another user")
            published = os.read(lock_fd, MAX_ADDRESS_BYTES).decode("ascii", "replace").strip()
            address = published.removesuffix(NOT_MADE)
            if not address or (made_token and address != published):
                return ""
            return address if is_held(lock_fd) else ""
        finally:
            os.close(lock_fd)

    def close(self) -> None:
        """Release the lock."""
        os.ftruncate(self._lock_fd, 0)
        os.close(self._lock_fd)


def why(error: OSError) -> str:
    """Return why a directory cannot be made or used."""
    # mkdir(exist_ok=True) raises FileExistsError where a file is in place of the directory.
    return os.strerror(errno.ENOTDIR if error.errno == errno.EEXIST else error.errno or 0)


def is_held(lock_fd: int) -> bool:
    """Return whether another process holds the lock. An attempt to take it without waiting may fail meanwhile."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
