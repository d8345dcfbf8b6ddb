"""The HTTP/2 core alone: prebuilt bytes of unary checks in, answers out, in µs per check.

No socket, no handler, no gRPC: only ``receive``, ``send_unary`` and ``data_to_send``, as in one event-loop iteration.
The baseline is a loop that splits the same bytes into frames by length and ignores them; the difference is the cost of
HTTP/2.
"""

import gc
import random
import time
from collections.abc import Callable

import hpack

from bench.report import Row
from bench.scripts import CHECK, go_fields
from ratelimitd.http2.connection import Connection
from ratelimitd.http2.headers import static_block
from ratelimitd.http2.sending import UnaryAnswer
from ratelimitd.http2.settings import PREFACE
from ratelimitd_wire import frames

ROUNDS = 5
CHECKS = 40_000
GREETING = PREFACE + frames.settings([]) + frames.SETTINGS_ACK
ANSWER = UnaryAnswer(
    static_block([(b":status", b"200"), (b"content-type", b"application/grpc")]),
    static_block([(b"grpc-status", b"0")]),
)
HEAD = go_fields(CHECK)
REQUEST = b"\0\0\0\0\x2a" + bytes(42)
MESSAGE = b"\0\0\0\0\x3c" + bytes(60)

Reads = list[list[bytes]]
"""Per connection: its handshake, then one read after the other."""


def measure() -> list[Row]:
    """Measure the best of five rounds each."""
    shapes = {
        "4 connections x 16 streams": (4, 16, False),
        "16 connections x 64 streams": (16, 64, False),
        "1 connection x 1 stream": (1, 1, False),
        "4 x 16, a new grpc-timeout in each": (4, 16, True),
    }
    rows = []
    for name, (connections, streams, changing) in shapes.items():
        reads = [_reads(connections, streams, changing=changing) for _ in range(connections)]
        rows.append(
            Row(name, _best_us(_answer, reads), "us", "cut into frames", _best_us(_cut, reads))
        )
    return rows


def _reads(connections: int, streams: int, *, changing: bool) -> list[bytes]:
    """Return what one connection sends: its share of the checks, ``streams`` per read."""
    encoder, source = hpack.Encoder(), random.Random(9113)

    def check(stream_id: int) -> bytes:
        timeout = [(b"grpc-timeout", b"%du" % source.randint(4_990_000, 4_999_990))]
        block = encoder.encode([*HEAD, *timeout] if changing else HEAD)
        head = frames.headers(stream_id, block, ended=False)
        return head + frames.frame(frames.FrameType.DATA, frames.END_STREAM, stream_id, REQUEST)

    reads = [GREETING + frames.window_update(0, 1 << 30)]
    stream_id = 1
    for _ in range(CHECKS // connections // streams):
        reads.append(b"".join(check(stream_id + 2 * number) for number in range(streams)))
        stream_id += 2 * streams
    return reads


def _answer(reads: Reads) -> int:
    """Run the iterations of a server over all connections; return the number of checks answered."""
    connections = [Connection() for _ in reads]
    answered = 0
    for turn in zip(*reads, strict=True):
        for connection, octets in zip(connections, turn, strict=True):
            send = connection.send_unary
            for event in connection.receive(octets):
                if type(event) is tuple:
                    send(event[0], ANSWER, MESSAGE)
                    answered += 1
            connection.data_to_send()
    assert not any(connection.ended or connection.open_streams for connection in connections)
    return answered


def _cut(reads: Reads) -> int:
    """Split all reads into frames; return the number of checks."""
    read_header, checks = frames.read_header, 0
    for turn in zip(*reads, strict=True):
        for octets in turn:
            at, size, payload = 0, len(octets), b""
            while at < size:
                _, length, _, _ = read_header(octets, at)
                end = at + 9 + length
                payload = octets[at + 9 : end]
                at = end
            checks += len(payload) > 0
    return checks


def _best_us(run: Callable[[Reads], int], reads: Reads) -> float:
    total = CHECKS // len(reads) * len(reads)
    best = float("inf")
    for _ in range(ROUNDS):
        gc.collect()
        started = time.perf_counter_ns()
        done = run(reads)
        best = min(best, time.perf_counter_ns() - started)
        assert done
    return best / total / 1_000
