import pytest

from ratelimitd.http2.errors import (
    Cause,
    ConnectionFailureError,
    demand_connection,
    demand_size,
    demand_stream,
    without_padding,
)
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import Frame, frames_of


def test_a_frame_is_its_header_and_its_payload():
    assert frames.frame(0x6, 0x1, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\x0012345678"


def test_a_payload_may_need_all_three_octets_of_the_length():
    assert frames.frame(0, 0, 5, bytes(0x012345))[:9] == b"\x01\x23\x45\0\0\0\0\0\x05"


@pytest.mark.parametrize(
    ("octets", "expected"),
    [
        (
            frames.settings([(3, 256), (4, 1 << 20)]),
            b"\0\0\x0c\x04\0\0\0\0\0\0\x03\0\0\1\0\0\4\0\x10\0\0",
        ),
        (frames.SETTINGS_ACK, b"\0\0\0\x04\x01\0\0\0\0"),
        (frames.ping(b"12345678"), b"\0\0\x08\x06\0\0\0\0\x0012345678"),
        (frames.ping(b"12345678", ack=True), b"\0\0\x08\x06\x01\0\0\0\x0012345678"),
        (
            frames.go_away(7, ErrorCode.PROTOCOL_ERROR, b"why"),
            b"\0\0\x0b\x07\0\0\0\0\0\0\0\0\7\0\0\0\1why",
        ),
        (frames.rst_stream(9, ErrorCode.CANCEL), b"\0\0\x04\x03\0\0\0\0\x09\0\0\0\x08"),
        (frames.window_update(0, 65_536), b"\0\0\x04\x08\0\0\0\0\0\0\1\0\0"),
    ],
)
def test_each_frame_is_built_octet_for_octet(octets, expected):
    assert octets == expected


def test_a_block_that_fits_is_one_frame_of_headers():
    assert frames_of(frames.headers(3, b"block", ended=False)) == [Frame(1, 0x4, 3, b"block")]
    assert frames_of(frames.headers(3, b"block", ended=True)) == [Frame(1, 0x5, 3, b"block")]


def test_a_longer_block_continues_in_continuation_and_ends_with_its_last_frame():
    assert frames_of(frames.headers(3, b"abcdefgh", ended=True, max_bytes=3)) == [
        Frame(1, 0x1, 3, b"abc"),
        Frame(9, 0x0, 3, b"def"),
        Frame(9, 0x4, 3, b"gh"),
    ]


def test_a_block_of_exactly_two_frames_has_no_third():
    assert [
        (sent.flags, sent.payload)
        for sent in frames_of(frames.headers(3, b"abcdef", ended=False, max_bytes=3))
    ] == [(0, b"abc"), (4, b"def")]


def test_a_frame_header_is_read_with_the_reserved_bit():
    header = b"\x01\x00\x02\x01\x04\x80\x00\x00\x07"
    assert frames.read_header(header, 0) == (1, 2, 0x0104, 0x8000_0007)


def test_32_bits_are_read():
    assert frames.u32(b"\0\0\0\1\0\0\0\2") == 1


def test_padding_is_removed():
    assert without_padding(0, b"\x02data") == b"\x02data"
    assert without_padding(frames.PADDED, b"\x02data\0\0") == b"data"
    assert without_padding(frames.PADDED, b"\x00data") == b"data"


def test_a_frame_may_be_all_padding():
    assert without_padding(frames.PADDED, b"\x02\0\0") == b""


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05data", b"\xff" + bytes(254)])
def test_padding_longer_than_the_payload_ends_the_connection(payload):
    with pytest.raises(ConnectionFailureError) as caught:
        without_padding(frames.PADDED, payload)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_connection_frames_on_a_stream_and_stream_frames_on_stream_0_are_refused():
    demand_connection(0)
    demand_stream(1)
    with pytest.raises(ConnectionFailureError):
        demand_connection(1)
    with pytest.raises(ConnectionFailureError):
        demand_stream(0)


def test_a_fixed_size_is_exact():
    demand_size(b"1234", 4)
    for payload in (b"123", b"12345"):
        with pytest.raises(ConnectionFailureError) as caught:
            demand_size(payload, 4)
        assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_error_codes_have_the_numbers_of_rfc_9113():
    assert [code.name for code in sorted(ErrorCode)] == [
        "NO_ERROR",
        "PROTOCOL_ERROR",
        "INTERNAL_ERROR",
        "FLOW_CONTROL_ERROR",
        "SETTINGS_TIMEOUT",
        "STREAM_CLOSED",
        "FRAME_SIZE_ERROR",
        "REFUSED_STREAM",
        "CANCEL",
        "COMPRESSION_ERROR",
        "CONNECT_ERROR",
        "ENHANCE_YOUR_CALM",
        "INADEQUATE_SECURITY",
        "HTTP_1_1_REQUIRED",
    ]
    assert [code.value for code in sorted(ErrorCode)] == list(range(14))


def test_causes_are_valid_labels():
    assert all(cause.value.replace("_", "").isalnum() for cause in Cause)
    assert len({cause.value for cause in Cause}) == len(Cause)
