"""The command line. What it offers is in :mod:`ratelimitd.cli.commands`; here is only the way in."""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (``None`` = that of the process) and return its exit status."""
    # gRPC reads this once, when it is imported. Its own lines on stderr would come before the one of the command and
    # say less; in `serve` they would let anybody who fails a TLS handshake write into the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ratelimitd.cli.commands import run  # noqa: PLC0415

    return run(arguments)
