import io
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.snapshot_format import (
    LOGS,
    MAX_TICK,
    RESETS,
    STATES,
    Chunk,
    chunk_bytes,
    clamp,
    decode_resets,
    decode_values,
    encode_resets,
    encode_values,
    full_after_s,
    header,
    is_log,
    is_over,
    latest_us,
    pack,
    read_chunks,
    tick_of,
    unpack,
    with_tick,
)
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm, IdentifierType, Rule
from tests.outcomes import NAMED_DECIDE

T = 1_700_006_400_000_000
SECOND = 1_000_000
RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET
)

MAX_SPENT = INT32_MAX * INT32_MAX * SECOND
windows = st.one_of(st.just(INT32_MAX), st.integers(1, INT32_MAX))
ticks = st.one_of(st.sampled_from([0, MAX_TICK]), st.integers(0, MAX_TICK))
times = st.one_of(st.sampled_from([0, MAX_TIME_US]), st.integers(0, MAX_TIME_US))


def log(*runs, base=0):
    sums = [base]
    for _, count in runs:
        sums.append(sums[-1] + count)
    return array("q", [at_us for at_us, _ in runs] + sums).tobytes()


logs = st.builds(
    lambda at, counts, base: log(*zip(sorted(at), counts, strict=False), base=base),
    st.lists(times, min_size=1, max_size=5),
    st.lists(st.integers(1, INT32_MAX), min_size=5, max_size=5),
    st.integers(0, 2**61),
)
states = st.one_of(st.tuples(st.integers(0, MAX_SPENT), times), logs)


def latest_of(state):
    return (
        array("q", state)[(len(state) // 8 - 1) // 2 - 1] if isinstance(state, bytes) else state[1]
    )


@given(states, windows, ticks)
def test_a_value_preserves_state_window_and_tick_exactly(state, window, tick):
    value = pack(state, replace(RULE, window_seconds=window), tick)
    assert unpack(value) == state
    assert full_after_s(value) == window
    assert tick_of(value) == tick
    assert latest_us(value) == latest_of(state)


@given(states, windows, ticks, ticks)
def test_another_tick_changes_nothing_else(state, window, tick, later):
    rule = replace(RULE, window_seconds=window)
    assert with_tick(pack(state, rule, tick), later) == pack(state, rule, later)


@given(states, windows, times)
def test_no_time_of_a_clamped_value_is_later_than_now(state, window, now_us):
    """I8."""
    value = pack(state, replace(RULE, window_seconds=window), 7)
    clamped = clamp(value, now_us)
    assert latest_us(clamped) == min(latest_us(value), now_us)
    assert (tick_of(clamped), full_after_s(clamped)) == (7, window)
    if latest_us(value) <= now_us:
        assert clamped is value
    elif isinstance(state, bytes):
        assert is_log(clamped)
        cells, before = array("q", unpack(clamped)), array("q", state)
        runs = len(cells) // 2
        assert cells[:runs].tolist() == [min(at_us, now_us) for at_us in before[:runs]]
        assert cells[runs:] == before[runs:]
    else:
        assert unpack(clamped)[0] == state[0]


@given(states, windows, times)
def test_a_bucket_expires_one_window_after_its_latest_check(state, window, now_us):
    value = pack(state, replace(RULE, window_seconds=window), 7)
    assert is_over(value, now_us) == (latest_of(state) + window * SECOND <= now_us)


@pytest.mark.parametrize("algorithm", ACCOUNTS)
@pytest.mark.parametrize("window", [1, 7, 60])
def test_an_expired_bucket_equals_a_fresh_one_under_any_limit(algorithm, window):
    """I12; a token bucket or a log that was just spent has not expired a microsecond earlier."""
    rule, decide = (
        replace(RULE, algorithm=algorithm, window_seconds=window),
        NAMED_DECIDE[algorithm],
    )
    state = decide(None, rule, T, 10).state
    over_us = T + window * SECOND
    assert not is_over(pack(state, rule, 1), over_us - 1)
    assert is_over(pack(state, rule, 1), over_us)
    for limit in (1, 10, 1000):
        edited = replace(rule, limit=limit)
        for cost in (1, limit, limit + 1):
            assert (
                decide(state, edited, over_us, cost)[:5] == decide(None, edited, over_us, cost)[:5]
            )
    if algorithm is not Algorithm.FIXED_WINDOW:
        assert not decide(state, rule, over_us - 1, 10).allowed


@given(logs, windows, ticks)
def test_a_packed_log_has_the_form_of_one(state, window, tick):
    assert is_log(GOOD)
    assert is_log(pack(state, replace(RULE, window_seconds=window), tick))


def test_a_log_of_full_length_has_the_form_of_one():
    state = log(*((T + number, 1) for number in range(MAX_RUNS)))
    assert is_log(pack(state, RULE, 1))


def cells(*values):
    return array("q", values).tobytes()


GOOD = cells(T, T + 1, 0, 2, 5, 60 << 28)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        GOOD[:8],
        GOOD[:16],
        GOOD[:-1],
        GOOD[8:],
        GOOD + b"\0" * 8,
        cells(60 << 28, 1),
        cells(T + 1, T, 0, 2, 5, 60 << 28),
        cells(T, T + 1, 5, 2, 4, 60 << 28),
        cells(-1, T, 0, 2, 5, 60 << 28),
        cells(T, MAX_TIME_US + 1, 0, 2, 5, 60 << 28),
        cells(T, T + 1, -1, 2, 5, 60 << 28),
        cells(T, T + 1, 0, 2, 5, 1),
        cells(T, T + 1, 0, 2, 5, -1),
        cells(T, T + 1, 0, 2, 2**62 + 1, 60 << 28),
        cells(T, T + 1, 0, 2, 5, 2**31 << 28),
        cells(*[T] * (MAX_RUNS + 1), *range(MAX_RUNS + 2), 60 << 28),
    ],
    ids=[
        "nothing",
        "one cell",
        "two cells",
        "a byte short",
        "a cell short",
        "a cell long",
        "no run",
        "times descend",
        "fewer tokens than none",
        "before the epoch",
        "after the last time",
        "a negative sum",
        "no window",
        "a negative window",
        "sums beyond what a check can add to",
        "a window beyond int32",
        "more runs than a log keeps",
    ],
)
def test_invalid_logs_are_detected(value):
    assert not is_log(value)


