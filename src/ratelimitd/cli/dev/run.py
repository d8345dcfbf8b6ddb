"""Nodes of a local experiment: their ports and command lines, and their end by a key or a signal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import typer

from ratelimitd.cli.client_options import demand
from ratelimitd.cli.dev.servers import Child, Children, failure
from ratelimitd.cli.output import Output, single_keys
from ratelimitd.node.process import StopSignals

HOST: Final = "127.0.0.1"
"""The cluster is for local use and has no passwords."""

PROGRAM: Final = (
    sys.executable,
    "-c",
    "from ratelimitd.cli import main; raise SystemExit(main())",
)
"""The command of this installation, regardless of PATH."""

GRPC_PORT: Final = 9090
"""The default target of other commands."""

HTTP_PORT: Final = 8080
LAST_PORT: Final = 65_535


def port_option(text: str) -> Any:
    """Return the option of a port; ``text`` is its help."""
    return typer.Option(min=1, max=LAST_PORT, metavar="PORT", help=text)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to start."""

    name: str
    grpc_port: int
    http_port: int

    @property
    def grpc_address(self) -> str:
        """The address for checks."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def http_address(self) -> str:
        """The address of its pages."""
        return f"{HOST}:{self.http_port}"

    def command(
        self,
        directory: Path,
        *,
        rules_file: Path,
        redis_url: str = "",
        database_url: str = "",
        identifier_types: str = "",
    ) -> list[str]:
        """Return its command line; it writes to ``directory`` only. Without the URLs it shares nothing."""
        return [
            *PROGRAM,
            "serve",
            *("--node-id", self.name),
            *("--listen", self.grpc_address),
            *("--http-listen", self.http_address),
            *("--redis-url", redis_url),
            *("--database-url", database_url or f"sqlite:///{directory / 'rules.db'}"),
            *("--rules-file", str(rules_file)),
            *("--identifier-types", identifier_types),
            *("--state-dir", str(directory / f"{self.name}-state")),
            *("--log-format", "console"),
            *("--on-breaker-open", "local"),
            # Any user of this host can access the shared state and the rule database, too.
            *("--loopback-admin", "on"),
        ]


def nodes(count: int, *, grpc_port: int, http_port: int) -> list[NodePlan]:
    """Return nodes on successive :func:`free_ports`."""
    grpc_ports = free_ports(grpc_port, count)
    http_ports = free_ports(http_port, count, taken=grpc_ports)
    ports = zip(grpc_ports, http_ports, strict=True)
    return [NodePlan(f"n{number}", *both) for number, both in enumerate(ports, 1)]


def free_ports(first: int, count: int, *, taken: Sequence[int] = ()) -> list[int]:
    """Return free ports from ``first`` on that are not ``taken``.

    Raises:
        UsageError: there are not enough.
    """
    ports = range(first, LAST_PORT + 1)
    found = list(islice((one for one in ports if one not in taken and is_free(one)), count))
    demand(len(found) == count, f"there are no {count} free ports from {first} on")
    return found


def is_free(port: int) -> bool:
    """Return whether a node could listen on the port; connections of a node that just ended do not block it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


READY: Final = b"ratelimitd ready "


async def until_stopped(
    live: Callable[[Children, Path], Coroutine[Any, Any, None]], output: Output
) -> None:
    """Run ``live``, which starts children and keeps files in a directory, until it ends or a signal arrives.

    Afterwards, ends the children and deletes the directory.

    Raises:
        CliError: something could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="ratelimitd-dev-") as name:
        directory = Path(name)
        children = Children(directory)
        stop = StopSignals(lambda _status: None)  # a further signal has no effect
        living = asyncio.create_task(live(children, directory))
        try:
            await stop.comes_before(living)
            with contextlib.suppress(OSError):  # the terminal may be gone
                output.line("stopping")
        finally:
            living.cancel()
            await children.stop()
        if not living.cancelled():
            living.result()


async def ready(node: Child) -> None:
    """Wait until a node is ready.

    Raises:
        CliError: the node ended.
    """
    stdout = node.process.stdout
    line = await stdout.readline() if stdout else b""
    if not line.startswith(READY):
        await node.process.wait()
        raise failure(node)


def write_rules(directory: Path, rules: str) -> Path:
    """Write the first rules of a node to a file; return its path."""
    path = directory / "rules.yaml"
    path.write_text(rules)
    return path


@contextlib.contextmanager
def pressed_keys() -> Iterator[asyncio.Event]:
    """Yield an event that is set when the quit key is pressed; never without a keyboard."""
    pressed = asyncio.Event()
    with single_keys() as keyboard:
        if keyboard is None:
            yield pressed
            return

        def read() -> None:
            if keyboard.quit_pressed():
                pressed.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(keyboard.descriptor, read)
        try:
            yield pressed
        finally:
            loop.remove_reader(keyboard.descriptor)
