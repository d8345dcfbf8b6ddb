import pytest

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd.http2.settings import PREFACE, PeerSettings, mistaken_protocol, undecided
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import Setting


def payload(*values):
    return b"".join(
        identifier.to_bytes(2, "big") + value.to_bytes(4, "big") for identifier, value in values
    )


def test_a_peer_without_settings_has_the_defaults_of_the_rfc():
    peer = PeerSettings()
    assert peer.apply(b"") == 4_096
    assert (peer.header_table_bytes, peer.initial_window_bytes, peer.max_frame_bytes) == (
        4_096,
        65_535,
        16_384,
    )


def test_values_apply_in_order_and_the_last_one_counts():
    peer = PeerSettings()
    peer.apply(
        payload(
            (Setting.INITIAL_WINDOW_SIZE, 100),
            (Setting.MAX_FRAME_SIZE, 20_000),
            (Setting.INITIAL_WINDOW_SIZE, 1),
        )
    )
    assert (peer.initial_window_bytes, peer.max_frame_bytes) == (1, 20_000)


@pytest.mark.parametrize(
    ("values", "smallest"),
    [((0, 4_096), 0), ((100, 50), 50), ((8_192,), 4_096), ((), 4_096)],
)
def test_the_smallest_table_size_in_between_is_returned(values, smallest):
    peer = PeerSettings()
    assert (
        peer.apply(payload(*((Setting.HEADER_TABLE_SIZE, value) for value in values))) == smallest
    )
    assert peer.header_table_bytes == (values[-1] if values else 4_096)


def test_unused_and_unknown_settings_are_ignored():
    PeerSettings().apply(
        payload(
            (Setting.ENABLE_PUSH, 0),
            (Setting.ENABLE_PUSH, 1),
            (Setting.MAX_CONCURRENT_STREAMS, 0),
            (Setting.MAX_HEADER_LIST_SIZE, 0),
            (0x7777, 2**32 - 1),
        )
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (Setting.INITIAL_WINDOW_SIZE, 0),
        (Setting.INITIAL_WINDOW_SIZE, 2**31 - 1),
        (Setting.MAX_FRAME_SIZE, 16_384),
        (Setting.MAX_FRAME_SIZE, 2**24 - 1),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_valid(setting, value):
    PeerSettings().apply(payload((setting, value)))


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        (Setting.ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
        (Setting.INITIAL_WINDOW_SIZE, 2**31, ErrorCode.FLOW_CONTROL_ERROR),
        (Setting.MAX_FRAME_SIZE, 16_383, ErrorCode.PROTOCOL_ERROR),
        (Setting.MAX_FRAME_SIZE, 2**24, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_value_out_of_its_range_ends_the_connection(setting, value, code):
    with pytest.raises(ConnectionFailureError) as caught:
        PeerSettings().apply(payload((setting, value)))
    assert caught.value.code is code


@pytest.mark.parametrize("size", [1, 5, 7])
def test_a_truncated_payload_ends_the_connection(size):
    with pytest.raises(ConnectionFailureError) as caught:
        PeerSettings().apply(bytes(size))
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize("size", range(len(PREFACE)))
def test_any_beginning_of_the_preface_is_undecided(size):
    assert undecided(PREFACE[:size])


@pytest.mark.parametrize("octets", [b"P", b"PO", b"POST", b"G", b"DELETE "])
def test_an_incomplete_http_1_method_is_undecided(octets):
    assert undecided(octets)


@pytest.mark.parametrize("octets", [b"PRI * HTTP/1", b"PX", b"\x16", b"GET /", b"get", b"\0"])
def test_other_octets_are_decided_at_once(octets):
    assert not undecided(octets)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_http_1_gets_an_http_1_error(method):
    cause, answer = mistaken_protocol(f"{method} / HTTP/1.1\r\n".encode())
    assert cause is Cause.HTTP1
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 400 Bad Request"
    assert b"connection: close" in lines
    assert f"content-length: {len(body)}".encode() in lines
    assert b"HTTP/2" in body


def test_tls_gets_an_alert():
    cause, answer = mistaken_protocol(b"\x16\x03\x01\x02\x00\x01")
    assert cause is Cause.TLS
    kind, major, _, length, level, description = (
        answer[0],
        answer[1],
        answer[2],
        int.from_bytes(answer[3:5], "big"),
        answer[5],
        answer[6],
    )
    assert (kind, major, length, level, description) == (21, 3, 2, 2, 10)


@pytest.mark.parametrize("octets", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"\0\0", b"GETS /"])
def test_any_other_protocol_gets_an_empty_answer(octets):
    assert mistaken_protocol(octets) == (Cause.PREFACE, b"")
