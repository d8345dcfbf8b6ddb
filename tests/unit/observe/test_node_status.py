import json
from base64 import b64encode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.errors import StoreCorruptError
from ratelimitd.observe.denials import TOP, DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.history import Sample
from ratelimitd.observe.node_status import (
    MAX_BYTES,
    MAX_ENDPOINT,
    MAX_SEALED,
    BusyRule,
    HeldLimit,
    decode,
    encode,
    names_within,
    sealed_names,
)
from tests.unit.observe.test_live import status_of

SAMPLE = Sample(1_700_006_400_000, 12.5, 3.0, 0.5, 15.5, 15.0, (1,) * 15, 42, 10**8, 0.002)
STATUS = replace(
    status_of(
        http_address="10.0.0.1:8080",
        hit_ratio=0.98,
        average_latency_ms=0.05,
        sync_lag_s=0.01,
        clock_error_s=-0.25,
        excess_ratio=0.01,
        excess_bound_ratio=0.51,
        admin_token_digest="a1b2c3d4",
    ),
    sample=SAMPLE,
)
BUSY = replace(
    STATUS,
    endpoints=[DeniedEndpoint(f"/endpoint/{number}", 99.5) for number in range(TOP)],
    identifiers=[
        DeniedIdentifier(f"{number:016x}", "user", "ada.…", 10.5, "ada.lovelace")
        for number in range(TOP)
    ],
    holds=[HeldLimit(f"/held/{number}", "user", "minute", 10**6, 10**9) for number in range(TOP)],
    unmatched=[DeniedEndpoint(f"/unmatched/{number}", 99.5) for number in range(TOP)],
    names="c2VhbGVk" * 50,
    rules=[BusyRule(f"00000000-0000-4000-8000-{number:012}", 12.25, 0.5) for number in range(TOP)],
)


LISTS = ("endpoints", "identifiers", "holds", "unmatched", "rules")
NONE: dict[str, list[object]] = {name: [] for name in LISTS}


def changed(**fields):
    return json.dumps(json.loads(encode(STATUS)) | fields).encode()


def test_encoded_status_is_decoded():
    assert decode(encode(STATUS)) == replace(STATUS, **NONE)
    assert decode(encode(BUSY)).endpoints == BUSY.endpoints
    assert decode(encode(BUSY)).holds == BUSY.holds
    assert decode(encode(BUSY)).unmatched == BUSY.unmatched
    assert decode(encode(BUSY)).rules == BUSY.rules
    assert decode(encode(BUSY)).names == BUSY.names


def test_status_of_the_previous_release_lacks_holds_rules_unmatched_endpoints_and_names():
    fields = json.loads(encode(BUSY))
    del fields["holds"], fields["unmatched"], fields["rules"], fields["names"]
    expected = replace(decode(encode(BUSY)), holds=[], unmatched=[], rules=[], names="")
    assert decode(json.dumps(fields).encode()) == expected


def test_status_is_small():
    assert len(encode(STATUS)) < 1_024
    assert len(encode(BUSY)) < 3_072


def test_identifier_names_are_never_published_unsealed():
    octets = encode(BUSY)
    assert b"lovelace" not in octets
    assert decode(octets).identifiers[0] == BUSY.identifiers[0]._replace(name="")


def test_long_endpoints_are_truncated():
    status = replace(STATUS, endpoints=[DeniedEndpoint("/" * 500, 1.0)])
    assert decode(encode(status)).endpoints == [DeniedEndpoint("/" * MAX_ENDPOINT, 1.0)]


def test_endpoints_with_too_many_bytes_drop_the_lists_and_keep_the_status():
    wide = [DeniedEndpoint("\x01" * MAX_ENDPOINT, 1.0)] * TOP * 2
    octets = encode(replace(BUSY, endpoints=wide))
    assert len(octets) < MAX_BYTES
    assert decode(octets) == replace(STATUS, **NONE)


