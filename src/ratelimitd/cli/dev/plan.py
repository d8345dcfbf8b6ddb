"""What a cluster to try out consists of: its nodes with their addresses, their command lines, and what to do with them.

Pure but for the question whether a port is free, which is handed in.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratelimitd.cli.client_options import UsageError

HOST: Final = "127.0.0.1"
"""The cluster is for local use and has no passwords."""

RULES: Final = """\
# 10 tokens per minute for each user on each endpoint, so that the limit is soon met by hand.
rules:
  - endpoint: "*"
    identifier_type: user
    limit: 10
    window_seconds: 60
    algorithm: token_bucket
"""

PROGRAM: Final = (
    sys.executable,
    "-c",
    "from ratelimitd.cli import main; raise SystemExit(main())",
)
"""The command of this very installation, whatever else is on the PATH."""

LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to be started."""

    name: str
    grpc_port: int
    http_port: int

    @property
    def grpc_address(self) -> str:
        """Where it answers checks."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def http_address(self) -> str:
        """Where its pages are."""
        return f"{HOST}:{self.http_port}"

    def command(
        self, directory: Path, *, redis_url: str, database_url: str, rules_file: Path
    ) -> list[str]:
        """Its command line; what it writes stays in ``directory``."""
        return [
            *PROGRAM,
            "serve",
            *("--node-id", self.name),
            *("--listen", self.grpc_address),
            *("--http-listen", self.http_address),
            *("--redis-url", redis_url),
            *("--database-url", database_url),
            *("--rules-file", str(rules_file)),
            *("--state-dir", str(directory / f"{self.name}-state")),
            *("--log-format", "console"),
            # The shared state and the rules database are open to everybody on this host, too.
            *("--loopback-admin", "on"),
        ]


def nodes(
    count: int, *, grpc_port: int, http_port: int, is_free: Callable[[int], bool]
) -> list[NodePlan]:
    """So many nodes on successive ports; those that somebody else listens on are left out.

    Raises:
        UsageError: there are not so many ports above the first ones.
    """
    grpc_ports = _ports(grpc_port, count, is_free, taken=())
    http_ports = _ports(http_port, count, is_free, taken=grpc_ports)
    ports = zip(grpc_ports, http_ports, strict=True)
    return [NodePlan(f"n{number}", *both) for number, both in enumerate(ports, 1)]


def _ports(
    first: int, count: int, is_free: Callable[[int], bool], *, taken: Sequence[int]
) -> list[int]:
    found: list[int] = []
    for port in range(first, LAST_PORT + 1):
        if port not in taken and is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    message = f"there are no {count} free ports from {first} on"
    raise UsageError(message)


def suggestions(plan: Sequence[NodePlan], last_pid: int, redis_pid: int) -> Iterator[str]:
    """What to try, as command lines; ``last_pid`` is that of the last node."""
    first, last = plan[0], plan[-1]
    ask = "ratelimitd check user alice /orders --count 6 --target"
    tries = {
        f"{ask} {first.grpc_address}": f"spends 6 of 10 on {first.name}",
        f"{ask} {last.grpc_address}": f"{last.name} knows of it: 4 are left",
        f"ratelimitd health --target {last.grpc_address}": "what a node says of itself",
        f"kill -9 {last_pid}": f"{last.name} dies, the others go on",
        f"kill -STOP {redis_pid}": "the shared state hangs, until kill -CONT",
    }
    width = max(map(len, tries))
    for command, remark in tries.items():
        yield f"{command:<{width}}  # {remark}"


# Which ports of this machine are free.


def is_free(port: int) -> bool:
    """Whether a node could listen on it; one that has just ended is no hindrance."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
