"""Answers of three nodes, one per ON_BREAKER_OPEN, while their Valkey is paused, and the time until they limit again.

Half of the checks are of three users who check constantly, half of new users. Settings are the defaults, so an open
breaker is probed after 30 s.
"""

import tempfile
from pathlib import Path

from bench.report import Row
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.load import Event, offer, steady, together
from tests.cluster.nodes import Nodes
from tests.servers import Valkey

PAUSES_S = 0.3, 1.0, 5.0, 12.0
ANSWERS = "fail_open", "local"
RATE_PER_S = 300.0
BEFORE_S = 2.0
AFTER_S = 35.0
NODES = 3
FAIL_OPEN = {pb.FAIL_OPEN_BREAKER, pb.FAIL_OPEN_ERROR}


def measure() -> list[Row]:
    """Measure checks allowed undecided, out of all during the pause and the 35 s after it."""
    return [row for pause_s in PAUSES_S for answer in ANSWERS for row in _measure(pause_s, answer)]


def _measure(pause_s: float, answer: str) -> list[Row]:
    seconds = BEFORE_S + pause_s + AFTER_S
    hot = steady(RATE_PER_S / 2, seconds, nodes=NODES, keys=("a", "b", "c"))
    rare = [
        due._replace(key=f"rare-{number}")
        for number, due in enumerate(steady(RATE_PER_S / 2, seconds, nodes=NODES, seed=2))
    ]
    with (
        tempfile.TemporaryDirectory() as directory,
        Valkey(Path(directory) / "valkey") as valkey,
        Nodes(Path(directory) / "nodes", valkey.url, "--on-breaker-open", answer) as nodes,
    ):
        nodes.wait_for_members()
        nodes.rule(endpoint="/pauses", limit=1_000_000, window_seconds=60)
        log = offer(
            nodes.addresses,
            together(hot, rare),
            endpoint="/pauses",
            events=[Event(BEFORE_S, valkey.pause), Event(BEFORE_S + pause_s, valkey.resume)],
        ).log
    rows = []
    for kind, is_rare in (("asked all the time", False), ("never seen", True)):
        of_kind = [one for one in log.entries if one.key.startswith("rare") is is_rare]
        meanwhile = [one for one in of_kind if one.sent_s > log.entries[0].sent_s + BEFORE_S]
        open_ones = sum(one.reason in FAIL_OPEN for one in meanwhile)
        name = f"{pause_s:g} s, {answer}, {kind}: let through"
        rows.append(Row(name, open_ones, "checks", "all", len(meanwhile)))
    return rows
