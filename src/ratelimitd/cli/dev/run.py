"""The life cycle of a local cluster: started, shown, watched, and stopped by a key or a signal."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratelimitd.cli.client_options import UsageError
from ratelimitd.cli.dev import servers
from ratelimitd.cli.dev.servers import Child, Children, failure
from ratelimitd.cli.output import Output, single_keys
from ratelimitd.model import EVERY_ENDPOINT, EVERYBODY, GLOBAL_ENDPOINT, IdentifierType
from ratelimitd.rules.store import RuleDraft

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
"""The command of this installation, regardless of PATH."""

GRPC_PORT: Final = 9090
"""The default target of other commands."""

HTTP_PORT: Final = 8080
LAST_PORT: Final = 65_535


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
    """Return nodes on successive free ports.

    Raises:
        UsageError: there are not enough ports above the first ones.
    """
    grpc_ports = free_ports(grpc_port, count)
    http_ports = free_ports(http_port, count, taken=grpc_ports)
    ports = zip(grpc_ports, http_ports, strict=True)
    return [NodePlan(f"n{number}", *both) for number, both in enumerate(ports, 1)]


def free_ports(first: int, count: int, *, taken: Sequence[int] = ()) -> list[int]:
    """Return free ports from ``first`` on that are not ``taken``.

    Raises:
        UsageError: there are not enough.
    """
    found: list[int] = []
    for port in range(first, LAST_PORT + 1):
        if port not in taken and is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    message = f"there are no {count} free ports from {first} on"
    raise UsageError(message)


def suggestions(
    plan: Sequence[NodePlan],
    last_pid: int,
    redis_pid: int,
    rules: Sequence[RuleDraft] | None = None,
) -> Iterator[str]:
    """Yield suggested command lines; ``last_pid`` is that of the last node, ``rules`` replace the default RULES."""
    first, last = plan[0], plan[-1]
    if rules is None:
        ask = "ratelimitd check user alice /orders --count 6 --target"
        tries = {
            f"{ask} {first.grpc_address}": f"spends 6 of 10 on {first.name}",
            f"{ask} {last.grpc_address}": f"{last.name} knows of it: 4 are left",
        }
    else:
        tries = _tries(rules, first, last)
    tries |= {
        f"ratelimitd health --target {last.grpc_address}": "what a node says of itself",
        f"kill -9 {last_pid}": f"{last.name} dies, the others go on",
        f"kill -STOP {redis_pid}": "the shared state hangs, until kill -CONT",
    }
    width = max(map(len, tries))
    for command, remark in tries.items():
        yield f"{command:<{width}}  # {remark}"


def _tries(rules: Sequence[RuleDraft], first: NodePlan, last: NodePlan) -> dict[str, str]:
    """Return checks that match a rule of one type, if there is any; the rule's limits may be of any kind."""
    tries = {f"ratelimitd rules list --target {first.grpc_address}": "the rules of the file"}
    single = (
        one
        for one in rules
        if one.enabled and "+" not in one.identifier_type and not one.endpoint.startswith("-")
    )
    rule = next((one for one in single if one.identifier_type != EVERYBODY), None)
    if rule is not None:
        kind = rule.identifier_type
        who = "192.0.2.7" if kind == IdentifierType.IP else "alice"
        every = rule.endpoint in {GLOBAL_ENDPOINT, EVERY_ENDPOINT}
        endpoint = "/orders" if every else shlex.quote(rule.endpoint)
        ask = f"ratelimitd check {kind} {who} {endpoint} --target"
        tries[f"{ask} {first.grpc_address}"] = f"asks {first.name}"
        tries[f"{ask} {last.grpc_address}"] = f"{last.name} knows of what was spent there"
    return tries


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


