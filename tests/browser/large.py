"""A large installation: 20 nodes that share a Valkey, and 10,000 rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.browser.crowd import crowd
from tests.servers import Valkey
from tests.system.process import Files, Served, until

MANY_NODES = 20
MANY_RULES = 10_000

RULE = (
    "  - {{endpoint: /v1/service-{number:05}/orders, identifier_type: user, limit: {limit}, window_seconds: 60,"
    " algorithm: token_bucket}}\n"
)


@contextlib.contextmanager
def large(directory: Path) -> Iterator[Served]:
    """The first of its nodes, in a process of its own, once it knows of the others."""
    rules = directory / "rules.yaml"
    lines = [RULE.format(number=number, limit=number + 1) for number in range(MANY_RULES)]
    rules.write_text("rules:\n" + "".join(lines))
    files = Files(directory)
    names = [f"n{number:02}" for number in range(1, MANY_NODES + 1)]
    with (
        Valkey(directory / "valkey") as valkey,
        files.serving(
            *("--node-id", names[0], "--redis-url", valkey.url, "--rules-file", str(rules)),
            *("--loopback-admin", "on"),  # who may see a page is no question here
        ) as node,
        crowd(names[1:], redis_url=valkey.url, database_url=f"sqlite:///{files.database}"),
    ):
        until(lambda: node.metric("rate_limiter_cluster_nodes") == MANY_NODES, "all have met")
        yield node
