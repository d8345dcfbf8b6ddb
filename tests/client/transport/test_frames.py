"""Frames: built as another library reads them, and refused where their payload cannot be."""

import hyperframe.frame as other
import pytest

from ratelimitd_client.transport import frames
from ratelimitd_client.transport.frames import PeerError
from ratelimitd_wire.codes import ErrorCode


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
        frames.settings({frames.HEADER_TABLE_SIZE: 0, frames.INITIAL_WINDOW_SIZE: 7})
        + frames.rst_stream(5, ErrorCode.CANCEL)
        + frames.go_away(ErrorCode.ENHANCE_YOUR_CALM)
        + frames.window_update(0, 2**31 - 1)
        + frames.headers(3, b"\x88")
    )
    settings, reset, leaving, update, headers = read(octets)
    assert settings.settings == {1: 0, 4: 7}
    assert (reset.stream_id, reset.error_code) == (5, 8)
    assert (leaving.last_stream_id, leaving.error_code) == (0, 11)
    assert update.window_increment == 2**31 - 1
    assert (headers.stream_id, headers.data, headers.flags) == (3, b"\x88", {"END_HEADERS"})


def test_a_block_that_is_longer_than_a_frame_is_continued():
    first, second, third = read(frames.headers(1, bytes(40_000)))
    assert not first.flags
    assert not second.flags
    assert third.flags == {"END_HEADERS"}
    assert first.data + second.data + third.data == bytes(40_000)


def test_padding_is_taken_off():
    assert frames.without_padding(0, b"\x02ab") == b"\x02ab"
    assert frames.without_padding(frames.PADDED, b"\x02ab\0\0") == b"ab"
    assert frames.without_padding(frames.PADDED, b"\x00ab") == b"ab"
    for payload in (b"", b"\x04ab\0", b"\x01"):
        with pytest.raises(PeerError):
            assert frames.without_padding(frames.PADDED, payload) == b"?"


def test_a_payload_has_the_size_of_its_type():
    frames.require_size(b"1234", 4)
    with pytest.raises(PeerError) as refused:
        frames.require_size(b"123", 4)
    assert refused.value.code is ErrorCode.FRAME_SIZE_ERROR
