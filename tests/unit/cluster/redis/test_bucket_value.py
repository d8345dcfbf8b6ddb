import sys
from array import array
from struct import pack

import pytest

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.cluster.redis import codec
from ratelimitd.cluster.redis.codec import NUMBERS, bucket_of, state_of
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import INT32_MAX, MAX_TIME_US, US_PER_S, Algorithm
from tests.outcomes import runs_of
from tests.store_scripts import rule_of

TOKEN_BUCKET, LOG, FIXED_WINDOW, SLOTS = map(rule_of, Algorithm)
WINDOW_US = TOKEN_BUCKET.window_us


def head(rule, *, form=1, generation=2, revision=3, limit=4):
    return pack("<BBIQI", form, NUMBERS[rule.algorithm], generation, revision, limit)


def cells(*numbers):
    return pack(f"<{len(numbers)}Q", *numbers)


def test_a_missing_value_has_no_state():
    assert state_of(None, TOKEN_BUCKET) is None


@pytest.mark.parametrize("rule", [TOKEN_BUCKET, FIXED_WINDOW, LOG])
def test_a_head_alone_is_a_full_bucket(rule):
    assert state_of(head(rule), rule) == SharedState(2, 3, 4, None)


def test_a_token_bucket_has_spent_whole_tokens_and_units_of_one():
    value = head(TOKEN_BUCKET) + cells(5, 7, 9)
    assert state_of(value, TOKEN_BUCKET) == SharedState(2, 3, 4, (5 * WINDOW_US + 7, 9))


def test_a_token_bucket_may_be_as_large_as_limits_are():
    rule = rule_of(Algorithm.TOKEN_BUCKET, INT32_MAX, INT32_MAX)
    units = INT32_MAX * US_PER_S - 1
    value = head(rule, limit=INT32_MAX) + cells(INT32_MAX, units, MAX_TIME_US)
    spent = INT32_MAX * rule.window_us + units
    assert bucket_of(value, rule).state == (spent, MAX_TIME_US)


def test_a_bucket_whose_limit_has_a_burst_ends_with_it():
    value = head(TOKEN_BUCKET) + cells(5, 7, 9) + pack("<I", 50)
    state = 5 * WINDOW_US + 7, 9
    assert state_of(value, TOKEN_BUCKET) == SharedState(2, 3, 4, state, 50)
    assert state_of(head(TOKEN_BUCKET) + pack("<I", 50), TOKEN_BUCKET) == SharedState(
        2, 3, 4, None, 50
    )
    assert state_of(head(TOKEN_BUCKET) + bytes(4), TOKEN_BUCKET) == SharedState(2, 3, 4)


def test_a_fixed_window_has_its_count_and_that_of_the_window_before():
    value = head(FIXED_WINDOW) + cells(5, 7, 9)
    assert state_of(value, FIXED_WINDOW) == SharedState(2, 3, 4, (5, 9, 7))
    value = head(FIXED_WINDOW) + cells(5, 0, 9)
    assert state_of(value, FIXED_WINDOW) == SharedState(2, 3, 4, (5, 9))


def test_a_bucket_may_contain_its_refunded_tokens():
    value = head(FIXED_WINDOW, form=2) + cells(3, 5, 0, 9)
    assert state_of(value, FIXED_WINDOW) == SharedState(2, 3, 4, (5, 9), refunded=3)
    assert state_of(head(LOG, form=2) + cells(3), LOG) == SharedState(2, 3, 4, None, refunded=3)


def test_all_tokens_of_a_log_may_be_refunded():
    state = bucket_of(head(LOG) + cells(3, 7, 3), LOG).state
    assert runs_of(state) == [(7, 0)]


def test_a_log_has_entries_with_running_sums():
    state = bucket_of(head(LOG) + cells(100, 7, 103, 9, 104), LOG).state
    assert runs_of(state) == [(7, 3), (9, 1)]


def test_a_log_is_decoded_alike_on_big_endian_machines(monkeypatch):
    value = head(LOG) + cells(100, 7, 103)
    monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    backwards = array("q", value[len(head(LOG)) :])
    backwards.byteswap()
    state = bucket_of(head(LOG) + backwards.tobytes(), LOG).state
    assert runs_of(state) == [(7, 3)]


BEYOND = MAX_TIME_US + 1

