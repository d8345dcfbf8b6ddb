"""The prebuilt bytes of a connection in the replayed load: whole calls in HTTP/2.

h2load repeats one body and one header block. Real clients do not: identifiers differ, and a deadline inherited from the
caller's own request changes ``grpc-timeout`` with each call. :class:`Heads` writes blocks as grpc-go and grpcio do, as
observed on the wire.
"""

import random
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, islice, repeat
from typing import NamedTuple

from bench.servers import ENDPOINT, SEVERAL_ENDPOINT
from ratelimitd_wire import huffman
from ratelimitd_wire.frames import END_HEADERS, END_STREAM, FrameType
from ratelimitd_wire.huffman import encode_integer
from ratelimitd_wire.static_table import STATIC_TABLE
from ratelimiter.v1 import ratelimiter_pb2 as pb

CHECK = b"/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH = b"/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
IDENTIFIERS = 100_000
BATCH_SIZE = 100
TABLE_BYTES = 4_096
"""Default size of the dynamic table (RFC 9113 §6.5.2)."""

Field = tuple[bytes, bytes]


class Script(NamedTuple):
    """The calls of one connection, on the streams 1, 3, 5 and so on.

    Call ``n`` is ``octets[starts[n]:starts[n + 1]]``; each has ``body_bytes`` of DATA for flow control.
    """

    octets: bytes
    starts: list[int]
    body_bytes: int


class Heads:
    """Header blocks of one connection as a gRPC client writes them, always with ``grpc-timeout`` as a new field.

    grpc-go refers to field names by index and compresses values when that is shorter; grpcio writes names and values as
    literals (``verbatim``). Both put every field into the dynamic table, so the constant ones are evicted from time to
    time.
    """

    def __init__(self, constant: Iterable[Field], *, verbatim: bool = False) -> None:
        self._constant = list(constant)
        self._verbatim = verbatim
        self._static = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
        self._static_names = {
            name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))
        }
        self._entries: deque[Field] = deque()
        self._bytes = 0
        self._inserted = 0
        self._numbers: dict[Field | bytes, int] = {}
        """Number of the last insertion of each field and of each name."""

    def block(self, timeout: bytes = b"") -> bytes:
        """Return the next block; without a timeout it has no ``grpc-timeout``."""
        parts = [self._encode(field) for field in self._constant]
        if timeout:
            parts.append(self._literal((b"grpc-timeout", timeout)))
        return b"".join(parts)

    def _encode(self, field: Field) -> bytes:
        index = self._static.get(field) or self._dynamic_index(field)
        return encode_integer(index, 7, 0x80) if index else self._literal(field)

    def _literal(self, field: Field) -> bytes:
        """Encode a literal with incremental indexing (RFC 7541 §6.2.1)."""
        name, value = field
        index = 0
        if not self._verbatim:
            index = self._static_names.get(name) or self._dynamic_index(name)
        written = encode_integer(index, 6, 0x40)
        if not index:
            written += self._string(name)
        self._insert(field)
        return written + self._string(value)

    def _string(self, text: bytes) -> bytes:
        code = text if self._verbatim else huffman.encode(text)
        if len(code) < len(text):
            return encode_integer(len(code), 7, 0x80) + code
        return encode_integer(len(text), 7, 0x00) + text

    def _dynamic_index(self, key: Field | bytes) -> int:
        number = self._numbers.get(key, 0)
        evicted = self._inserted - len(self._entries)
        return len(STATIC_TABLE) + self._inserted - number + 1 if number > evicted else 0

    def _insert(self, field: Field) -> None:
        self._bytes += _field_bytes(field)
        while self._bytes > TABLE_BYTES:
            self._bytes -= _field_bytes(self._entries.popleft())
        self._entries.append(field)
        self._inserted += 1
        self._numbers[field] = self._numbers[field[0]] = self._inserted


def _field_bytes(field: Field) -> int:
    return len(field[0]) + len(field[1]) + 32


