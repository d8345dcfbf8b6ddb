"""Encoding of holds for the store, and decoding of its replies."""

from struct import pack

import pytest

from ratelimitd.cluster.redis.hold_codec import hold_reply, hold_request, step_reply, step_request
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.shared_holds import HoldCall, Made, Step, StepCall, Stepped
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME, StoreCheck
from ratelimitd.model import ALLOWED, MAX_TIME_US, WITHIN_LIMIT, Algorithm
from tests.store_scripts import TAG, key_of, rule_of

NUMBER = b"a number of 16 B"
ONE, OTHER, THIRD = key_of(1), key_of(2), key_of(3)
WINDOW, SLOTS = rule_of(Algorithm.FIXED_WINDOW), rule_of(Algorithm.CONCURRENCY, 7)
CALL = HoldCall(
    NUMBER,
    b"digest01",
    b"attempt1",
    [StoreCheck(ONE, WINDOW, 5, 3, 0), StoreCheck(OTHER, SLOTS, STORE_TIME, 3, OBSERVES)],
    60_000_000,
    9,
    7_000_000,
)
STEP = StepCall(Step.SETTLE, NUMBER, [ONE, OTHER], 2, STORE_TIME)
ANSWER = pack("<BBIIQ", 1, 1, 6, 0, 99)
NONE = bytes(18)
LEFT = (ALLOWED, 6, 99, 0, WITHIN_LIMIT, None)


def test_a_hold_names_its_record_and_each_bucket_with_its_open_holds():
    keys, [argument] = hold_request(0x12, CALL)
    assert keys == [
        b"rl1:{12}:hold:" + NUMBER,
        b"rl1:{a7}:" + ONE,
        b"rl1:{a7}:holds:" + ONE,
        b"rl1:{a7}:" + OTHER,
        b"rl1:{a7}:holds:" + OTHER,
    ]
    head = pack("<8s8sQIQ", b"digest01", b"attempt1", 60_000_000, 9, 7_000_000)
    window = pack("<BBQIIIIq", 2, 0, 1, 10, 0, 60, 3, 5)
    assert argument == head + window + pack("<BBQIIIIq", 4, 4, 1, 7, 0, 60, 3, -1)


def test_a_step_names_the_same_keys():
    limits = {check.name: check.rule for check in CALL.checks[1:]}
    keys, [argument] = step_request(TAG, STEP._replace(attempt=b"attempt1", limits=limits))
    assert keys == [b"rl1:{a7}:hold:" + NUMBER, *hold_request(TAG, CALL)[0][1:]]
    no_limit, limit = bytes(21), pack("<BQIII", 4, 1, 7, 0, 60)
    assert argument == pack("<BQq8s", 1, 2, -1, b"attempt1") + no_limit + limit


@pytest.mark.parametrize("made", [made for made in Made if made is not Made.FOUND])
def test_the_result_of_a_hold_is_decoded(made):
    corrupt, held = hold_reply(CALL, pack("<BQI", made, 500, 2) + ANSWER + NONE)
    assert (corrupt, held) == (2, (made, 500, [LEFT, None], [ONE, OTHER]))


def test_the_buckets_of_a_found_hold_are_decoded():
    found = pack("<BQI", Made.FOUND, 500, 0) + THIRD + ANSWER
    assert hold_reply(CALL, found) == (0, (Made.FOUND, 500, [LEFT], [THIRD]))


@pytest.mark.parametrize("made", [Made.OF_ANOTHER_CHECK, Made.OVER])
def test_a_hold_refused_for_its_id_contains_no_buckets(made):
    assert hold_reply(CALL, pack("<BQI", made, 0, 0)) == (0, (made, 0, (), ()))


@pytest.mark.parametrize("stepped", Stepped)
def test_the_result_of_a_step_is_decoded(stepped):
    reply = step_reply(STEP, pack("<BQQQ", stepped, 500, 2, 3) + ANSWER + NONE)
    assert reply == (stepped, 500, 2, 3, [LEFT, None])
    assert step_reply(STEP, pack("<BQQQ", stepped, 500, 2, 3)).outcomes == ()


@pytest.mark.parametrize(
    "reply",
    [
        None,
        7,
        [],
        b"",
        pack("<BQI", 1, 500, 0)[:-1],
        pack("<BQI", 1, 500, 0) + ANSWER,
        pack("<BQI", 1, 500, 0) + ANSWER * 3,
        pack("<BQI", 1, 500, 0) + (ONE + ANSWER) * 2,
        pack("<BQI", 2, 500, 0),
        pack("<BQI", 2, 500, 0) + ANSWER * 3,
        pack("<BQI", 2, 500, 0) + (ONE + ANSWER)[:-1],
        pack("<BQI", 1, 500, 5) + ANSWER * 2,
        pack("<BQI", 0, 500, 0) + ANSWER * 2,
        pack("<BQI", 7, 500, 0) + ANSWER * 2,
        pack("<BQI", 1, MAX_TIME_US + 1, 0) + ANSWER * 2,
    ],
)
def test_a_malformed_reply_to_a_hold_is_an_error(reply):
    with pytest.raises(StoreCorruptError, match="to a hold is malformed"):
        hold_reply(CALL, reply)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        pack("<BQQQ", 1, 500, 0, 0)[:-1],
        pack("<BQQQ", 1, 500, 0, 0) + ANSWER,
        pack("<BQQQ", 5, 500, 0, 0),
        pack("<BQQQ", 1, MAX_TIME_US + 1, 0, 0),
    ],
)
def test_a_malformed_reply_to_a_step_is_an_error(reply):
    with pytest.raises(StoreCorruptError, match="to a step of a hold is malformed"):
        step_reply(STEP, reply)
