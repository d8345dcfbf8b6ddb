"""File descriptors: how many connections the process can have open and still reach its own files.

A process without a free descriptor cannot write its buckets, open its database or answer a probe. Never opens any.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

RESERVED: Final = 256
"""For everything but callers: files, the database, the HTTP port and who reads metrics there."""

_log = logging.getLogger(__name__)


def room_for(connections: int) -> int:
    """How many connections to admit where ``connections`` are wanted: at least one.

    The process's soft limit is raised as far as that needs and the hard one allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return connections
    room = max(1, allowed - RESERVED)
    _log.warning("room for %d connections only: the limit of open files is %d", room, allowed)
    return room