@pytest.mark.parametrize("window_seconds", [1, 2**31 - 1])
def test_a_log_may_have_any_window_of_a_rule(window_seconds):
    assert is_log(cells(T, T + 1, 0, 2, 5, window_seconds << 28))
    assert is_log(cells(0, MAX_TIME_US, 0, 2, 2**62, window_seconds << 28))


def test_a_log_without_tokens_is_valid():
    assert is_log(cells(T, T + 1, 5, 5, 5, 60 << 28))


@given(
    ends=st.tuples(times, times, st.integers(0, 2**62), st.integers(0, 2**62), windows),
    inside=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), max_size=5),
    cost=st.integers(1, 20),
)
def test_a_log_that_passes_the_test_of_its_form_never_makes_a_check_raise(ends, inside, cost):
    first_us, last_us, first_sum, last_sum, window = ends
    between = [at_us for at_us, _ in inside], [total for _, total in inside]
    value = cells(first_us, *between[0], last_us, first_sum, *between[1], 0, last_sum, window << 28)
    if is_log(value):
        outcome = NAMED_DECIDE[Algorithm.SLIDING_WINDOW](unpack(value), RULE, T, cost)
        assert unpack(pack(outcome.state, RULE, 1)) == outcome.state
    else:
        assert first_us > last_us or first_sum > last_sum


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


def test_a_header_distinguishes_secrets_without_revealing_them():
    secret = b"a secret of 32 bytes, or so....."
    assert header(secret) == header(secret) != header(b"another")
    assert header(secret).startswith(b"ratelimitd buckets 1\n")
    assert secret not in header(secret)


@given(st.lists(st.tuples(stored_keys, values), max_size=20))
def test_values_are_read_as_they_were_written(pairs):
    assert sorted(decoded(encode_values(pairs)), key=repr) == sorted(pairs, key=repr)


def test_states_and_logs_are_one_chunk_each_in_order():
    data = encode_values([(ADA, LOG), (BOB, STATE), (BOB, LOG), (ADA, STATE)])
    states, logs = read(data)
    assert (states.kind, list(decode_values(states))) == (STATES, [(BOB, STATE), (ADA, STATE)])
    assert (logs.kind, list(decode_values(logs))) == (LOGS, [(ADA, LOG), (BOB, LOG)])


def test_no_values_encode_to_no_bytes():
    assert encode_values([]) == b""


def test_the_largest_possible_state_fits():
    rule = Rule(
        "1",
        "/e",
        IdentifierType.USER,
        limit=INT32_MAX,
        window_seconds=INT32_MAX,
        algorithm=Algorithm.TOKEN_BUCKET,
    )
    value = pack((INT32_MAX * rule.window_us, MAX_TIME_US), rule, (1 << 28) - 1)
    assert decoded(encode_values([(ADA, value)])) == [(ADA, value)]


@given(st.lists(stored_keys, max_size=20))
def test_resets_are_read_as_they_were_written(stored):
    (chunk,) = read(encode_resets(stored))
    assert chunk.kind == RESETS
    assert list(decode_resets(chunk)) == stored


@pytest.mark.parametrize("length", range(1, 16))
def test_a_partial_key_is_ignored(length):
    assert list(decode_resets(Chunk(RESETS, ADA + BOB[:length]))) == [ADA]


def test_chunks_are_read_in_the_order_in_which_they_were_appended():
    data = encode_resets([ADA]) + encode_values([(ADA, STATE)]) + encode_resets([BOB])
    assert [chunk.kind for chunk in read(data)] == [RESETS, STATES, RESETS]


def test_a_file_is_read_from_its_position_one_chunk_at_a_time():
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


def test_a_truncated_file_is_read_up_to_the_last_complete_chunk():
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


def test_zeros_are_not_a_chunk():
    """A file may end in zeros after a power failure, on a file system that allocates before it writes."""
    assert read(bytes(100)) == []
    assert [chunk.kind for chunk in read(encode_resets([ADA]) + bytes(100))] == [RESETS]


def test_an_invalid_length_ends_the_reading(monkeypatch):
    data = encode_values([(ADA, STATE)])
    monkeypatch.setattr(snapshot_format, "MAX_PAYLOAD_BYTES", 41)
    assert read(data) == []
    monkeypatch.setattr(snapshot_format, "MAX_PAYLOAD_BYTES", 42)
    assert len(read(data)) == 1


def test_an_invalid_log_is_skipped_and_its_neighbours_are_read():
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
