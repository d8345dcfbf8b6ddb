"""Encoding of messages, statuses and deadlines."""

import gzip
import zlib
from itertools import pairwise

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.rpc import messages
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import (
    PREFIXES,
    Encoding,
    MessageReader,
    Part,
    framed,
    inflated,
    is_positive_timeout,
    message_of,
    only_message,
    parse_timeout_s,
    status_fields,
    trailers,
    trailers_only,
)

LIMIT = 5_000


@given(messages=st.lists(st.binary(max_size=40), max_size=5), cuts=st.lists(st.integers(0, 200)))
def test_messages_do_not_depend_on_the_split_of_their_bytes(messages, cuts):
    octets = b"".join(map(framed, messages))
    places = sorted({0, *(cut for cut in cuts if cut < len(octets)), len(octets)})
    reader = MessageReader(LIMIT)
    found = []
    for start, end in pairwise(places):
        found += reader.feed(octets[start:end])
    assert found == [Part(compressed=False, content=message) for message in messages]
    assert reader.unfinished_bytes == 0


def test_an_unfinished_message_is_held_and_counted():
    reader = MessageReader(LIMIT)
    assert list(reader.feed(framed(b"one") + framed(b"two")[:-1])) == [Part(False, b"one")]
    assert reader.unfinished_bytes == 7
    assert list(reader.feed(b"o")) == [Part(False, b"two")]


def test_a_message_over_the_bound_is_refused_by_its_prefix():
    reader = MessageReader(LIMIT)
    assert list(reader.feed(framed(bytes(LIMIT)))) == [Part(False, bytes(LIMIT))]
    with pytest.raises(RpcError) as caught:
        list(reader.feed(framed(bytes(LIMIT + 1))[:5]))
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.message == "SERVER: Received message larger than max (5001 vs. 5000)"


def test_cached_prefixes_match_bodies_of_one_uncompressed_message():
    assert [*PREFIXES] == [*range(5, 5 + 1024)]
    for length, prefix in PREFIXES.items():
        body = framed(bytes(length - 5))
        assert (len(body), body[:5]) == (length, prefix)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 70_000])
def test_a_body_of_exactly_one_message_is_that_message(size):
    message = b"x" * size
    assert only_message(framed(message)) == message
    assert only_message(framed(message) + b"x") is None
    assert only_message(framed(message)[:-1]) is None
    assert only_message(b"\x01" + framed(message)[1:]) is None


@pytest.mark.parametrize(
    ("encoding", "compressed"),
    [
        (Encoding.GZIP, gzip.compress(b"hello" * 9)),
        (Encoding.DEFLATE, zlib.compress(b"hello" * 9)),
    ],
    ids=["gzip", "deflate"],  # not the octets, which contain the time
)
def test_a_compressed_message_is_inflated(encoding, compressed):
    assert message_of(Part(True, compressed), encoding, LIMIT) == b"hello" * 9
    assert message_of(Part(False, compressed), encoding, LIMIT) == compressed


def test_a_compressed_message_without_grpc_encoding_is_refused():
    with pytest.raises(RpcError, match="no encoding configured") as caught:
        message_of(Part(True, b"x"), Encoding.IDENTITY, LIMIT)
    assert caught.value.code is StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (b"no gzip", StatusCode.INTERNAL, "zlib error"),
        (gzip.compress(b"hello")[:-3], StatusCode.INTERNAL, "data error"),
        (b"", StatusCode.INTERNAL, "data error"),
        (gzip.compress(b"a") * 2, StatusCode.INTERNAL, "not all input consumed"),
        (gzip.compress(bytes(LIMIT + 1)), StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (gzip.compress(bytes(50_000_000)), StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
    ids=["garbage", "truncated", "empty", "two", "one too large", "bomb"],
)
def test_a_broken_or_huge_compressed_message_is_refused(content, code, text):
    with pytest.raises(RpcError, match=text) as caught:
        inflated(content, Encoding.GZIP, LIMIT)
    assert caught.value.code is code


def test_a_compressed_message_may_inflate_to_the_bound():
    assert inflated(gzip.compress(bytes(LIMIT)), Encoding.GZIP, LIMIT) == bytes(LIMIT)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"0S", 0.0),
        (b"00000001S", 1.0),
        (b"99999999H", 99_999_999 * 3600.0),
    ],
)
def test_a_timeout_is_up_to_eight_digits_and_a_unit(value, seconds):
    assert parse_timeout_s(value) == pytest.approx(seconds)
    assert is_positive_timeout(value) is not value.startswith(b"0")


@pytest.mark.parametrize(
    "value", [b"", b"S", b"1", b"-1S", b"+1S", b" 1S", b"1 S", b"1s", b"1.5S", b"123456789S", b"1\xb2S"]
)  # fmt: skip
def test_anything_else_is_none(value):
    with pytest.raises(ValueError, match="no timeout"):
        parse_timeout_s(value)
    assert not is_positive_timeout(value)


def decoded(block):
    """Decode a block without a dynamic table."""
    decoder = hpack.Decoder()
    found = decoder.decode(block, raw=True)
    assert not decoder.header_table.dynamic_entries
    return dict(found)


def test_a_status_message_is_percent_encoded_except_for_printable_ascii():
    error = RpcError(StatusCode.ABORTED, "caf\u00e9 100% \n~\x7f")
    assert status_fields(error) == (
        (b"grpc-status", b"10"),
        (b"grpc-message", b"caf%C3%A9 100%25 %0A~%7F"),
    )


def test_a_lone_surrogate_in_a_status_message_is_replaced():
    assert status_fields(RpcError(StatusCode.ABORTED, "\ud800"))[1] == (b"grpc-message", b"?")


def test_details_are_base64_without_padding():
    fields = dict(status_fields(RpcError(StatusCode.NOT_FOUND, "", b"\x00det")))
    assert fields == {b"grpc-status": b"5", b"grpc-status-details-bin": b"AGRldA"}


def test_a_long_status_message_is_truncated():
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
