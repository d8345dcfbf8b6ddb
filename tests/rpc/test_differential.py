"""Thousands of generated calls to two nodes that differ only in their transport: equal answers, equal state.

grpcio is the reference. ``DIFFERENCES`` lists all permitted differences and their reasons. A failed call prints a text
to repeat it.
"""

import asyncio
import re
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, product
from typing import NamedTuple

import grpc
import pytest

from ratelimitd.rpc.interface import MAX_MESSAGE_BYTES
from ratelimitd.services.auth import Credentials
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.asking import CLIENTS, PATIENCE_S, Asked, Client, Seen
from tests.rpc.chance import ENDPOINTS, IDENTIFIERS
from tests.rpc.generated_calls import (
    ADMIN_TOKEN,
    CHECK,
    CHECK_TOKEN,
    LIST,
    WATCH,
    Memory,
    generated,
)
from tests.rpc.node import Node, running_node

OPEN, GUARDED = (
    Credentials(loopback_admin=True),
    Credentials(admin_token=ADMIN_TOKEN, check_token=CHECK_TOKEN),
)

COUNTED = ("allowed_total", "blocked_total", "invalid_total", "clock_rejected_total", "bucket_looked_total",
           "bucket_known_total", "fail_open_breaker_total", "fail_open_error_total")  # fmt: skip
"""The counters of decisions."""

