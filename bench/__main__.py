"""``make bench``: every figure beside its baseline in the same run. Run it on a machine that does nothing else.

``python -m bench [part ...]`` runs some of the parts only; ``peers`` runs only when it is named.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import (
    assignments,
    client,
    decisions,
    hpack,
    http2_core,
    loop,
    memory,
    middleware,
    native,
    outage,
    page,
    pauses,
    peers,
    report,
    rpc,
    rules,
    shared,
    traces,
    workers,
)
from bench.servers import Missing

Part = tuple[str, Callable[[], list[report.Row]]]

PARTS: dict[str, Part] = {
    "decisions": ("Decisions, one core", decisions.measure),
    "memory": ("Memory per bucket, 38-character identifiers", memory.measure),
    "loop": ("Turns of the event loop", loop.measure),
    "hpack": ("Header blocks, one core", hpack.measure),
    "http2": ("HTTP/2 alone, one core", http2_core.measure),
    "native": ("The native transport, server on one core, load on another", native.measure),
    "rpc": ("Over gRPC, server on one core, load on another", rpc.measure),
    "shared": ("A node of a cluster, Valkey on the other core", shared.measure),
    "workers": ("Two workers and a private Valkey, CPU time", workers.measure),
    "client": ("The client, its callers on one core", client.measure),
    "middleware": ("The middleware for ASGI: FastAPI on one core", middleware.measure),
    "outage": ("The limiter is away, and an application at load", outage.measure),
    "pauses": ("The shared state stands still, and three nodes at load", pauses.measure),
    "rules": ("100,000 rules", rules.measure),
    "assignments": ("1,000,000 assignments", assignments.measure),
    "traces": ("Recording and replaying checks, CPU time", traces.measure),
    "page": ("The page: a node that is watched, and a first render", page.measure),
}


def main() -> None:
    """Run the named parts, or all; a part that lacks a program fails on its own."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; peers")
    parser.add_argument(
        "--peer",
        type=peers.parse,
        action="append",
        default=[],
        metavar=peers.FORM,
        help="a server for peers to measure; may be repeated",
    )
    options = parser.parse_args()
    parts: dict[str, Part] = {
        **PARTS,
        "peers": ("Other rate limiters, each on one core", partial(peers.measure, options.peer)),
    }
    for unknown in {*options.parts} - {*parts}:
        parser.error(f"no part is named {unknown}")
    if "peers" in options.parts and not options.peer:
        parser.error(f"name the peers that run: --peer {peers.FORM}")
    figures, missing = {}, []
    for name in options.parts or PARTS:
        title, measure = parts[name]
        try:
            figures[title] = measure()
        except (Missing, peers.PeerError) as what:
            missing.append(f"{name}: {what}")
            continue
        report.show(title, figures[title])
    if figures:
        report.save(Path(__file__).parent / "results" / "latest.json", figures)
    if missing:
        sys.exit("\n".join(missing))


if __name__ == "__main__":
    main()
