"""The native transport of a complete node, vs. nghttpd (C) and the grpcio transport in the same run.

The server has one core, the load the other. nghttpd serves a file of 13 bytes with one thread: HTTP/2 in C without
decisions. h2load drives both sides where it is installed and the calls of a row are identical, else
:mod:`bench.replay`. The targets are ratios to the baselines, so they hold on any machine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import grpc

from bench.h2load import h2load, installed
from bench.replay import Measured, replay
from bench.report import Row
from bench.scripts import BATCH_SIZE, identifier
from bench.servers import LIMIT, WINDOW_SECONDS, Server, load_core, nghttpd, node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1.ratelimiter_pb2_grpc import RateLimiterStub

ROUNDS, SECONDS = 3, 2
SHAPES = FEW, MANY, ONE = (4, 16), (16, 64), (1, 1)
"""Connections, and calls in flight on each."""
BUSY = 0.85
"""Minimum busy fraction of a server with its own core and enough load; the kernel needs the rest."""
EVERYTHING = ("--http-listen", "127.0.0.1:0")
"""Default options of a node; the other parts omit the HTTP side."""
ALIKE = "one-key"
SEVERAL = "three-limits"
VARIED = (SEVERAL, "identifiers", "go-timeouts", "grpcio-timeouts", "batch", "batch-one-key")

Ask = Callable[..., Measured]


def measure() -> list[Row]:
    """Measure the best of several rounds each. Servers alternate within a round, which spreads stalls of the machine.

    Raises:
        Missing: nghttpd is not installed.
    """
    ask, tool = (h2load, "h2load") if installed() else (replay, "replay")
    print(
        f"\nCalls that are all alike come from bench.{tool}, others from bench.replay.", flush=True
    )
    with (
        load_core(),
        nghttpd() as c,
        node("--transport", "grpcio", *EVERYTHING) as grpcio,
        node("--transport", "native", *EVERYTHING) as ours,
        node("--transport", "native", *EVERYTHING, tls=True) as tls,
    ):
        best = _best_of_rounds(
            {
                **{f"nghttpd {shape}": partial(ask, c, "file", shape) for shape in SHAPES},
                **{
                    f"native {shape}": partial(_checked, ask, ours, ALIKE, shape)
                    for shape in SHAPES
                },
                "grpcio": partial(_checked, ask, grpcio, ALIKE, FEW),
                ALIKE: partial(_checked, replay, ours, ALIKE, FEW),
                **{name: partial(_checked, replay, ours, name, FEW) for name in VARIED},
                **{
                    f"{name} {ONE}": partial(_checked, replay, ours, name, ONE)
                    for name in (ALIKE, SEVERAL)
                },
                "TLS": partial(ask, tls, ALIKE, FEW, tls=True),
            }
        )
    _warn(best)
    few, many, alike = best[f"native {FEW}"], best[f"native {MANY}"], best[ALIKE]
    c_few, c_many = best[f"nghttpd {FEW}"], best[f"nghttpd {MANY}"]
    one, c_one = best[f"native {ONE}"], best[f"nghttpd {ONE}"]
    return [
        *_both("4x16", few, "nghttpd; aim 0.34", c_few),
        *_both("16x64", many, "nghttpd; aim 0.40", c_many),
        Row(
            "one at a time: mean latency",
            one.latency_us,
            "us",
            "nghttpd; aim at most 1.1",
            c_one.latency_us,
        ),
        Row("one at a time: CPU", one.cpu_us, "us/check", "nghttpd", c_one.cpu_us),
        *_both("4x16", few, "grpcio transport, 4x16; aim 25", best["grpcio"]),
        *_both("16x64", many, "grpcio transport, 4x16", best["grpcio"]),
        *_both("100,000 identifiers", best["identifiers"], "one key; aim 0.7", alike),
        *_both("three limits, 4x16", best[SEVERAL], "one; aim 0.62", alike),
        *_both(
            "three limits, one at a time", best[f"{SEVERAL} {ONE}"], "one", best[f"{ALIKE} {ONE}"]
        ),
        *_both("new timeouts, grpc-go", best["go-timeouts"], "constant; aim 0.5", alike),
        *_both("new timeouts, grpcio", best["grpcio-timeouts"], "constant; aim 0.5", alike),
        *_batches("batches of 100 identifiers", best["batch"], c_few),
        *_batches("batches of one key", best["batch-one-key"], c_few),
        *_both("TLS, 4x16", best["TLS"], "plaintext; aim 0.6", few),
    ]


def _best_of_rounds(asks: dict[str, Callable[..., Measured]]) -> dict[str, Measured]:
    best: dict[str, Measured] = {}
    for _ in range(ROUNDS):
        for name, ask in asks.items():
            measured = ask(seconds=SECONDS)
            if name not in best or measured.rate > best[name].rate:
                best[name] = measured
    return best


def _warn(measured: dict[str, Measured]) -> None:
    """Warn if a server did not have its core to itself, or had too little load: its rate is then meaningless."""
    for name, one in measured.items():
        busy = one.rate * one.cpu_us / 1e6
        if busy < BUSY and not name.endswith(str(ONE)):
            print(f"  {name}: the server was busy for {busy:.0%} of the time only", flush=True)


def _both(name: str, ours: Measured, beside: str, baseline: Measured) -> list[Row]:
    """Return the rate, and the server's cost per check."""
    whom = beside.partition(";")[0]
    return [
        Row(name, ours.rate, "checks/s", beside, baseline.rate),
        Row(f"{name}: CPU", ours.cpu_us, "us/check", whom, baseline.cpu_us),
    ]


def _batches(name: str, ours: Measured, c: Measured) -> list[Row]:
    beside = "nghttpd, 4x16, requests/s"
    return [
        Row(name, ours.rate * BATCH_SIZE, "checks/s", f"{beside}; aim 0.8", c.rate),
        Row(f"{name}: CPU", ours.cpu_us / BATCH_SIZE, "us/check", beside, c.cpu_us),
    ]


def _checked(
    ask: Ask, server: Server, scenario: str, shape: tuple[int, int], *, seconds: int
) -> Measured:
    """Measure, and verify that the answered checks were charged to the key, if there is one."""
    if scenario in (SEVERAL, "identifiers", "batch"):
        return ask(server, scenario, shape, seconds=seconds)
    with _charged(server.port) as spent:
        measured = ask(server, scenario, shape, seconds=seconds)
    checks = measured.calls * (BATCH_SIZE if scenario.startswith("batch") else 1)
    assert spent[0] >= checks, f"{scenario}: {checks} checks answered, {spent[0]:.0f} charged"
    return measured


@contextmanager
def _charged(port: int) -> Iterator[list[float]]:
    """Yield a list that holds, after the block, an upper bound of the checks charged to the bucket."""
    spent: list[float] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        started, before = time.monotonic(), _remaining(channel)
        yield spent
        after, seconds = _remaining(channel), time.monotonic() - started
        spent.append(before - after + seconds * LIMIT / WINDOW_SECONDS)


def _remaining(channel: grpc.Channel) -> int:
    request = pb.RateLimitRequest(
        identifier=identifier(42), identifier_type="user", endpoint="/api/orders", peek=True
    )
    answer = RateLimiterStub(channel).CheckRateLimit(request)
    assert answer.allowed
    assert answer.reason == pb.WITHIN_LIMIT, answer
    return int(answer.remaining_tokens)
