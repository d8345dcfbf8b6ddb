import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.snapshot_format import (
    LOGS,
    RESETS,
    STATES,
    Chunk,
    chunk_bytes,
    decode_resets,
    decode_values,
    encode_resets,
    encode_values,
    header,
    pack,
    read_chunks,
)
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm, IdentifierType, Rule

T = 1_700_006_400_000_000
RULE = Rule("1", "/e", IdentifierType.USER, 10, 60, Algorithm.TOKEN_BUCKET)
LOG = pack(T.to_bytes(8, "little") + (0).to_bytes(8, "little") + (3).to_bytes(8, "little"), RULE, 1)
STATE = pack((5, T), RULE, 1)
ADA, BOB = b"a" * 16, b"b" * 16

stored_keys = st.binary(min_size=16, max_size=16)
values = st.one_of(st.just(LOG), st.integers(0, 2**194 - 1))


def read(data):
    return list(read_chunks(io.BytesIO(data)))


def decoded(data):
    return [
        pair
        for chunk in read(data)
        if chunk.kind in {STATES, LOGS}
        for pair in decode_values(chunk)
    ]


def test_a_header_tells_secrets_apart_without_telling_them():
    secret = b"a secret of 32 bytes, or so....."
    assert header(secret) == header(secret) != header(b"another")
    assert header(secret).startswith(b"ratelimitd buckets 1\n")
    assert secret not in header(secret)


@given(st.lists(st.tuples(stored_keys, values), max_size=20))
def test_values_are_read_as_they_were_written(pairs):
    assert sorted(decoded(encode_values(pairs)), key=repr) == sorted(pairs, key=repr)


def test_states_and_logs_take_a_chunk_each_in_their_order():
    data = encode_values([(ADA, LOG), (BOB, STATE), (BOB, LOG), (ADA, STATE)])
    states, logs = read(data)
    assert (states.kind, list(decode_values(states))) == (STATES, [(BOB, STATE), (ADA, STATE)])
    assert (logs.kind, list(decode_values(logs))) == (LOGS, [(ADA, LOG), (BOB, LOG)])


def test_no_values_take_no_bytes():
    assert encode_values([]) == b""


def test_the_largest_state_there_can_be_fits():
    rule = Rule("1", "/e", IdentifierType.USER, INT32_MAX, INT32_MAX, Algorithm.TOKEN_BUCKET)
    value = pack((INT32_MAX * rule.window_us, MAX_TIME_US), rule, (1 << 28) - 1)
    assert decoded(encode_values([(ADA, value)])) == [(ADA, value)]


@given(st.lists(stored_keys, max_size=20))
def test_resets_are_read_as_they_were_written(stored):
    (chunk,) = read(encode_resets(stored))
    assert chunk.kind == RESETS
    assert list(decode_resets(chunk)) == stored


def test_chunks_are_read_in_the_order_in_which_they_were_appended():
    data = encode_resets([ADA]) + encode_values([(ADA, STATE)]) + encode_resets([BOB])
    assert [chunk.kind for chunk in read(data)] == [RESETS, STATES, RESETS]


def test_a_file_is_read_on_from_where_it_stands_a_chunk_at_a_time():
    resets, values = encode_resets([ADA]), encode_values([(ADA, STATE)])
    file = io.BytesIO(b"head" + resets + values)
    file.seek(4)
    reading = read_chunks(file)
    assert next(reading).kind == RESETS
    assert file.tell() == 4 + len(resets)
    assert [chunk.kind for chunk in reading] == [STATES]


def test_the_bytes_of_the_chunks_add_up_to_those_of_the_file():
    data = encode_resets([ADA]) + encode_values([(ADA, STATE), (BOB, LOG)])
    assert sum(map(chunk_bytes, read(data))) == len(data)


def test_a_file_cut_anywhere_is_read_up_to_the_last_whole_chunk():
    parts = [encode_resets([ADA]), encode_values([(ADA, STATE)]), encode_values([(BOB, LOG)])]
    data, whole = b"".join(parts), [sum(map(len, parts[:count])) for count in range(4)]
    for cut in range(len(data) + 1):
        assert sum(map(chunk_bytes, read(data[:cut]))) == max(size for size in whole if size <= cut)


@pytest.mark.parametrize("bit", range(8))
def test_any_changed_bit_of_a_chunk_ends_the_reading_before_it(bit):
    first, second = encode_resets([ADA]), encode_values([(ADA, STATE)])
    for place in range(len(first), len(first) + len(second)):
        data = bytearray(first + second)
        data[place] ^= 1 << bit
        assert [chunk.kind for chunk in read(bytes(data))] == [RESETS]


def test_zeros_are_no_chunk():
    """The end of a file after a power failure, on a file system that allots room before it writes."""
    assert read(bytes(100)) == []
    assert [chunk.kind for chunk in read(encode_resets([ADA]) + bytes(100))] == [RESETS]


def test_a_length_that_is_noise_ends_the_reading(monkeypatch):
    data = encode_values([(ADA, STATE)])
    monkeypatch.setattr(snapshot_format, "MAX_PAYLOAD_BYTES", 41)
    assert read(data) == []
    monkeypatch.setattr(snapshot_format, "MAX_PAYLOAD_BYTES", 42)
    assert len(read(data)) == 1


def test_a_log_that_is_none_is_passed_over_and_its_neighbours_are_not():
    data = encode_values([(ADA, LOG), (BOB, b"no log"), (BOB, LOG)])
    assert decoded(data) == [(ADA, LOG), (BOB, LOG)]


@pytest.mark.parametrize("kind", [STATES, LOGS, RESETS])
@given(payload=st.binary(max_size=200))
def test_no_payload_makes_decoding_fail(kind, payload):
    chunk = Chunk(kind, payload)
    for stored_key in decode_resets(chunk) if kind == RESETS else decode_values(chunk):
        assert stored_key


@given(st.binary(max_size=300))
def test_no_bytes_make_reading_fail(data):
    assert sum(map(chunk_bytes, read(data))) <= len(data)
