"""The latency that the middleware adds to an application, vs. slowapi with Valkey on the same application.

A FastAPI application on Uvicorn has one core; the load, the node and Valkey share the other. Each connection sends a
request, waits for the answer, and sends the next. The application alone, with ratelimitd, and with slowapi alternate,
and the best of each counts; the added latency is the difference to the application alone.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.report import Row, percentile
from bench.servers import ENDPOINT, LOAD_CORE, load_core, node, uvicorn
from tests.servers import Valkey

CONNECTIONS = (1, 8, 32)
ROUNDS, SECONDS = 10, 0.5
"""Many short rounds: other activity of the machine affects all three alike."""
WARM_UP_REQUESTS = 200
REQUEST = f"GET {ENDPOINT} HTTP/1.1\r\nHost: shop\r\n\r\n".encode()
NONE, OURS, SLOWAPI = "no limiter", "ratelimitd", "slowapi"


class Measured(NamedTuple):
    """One round, or the best of several."""

    p50_ms: float
    p99_ms: float
    rate: float


def measure() -> list[Row]:
    """Measure added latency at p50 and p99, and requests per second, by number of connections."""
    with (
        load_core(),
        tempfile.TemporaryDirectory() as directory,
        Valkey(Path(directory)) as valkey,
        node(core=LOAD_CORE) as limiter,
        contextlib.ExitStack() as stack,
    ):
        os.sched_setaffinity(valkey.pid, {LOAD_CORE})
        limiters = {
            NONE: "",
            OURS: f"ratelimitd 127.0.0.1:{limiter.port}",
            SLOWAPI: f"slowapi {valkey.url}",
        }
        ports = {
            name: stack.enter_context(uvicorn("bench.middleware_app:app", LIMITER=chosen)).port
            for name, chosen in limiters.items()
        }
        best = uvloop.run(_all(ports))
        assert valkey.ask("DBSIZE"), "slowapi has counted nothing"
    rows = []
    for connections in CONNECTIONS:
        alone, ours, slowapi = (best[name, connections] for name in (NONE, OURS, SLOWAPI))
        # Sequential requests are the worst case for waiting on a gRPC thread, and the best one for blocking the loop.
        at, beside = f"{connections} connections", "slowapi; aim 1"
        if connections == 1:
            at, beside = "1 connection", "slowapi"
        for part in ("p50", "p99"):
            base_ms, ours_ms, slowapi_ms = (
                getattr(found, f"{part}_ms") for found in (alone, ours, slowapi)
            )
            added = f"{at}: added at {part}"
            rows += [
                Row(added, ours_ms - base_ms, "ms", beside, slowapi_ms - base_ms),
                Row(f"{at}: {part}", ours_ms, "ms", NONE, base_ms),
            ]
        rows.append(Row(f"{at}: rate", ours.rate, "requests/s", SLOWAPI, slowapi.rate))
    return rows


async def _all(ports: dict[str, int]) -> dict[tuple[str, int], Measured]:
    best: dict[tuple[str, int], Measured] = {}
    for name, port in ports.items():
        await _Caller.ask(port, name, WARM_UP_REQUESTS)
    for _ in range(ROUNDS):
        for connections in CONNECTIONS:
            for name, port in ports.items():
                found = await _closed_loop(port, name, connections)
                known = best.get((name, connections), found)
                best[name, connections] = Measured(
                    min(found.p50_ms, known.p50_ms),
                    min(found.p99_ms, known.p99_ms),
                    max(found.rate, known.rate),
                )
    return best


async def _closed_loop(port: int, name: str, connections: int) -> Measured:
    began = time.perf_counter()
    until = began + SECONDS
    found = await asyncio.gather(
        *(_Caller.ask(port, name, until=until) for _ in range(connections))
    )
    latencies_ms = [latency_ms for of_one in found for latency_ms in of_one]
    rate = len(latencies_ms) / (time.perf_counter() - began)
    return Measured(percentile(latencies_ms, 0.5), percentile(latencies_ms, 0.99), rate)


class _Caller:
    """One connection to the application."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(
        cls, port: int, name: str, requests: int = 1_000_000, *, until: float = float("inf")
    ) -> list[float]:
        """Send ``requests`` requests one by one, or until ``until``; return the duration of each in ms."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        caller = cls(reader, writer)
        latencies_ms: list[float] = []
        while len(latencies_ms) < requests and (began := time.perf_counter()) < until:
            head = await caller._request()
            latencies_ms.append((time.perf_counter() - began) * 1000)
            assert head.startswith(b"HTTP/1.1 200 "), head
            # A request that failed open has no such header.
            assert (b"\r\nratelimit: " in head) is (name == OURS), head
        writer.close()
        await writer.wait_closed()
        return latencies_ms

    async def _request(self) -> bytes:
        self._writer.write(REQUEST)
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, _, rest = head.partition(b"content-length: ")
        await self._reader.readexactly(int(rest[: rest.index(b"\r")]))
        return head
