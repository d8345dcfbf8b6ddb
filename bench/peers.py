"""Other rate limiters vs. a node in one run: ``python -m bench peers --peer gubernator=127.0.0.1:1051,pid=4711 …``.

The peers must already run on this machine, ideally on the core of our node. :mod:`bench.replay` loads them in turn;
every answer must allow its check, and if a peer reports remaining tokens, they must match the checks charged.
"""

import argparse
import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.native import BUSY, EVERYTHING, FEW, MANY, ROUNDS, SECONDS
from bench.protocols import OVER_LIMIT, PROTOCOLS, NotAllowedError, fields
from bench.replay import Measured, ReplayError, replay
from bench.report import Row
from bench.servers import SERVER_CORE, Server, load_core, node

ANSWER_SECONDS = 5.0
WARM_UP_SECONDS = 1.0
FORM = "KIND=127.0.0.1:PORT[,pid=PID]"
HOSTS = ("127.0.0.1", "localhost")
LISTENING = "0A"
"""Socket state in /proc/net/tcp (include/net/tcp_states.h)."""
ROUNDED = 1
"""Tokens: remaining tokens are reported as integers."""
NO_LIMIT = "no limit denies 4294967295 hits, so none is in force"


class Peer(NamedTuple):
    """A running server. ``pids`` are the processes whose CPU time counts, empty if unknown."""

    kind: str
    port: int
    pids: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{self.port}"


class PeerError(Exception):
    """A peer answered incorrectly; the run is invalid."""

    def __init__(self, peer: Peer, what: object) -> None:
        super().__init__(f"{peer}: {what}")


def parse(text: str) -> Peer:
    """Parse ``KIND=127.0.0.1:PORT[,pid=PID]…``; without a pid, finds the processes that listen there.

    Raises:
        argparse.ArgumentTypeError: the text is malformed.
    """
    found = re.fullmatch(r"([\w-]+)=([\w.]+):(\d{1,5})((?:,pid=\d+)*)", text)
    if not found or found[1] not in PROTOCOLS:
        message = f"must be {FORM}, KIND one of {', '.join(PROTOCOLS)}"
        raise argparse.ArgumentTypeError(message)
    if found[2] not in HOSTS:
        message = "the peer must run on this machine, as its CPU time is read"
        raise argparse.ArgumentTypeError(message)
    port, pids = int(found[3]), tuple(map(int, re.findall(r"\d+", found[4])))
    for pid in pids:
        if not Path(f"/proc/{pid}").exists():
            message = f"there is no process {pid}"
            raise argparse.ArgumentTypeError(message)
    return Peer(found[1], port, pids or tuple(listeners(port)))


