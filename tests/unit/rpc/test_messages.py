"""Messages out of bytes, however these are cut, and never more of them than may be."""

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import (
    PREFIXES,
    Encoding,
    MessageReader,
    Part,
    framed,
    inflated,
    message_of,
    only_message,
)

LIMIT = 5_000


@given(messages=st.lists(st.binary(max_size=40), max_size=5), cuts=st.lists(st.integers(0, 200)))
def test_messages_are_the_same_however_their_bytes_are_cut(messages, cuts):
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


def test_a_message_over_the_bound_is_refused_as_soon_as_its_prefix_tells():
    reader = MessageReader(LIMIT)
    assert list(reader.feed(framed(bytes(LIMIT)))) == [Part(False, bytes(LIMIT))]
    with pytest.raises(RpcError) as caught:
        list(reader.feed(framed(bytes(LIMIT + 1))[:5]))
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.message == "SERVER: Received message larger than max (5001 vs. 5000)"


def test_the_kept_prefixes_are_those_of_bodies_of_one_uncompressed_message():
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
    ids=["gzip", "deflate"],  # not the octets: they hold the time
)
def test_a_compressed_message_is_inflated(encoding, compressed):
    assert message_of(Part(True, compressed), encoding, LIMIT) == b"hello" * 9
    assert message_of(Part(False, compressed), encoding, LIMIT) == compressed


def test_a_compressed_message_without_a_header_that_says_how_is_refused():
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


def test_a_compressed_message_may_be_as_large_as_any():
    assert inflated(gzip.compress(bytes(LIMIT)), Encoding.GZIP, LIMIT) == bytes(LIMIT)