def go_fields(path: bytes) -> list[Field]:
    """Return the fields of a call by grpc-go, except its deadline."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"ratelimitd.internal:50051"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"grpc-go/1.75.0"),
        (b"te", b"trailers"),
    ]


GRPCIO_FIELDS = [
    (b":path", CHECK),
    (b":authority", b"ratelimitd.internal:50051"),
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    (b"user-agent", b"grpc-python/1.85.1 grpc-c/58.0.0 (linux; chttp2)"),
]
FILE_FIELDS = [
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/file"),
    (b":authority", b"127.0.0.1"),
]


def _constant_blocks(fields: list[Field]) -> Iterator[bytes]:
    """Yield constant blocks: after the first, all fields are indexed."""
    heads = Heads(fields)
    yield heads.block()
    yield from repeat(heads.block())


def _checks() -> Iterator[bytes]:
    return _constant_blocks([*go_fields(CHECK), (b"grpc-timeout", b"5S")])


def _batches() -> Iterator[bytes]:
    return _constant_blocks([*go_fields(BATCH), (b"grpc-timeout", b"5S")])


def _go_timeouts() -> Iterator[bytes]:
    """Yield the remainder of 5 s, in µs."""
    source, heads = random.Random(7541), Heads(go_fields(CHECK))
    while True:
        yield heads.block(b"%du" % source.randint(4_900_000, 4_999_999))


def _grpcio_timeouts() -> Iterator[bytes]:
    """Yield the remainder of up to 10 s, rounded to 10 ms: grpcio sends no more digits."""
    source, heads = random.Random(7541), Heads(GRPCIO_FIELDS, verbatim=True)
    while True:
        yield heads.block(b"%d0m" % source.randint(100, 999))


def identifier(number: int) -> str:
    """Return an identifier of 38 characters, as in the other parts."""
    return f"user-{number:033d}"


def _request(number: int, endpoint: str = ENDPOINT) -> pb.RateLimitRequest:
    return pb.RateLimitRequest(
        identifier=identifier(number), identifier_type="user", endpoint=endpoint
    )


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def _one_key() -> Iterator[bytes]:
    return repeat(_framed(_request(42).SerializeToString()))


def _three_limits() -> Iterator[bytes]:
    return repeat(_framed(_request(42, SEVERAL_ENDPOINT).SerializeToString()))


def _any_key(identifiers: int = IDENTIFIERS) -> Iterator[bytes]:
    messages = [_framed(_request(number).SerializeToString()) for number in range(identifiers)]
    source = random.Random(100_000)
    while True:
        yield from source.sample(messages, identifiers)


def _batch_of_one_key() -> Iterator[bytes]:
    requests = [_request(42)] * BATCH_SIZE
    return repeat(_framed(pb.BatchRateLimitRequest(requests=requests).SerializeToString()))


def _batch_of_any_keys() -> Iterator[bytes]:
    source = random.Random(100_000)
    batches = []
    for _ in range(IDENTIFIERS // BATCH_SIZE):
        numbers = source.sample(range(IDENTIFIERS), BATCH_SIZE)
        batch = pb.BatchRateLimitRequest(requests=[_request(number) for number in numbers])
        batches.append(_framed(batch.SerializeToString()))
    while True:
        yield from batches


def _nothing() -> Iterator[bytes]:
    return repeat(b"")


class Scenario(NamedTuple):
    """The form of the calls, and how many per second to prepare: more than any server here answers on one core."""

    blocks: Callable[[], Iterator[bytes]]
    bodies: Callable[[], Iterator[bytes]]
    most_per_second: int
    allowed: re.Pattern[bytes] | None = None
    """Matches the start of the DATA of each answer, if verified."""


def alike(path: bytes, message: bytes, allowed: re.Pattern[bytes]) -> Scenario:
    """Return the same message to one method repeatedly, with the headers of ``one-key``."""
    fields = [*go_fields(path), (b"grpc-timeout", b"5S")]
    return Scenario(
        lambda: _constant_blocks(fields), lambda: repeat(_framed(message)), 400_000, allowed
    )


SCENARIOS = {
    "file": Scenario(lambda: _constant_blocks(FILE_FIELDS), _nothing, 800_000),
    "one-key": Scenario(_checks, _one_key, 400_000),
    "three-limits": Scenario(_checks, _three_limits, 300_000),
    "identifiers": Scenario(_checks, _any_key, 400_000),
    "thousand-identifiers": Scenario(_checks, partial(_any_key, 1_000), 400_000),
    "go-timeouts": Scenario(_go_timeouts, _one_key, 300_000),
    "grpcio-timeouts": Scenario(_grpcio_timeouts, _one_key, 300_000),
    "batch": Scenario(_batches, _batch_of_any_keys, 8_000),
    "batch-one-key": Scenario(_batches, _batch_of_one_key, 8_000),
}


def build(scenario: Scenario, calls: int, *, skip: int = 0) -> Script:
    """Write ``calls`` calls, with bodies from number ``skip`` on.

    A body fits one frame, so it is at most 16 KiB; all have the same size.
    """
    header = struct.Struct(">BHBBI").pack
    bodies = islice(scenario.bodies(), skip, None)
    body_bytes = len(next(bodies))
    flags = END_HEADERS if body_bytes else END_HEADERS | END_STREAM
    parts = []
    for number, block in enumerate(islice(scenario.blocks(), calls)):
        stream_id = 2 * number + 1
        head = header(0, len(block), FrameType.HEADERS, flags, stream_id) + block
        if body_bytes:
            head += header(0, body_bytes, FrameType.DATA, END_STREAM, stream_id) + next(bodies)
        parts.append(head)
    return Script(b"".join(parts), [0, *accumulate(map(len, parts))], body_bytes)
