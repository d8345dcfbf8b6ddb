"""The native transport, a real node with everything on, beside nghttpd (C) and the grpcio transport in the same run.

The server has one core, the load the other. nghttpd serves a file of 13 bytes with one thread: HTTP/2 in C that
decides nothing. Where the calls of a row are all alike h2load asks both sides, else, and where it is not installed,
:mod:`bench.replay` does. Limits to aim at stand beside the baselines; they hold on any machine, as they are ratios.
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
"""Connections, and calls open on each."""
BUSY = 0.85
"""A server that has a core, and load enough, is busy for all of the time but what the kernel needs."""
EVERYTHING = ("--http-listen", "127.0.0.1:0")
"""What a node has by default; the other parts leave the HTTP side out."""
ALIKE = "one-key"
SEVERAL = "three-limits"
VARIED = (SEVERAL, "identifiers", "go-timeouts", "grpcio-timeouts", "batch", "batch-one-key")

Ask = Callable[..., Measured]


def measure() -> list[Row]:
    """The best of several rounds for each; in a round all have their turn, so that no stall of the machine hits one.

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
    """Say where the server did not have its core for itself, or had too little to do: the rate means nothing then."""
    for name, one in measured.items():
        busy = one.rate * one.cpu_us / 1e6
        if busy < BUSY and not name.endswith(str(ONE)):
            print(f"  {name}: the server was busy for {busy:.0%} of the time only", flush=True)


def _both(name: str, ours: Measured, beside: str, baseline: Measured) -> list[Row]:
    """The rate, and what a check costs the server."""
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
    """Measure, and see that what was answered was also charged to the one key, where there is one key."""
    if scenario in (SEVERAL, "identifiers", "batch"):
        return ask(server, scenario, shape, seconds=seconds)
    with _charged(server.port) as spent:
        measured = ask(server, scenario, shape, seconds=seconds)
    checks = measured.calls * (BATCH_SIZE if scenario.startswith("batch") else 1)
    assert spent[0] >= checks, f"{scenario}: {checks} checks answered, {spent[0]:.0f} charged"
    return measured


@contextmanager
def _charged(port: int) -> Iterator[list[float]]:
    """After the block: at most how many checks the bucket was charged with, as its level and the refill have it."""
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
