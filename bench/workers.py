"""Two workers with a private Valkey vs. one process with local memory: CPU time of all processes per check.

CPU time, because two workers, Valkey and the load would need four cores to show their rate.
"""

import re
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.native import EVERYTHING
from bench.replay import replay
from bench.report import Row
from bench.servers import Server, cpu_seconds, load_core, node
from ratelimitd.model import US_PER_S

SECONDS, ROUNDS = 3, 3
SHAPE = (16, 16)
"""Connections, which the kernel spreads over the workers, and calls in flight on each."""
SCENARIOS = {
    "one-key": "one bucket",
    "thousand-identifiers": "1,000 buckets",
    "identifiers": "100,000 buckets, unknown to most",
}
TWO = ("--workers", "2")


class Spent(NamedTuple):
    """CPU time of the nodes with their parent, and of Valkey, in s."""

    nodes: float
    valkey: float


def measure() -> list[Row]:
    """Return the minimum of several rounds; the two alternate."""
    with load_core(), node(*EVERYTHING) as one, node(*EVERYTHING, *TWO) as two:
        rows = []
        for scenario, name in SCENARIOS.items():
            rounds = [(_per_check(one, scenario), _per_check(two, scenario)) for _ in range(ROUNDS)]
            alone = min(sum(first) for first, _ in rounds)
            shared = min((second for _, second in rounds), key=sum)
            rows += [
                Row(
                    f"{name}: two workers and Valkey", sum(shared), "us/check", "one process", alone
                ),
                Row(f"{name}: of which Valkey", shared.valkey, "us/check"),
            ]
    return rows


def _per_check(server: Server, scenario: str) -> Spent:
    """Return the CPU time in µs per answered check under load."""
    checks, before = _answered(server), _spent(server.pid)
    replay(server, scenario, SHAPE, seconds=SECONDS)
    after, checks = _spent(server.pid), _answered(server) - checks
    return Spent(
        *((end - start) * US_PER_S / checks for start, end in zip(before, after, strict=True))
    )


def _answered(server: Server) -> float:
    page = httpx.get(f"http://127.0.0.1:{server.http_port}/metrics", timeout=30).text
    counts = re.findall(
        r"^rate_limiter_requests_(?:allowed|blocked)_total (\S+)$", page, re.MULTILINE
    )
    return sum(map(float, counts))


def _spent(pid: int) -> Spent:
    nodes, valkey = cpu_seconds(pid), 0.0
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if "valkey-server" in Path(f"/proc/{child}/cmdline").read_text():
            valkey += cpu_seconds(child)
        else:
            nodes += cpu_seconds(child)
    return Spent(nodes, valkey)