WRONG = {
    "no bytes": (TOKEN_BUCKET, 7),
    "nothing": (TOKEN_BUCKET, b""),
    "half a head": (TOKEN_BUCKET, head(TOKEN_BUCKET)[:-1]),
    "another format": (TOKEN_BUCKET, head(TOKEN_BUCKET, form=2)),
    "another algorithm": (TOKEN_BUCKET, head(FIXED_WINDOW)),
    "no limit": (TOKEN_BUCKET, head(TOKEN_BUCKET, limit=0)),
    "a limit beyond all": (TOKEN_BUCKET, head(TOKEN_BUCKET, limit=INT32_MAX + 1)),
    "a revision beyond all": (TOKEN_BUCKET, head(TOKEN_BUCKET, revision=BEYOND)),
    "a generation that no batch can name": (
        TOKEN_BUCKET,
        head(TOKEN_BUCKET, generation=INT32_MAX + 1),
    ),
    "half a token bucket": (TOKEN_BUCKET, head(TOKEN_BUCKET) + cells(5, 7)),
    "too many tokens": (TOKEN_BUCKET, head(TOKEN_BUCKET) + cells(BEYOND, 7, 9)),
    "units that are a token": (TOKEN_BUCKET, head(TOKEN_BUCKET) + cells(5, WINDOW_US, 9)),
    "a late token bucket": (TOKEN_BUCKET, head(TOKEN_BUCKET) + cells(5, 7, BEYOND)),
    "a burst beyond all": (TOKEN_BUCKET, head(TOKEN_BUCKET) + pack("<I", INT32_MAX + 1)),
    "half a token bucket with a burst": (
        TOKEN_BUCKET,
        head(TOKEN_BUCKET) + cells(5) + pack("<I", 9),
    ),
    "a window with a burst": (FIXED_WINDOW, head(FIXED_WINDOW) + cells(5, 0, 9) + pack("<I", 9)),
    "a log with a burst": (LOG, head(LOG) + cells(0, 7, 3) + pack("<I", 9)),
    "half a window": (FIXED_WINDOW, head(FIXED_WINDOW) + cells(5, 9)),
    "too high a count": (FIXED_WINDOW, head(FIXED_WINDOW) + cells(BEYOND, 0, 9)),
    "too high a count before": (FIXED_WINDOW, head(FIXED_WINDOW) + cells(5, BEYOND, 9)),
    "a late window": (FIXED_WINDOW, head(FIXED_WINDOW) + cells(5, 0, BEYOND)),
    "a log without entries": (LOG, head(LOG) + cells(1)),
    "a log with half an entry": (LOG, head(LOG) + cells(1, 7)),
    "a log that is too long": (LOG, head(LOG) + cells(0, *range(1, 2 * MAX_RUNS + 3))),
    "a log that runs backwards": (LOG, head(LOG) + cells(0, 9, 1, 7, 2)),
    "a late log": (LOG, head(LOG) + cells(0, 7, 1, BEYOND, 2)),
    "half a count of refunds": (LOG, head(LOG, form=2) + b"1234567"),
    "too many refunds": (FIXED_WINDOW, head(FIXED_WINDOW, form=2) + cells(BEYOND, 5, 0, 9)),
    "refunds of no window": (FIXED_WINDOW, head(FIXED_WINDOW, form=2) + cells(5, 0, 9)),
    "half a mark": (FIXED_WINDOW, head(FIXED_WINDOW, form=3) + cells(5) + b"1234567"),
    "too late a mark": (FIXED_WINDOW, head(FIXED_WINDOW, form=3) + cells(0, BEYOND, 5, 0, 9)),
    "slots with more than a head": (SLOTS, head(SLOTS) + cells(5, 0, 9)),
    "too high a sum": (LOG, head(LOG) + cells(0, 7, BEYOND)),
    "too high a sum at the end": (LOG, head(LOG) + cells(0, 7, 1, 9, BEYOND)),
    "a log whose sums end below their start": (LOG, head(LOG) + cells(3, 7, 4, 9, 2)),
    "a sum of 64 bits": (LOG, head(LOG) + cells(2**63, 7, 1)),
}


def test_a_bucket_that_was_charged_for_a_hold_is_read_without_its_mark():
    value = head(FIXED_WINDOW, form=3) + cells(7, 1_700_000_000_000_000, 5, 0, 9)
    plain = head(FIXED_WINDOW) + cells(5, 0, 9)
    assert state_of(value, FIXED_WINDOW) == state_of(plain, FIXED_WINDOW)._replace(refunded=7)


def test_slots_have_no_state():
    assert state_of(head(SLOTS), SLOTS).state is None


@pytest.mark.parametrize(("rule", "value"), WRONG.values(), ids=WRONG)
def test_a_malformed_bucket_is_an_error_without_the_value(rule, value):
    with pytest.raises(StoreCorruptError, match=r"something else where a bucket should be$"):
        state_of(value, rule)


def test_every_algorithm_has_its_number():
    assert set(NUMBERS) == set(Algorithm)
    assert len(set(NUMBERS.values())) == len(Algorithm)
    assert codec.FORMAT == 1