def listeners(port: int) -> Iterator[int]:
    """Yield the processes that listen on a port, as far as visible to this user (proc_net(5), proc_pid_fd(5))."""
    tables = Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()
    entries = [line.split() for table in tables for line in table.splitlines()]
    ours = f"{port:04X}", LISTENING
    sockets = {
        f"socket:[{one[9]}]" for one in entries if (one[1].rpartition(":")[2], one[3]) == ours
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or ended
            if not sockets.isdisjoint(map(_target, (process / "fd").iterdir())):
                yield int(process.name)


def _target(fd: Path) -> str:
    """Return the target of a descriptor; empty if closed meanwhile, such as the one that read the directory."""
    with contextlib.suppress(OSError):
        return str(fd.readlink())
    return ""


def measure(peers: Sequence[Peer]) -> list[Row]:
    """Measure the peers beside a newly started node.

    Raises:
        PeerError: an answer did not allow its check, or a peer charged a different number of checks.
    """
    for peer in peers:
        look_at(peer)
    # Other services of Envoy's protocol add no header fields by default.
    with load_core(), node("--transport", "native", "--envoy-fields", "none", *EVERYTHING) as ours:
        return beside(ours, peers)


def beside(
    ours: Server,
    peers: Sequence[Peer],
    *,
    shapes: Sequence[tuple[int, int]] = (FEW, MANY),
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    warm_up: float = WARM_UP_SECONDS,
) -> list[Row]:
    """Load our node, by our protocol and by Envoy's, and every peer in turn, with each shape in each round.

    Raises:
        PeerError: an answer did not allow its check, or a peer charged a different number of checks.
    """
    both = [Peer(kind, ours.port, (ours.pid,)) for kind in ("ratelimitd", "ratelimitd-envoy")]
    taken: dict[tuple[Peer, tuple[int, int]], list[Measured]] = {
        (peer, shape): [] for shape in shapes for peer in (*both, *peers)
    }
    for _ in range(rounds):
        for (peer, shape), results in taken.items():
            results.append(ask(peer, shape, seconds=seconds, warm_up=warm_up))
    return [
        row
        for (peer, shape), results in taken.items()
        for row in _rows(peer, shape, results, taken[both[0], shape])
    ]


def ask(peer: Peer, shape: tuple[int, int], *, seconds: float, warm_up: float) -> Measured:
    """Measure one peer once, and verify that it charged the checks it answered.

    Raises:
        PeerError: an answer did not allow its check, or the peer charged a different number of checks.
    """
    started, before = time.monotonic(), _remaining(peer)
    try:
        measured = replay(
            Server(peer.port, 0), peer.kind, shape, seconds=seconds, warm_up=warm_up, pids=peer.pids
        )
    except ReplayError as error:
        raise PeerError(peer, error) from None
    after = _remaining(peer)
    if before is None or after is None:
        return measured
    # The second call of `_remaining` took one token; calls in flight at the end may or may not have been charged.
    charged = before - after - 1
    refilled = (time.monotonic() - started) * PROTOCOLS[peer.kind].refill
    if charged > measured.sent + ROUNDED or charged + refilled + ROUNDED < measured.answered:
        counts = f"{measured.sent} checks sent, {measured.answered} answered, but {charged} charged"
        raise PeerError(peer, f"{counts}, with a refill of at most {refilled:.0f}")
    return measured


def look_at(peer: Peer) -> None:
    """Report figures that will be missing, and send one check before the run.

    Raises:
        PeerError: it does not allow a check, or has no limit.
    """
    _remaining(peer)
    too_many = PROTOCOLS[peer.kind].too_many
    if too_many and fields(_call(peer, too_many)).get(1) != OVER_LIMIT:
        raise PeerError(peer, NO_LIMIT)
    if not peer.pids:
        print(f"  {peer}: no process found that listens there, so no CPU time", flush=True)
    for pid in peer.pids:
        if os.sched_getaffinity(pid) != {SERVER_CORE}:
            core = f"core {SERVER_CORE}, where our node runs"
            print(f"  {peer}: process {pid} is not pinned to {core}", flush=True)


def _remaining(peer: Peer) -> int | None:
    """Return the tokens left after one more check, if the peer reports them."""
    protocol = PROTOCOLS[peer.kind]
    try:
        return protocol.remaining(_call(peer, protocol.message))
    except NotAllowedError as error:
        raise PeerError(peer, f"instead of an allowed check: {error}") from None


def _call(peer: Peer, message: bytes) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{peer.port}") as channel:
        call: Any = channel.unary_unary(PROTOCOLS[peer.kind].path.decode())
        try:
            return bytes(call(message, timeout=ANSWER_SECONDS))
        except grpc.RpcError as error:
            raise PeerError(peer, f"{error.code().name}: {error.details()}") from None


def _rows(
    peer: Peer, shape: tuple[int, int], results: list[Measured], ours: list[Measured]
) -> Iterator[Row]:
    """Yield the best rate, the median rate, and the cost per check; ratios are relative to our node."""
    name = f"{peer}, {shape[0]}x{shape[1]}"
    rates, our_rates = ([one.rate for one in each] for each in (results, ours))
    yield Row(f"{name}: best", max(rates), "checks/s", "ours", max(our_rates))
    median, our_median = statistics.median(rates), statistics.median(our_rates)
    yield Row(f"{name}: median", median, "checks/s", "ours", our_median)
    if peer.pids:
        cpu_us, our_cpu_us = (
            statistics.median(one.cpu_us for one in each) for each in (results, ours)
        )
        yield Row(f"{name}: CPU", cpu_us, "us/check", "ours", our_cpu_us)
        busy = statistics.median(one.rate * one.cpu_us for one in results) / 1e6
        if busy < BUSY:
            print(f"  {name}: busy for {busy:.0%} of the time only", flush=True)