def test_long_status_drops_rules_first_and_then_names():
    told = []
    for length in range(0, MAX_ENDPOINT, 2):
        wide = [DeniedEndpoint("é" * length, 1.0)] * TOP
        status = decode(encode(replace(BUSY, endpoints=wide, unmatched=wide)))
        assert status.holds == BUSY.holds
        told.append((bool(status.rules), bool(status.names)))
    assert [*dict.fromkeys(told)] == [(True, True), (False, True), (False, False)]


def test_names_are_sealed_as_far_as_they_fit():
    keys = BucketKeys(b"k" * 16)
    long = [one._replace(name="n" * 150) for one in BUSY.identifiers]
    sealed = sealed_names(long, keys)
    assert len(sealed) <= MAX_SEALED
    assert names_within(sealed, keys) == {one.digest: one.name for one in long[:3]}
    assert sealed_names([one._replace(name="") for one in long], keys) == ""
    assert sealed_names([long[0]._replace(name="n" * 1_000)], keys) == ""


def test_names_sealed_with_another_secret_or_malformed_are_empty():
    keys, other = BucketKeys(b"k" * 16), BucketKeys(b"x" * 16)
    assert names_within(sealed_names(BUSY.identifiers, other), keys) == {}
    for octets in (b"[]", b"{", b"\xff", b'{"00":7}', b'{"00":"' + b"n" * 300 + b'"}'):
        assert names_within(b64encode(keys.seal(octets)).decode(), keys) == {}
    for text in ("", "no base64!", "AAAA", "\u00e4"):
        assert names_within(text, keys) == {}


def test_invisible_and_bidirectional_characters_are_replaced():
    assert decode(changed(node_id="a\u202eb\ud800\n<b>")).node_id == "a\ufffdb\ufffd\ufffd<b>"


@pytest.mark.parametrize(
    "fields",
    [
        {"v": 2},
        {"node_id": 7},
        {"node_id": "n" * 257},
        {"rules_revision": -1},
        {"rules_revision": True},
        {"rules_revision": 2**60},
        {"rules_revision": 1.5},
        {"healthy": 1},
        {"hit_ratio": float("nan")},
        {"hit_ratio": float("inf")},
        {"hit_ratio": 10**400},
        {"hit_ratio": True},
        {"hit_ratio": "1"},
        {"hit_ratio": -0.5},
        {"clock_error_s": float("-inf")},
        {"clock_error_s": []},
        {"breaker_state": "ajar"},
        {"breaker_state": []},
        {"sample": []},
        {"sample": [*SAMPLE[:6], [1] * 14, *SAMPLE[7:]]},
        {"sample": [*SAMPLE[:6], [-1] * 15, *SAMPLE[7:]]},
        {"sample": {}},
        {"endpoints": [["/a", 1.0]] * (TOP + 1)},
        {"endpoints": [["/a"]]},
        {"endpoints": "ab"},
        {"identifiers": [["00", "u" * 10_000, "a…", 1.0]]},
        {"identifiers": [["00", [], "a…", 1.0]]},
        {"identifiers": [["00", "user", "a…", 1.0, "ada"]]},
        {"rules": [["1", 1.0]]},
        {"rules": [["1", 1.0, 1.0]] * (TOP + 1)},
        {"names": 7},
        {"names": "n" * (MAX_SEALED + 1)},
    ],
)
def test_status_out_of_bounds_is_refused(fields):
    with pytest.raises(StoreCorruptError):
        decode(changed(**fields))


@pytest.mark.parametrize(
    "octets",
    [b"", b"\xff", b"[]", b"{}", b"null", b"[" * MAX_BYTES, b"9" * MAX_BYTES, b" " * 5_000],
)
def test_bytes_that_are_not_a_status_are_refused(octets):
    with pytest.raises(StoreCorruptError):
        decode(octets)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_status_or_a_known_error(octets):
    with pytest.raises(StoreCorruptError):
        decode(octets)


@given(
    st.sampled_from(sorted(json.loads(encode(BUSY)))),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=12,
    ),
)
def test_any_value_of_any_field_is_accepted_or_refused(name, value):
    try:
        decode(changed(**{name: value}))
    except StoreCorruptError:
        return
