"""The command: the load to send, and the output of its results."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from ratelimitd.cli.bench.load import Load, Result, Sender, channels
from ratelimitd.cli.bench.report import as_json, print_report
from ratelimitd.cli.bench.report import picture as drawn
from ratelimitd.cli.bench.workload import Arrival, Arrivals, Distribution, Keys
from ratelimitd.cli.client_options import EXIT_ERROR, Target, asks_node, demand, naming
from ratelimitd.cli.output import working
from ratelimitd.cli.picture import write_picture
from ratelimitd.model import IdentifierType
from ratelimitd_client.transport.grpc_channel import authorization
from ratelimiter.v1 import ratelimiter_pb2 as pb


@asks_node
def bench(
    target: Target,
    *,
    duration: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Duration of the load.")
    ] = 10.0,
    concurrency: Annotated[
        int,
        typer.Option(min=1, max=10_000, metavar="N", help="Checks in flight at a time."),
    ] = 50,
    connections: Annotated[
        int, typer.Option(min=1, max=1_000, metavar="N", help="Connections to use.")
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1_000_000,
            metavar="N",
            help="Checks per second, independent of answers; default: each answer sends the next.",
        ),
    ] = None,
    arrival: Annotated[
        Arrival | None,
        typer.Option(
            help="With --rate: spaced evenly (the default) or randomly, like independent callers."
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="The endpoint, as in the rules.")
    ] = "/bench",
    identifier_type: Annotated[IdentifierType, typer.Option(help="Identifier type.")] = (
        IdentifierType.USER
    ),
    keys: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="Number of identifiers.")
    ] = 1_000,
    distribution: Annotated[
        Distribution, typer.Option(help="Distribution of checks over identifiers.")
    ] = Distribution.IN_TURN,
    exponent: Annotated[
        float,
        typer.Option(
            min=0,
            max=10,
            metavar="S",
            help="For zipf: exponent; key n has a share in proportion to n to the power of -S.",
        ),
    ] = 1.0,
    hot_share: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="For hot: share of the one key."),
    ] = 0.5,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of random keys and arrivals.")] = 1,
    peek: Annotated[bool, typer.Option("--peek", help="Spend nothing.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg",
            help="Write a picture of latency by percentile and answers over time.",
        ),
    ] = None,
) -> None:
    """Measure the latency of a node under load.

    It sends checks of the identifiers bench-0, bench-1, … (as type ip: 198.18.0.0, …), which spend their tokens: use an
    endpoint of its own. It is one process of Python and gRPC, good for some thousands of checks a second: it shows what
    a caller gets, and reaches its own limits before those of a node. Ctrl-C ends it early.

    At a --rate a latency counts from when the check was due, not from when it could be sent, so that a node that stalls
    looks as it does to callers who do not wait for each other.

    Exit status: 0 when every check was answered, 1 when not.

    Example:
      ratelimitd bench --duration 5
      ratelimitd bench --rate 1000 --arrival poisson --concurrency 200 --json
      ratelimitd bench --rate 500 --keys 100000 --distribution zipf --picture load.svg
    """
    demand(arrival is None or rate is not None, "--arrival needs --rate")
    if picture is not None:  # fail before the load, not after it
        where = picture if picture.exists() else picture.parent
        demand(os.access(where, os.W_OK), f"--picture: cannot write {picture}")

    def check_of(key: int) -> pb.RateLimitRequest:
        return pb.RateLimitRequest(
            identifier=_identifier(key, identifier_type),
            identifier_type=identifier_type,
            endpoint=endpoint,
            peek=peek,
        )

    arrivals = (
        None
        if rate is None
        else Arrivals(rate=rate, arrival=arrival or Arrival.CONSTANT, seed=seed)
    )
    load = Load(
        check_of=check_of,
        keys=Keys(
            count=keys,
            distribution=distribution,
            exponent=exponent,
            hot_share=hot_share,
            seed=seed,
        ),
        seconds=duration,
        concurrency=concurrency,
        arrivals=arrivals,
        timeout_s=target.timeout_s,
    )
    with target.explained(), working("sending checks"):
        result = asyncio.run(_send(target, load, connections))
    if target.output.as_json:
        target.output.json(as_json(result, load))
    else:
        print_report(result, load, target.output)
    if picture is not None:
        write_picture(picture, drawn(result, load), EXIT_ERROR)
    if result.errors:
        raise typer.Exit(EXIT_ERROR)


async def _send(target: Target, load: Load, connections: int) -> Result:
    with naming(""):
        metadata = authorization(target.token)
        opened = channels(target.address, target.tls, connections)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        sender = Sender(load, opened, metadata, stop=stop, time_s=time.perf_counter)
        return await sender.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for channel in opened:
            await channel.close()


def _identifier(number: int, identifier_type: IdentifierType) -> str:
    """Return a name, or an address of the benchmark network (RFC 2544), which has 131,072, in rotation."""
    if identifier_type is not IdentifierType.IP:
        return f"bench-{number}"
    return f"198.{18 + (number >> 16 & 1)}.{number >> 8 & 255}.{number & 255}"
