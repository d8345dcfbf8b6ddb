import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import StoreCorruptError
from ratelimitd.observe.denials import TOP, DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.history import Sample
from ratelimitd.observe.node_status import (
    MAX_BYTES,
    MAX_ENDPOINT,
    BusyRule,
    HeldLimit,
    NodeStatus,
    decode,
    encode,
)

SAMPLE = Sample(1_700_006_400_000, 12.5, 3.0, 0.5, 15.5, 15.0, (1,) * 15, 42, 10**8, 0.002)
STATUS = NodeStatus(
    node_id="n1",
    version="0.1.0",
    grpc_address="10.0.0.1:9090",
    http_address="10.0.0.1:8080",
    rules_revision=7,
    healthy=True,
    shared_state_connected=True,
    hit_ratio=0.98,
    hit_ratio_met=True,
    average_latency_ms=0.05,
    latency_met=True,
    error_rate=0.0,
    breaker_state="closed",
    retry_s=0.0,
    sync_lag_s=0.01,
    clock_error_s=-0.25,
    excess_ratio=0.01,
    excess_bound_ratio=0.51,
    admin_token_digest="a1b2c3d4",
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
    rules=[BusyRule(f"00000000-0000-4000-8000-{number:012}", 12.25, 0.5) for number in range(TOP)],
)


LISTS = ("endpoints", "identifiers", "holds", "unmatched", "rules")
NONE: dict[str, list[object]] = {name: [] for name in LISTS}


def changed(**fields):
    return json.dumps(json.loads(encode(STATUS)) | fields).encode()


def test_what_was_encoded_is_decoded():
    assert decode(encode(STATUS)) == replace(STATUS, **NONE)
    assert decode(encode(BUSY)).endpoints == BUSY.endpoints
    assert decode(encode(BUSY)).holds == BUSY.holds
    assert decode(encode(BUSY)).unmatched == BUSY.unmatched
    assert decode(encode(BUSY)).rules == BUSY.rules


def test_a_node_of_the_release_before_tells_neither_holds_nor_rules_nor_endpoints_without_one():
    fields = json.loads(encode(BUSY))
    del fields["holds"], fields["unmatched"], fields["rules"]
    expected = replace(decode(encode(BUSY)), holds=[], unmatched=[], rules=[])
    assert decode(json.dumps(fields).encode()) == expected


def test_a_status_is_small():
    assert len(encode(STATUS)) < 1_024
    assert len(encode(BUSY)) < 2_560


def test_no_name_of_an_identifier_leaves_the_node():
    octets = encode(BUSY)
    assert b"lovelace" not in octets
    assert decode(octets).identifiers[0] == BUSY.identifiers[0]._replace(name="")


def test_long_endpoints_are_cut():
    status = replace(STATUS, endpoints=[DeniedEndpoint("/" * 500, 1.0)])
    assert decode(encode(status)).endpoints == [DeniedEndpoint("/" * MAX_ENDPOINT, 1.0)]


def test_endpoints_that_take_too_many_bytes_cost_the_lists_and_not_the_status():
    wide = [DeniedEndpoint("\x01" * MAX_ENDPOINT, 1.0)] * TOP * 2
    octets = encode(replace(BUSY, endpoints=wide))
    assert len(octets) < MAX_BYTES
    assert decode(octets) == replace(STATUS, **NONE)


def test_where_there_is_no_room_for_all_rules_are_left_out_first():
    wide = [DeniedEndpoint("\x01" * (MAX_ENDPOINT // 2), 1.0)] * TOP
    octets = encode(replace(BUSY, endpoints=wide))
    assert len(octets) < MAX_BYTES
    assert decode(octets).rules == []
    assert decode(octets).holds == BUSY.holds


def test_text_that_no_screen_shows_or_that_turns_a_line_round_is_replaced():
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
    ],
)
def test_a_status_out_of_bounds_is_none(fields):
    with pytest.raises(StoreCorruptError):
        decode(changed(**fields))


@pytest.mark.parametrize(
    "octets",
    [b"", b"\xff", b"[]", b"{}", b"null", b"[" * MAX_BYTES, b"9" * MAX_BYTES, b" " * 5_000],
)
def test_what_is_no_status_at_all_is_none(octets):
    with pytest.raises(StoreCorruptError):
        decode(octets)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_status_or_an_error_that_is_known(octets):
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
def test_any_value_of_any_field_is_believed_or_refused(name, value):
    try:
        decode(changed(**{name: value}))
    except StoreCorruptError:
        return
