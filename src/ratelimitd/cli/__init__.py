"""The entry point of the command line; :mod:`ratelimitd.cli.commands` defines the commands."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (``None`` = that of the process) and return its exit status."""
    if arguments is None and sys.argv[1:2] == ["serve"]:
        # Until the node handles them itself: its imports take a second or more, and nothing is open yet.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(0))
    # gRPC reads this once, when imported. Its own lines on stderr would precede the command's and say less; in `serve`,
    # any failed TLS handshake could write to the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ratelimitd.cli.commands import run  # noqa: PLC0415

    return run(arguments)
