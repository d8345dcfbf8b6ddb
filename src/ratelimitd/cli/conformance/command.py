"""The command: the server, the clock, and the exit status."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from ratelimitd.cli.client_options import EXIT_ERROR, Target, UsageError, asks_node
from ratelimitd.cli.conformance.cases import cases
from ratelimitd.cli.conformance.own_rules import own_rules
from ratelimitd.cli.conformance.report import as_json, passed, print_table
from ratelimitd.cli.conformance.run import RealTime, Runner, SystemTime
from ratelimitd.cli.output import working
from ratelimitd.model import US_PER_S


@asks_node
def conformance(
    target: Target,
    *,
    one_batch: Annotated[
        bool,
        typer.Option("--one-batch", help="Also send all checks in one batch; not for clusters."),
    ] = False,
    real_time: Annotated[
        bool,
        typer.Option("--real-time", help="Use the clock of the server, and wait in real time."),
    ] = False,
    longest: Annotated[
        float,
        typer.Option(
            min=1,
            max=86_400,
            metavar="SECONDS",
            help="With --real-time: skip cases that take longer.",
        ),
    ] = 30.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=1,
            max=1_000,
            metavar="MS",
            help="With --real-time: longest delay of an answer.",
        ),
    ] = 20.0,
) -> None:
    """Test a server against the contract, and print a table of the cases.

    Any server of the contract: it makes rules for endpoints of its own (/conformance- and something random), and one
    for ** that denies nobody else, asks checks, and deletes the rules again, also after Ctrl-C. It needs the admin
    role. The checks carry the time that they are to be judged at, so the server must go by it (TIMESTAMPS=caller);
    with --real-time it goes by its own.

    Exit status: 0 as expected, 1 when an answer differs, a check is refused or none could be judged, 2 when the server
    cannot be asked.

    Example:
      ratelimitd conformance --target 127.0.0.1:9090
      ratelimitd conformance --real-time --longest 5 --json
    """
    if one_batch and real_time:
        message = "--one-batch is for checks that carry their time: not with --real-time"
        raise UsageError(message)
    name = f"conformance-{secrets.token_hex(6)}"
    chosen = cases()
    how = RealTime(round(longest * US_PER_S), round(tolerance * 1_000)) if real_time else None
    with target.client() as client, own_rules(target, client, f"/{name}", chosen) as places:
        runner = Runner(client, chosen, places, name=name, time=SystemTime())
        with working("asking checks"):
            results = (
                runner.with_virtual_time(one_batch=one_batch)
                if how is None
                else runner.with_real_time(how)
            )
    if target.output.as_json:
        target.output.json(as_json(results, target.address, how))
    else:
        print_table(results, target.output, how)
    if not passed(results):
        raise typer.Exit(EXIT_ERROR)
