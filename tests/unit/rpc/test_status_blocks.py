"""What a status looks like on the line."""

import hpack

from ratelimitd.rpc import messages
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import status_fields, trailers, trailers_only


def decoded(block):
    """What a peer reads that has seen no block before, and none after."""
    decoder = hpack.Decoder()
    found = decoder.decode(block, raw=True)
    assert not decoder.header_table.dynamic_entries
    return dict(found)


def test_a_message_is_percent_encoded_but_for_printable_ascii():
    error = RpcError(StatusCode.ABORTED, "caf\u00e9 100% \n~\x7f")
    assert status_fields(error) == (
        (b"grpc-status", b"10"),
        (b"grpc-message", b"caf%C3%A9 100%25 %0A~%7F"),
    )


def test_a_lone_surrogate_breaks_no_answer():
    assert status_fields(RpcError(StatusCode.ABORTED, "\ud800"))[1] == (b"grpc-message", b"?")


def test_details_are_base64_without_padding():
    fields = dict(status_fields(RpcError(StatusCode.NOT_FOUND, "", b"\x00det")))
    assert fields == {b"grpc-status": b"5", b"grpc-status-details-bin": b"AGRldA"}


def test_a_long_message_is_cut():
    fields = dict(status_fields(RpcError(StatusCode.INTERNAL, "x" * 2_000)))
    assert len(fields[b"grpc-message"]) == messages.MAX_MESSAGE_CHARS


def test_blocks_need_no_dynamic_table():
    error = RpcError(StatusCode.INTERNAL, "no")
    assert decoded(trailers(error)) == {b"grpc-status": b"13", b"grpc-message": b"no"}
    assert decoded(trailers_only(error, ((b"a", b"b"),))) == {
        b":status": b"200",
        b"content-type": b"application/grpc",
        b"a": b"b",
        b"grpc-status": b"13",
        b"grpc-message": b"no",
    }
    assert decoded(messages.HEADERS) == {
        b":status": b"200",
        b"content-type": b"application/grpc",
    }
    assert decoded(messages.OK_TRAILERS) == {b"grpc-status": b"0"}
