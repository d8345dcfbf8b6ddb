"""The command: what load to send, and what came of it, as a picture or as JSON."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratelimitd.cli.bench.latencies import QUANTILES, US_PER_MS, Latencies
from ratelimitd.cli.failures import EXIT_ERROR
from ratelimitd.cli.output import Output
from ratelimitd.cli.progress import working
from ratelimitd.cli.target import Target, asks_node
from ratelimitd.model import IdentifierType
from ratelimiter.v1 import ratelimiter_pb2 as pb

if TYPE_CHECKING:
    from ratelimitd.cli.bench.load import Load, Result  # with grpc, see target.py

BAR_WIDTH: Final = 40

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_FULL: Final = "█"


@asks_node
def bench(
    target: Target,
    *,
    duration: Annotated[
        float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="How long to send.")
    ] = 10.0,
    concurrency: Annotated[
        int,
        typer.Option(min=1, max=10_000, metavar="N", help="Checks that are under way at a time."),
    ] = 50,
    connections: Annotated[
        int, typer.Option(min=1, max=1_000, metavar="N", help="Connections to send them over.")
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1_000_000,
            metavar="N",
            help="Checks a second, whether answers come or not; without, as fast as they come.",
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="The endpoint, as in the rules.")
    ] = "/bench",
    identifier_type: Annotated[IdentifierType, typer.Option(help="What identifiers are.")] = (
        IdentifierType.USER
    ),
    identifiers: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="How many, taken in turn.")
    ] = 1_000,
    peek: Annotated[bool, typer.Option("--peek", help="Spend nothing.")] = False,
) -> None:
    """Put load on a node, and show how long its answers took.

    It sends checks of the identifiers bench-0, bench-1, … (as type ip: 198.18.0.0, …), which spend their tokens: use an
    endpoint of its own. It is one process of Python and gRPC, good for some thousands of checks a second: it shows what
    a caller gets, and reaches its own limits before those of a node. Ctrl-C ends it early.

    Exit status: 0 when every check was answered, 1 when not.

    Example:
      ratelimitd bench --duration 5
      ratelimitd bench --rate 1000 --concurrency 200 --json
    """
    from ratelimitd.cli.bench.load import Load  # noqa: PLC0415 -- with grpc, see target.py

    checks = [
        pb.RateLimitRequest(
            identifier=_identifier(number, identifier_type),
            identifier_type=identifier_type,
            endpoint=endpoint,
            peek=peek,
        )
        for number in range(identifiers)
    ]
    load = Load(
        checks=checks,
        seconds=duration,
        concurrency=concurrency,
        rate=rate,
        timeout_s=target.timeout_s,
    )
    with target.explained(), working("sending checks"):
        result = asyncio.run(_send(target, load, connections))
    if target.output.as_json:
        target.output.json(_as_json(result))
    else:
        _print(result, target.output)
    if result.errors:
        raise typer.Exit(EXIT_ERROR)


async def _send(target: Target, load: Load, connections: int) -> Result:
    from ratelimitd.cli.bench.load import channels, run  # noqa: PLC0415 -- as above

    metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
    opened = channels(target.address, target.tls, connections)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await run(load, opened, metadata, stop=stop, time_s=time.perf_counter)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for channel in opened:
            await channel.close()


def _identifier(number: int, identifier_type: IdentifierType) -> str:
    """A name, or an address of the network that is set aside for benchmarks (RFC 2544), 1 of its 131,072 in turn."""
    if identifier_type is not IdentifierType.IP:
        return f"bench-{number}"
    return f"198.{18 + (number >> 16 & 1)}.{number >> 8 & 255}.{number & 255}"


def _print(result: Result, output: Output) -> None:
    latencies = result.latencies
    output.line(
        f"{latencies.count:,} checks in {result.seconds:.2f} s: {_rate(result):,.0f} a second"
    )
    output.line(
        f"{result.allowed:,} allowed, {result.denied:,} denied, {result.fail_open:,} fail open"
    )
    for name, count in sorted(result.errors.items()):
        output.line(output.styled(f"{count:,} not answered: {name}", "bad"))
    if not latencies.count:
        return
    output.line()
    output.pairs((name, f"{value:.3f} ms") for name, value in _figures(latencies).items())
    output.line()
    bars = latencies.bars()
    most = max(bar.checks for bar in bars)
    for bar in bars:
        share = bar.checks / latencies.count
        label = f"≤ {bar.up_to_us / US_PER_MS:g} ms"
        output.line(
            f"{label:>12}  {_bar(bar.checks / most):<{BAR_WIDTH}}  {share:6.1%}  {bar.checks:,}"
        )


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * len(_EIGHTHS))
    whole, part = divmod(eighths, len(_EIGHTHS))
    return _FULL * whole + (_EIGHTHS[part] if part else "")


def _figures(latencies: Latencies) -> dict[str, float]:
    """In ms."""
    figures = {"mean": latencies.mean_us, "min": latencies.min_us}
    figures |= {f"p{share * 100:g}": latencies.quantile_us(share) for share in QUANTILES}
    figures["max"] = latencies.max_us
    return {name: value / US_PER_MS for name, value in figures.items()}


def _rate(result: Result) -> float:
    return result.latencies.count / result.seconds if result.seconds else 0.0


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "checks": result.latencies.count,
        "seconds": result.seconds,
        "checks_per_s": _rate(result),
        "allowed": result.allowed,
        "denied": result.denied,
        "fail_open": result.fail_open,
        "errors": dict(result.errors),
        "latency_ms": _figures(result.latencies),
        "histogram": [
            {"up_to_ms": bar.up_to_us / US_PER_MS, "checks": bar.checks}
            for bar in result.latencies.bars()
        ],
    }