LEFT = {
    (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline had passed on arrival"),
    (grpc.StatusCode.CANCELLED, "Locally cancelled by application!"),
}
"""Ends of a call whose client did not wait; client or server may report it first."""

A_PEEK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a", peek=True)
PEEK = Asked(CHECK, (A_PEEK.SerializeToString(),))
NO_PATIENCE_S = 0.5
"""Deadline of a call that one of the two transports never answers."""

Verdict = tuple[grpc.StatusCode, str]
"""A status, and a pattern for the whole of its text."""

_OK = (grpc.StatusCode.OK, "")
_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
_NEVER = (grpc.StatusCode.DEADLINE_EXCEEDED, ".*Deadline Exceeded.*")
_RESET = (grpc.StatusCode.INTERNAL, r".*RST_STREAM with error code 1\).*")
_TOO_MANY = (grpc.StatusCode.INTERNAL, "the call has more than one message")
_TOO_FEW = (grpc.StatusCode.INTERNAL, "the call ended before its message did")
_TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED


class Difference(NamedTuple):
    """A call that the two transports answer differently."""

    asked: Asked
    grpcio: Verdict
    native: Verdict


def _with(key, value):
    return replace(PEEK, metadata=((key, value),))


def _messages(number, **changes):
    asked = replace(PEEK, messages=PEEK.messages * number, kind="stream_unary")
    return replace(asked, **changes)


DIFFERENCES = {
    # RFC 9113 makes these malformed requests a stream error; grpcio accepts them.
    "8.2.1: a value that begins or ends with a space": Difference(_with("x", " a "), _OK, _RESET),
    "8.2.2: fields that are about connections": Difference(
        _with("connection", "close"), _OK, _RESET
    ),
    "8.3.1: a host that is not the authority": Difference(_with("host", "elsewhere"), _OK, _RESET),
    "8.3.1: an empty path": Difference(replace(PEEK, path=""), _UNIMPLEMENTED, _RESET),
    "8.2.1: an octet 0 in the path": Difference(
        replace(PEEK, path="/\x00"), _UNIMPLEMENTED, _RESET
    ),
    # A unary method received another number of messages. grpcio ignores the second, and waits for the first.
    "two messages for one": Difference(_messages(2), _OK, _TOO_MANY),
    "no message": Difference(_messages(0, timeout_s=NO_PATIENCE_S), _NEVER, _TOO_FEW),
    "two messages for a watch": Difference(
        _messages(2, path=WATCH, kind="stream_stream", cancel_after=1),
        (grpc.StatusCode.CANCELLED, "Locally cancelled by application!"),
        _TOO_MANY,
    ),
    # The status is the same. We stop before the size is known; grpcio reads the whole message and names it.
    "metadata above 16 KiB": Difference(
        _with("x", "v" * (16 << 10)),
        (_TOO_LARGE, r"received metadata size exceeds hard limit \(.*"),
        (_TOO_LARGE, "the metadata are too large"),
    ),
    "a message above the bound when inflated": Difference(
        replace(PEEK, messages=(bytes(MAX_MESSAGE_BYTES + 1),), compression=grpc.Compression.Gzip),
        (_TOO_LARGE, r"SERVER: Received message larger than max \(4194305 vs\. 4194304\)"),
        (_TOO_LARGE, "Decompressed message larger than max"),
    ),
    # An even larger header block would cost us its memory; in HTTP/2 only closing the connection avoids that.
    "metadata above 64 KiB": Difference(
        _with("x", "v" * (80 << 10)),
        (_TOO_LARGE, r"received metadata size exceeds hard limit \(.*"),
        (grpc.StatusCode.UNAVAILABLE, ".*a header block is too large.*"),
    ),
}
"""All permitted differences by name; docs/protocol.md documents them."""


class Side(NamedTuple):
    """One of the two nodes, its client, and the file of its rules."""

    node: Node
    client: Client
    database: str


@pytest.fixture
async def sides(tmp_path, client, credentials):
    """A node on grpcio and one on the native transport, equal in everything else, including random numbers."""
    async with AsyncExitStack() as stack:
        found = []
        for transport in ("grpcio", "native"):
            directory = tmp_path / transport
            directory.mkdir()
            node = await stack.enter_async_context(
                running_node(
                    directory,
                    transport=transport,
                    credentials=credentials,
                    perf_counter_s=lambda: 0.0,
                    store_options={
                        "new_id": (uuid.UUID(int=number) for number in count(1)).__next__,
                        "random_bytes": lambda size: b"r" * size,
                    },
                )
            )
            asking = await stack.enter_async_context(CLIENTS[client](node.address))
            found.append(Side(node, asking, str(directory / "rules.db")))
        yield found


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("calls", [400, pytest.param(2_500, marks=pytest.mark.long)])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("credentials", [OPEN, GUARDED], ids=["open", "guarded"])
async def test_generated_calls_are_answered_alike_and_leave_the_same_state(
    sides, client, credentials, calls
):
    memory = Memory()
    for number in range(calls):
        asked = generated(client, number, memory, with_tokens=credentials is GUARDED)
        seen = await (agree_but_for_chance if may_be_left(asked) else agree)(sides, asked)
        memory.learn(asked, seen)
        for side in sides:
            side.node.clock.advance(us=number % 7 * 1_000)
    for ask in looks_at_the_state():
        seen = await agree(sides, ask)
        assert seen.code is grpc.StatusCode.OK
    first, second = [insides(side) for side in sides]
    assert first == second
    assert first["allowed_total"] > calls / 10
    assert first["blocked_total"] > calls / 50
    assert len(first["audit"]) > calls / 50


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize("client", ["aio"])
@pytest.mark.parametrize("credentials", [OPEN], ids=["open"])
async def test_a_known_difference_is_as_documented(sides, client, credentials, name):
    difference = DIFFERENCES[name]
    for side, (code, pattern) in zip(sides, difference[1:], strict=True):
        seen = await side.client.ask(difference.asked)
        assert seen.code is code
        assert re.fullmatch(pattern, seen.text)
        assert seen.trailing_metadata == ()


async def agree(sides: Sequence[Side], asked: Asked) -> Seen:
    """Call both nodes, check that the answers are equal, and return them."""
    first, second = await asyncio.gather(*(side.client.ask(asked) for side in sides))
    if inflates_too_far(asked):
        assert (first.code, second.code) == (_TOO_LARGE, _TOO_LARGE), asked
    else:
        assert second == first, asked
    return first


def inflates_too_far(asked: Asked) -> bool:
    """Whether only the text may differ; see DIFFERENCES."""
    compressed = asked.compression is not grpc.Compression.NoCompression
    return compressed and max(map(len, asked.messages), default=0) > MAX_MESSAGE_BYTES


def may_be_left(asked: Asked) -> bool:
    """Whether the client may have left before the answer arrives."""
    return asked.cancel_after == 0 or (asked.timeout_s is not None and asked.timeout_s < 1)


async def agree_but_for_chance(sides: Sequence[Side], asked: Asked) -> Seen:
    """Call both; each must answer as for a client that waits, or end as for one that leaves."""
    patient = replace(
        asked, timeout_s=PATIENCE_S, cancel_after=1 if "_stream" in asked.kind else None
    )
    expected = await agree(sides, patient)
    for seen in await asyncio.gather(*(side.client.ask(asked) for side in sides)):
        if seen != expected:
            assert (seen.code, seen.text) in LEFT, asked
            assert seen.trailing_metadata in {(), expected.trailing_metadata}
            assert seen.answers == expected.answers[: len(seen.answers)]
    return expected


def looks_at_the_state():
    """Calls that show every bucket and all rules."""
    metadata = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
    for kind, endpoint in product(IDENTIFIERS, ENDPOINTS):
        for identifier in IDENTIFIERS[kind]:
            peek = pb.RateLimitRequest(
                identifier=identifier, identifier_type=kind, endpoint=endpoint, peek=True
            )
            yield Asked(CHECK, (peek.SerializeToString(),), metadata=metadata)
    yield Asked(LIST, (b"",), metadata=metadata)


def insides(side: Side):
    """The counters of a node, and its audit trail of the rules."""
    with sqlite3.connect(side.database) as connection:
        audit = connection.execute("SELECT * FROM rule_audit ORDER BY revision").fetchall()
    connection.close()
    return {"audit": audit, **{name: getattr(side.node.stats, name) for name in COUNTED}}
