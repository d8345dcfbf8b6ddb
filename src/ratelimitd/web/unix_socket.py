"""A Unix socket by its place in a directory, however long the directory's path is: the kernel takes 107 bytes.

See ADR 0025.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BACKLOG: Final = 128


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name of ``path`` that is short, as long as the context lasts.

    Raises:
        OSError: its directory cannot be opened.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listening_at(path: Path) -> socket.socket:
    """A socket that listens at ``path``, for this user alone; one that somebody left there is replaced.

    Raises:
        OSError: it cannot be made there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with short_name(path) as name:
            sock.bind(name)
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