async def until_stopped(live: Callable[[Children, Path], Awaitable[None]], output: Output) -> None:
    """Run ``live``, which starts children and keeps files in a directory, until it ends or a signal arrives.

    Afterwards, ends the children and deletes the directory.

    Raises:
        CliError: something could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="ratelimitd-dev-") as name:
        directory = Path(name)
        children = Children(directory)
        with _stopped_by_signals() as stop:
            living = asyncio.ensure_future(live(children, directory))
            asked = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((living, asked), return_when=asyncio.FIRST_COMPLETED)
            finally:
                try:
                    for task in (living, asked):
                        task.cancel()
                    await asyncio.wait((living, asked))
                    with contextlib.suppress(OSError):  # the terminal may be gone
                        output.line("stopping")
                finally:
                    await children.stop()
        if not living.cancelled():
            living.result()


@dataclass(frozen=True, slots=True)
class Cluster:
    """One run of the command; ``rules`` are the content of ``rules_file``."""

    nodes: Sequence[NodePlan]
    output: Output
    rules_file: Path | None
    rules: Sequence[RuleDraft] | None
    sqlite: bool
    identifier_types: str

    async def run(self) -> None:
        """Start everything, wait until stopped, and remove all traces.

        Raises:
            CliError: a process cannot start.
        """
        await until_stopped(self._live, self.output)

    async def _live(self, children: Children, directory: Path) -> None:
        """Start everything and watch it; return when the quit key is pressed."""
        servers_too = "Valkey" if self.sqlite else "Valkey, PostgreSQL"
        self.output.line(f"starting {servers_too} and {len(self.nodes)} nodes")
        self.output.flush()
        valkey, redis_url = await servers.start_valkey(children, directory)
        database_url = await self._start_database(children, directory)
        rules_file = self.rules_file or write_rules(directory, RULES)
        nodes: list[Child] = []
        for planned in self.nodes:
            command = planned.command(
                directory,
                redis_url=redis_url,
                database_url=database_url,
                rules_file=rules_file,
                identifier_types=self.identifier_types,
            )
            nodes.append(await children.start(planned.name, command, read=True))
            if len(nodes) == 1:  # the first node seeds the rule book, which only one may do
                await ready(nodes[0])
        await asyncio.gather(*map(ready, nodes[1:]))
        self._show_nodes(nodes)
        places = {"shared state": redis_url, "rules": database_url, "logs": f"{directory}/*.log"}
        self.output.pairs(places.items())
        self._show_what_to_try(nodes, valkey)
        await self._watch(children, [valkey, *nodes])

    async def _start_database(self, children: Children, directory: Path) -> str:
        if self.sqlite:
            return f"sqlite:///{directory / 'rules.db'}"
        _, database_url = await servers.start_postgresql(children, directory)
        upgrade = [*PROGRAM, "db", "upgrade", "--database-url", database_url]
        await children.run("db-upgrade", upgrade)
        return database_url

    def _show_nodes(self, nodes: Sequence[Child]) -> None:
        rows = [
            (planned.name, planned.grpc_address, f"http://{planned.http_address}/", child.pid)
            for planned, child in zip(self.nodes, nodes, strict=True)
        ]
        self.output.table(("NODE", "GRPC", "HTTP", "PID"), rows)
        self.output.line()

    def _show_what_to_try(self, nodes: Sequence[Child], valkey: Child) -> None:
        self.output.line()
        for line in suggestions(self.nodes, nodes[-1].pid, valkey.pid, self.rules):
            self.output.line(line)
        self.output.line()
        self.output.line("q or Ctrl-C stops everything")
        self.output.flush()

    async def _watch(self, children: Children, watched: Sequence[Child]) -> None:
        with pressed_keys() as quit_pressed:
            reports = [asyncio.create_task(self._report(children, child)) for child in watched]
            try:
                await quit_pressed.wait()
            finally:
                for task in reports:
                    task.cancel()
                await asyncio.gather(*reports, return_exceptions=True)

    async def _report(self, children: Children, child: Child) -> None:
        """Print a line when a child ends; the others continue, as in a real cluster."""
        if await children.ended(child):
            self.output.line(self.output.styled(str(failure(child)), "bad"))
            self.output.flush()


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
def _stopped_by_signals() -> Iterator[asyncio.Event]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


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
