import io
import json
import struct
from zlib import crc32

import pytest

from ratelimitd.backtest.trace import (
    HEADER_BYTES,
    MAGIC,
    Block,
    End,
    Kind,
    TraceReader,
    checks_of,
    encode_block,
    encode_end,
    header,
)
from ratelimitd.errors import TraceInvalidError

AT_US = 1_700_006_400_000_000
ORDERS = Kind(("user",), "/orders")
BOTH = Kind(("user", "tenant"), "/é", peek=True, max_wait_ms=500, plans=("", "gold"))
BLOCK = Block(
    kinds=[ORDERS, BOTH],
    times=(AT_US, AT_US + 5, AT_US - 1),
    identities=[b"a" * 8, b"b" * 8, b"a" * 8],
    costs=(1, 2**31 - 1, 7),
    numbers=(0, 1, 0),
    allowed=b"\1\0\1",
    further=[b"t" * 8],
    lost=9,
)
HEADER = header(b"T" * 16, b"W" * 8)
WHOLE = HEADER + encode_block(BLOCK) + encode_block(BLOCK) + encode_end(End(6, 2, 0.5))


def read(data):
    reader = TraceReader(io.BytesIO(data), "x.trace")
    return reader, [*reader.blocks()]


def refusal(data):
    with pytest.raises(TraceInvalidError) as refused:
        read(data)
    return str(refused.value)


def block_of(payload, kind=b"C"):
    title = kind + struct.pack("<I", len(payload))
    return title + struct.pack("<I", crc32(payload, crc32(title))) + payload


def test_a_trace_is_read_as_it_was_written():
    reader, blocks = read(WHOLE)
    assert (reader.trace, reader.writer, reader.end) == (b"T" * 16, b"W" * 8, End(6, 2, 0.5))
    assert [(*map(list, block[:7]), block.lost) for block in blocks] == [
        (*map(list, BLOCK[:7]), 9)
    ] * 2


def test_checks_have_the_readers_kind_numbers_and_further_identities():
    assert [*checks_of(BLOCK, [10, 20])] == [
        (AT_US, b"a" * 8, 1, 10, 1, ()),
        (AT_US + 5, b"b" * 8, 2**31 - 1, 20, 0, (b"t" * 8,)),
        (AT_US - 1, b"a" * 8, 7, 10, 1, ()),
    ]


def test_a_truncated_trace_is_refused_with_the_byte_of_its_block():
    second = HEADER_BYTES + len(encode_block(BLOCK))
    for size in range(len(MAGIC), len(WHOLE)):
        message = refusal(WHOLE[:size])
        assert "x.trace is cut: the block at byte " in message
        if second <= size < second + len(encode_block(BLOCK)):
            assert f"at byte {second} " in message


def test_an_altered_trace_is_refused():
    for place in range(HEADER_BYTES, len(WHOLE)):
        altered = bytearray(WHOLE)
        altered[place] ^= 0x10
        assert "x.trace was altered: the block at byte " in refusal(altered) or "is cut" in refusal(
            altered
        )


def test_a_missing_block_is_detected():
    assert "is malformed" in refusal(HEADER + encode_block(BLOCK) + encode_end(End(6, 2, 0.5)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.trace is empty"),
        (b"rules:\n", "x.trace is no trace"),
        (b"ratelimitd trace 2\n", "x.trace is of version 2 of the format"),
        (WHOLE + b"!", f"x.trace goes on after its end, at byte {len(WHOLE)}"),
        (HEADER + block_of(bytes(7), b"E"), "is malformed"),
        (HEADER + encode_end(End(0, 0, float("nan"))), "is malformed"),
        (HEADER + block_of(b""), "is malformed: the block at byte 43"),
    ],
)
def test_a_file_that_is_not_a_trace_of_this_version_is_named(data, message):
    assert message in refusal(data)


@pytest.mark.parametrize(
    "wrong",
    [
        BLOCK._replace(times=(AT_US, -1, AT_US)),
        BLOCK._replace(times=(AT_US, 2**53, AT_US)),
        BLOCK._replace(costs=(1, 0, 1)),
        BLOCK._replace(numbers=(0, 2, 0)),
        BLOCK._replace(allowed=b"\1\2\1"),
        BLOCK._replace(further=[]),
        BLOCK._replace(further=[b"t" * 8] * 2),
        BLOCK._replace(identities=[b"a" * 7] * 3),
        Block([ORDERS], (), (), (), (), b""),
    ],
)
def test_malformed_columns_are_refused(wrong):
    assert "is malformed: the block at byte 43" in refusal(HEADER + encode_block(wrong))


@pytest.mark.parametrize(
    "kinds",
    [
        b"[",
        b"[" * 100_000,
        b"7",
        b"[7]",
        b"[[]]",
        *[
            json.dumps([one]).encode()
            for one in (
                ["user", "/", False, 0, []],
                [[], "/", False, 0, []],
                [["user"] * 2, "/", False, 0, []],
                [["User"], "/", False, 0, []],
                [[7], "/", False, 0, []],
                [list("abcdefghi"), "/", False, 0, []],
                [["user"], "", False, 0, []],
                [["user"], 7, False, 0, []],
                [["user"], "x" * 256, False, 0, []],
                [["user"], "\n", False, 0, []],
                [["user"], "\ud800", False, 0, []],
                [["user"], "/", 0, 0, []],
                [["user"], "/", False, "0", []],
                [["user"], "/", False, -1, []],
                [["user"], "/", False, 60_001, []],
                [["user"], "/", False, True, []],
                [["user"], "/", False, 0, "a"],
                [["user"], "/", False, 0, ["a", "b"]],
                [["user"], "/", False, 0, ["A b"]],
                [["user"], "/", False, 0, [0]],
                [["user"], "/", False, 0, [None]],
                [["user"], "/", False, 0, [False]],
                [["user"], "/", False, 0, [[]]],
                [["user"], "/", False, 0, [[[]]]],
            )
        ],
    ],
)
def test_malformed_kinds_are_refused(kinds):
    payload = struct.pack("<IIQI", 1, 0, 0, len(kinds)) + kinds
    payload += struct.pack("<q8siHB", AT_US, b"a" * 8, 1, 0, 1)
    assert "is malformed" in refusal(HEADER + block_of(payload))
