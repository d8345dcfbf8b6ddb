from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.buckets.snapshot_format import (
    MAX_TICK,
    clamp,
    is_log,
    is_over,
    latest_us,
    pack,
    tick_of,
    unpack,
    window_seconds,
    with_tick,
)
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm, IdentifierType, Rule
from tests.outcomes import NAMED_DECIDE

T = 1_700_006_400_000_000
SECOND = 1_000_000
RULE = Rule("1", "/e", IdentifierType.USER, 10, 60, Algorithm.TOKEN_BUCKET)

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
def test_a_value_holds_state_window_and_tick_to_the_last_bit(state, window, tick):
    value = pack(state, replace(RULE, window_seconds=window), tick)
    assert unpack(value) == state
    assert window_seconds(value) == window
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
    assert (tick_of(clamped), window_seconds(clamped)) == (7, window)
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
def test_a_bucket_is_over_one_window_after_its_latest_check(state, window, now_us):
    value = pack(state, replace(RULE, window_seconds=window), 7)
    assert is_over(value, now_us) == (latest_of(state) + window * SECOND <= now_us)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("window", [1, 7, 60])
def test_what_is_over_equals_a_fresh_bucket_whatever_the_limit(algorithm, window):
    """I12: and a token bucket or a log just spent is not over a microsecond earlier."""
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
        cells(T, T + 1, 5, 2, 5, 60 << 28),
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
        "no tokens",
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
def test_what_is_no_log_is_told_from_one(value):
    assert not is_log(value)


@given(
    ends=st.tuples(times, times, st.integers(0, 2**62), st.integers(0, 2**62), windows),
    inside=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), max_size=5),
    cost=st.integers(1, 20),
)
def test_what_passes_for_a_log_can_be_used_whatever_lies_between_its_ends(ends, inside, cost):
    first_us, last_us, first_sum, last_sum, window = ends
    between = [at_us for at_us, _ in inside], [total for _, total in inside]
    value = cells(first_us, *between[0], last_us, first_sum, *between[1], 0, last_sum, window << 28)
    if is_log(value):
        outcome = NAMED_DECIDE[Algorithm.SLIDING_WINDOW](unpack(value), RULE, T, cost)
        assert unpack(pack(outcome.state, RULE, 1)) == outcome.state
    else:
        assert first_us > last_us or first_sum >= last_sum
