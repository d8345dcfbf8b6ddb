"""Frames and header blocks: agreed on with other libraries, RFC 7541's own examples, and whatever octets come."""

from contextlib import suppress

import hpack
import hyperframe.frame as other
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd_client.transport import payloads
from ratelimitd_client.transport.payloads import PeerError
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import Setting
from ratelimitd_wire.static_table import STATIC_TABLE
from tests import rfc7541_examples as rfc


def read(octets):
    """The frames that another library makes of them."""
    found = []
    while octets:
        frame, length = other.Frame.parse_frame_header(memoryview(octets[:9]))
        frame.parse_body(memoryview(octets[9 : 9 + length]))
        octets = octets[9 + length :]
        found.append(frame)
    return found


def test_frames_are_what_another_library_reads():
    octets = (
        frames.settings({Setting.HEADER_TABLE_SIZE: 0, Setting.INITIAL_WINDOW_SIZE: 7}.items())
        + frames.rst_stream(5, ErrorCode.CANCEL)
        + frames.go_away(0, ErrorCode.ENHANCE_YOUR_CALM)
        + frames.window_update(0, 2**31 - 1)
        + frames.headers(3, b"\x88", ended=False)
    )
    settings, reset, leaving, update, headers = read(octets)
    assert settings.settings == {1: 0, 4: 7}
    assert (reset.stream_id, reset.error_code) == (5, 8)
    assert (leaving.last_stream_id, leaving.error_code) == (0, 11)
    assert update.window_increment == 2**31 - 1
    assert (headers.stream_id, headers.data, headers.flags) == (3, b"\x88", {"END_HEADERS"})


def test_a_block_that_is_longer_than_a_frame_is_continued():
    first, second, third = read(frames.headers(1, bytes(40_000), ended=False))
    assert not first.flags
    assert not second.flags
    assert third.flags == {"END_HEADERS"}
    assert first.data + second.data + third.data == bytes(40_000)


def test_padding_is_taken_off():
    assert payloads.without_padding(0, b"\x02ab") == b"\x02ab"
    assert payloads.without_padding(frames.PADDED, b"\x02ab\0\0") == b"ab"
    assert payloads.without_padding(frames.PADDED, b"\x00ab") == b"ab"
    for payload in (b"", b"\x04ab\0", b"\x01"):
        with pytest.raises(PeerError):
            assert payloads.without_padding(frames.PADDED, payload) == b"?"


def test_a_payload_has_the_size_of_its_type():
    payloads.require_size(b"1234", 4)
    with pytest.raises(PeerError) as refused:
        payloads.require_size(b"123", 4)
    assert refused.value.code is ErrorCode.FRAME_SIZE_ERROR


SEQUENCES = (
    rfc.REQUESTS_PLAIN,
    rfc.REQUESTS_HUFFMAN,
    rfc.RESPONSES_PLAIN,
    rfc.RESPONSES_HUFFMAN,
)
WITHOUT_A_TABLE = [*rfc.SINGLE, *(sequence[0] for sequence in SEQUENCES)]
WITH_A_TABLE = [example for sequence in SEQUENCES for example in sequence[1:]]

TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300)
NAMES = TEXT | st.sampled_from([name.decode() for name, _ in STATIC_TABLE])


def without_a_table():
    """The encoder of a peer that was told to keep none."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder


def test_the_static_table_is_that_of_another_library():
    assert STATIC_TABLE == hpack.table.HeaderTable.STATIC_TABLE


@given(st.lists(st.tuples(NAMES, TEXT), max_size=10), st.booleans())
def test_what_another_library_wrote_is_read(fields, huffman):
    encoder = without_a_table()
    expected = [(name.encode(), value.encode()) for name, value in fields]
    for _ in range(2):
        assert payloads.decode_block(encoder.encode(fields, huffman=huffman)) == expected


@given(st.lists(st.tuples(NAMES, TEXT), max_size=10))
def test_another_library_reads_what_is_written(fields):
    read = hpack.Decoder(max_header_list_size=2**20).decode(payloads.encode_block(fields), raw=True)
    assert [tuple(field) for field in read] == [(n.encode(), v.encode()) for n, v in fields]


def test_a_secret_is_never_to_be_indexed():
    [field] = hpack.Decoder().decode(
        payloads.encode_block([("authorization", "Bearer s3cret")]), raw=True
    )
    assert isinstance(field, hpack.NeverIndexedHeaderTuple)
    [field] = hpack.Decoder().decode(payloads.encode_block([("grpc-timeout", "20m")]), raw=True)
    assert not isinstance(field, hpack.NeverIndexedHeaderTuple)


@pytest.mark.parametrize("example", WITHOUT_A_TABLE, ids=lambda example: example.section)
def test_the_examples_of_the_rfc_are_read(example):
    assert payloads.decode_block(example.block) == list(example.fields)


@pytest.mark.parametrize("example", WITH_A_TABLE, ids=lambda example: example.section)
def test_those_that_point_into_a_dynamic_table_are_refused(example):
    with pytest.raises(PeerError):
        payloads.decode_block(example.block)


@given(st.binary(max_size=200))
def test_any_octets_are_read_or_refused(block):
    with suppress(PeerError):
        payloads.decode_block(block)


@pytest.mark.parametrize(
    "block",
    [b"\x80", b"\xbe", b"\x00\x05ab", b"\x00", b"\xff" * 7, b"\x88\x20", b"\x3f\xe1\x1f", b"\x0f"],
    ids=[
        "index 0",
        "a table",
        "cut off",
        "no name",
        "an endless integer",
        "a late update",
        "a table of 4096",
        "half an index",
    ],
)
def test_what_is_malformed_is_refused(block):
    with pytest.raises(PeerError) as refused:
        payloads.decode_block(block)
    assert refused.value.code is ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize("block", [b"\x88" * 400, b"\x00\x00\x00" * 600], ids=["status", "empty"])
def test_a_list_that_is_too_large_is_not_read_to_its_end(block):
    with pytest.raises(PeerError) as refused:
        payloads.decode_block(block)
    assert refused.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_long_values_keep_their_length():
    fields = [("authorization", "Bearer " + "x" * 5_000)]
    assert payloads.decode_block(payloads.encode_block(fields)) == [
        (b"authorization", b"Bearer " + b"x" * 5_000)
    ]
