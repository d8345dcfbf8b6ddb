"""One file that only ever grows, and never keeps half of what was to be appended.

Blocking; meant for a thread. Never knows what the bytes mean.
"""

from __future__ import annotations

import os
from pathlib import Path


class Appender:
    """A new file with ``header``, readable by its owner alone.

    Raises:
        OSError: from every method that writes, when the file cannot be written.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        try:
            self.append(header)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(self, data: bytes, *, durable: bool = False) -> None:
        """Append ``data``, whole or not at all; with ``durable`` it is on disk before this returns."""
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            if durable:
                os.fdatasync(self._fd)
        except OSError:
            # Half a chunk would hide everything appended after it.
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)

    def publish(self, name: Path) -> None:
        """Put everything on disk and give the file its name, at once for every reader."""
        os.fsync(self._fd)
        self.path.rename(name)
        self.path = name
        directory_fd = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)

    def close(self) -> None:
        """Close the file; what was not appended durably is on disk when the system gets to it."""
        os.close(self._fd)
