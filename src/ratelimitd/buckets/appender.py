"""A file with atomic appends, for the log of buckets and for traces."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path


class Appender:
    """A new file with ``header``, readable by its owner only, that never keeps a partial append.

    Blocking; runs in threads.

    Raises:
        OSError: from every method that writes, if the file cannot be written.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        self._name_is_durable = False
        try:
            self.append(header)
        except OSError:
            self.discard()
            raise

    @property
    def removed(self) -> bool:
        """Whether the file was removed, perhaps with its directory."""
        return not os.fstat(self._fd).st_nlink

    def append(self, data: bytes, *, durable: bool = False) -> None:
        """Append ``data`` completely or not at all; with ``durable``, it is on disk before this returns.

        Fails if the file was removed, because its content would be lost.
        """
        if self.removed:
            raise OSError(errno.ENOENT, "the file was removed while it was in use")
        try:
            written = 0
            while written < len(data):
                # At an offset: the next append overwrites a partial one that could not be truncated.
                written += os.pwrite(self._fd, memoryview(data)[written:], self.size + written)
            if durable:
                os.fdatasync(self._fd)
                self._sync_name()
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def lock(self) -> None:
        """Lock the file until it is closed or the process ends, so that others see that it is being written."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def publish(self, name: Path) -> None:
        """Sync the file to disk and rename it atomically."""
        os.fsync(self._fd)
        self.path.rename(name)
        self.path = name
        self._name_is_durable = False
        self._sync_name()

    def close(self) -> None:
        """Close the file, without a sync."""
        os.close(self._fd)

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _sync_name(self) -> None:
        """Sync the directory, because a power failure can lose the name of a synced file."""
        if self._name_is_durable:
            return
        # equivalent: O_RDONLY is 0, and the parent of a file is a directory
        directory_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)
        self._name_is_durable = True
