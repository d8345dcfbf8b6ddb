"""Checks per second and latency of a node on the grpcio transport; vs. a bare grpc.aio echo and an idle process.

Both sides pay the cost of grpcio, so the difference is ours; for the native transport see :mod:`bench.native`. The
server has one core, the load the other. Latency under load counts from a call's due time, not from its sending, so that
a stall counts for every call it delayed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import uvloop

from bench import scripts, servers
from bench.report import Row, percentile
from bench.scripts import identifier
from bench.turns import idle_control
from ratelimiter.v1 import ratelimiter_pb2 as pb

CHECK, BATCH = scripts.CHECK.decode(), scripts.BATCH.decode()
IN_FLIGHT = 64
CHANNELS = 4
SECONDS = 5.0
SEQUENTIAL_CALLS = 5_000
PERCENTILES = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))


def measure() -> list[Row]:
    """Measure both servers, one after the other, with the same load."""
    with servers.load_core():
        with servers.node("--transport", "grpcio") as server:
            node = uvloop.run(_load(server.port))
        with servers.echo() as server:
            echo = uvloop.run(_load(server.port))
    rows = []
    for name, value in node.items():
        unit = name.rsplit(", ", 1)[1]
        label = name.rsplit(", ", 1)[0]
        rows.append(
            Row(
                label,
                value,
                unit,
                "bare grpc.aio echo" if "idle" not in name else "",
                echo.get(name),
            )
        )
    for at in ("one in flight", "70 % load"):
        added_ms = node[f"{at} p99, ms"] - echo[f"{at} p99, ms"]
        rows.append(Row(f"{at}: added at p99 (promised: below 1)", added_ms, "ms"))
    return rows


async def _load(port: int) -> dict[str, float]:
    request = pb.RateLimitRequest(
        identifier=identifier(42), identifier_type="user", endpoint=servers.ENDPOINT
    )
    one = request.SerializeToString()
    hundred = pb.BatchRateLimitRequest(requests=[request] * 100).SerializeToString()
    figures: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(port, number)) for number in range(CHANNELS)
        ]
        await _closed_loop(channels, CHECK, one, seconds=1.0)  # warm up
        rate = await _closed_loop(channels, CHECK, one, seconds=SECONDS)
        figures[f"unary, {IN_FLIGHT} in flight, checks/s"] = rate
        batches = await _closed_loop(channels, BATCH, hundred, seconds=SECONDS)
        figures["batch of 100, checks/s"] = batches * 100
        with idle_control() as control:
            latencies_ms = await _sequential(channels[0], one)
        figures.update(_latency("one in flight", latencies_ms, control))
        with idle_control() as control:
            latencies_ms = await _open_loop(channels, one, rate * 0.7)
        figures.update(_latency("70 % load", latencies_ms, control))
    return figures


@contextlib.asynccontextmanager
async def _channel(port: int, number: int) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("ratelimitd.bench.number", number)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        await channel.channel_ready()
        yield channel


async def _closed_loop(
    channels: list[grpc.aio.Channel], method: str, message: bytes, *, seconds: float
) -> float:
    """Return calls per second with ``IN_FLIGHT`` calls always in flight."""
    calls = 0
    end = time.perf_counter() + seconds

    async def caller(channel: grpc.aio.Channel) -> None:
        nonlocal calls
        call = channel.unary_unary(method)
        while time.perf_counter() < end:
            await call(message)
            calls += 1

    started = time.perf_counter()
    await asyncio.gather(*(caller(channels[number % CHANNELS]) for number in range(IN_FLIGHT)))
    return calls / (time.perf_counter() - started)


async def _sequential(channel: grpc.aio.Channel, message: bytes) -> list[float]:
    call, latencies_ms = channel.unary_unary(CHECK), []
    for _ in range(SEQUENTIAL_CALLS):
        started = time.perf_counter()
        await call(message)
        latencies_ms.append((time.perf_counter() - started) * 1000)
    return latencies_ms


async def _open_loop(channels: list[grpc.aio.Channel], message: bytes, rate: float) -> list[float]:
    """Return latencies at ``rate`` calls per second, regardless of answers."""
    latencies_ms: list[float] = []
    calls = [channel.unary_unary(CHECK) for channel in channels]

    async def one(number: int, due: float) -> None:
        await calls[number % CHANNELS](message)
        latencies_ms.append((time.perf_counter() - due) * 1000)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * SECONDS)):
            due = started + number / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.create_task(one(number, due))
    return latencies_ms


def _latency(at: str, latencies_ms: list[float], control: dict[str, float]) -> dict[str, float]:
    figures = {f"{at} {name}, ms": percentile(latencies_ms, part) for name, part in PERCENTILES}
    figures |= {f"{at}: idle process {name}, ms": control[f"{name}_ms"] for name, _ in PERCENTILES}
    return figures
