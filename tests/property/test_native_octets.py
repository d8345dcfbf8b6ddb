"""Arbitrary octets to the native transport without sockets: known ones in every run, new ones for minutes."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ratelimitd.rpc.messages import framed
from tests.http2_peer import (
    GREETING,
    POST,
    SETTINGS_ACK,
    data,
    frame,
    priority,
    rst_stream,
    window_update,
)
from tests.http2_peer import settings as settings_frame
from tests.property.native_fuzz import cut, drive

SEEDS = sorted((Path(__file__).parent / "octets").glob("*.bin"))

MINUTES = 5
EXAMPLES_AT_A_TIME = 500


def literal(name: str, value: str) -> bytes:
    """Return a field that is not indexed, so that any order of blocks can be decoded."""
    return b"\x00%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())


BASE = b"".join(literal(*field) for field in POST if field[0] != ":path")
BASES = st.sampled_from([BASE, BASE, BASE.replace(b"application/grpc", b"application/json")])
PATHS = st.sampled_from(["/u", "/l", "/n", "/x", "/c", "/e", "/b", "/d", "/?", ""])
EXTRAS = st.sampled_from(
    [
        b"",
        literal("grpc-timeout", "1S"),
        literal("grpc-timeout", "0n"),
        literal("grpc-timeout", "soon"),
        literal("grpc-encoding", "gzip"),
        literal("grpc-encoding", "snappy"),
        literal("content-length", "9"),
        literal("x-bin", "!"),
        literal("x", "y" * 120) * 4,
        literal("Upper", "case"),
        literal("connection", "close"),
        b"\x40\x01a\x01b",  # into the dynamic table
        b"\xbe",  # its newest entry, if any
        b"\x20",  # a size update where none is allowed
    ]
)
BLOCKS = st.builds(
    lambda path, base, extra: literal(":path", path) + base + extra, PATHS, BASES, EXTRAS
)
IDS = st.sampled_from([1, 1, 3, 3, 5, 7, 9, 11, 13, 0, 2, 2**31 - 1])
MESSAGES = st.one_of(
    st.binary(max_size=40).map(framed),
    st.lists(st.just(b"\0" * 5), max_size=200).map(b"".join),
    st.binary(max_size=40),
    st.just(b"\x00\xff\xff\xff\xff"),
    st.just(b"\x00\x00\x00\x01\x00" + bytes(200)),
    st.just(b"\x01\x00\x00\x00\x04junk"),
)
NUMBERS = st.sampled_from([0, 1, 5, 100, 65_535, 2**31 - 1, 2**32 - 1])
SMALL_FRAMES = st.builds(frame, st.integers(0, 12), st.integers(0, 255), IDS, st.binary(max_size=9))


def split_head(stream_id: int, block: bytes, at: int) -> bytes:
    """Return a header block in two frames."""
    return frame(1, 0, stream_id, block[:at]) + frame(9, 4, stream_id, block[at:])


STEPS = st.one_of(
    st.builds(lambda i, block, end: frame(1, 4 | end, i, block), IDS, BLOCKS, st.sampled_from([0, 1])),
    st.builds(lambda i, block: frame(1, 4, i, block) + data(i, framed(b"hi"), 1), IDS, BLOCKS),
    st.builds(split_head, IDS, BLOCKS, st.integers(0, 60)),
    st.builds(data, IDS, MESSAGES, st.sampled_from([0, 0, 1, 8, 9])),
    st.builds(rst_stream, IDS),
    st.builds(window_update, IDS, st.sampled_from([0, 1, 10, 2**31 - 1])),
    st.builds(priority, IDS, IDS),
    st.builds(lambda number, value: settings_frame(**{f"s{number}": value}), st.integers(0, 7), NUMBERS),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), IDS, st.binary(max_size=24)),
    st.builds(lambda part, count: part * count, SMALL_FRAMES, st.sampled_from([150, 1_100])),
    st.binary(max_size=30),
    st.sampled_from(["turn", "turn", "minute"]),
)  # fmt: skip
CONVERSATIONS = st.lists(STEPS, max_size=40)


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
async def test_known_octets_keep_every_table_within_its_bound_for_any_division(path, size):
    octets = path.read_bytes()
    await drive([octets[at : at + size] for at in range(0, len(octets), size)])


def test_known_octets_exist():
    assert len(SEEDS) >= 20


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(CONVERSATIONS)
async def test_any_conversation_keeps_every_table_within_its_bound(steps):
    await drive([GREETING + SETTINGS_ACK, *steps])


@pytest.mark.long
@pytest.mark.timeout(60 * (MINUTES + 5))
@pytest.mark.parametrize("kind", ["conversations", "octets"])
def test_minutes_of_fuzzing_find_nothing(kind):
    strategy = (
        CONVERSATIONS.map(lambda steps: [GREETING + SETTINGS_ACK, *steps])
        if kind == "conversations"
        else st.builds(
            cut,
            st.one_of(
                st.binary(max_size=2_000),
                st.binary(max_size=2_000).map(lambda octets: GREETING + octets),
                st.sampled_from(SEEDS).map(Path.read_bytes).flatmap(mutated),
            ),
            st.lists(st.integers(0, 2_000), max_size=10),
        )
    )
    until_s = time.monotonic() + 60 * MINUTES / 2
    number = 0
    with asyncio.Runner() as runner:
        while time.monotonic() < until_s:
            number += 1

            @seed(number)
            @settings(
                max_examples=EXAMPLES_AT_A_TIME,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def hold(steps):
                runner.run(drive(steps))

            hold()
    assert number


def mutated(octets: bytes) -> st.SearchStrategy[bytes]:
    """Draw octets of which some are replaced, removed or repeated."""

    def edited(edits: list[tuple[int, bytes, int]]) -> bytes:
        found = bytearray(octets)
        for at, replacement, length in edits:
            place = at % (len(found) + 1)
            found[place : place + length] = replacement
        return bytes(found)

    edit = st.tuples(st.integers(0, 4_000), st.binary(max_size=6), st.integers(0, 6))
    return st.lists(edit, max_size=6).map(edited)
