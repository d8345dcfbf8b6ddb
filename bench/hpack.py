"""HPACK: the time to decode the header block of a unary call, vs. the ``hpack`` library on the same blocks.

Clients such as grpc-go, grpc-java and grpcio add a new ``grpc-timeout`` to the dynamic table with each call, so their
blocks never repeat: every index shifts, and the constant fields are evicted from time to time.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import hpack

from bench.report import Row
from bench.scripts import CHECK, go_fields
from ratelimitd.http2.hpack_decoder import Decoder
from ratelimitd_wire import huffman

ROUNDS = 7
BLOCKS = 20_000
HEAD = [*go_fields(CHECK), (b"x-request-source", b"checkout")]
CONSTANT = [*HEAD, (b"grpc-timeout", b"5S")]


def measure() -> list[Row]:
    """Measure the best of seven rounds each, in ns per block of nine fields."""
    encoder = hpack.Encoder()
    blocks = {
        "nine indexed fields": [encoder.encode(CONSTANT) for _ in range(BLOCKS)],
        "a new grpc-timeout in each, Huffman": list(_fresh_timeouts(huffman_code=True)),
        "a new grpc-timeout in each, plain": list(_fresh_timeouts(huffman_code=False)),
        "everything literal, not indexed": [_literals()] * BLOCKS,
    }
    rows = [
        Row(
            what,
            _best_ns(lambda: Decoder().decode, some),
            "ns",
            "hpack",
            _best_ns(_library_decode, some[: BLOCKS // 10]),
        )
        for what, some in blocks.items()
    ]
    code = huffman.encode(b"4999841u")
    rows.append(
        Row(
            "Huffman code of a timeout",
            _best_ns(lambda: huffman.decode, [code] * BLOCKS),
            "ns",
            "hpack",
            _best_ns(lambda: hpack.huffman_table.decode_huffman, [code] * BLOCKS),
        )
    )
    return rows


def _fresh_timeouts(*, huffman_code: bool) -> Iterator[bytes]:
    source, encoder = random.Random(7541), hpack.Encoder()
    for _ in range(BLOCKS):
        timeout = b"%du" % source.randint(4_990_000, 4_999_990)
        yield encoder.encode([*HEAD, (b"grpc-timeout", timeout)], huffman=huffman_code)


def _literals() -> bytes:
    fields = [hpack.NeverIndexedHeaderTuple(name, value) for name, value in CONSTANT]
    return hpack.Encoder().encode(fields)


def _library_decode() -> Callable[[bytes], Any]:
    decode = hpack.Decoder().decode
    return lambda block: decode(block, raw=True)


def _best_ns(make: Callable[[], Callable[[bytes], Any]], blocks: list[bytes]) -> float:
    """Decode all blocks in order, with a new decoder per round."""
    best = float("inf")
    gc.collect()
    for _ in range(ROUNDS):
        decode = make()
        start = time.perf_counter_ns()
        for block in blocks:
            decode(block)
        best = min(best, time.perf_counter_ns() - start)
    return best / len(blocks)
