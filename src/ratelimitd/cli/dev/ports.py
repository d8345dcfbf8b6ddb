"""Which ports of this machine are free."""

from __future__ import annotations

import socket

from ratelimitd.cli.dev.plan import HOST


def is_free(port: int) -> bool:
    """Whether a node could listen on it; one that has just ended is no hindrance."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
