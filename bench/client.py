"""Checks per second of one caller core: the asyncio client vs. plain grpcio, with equal numbers of callers.

Each caller sends a check, waits for the answer, and sends the next. The node and the callers have one core each, so the
callers are the bottleneck. The two alternate, and the best run of each counts. Then checks arrive at random, regardless
of answers.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import grpc.aio
import uvloop

from bench.arrivals import DUE
from bench.report import Row, percentile
from bench.scripts import identifier
from bench.servers import ENDPOINT, SERVER_CORE, load_core, node
from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.transport.grpc_channel import CHANNEL_OPTIONS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

CALLERS = (1, 64, 512)
ROUNDS, SECONDS = 3, 1.5
ARRIVALS = 5_000
"""Per second: a rate that grpcio alone also reaches on a core of its own."""
TIMEOUT_S = 5.0
"""Long enough that no check fails open on its deadline."""
BLOCKING_CHECKS = 2_000
BURST = 1_000
IDENTIFIER = identifier(42)

Ask = Callable[[], Awaitable[bool]]


def measure() -> list[Row]:
    """Measure checks per second of one core, and the latency of a single check."""
    with load_core(), node() as server:
        address = f"127.0.0.1:{server.port}"
        best = uvloop.run(_all(address))
        blocking_us = _blocking(address)
    rows = []
    for callers in CALLERS:
        plain, ours = best["grpcio", callers], best["client", callers]
        aim = "; aim 5" if callers > 1 else ""
        rows.append(
            Row(f"{callers} callers", ours[0], "checks/s", f"grpcio.aio alone{aim}", plain[0])
        )
        rows.append(Row(f"{callers} callers: p99", ours[1], "ms", "grpcio.aio alone", plain[1]))
    leased = best["leases", 0][0]
    rows.append(
        Row(
            "with leases",
            leased,
            "checks/s",
            "64 callers without; aim 1,000,000",
            best["client", 64][0],
        )
    )
    (_, plain_ms), (_, ours_ms) = best["grpcio", 0], best["client", 0]
    rows.append(Row(f"{ARRIVALS:,} arrivals/s: p99", ours_ms, "ms", "grpcio.aio alone", plain_ms))
    return [*rows, Row("blocking client, one at a time: p50", blocking_us, "us")]


async def _all(address: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Return rate and p99 in ms by client and number of callers."""
    request = pb.RateLimitRequest(identifier=IDENTIFIER, identifier_type="user", endpoint=ENDPOINT)
    best: dict[tuple[str, int], tuple[float, float]] = {}
    async with (
        grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS.items())) as channel,
        AsyncRateLimiterClient(address, timeout_s=TIMEOUT_S) as client,
        AsyncRateLimiterClient(address, timeout_s=TIMEOUT_S, lease_ms=500) as leasing,
    ):
        check = stubs.RateLimiterStub(channel).CheckRateLimit

        async def plain() -> bool:
            return (await check(request, timeout=TIMEOUT_S)).allowed

        async def ours() -> bool:
            decision = await client.check(IDENTIFIER, "user", ENDPOINT)
            return decision.allowed and not decision.fail_open

        for _ in range(ROUNDS):
            for callers in CALLERS:
                for name, ask in (("grpcio", plain), ("client", ours)):
                    measured = await _closed_loop(ask, callers)
                    if measured > best.get((name, callers), (0.0, 0.0)):
                        best[name, callers] = measured
            rate = await _leased(leasing)
            best["leases", 0] = max(best.get(("leases", 0), (0.0, 0.0)), (rate, 0.0))
            for name, ask in (("grpcio", plain), ("client", ours)):
                p99_ms = await _by_chance(ask)
                best[name, 0] = min(best.get((name, 0), (0.0, p99_ms)), (0.0, p99_ms))
    return best


async def _closed_loop(ask: Ask, callers: int) -> tuple[float, float]:
    latencies_ms: list[float] = []
    end = time.perf_counter() + SECONDS

    async def caller() -> None:
        while (began := time.perf_counter()) < end:
            assert await ask(), "a check was denied, or let through unchecked"
            latencies_ms.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(latencies_ms) / (time.perf_counter() - began), percentile(latencies_ms, 0.99)


async def _leased(client: AsyncRateLimiterClient) -> float:
    """Return the checks per second that one core decides on one bucket, yielding to the loop after each thousand."""
    check, count, end = client.check, 0, time.perf_counter() + SECONDS
    began = time.perf_counter()
    while time.perf_counter() < end:
        for _ in range(BURST):
            assert (await check(IDENTIFIER, "user", ENDPOINT)).allowed
        count += BURST
        await asyncio.sleep(0)
    return count / (time.perf_counter() - began)


async def _by_chance(ask: Ask) -> float:
    """Return the p99 in ms of checks that arrive regardless of earlier answers."""
    loop = asyncio.get_running_loop()
    latencies_ms: list[float] = []
    under_way: set[asyncio.Task[None]] = set()
    over = asyncio.Event()
    command = [sys.executable, "-m", "bench.arrivals", str(ARRIVALS), str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - before anything is measured
        os.sched_setaffinity(process.pid, {SERVER_CORE})
        assert process.stdout
        told = process.stdout.fileno()

        async def caller(due_s: float) -> None:
            assert await ask(), "a check was denied, or let through unchecked"
            latencies_ms.append((time.monotonic() - due_s) * 1000)

        def arrive() -> None:
            came = os.read(told, DUE.size * 1_000)
            for (due_s,) in DUE.iter_unpack(came):
                task = loop.create_task(caller(due_s))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            if not came:
                loop.remove_reader(told)
                over.set()

        loop.add_reader(told, arrive)
        await over.wait()
        await asyncio.gather(*under_way)
    return percentile(latencies_ms, 0.99)


def _blocking(address: str) -> float:
    latencies_us = []
    with RateLimiterClient(address, timeout_s=TIMEOUT_S) as client:
        for _ in range(BLOCKING_CHECKS):
            began = time.perf_counter()
            assert not client.check(IDENTIFIER, "user", ENDPOINT).fail_open
            latencies_us.append((time.perf_counter() - began) * 1e6)
    return percentile(latencies_us, 0.5)
