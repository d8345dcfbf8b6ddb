"""Measures the traffic between nodes and the store by the number of nodes: ``python -m tests.simulation.traffic``.

Prints the tables of docs/scaling.md. Requests count all bytes sent to the store, replies only those of values.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ratelimitd.cluster.redis.codec import Request, checks_request, settle_request
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import FirstResult, SharedState
from ratelimitd.model import Algorithm
from tests.ledger_model import Ledger
from tests.outcomes import rule_of
from tests.simulation.node import Node
from tests.simulation.world import SECOND, START_US, FirstCheck, Network, World

NODES = (1, 2, 4, 8, 16)
WARM_S = 1
VALUE_BYTES = 42
"""Bytes of a token bucket in the store."""
OUTCOME_BYTES = 18
"""Bytes of the answer to a first check."""
NAME = bytes(16)


@dataclass(frozen=True)
class Cell:
    """One bucket under ``load`` times its limit."""

    title: str
    limit: int
    load: float
    cost: int = 1

    @property
    def checks_per_s(self) -> float:
        return self.limit * self.load / self.cost

    @property
    def measured_s(self) -> int:
        return 4 if self.checks_per_s > 1_000 else 40


CELLS = (
    Cell("10/s, half of it", 10, 0.5),
    Cell("10/s, all of it", 10, 1.0),
    Cell("10/s, attacked with 20 times it", 10, 20),
    Cell("1,000/s, half of it", 1_000, 0.5),
    Cell("1,000/s, all of it", 1_000, 1.0),
    Cell("1,000/s, attacked with 20 times it", 1_000, 20),
    Cell("100,000/s, half of it, costs of 20", 100_000, 0.5, cost=20),
    Cell("100,000/s, all of it, costs of 20", 100_000, 1.0, cost=20),
    Cell("100,000/s, attacked with 20 times it, costs of 200", 100_000, 20, cost=200),
)


class CountingWorld(World):
    """Counts calls of the store, messages and bytes, without heartbeats (one per node and second)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Network(), Ledger())
        self.counts: Counter[str] = Counter()

    def _count(self, request: Iterable[bytes], reply_bytes: int) -> None:
        self.counts["calls"] += 1
        self.counts["messages"] += 2
        self.counts["bytes"] += on_wire(request) + reply_bytes

    def send(self, node: Node, batch: Batch, back: Callable[[Reply], None]) -> None:
        named = {NAME + key: update for key, update in batch.updates.items()}
        command = script_call(settle_request(0, batch._replace(updates=named)))
        grants = sum(len(update.asks) for update in batch.updates.values())
        self._count(command, len(batch.updates) * (VALUE_BYTES + 7) + 4 * grants + 4)
        super().send(node, batch, back)

    def send_first_check(
        self, node: Node, first_check: FirstCheck, back: Callable[[FirstResult], None]
    ) -> None:
        check = first_check.check._replace(name=NAME + first_check.check.name)
        self._count(script_call(checks_request([check])), VALUE_BYTES + OUTCOME_BYTES + 11)
        super().send_first_check(node, first_check, back)

    def read(self, node: Node, key: bytes, back: Callable[..., None]) -> None:
        self._count((b"GET", NAME + key), VALUE_BYTES + 7)
        super().read(node, key, back)

    def publish(self, sender: Node, number: int, key: bytes, shared: SharedState) -> None:
        self.counts["calls"] += 1
        self.counts["messages"] += len(
            self.nodes
        )  # one to the store, and one to each of the others
        self.counts["bytes"] += len(self.nodes) * (VALUE_BYTES + 60)
        super().publish(sender, number, key, shared)


def script_call(request: Request) -> tuple[bytes, ...]:
    """Return the command that calls a script cached by the store."""
    keys, arguments = request
    return (b"EVALSHA", bytes(40), b"%d" % len(keys), *keys, *arguments)


def on_wire(command: Iterable[bytes]) -> int:
    """Return the bytes of a command in the protocol of the store."""
    parts = [b"$%d\r\n%s\r\n" % (len(part), part) for part in command]
    return sum(map(len, parts)) + len(b"*%d\r\n" % len(parts))


def measure(cell: Cell, nodes: int) -> dict[str, float]:
    """Return the counts per second of all nodes together."""
    world = CountingWorld(nodes)
    rule = rule_of(Algorithm.TOKEN_BUCKET, cell.limit, 1)
    for number in range(nodes):
        world.start(f"n{number}/0")
        Node(world, f"n{number}", rule, members=nodes, max_views=10**9)
    offer(cell, world, START_US + WARM_S * SECOND)
    world.counts.clear()
    asks_before = sum(node.asks for node in world.nodes)
    offer(cell, world, START_US + (WARM_S + cell.measured_s) * SECOND)
    counts: dict[str, float] = {
        name: world.counts[name] / cell.measured_s for name in ("calls", "messages", "bytes")
    }
    asks = sum(node.asks for node in world.nodes) - asks_before
    return counts | {"asks": asks / cell.measured_s}


def offer(cell: Cell, world: World, until_us: int) -> None:
    """Generate checks until ``until_us``."""
    per_us, most = cell.checks_per_s / SECOND, 2 * cell.cost - 1
    at_us = float(world.now_us)
    while (at_us := at_us + world.random.expovariate(per_us)) < until_us:
        world.run_until(int(at_us))
        node = world.nodes[int(world.chance() * len(world.nodes))]
        node.check(b"key", 1 + int(world.chance() * most))
    world.run_until(until_us)


def main() -> None:
    """Measure all cells, and print the tables."""
    measured = {(cell, nodes): measure(cell, nodes) for cell in CELLS for nodes in NODES}
    tables = {
        "calls": ("store calls/s", 1),
        "messages": ("messages/s", 1),
        "bytes": ("kB/s", 1_000),
        "asks": ("checks/s that wait for the store", 1),
    }
    for name, (title, unit) in tables.items():
        lines = ["| " + " | ".join([title, *(f"N = {nodes}" for nodes in NODES)]) + " |"]
        lines.append("|---" + "|---:" * len(NODES) + "|")
        for cell in CELLS:
            values = (f"{measured[cell, nodes][name] / unit:,.0f}" for nodes in NODES)
            lines.append("| " + " | ".join([cell.title, *values]) + " |")
        sys.stdout.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
