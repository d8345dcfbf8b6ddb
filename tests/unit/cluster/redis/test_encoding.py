from struct import pack

import pytest

from ratelimitd.cluster.redis.codec import (
    bucket_key,
    bucket_of,
    checks_request,
    decided,
    first_checked,
    holds_key,
    replaced,
    reset_request,
    settle_reply,
    settle_request,
)
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import STORE_TIME, Ask, Settled, SharedState, StoreCheck, Update
from ratelimitd.model import Algorithm, Reason
from tests.store_scripts import TAG, key_of, rule_of

ONE, OTHER = key_of(1), key_of(2)
RULE = rule_of(Algorithm.TOKEN_BUCKET, 10, 60, revision=3, burst=20)
WINDOW = rule_of(Algorithm.FIXED_WINDOW, 11, 61, revision=4)
FULL = pack("<BBIQI", 1, 1, 0, 3, 10)
COUNTED = pack("<BBIQIQQQ", 1, 2, 0, 4, 11, 5, 0, 6)


def batch_of(**updates):
    keys = {"one": ONE, "other": OTHER}
    return Batch("node", 7, 0, {keys[name]: update for name, update in updates.items()})


def test_keys_of_a_tag_are_in_one_slot():
    assert bucket_key(ONE) == b"rl1:{a7}:" + ONE
    keys, _ = settle_request(TAG, batch_of(one=Update(RULE, 0), other=Update(RULE, 0)))
    assert keys == [b"rl1:{a7}:s:node", b"rl1:{a7}:" + ONE, b"rl1:{a7}:" + OTHER]


def test_a_batch_without_updates_is_its_number():
    assert settle_request(TAG, batch_of()) == ([b"rl1:{a7}:s:node"], [pack("<Q", 7)])


def test_an_update_of_one_run_is_encoded_like_any_other():
    _, [one] = settle_request(TAG, batch_of(one=Update(RULE, 5, ((100, 2),))))
    assert one == pack("<QBiQIIIIIQQ", 7, 1, 5, 3, 10, 20, 60, 1, 0, 100, 2)


def test_an_update_contains_its_runs_then_its_asks():
    update = Update(WINDOW, None, ((100, 2), (101, 1)), (Ask(102, 9),))
    _, [argument] = settle_request(TAG, batch_of(one=update))
    head = pack("<QBiQIIIII", 7, 2, -1, 4, 11, 0, 61, 2, 1)
    assert argument == head + pack("<6Q", 100, 2, 101, 1, 102, 9)


def test_a_reply_contains_states_and_grants_by_key():
    asks = (Ask(1, 1), Ask(2, 1))
    batch = batch_of(one=Update(RULE, 0, (), asks), other=Update(WINDOW, 0, ((1, 1),)))
    reply = settle_reply(batch, [b"\1\0", 0, FULL, COUNTED])
    assert reply == Reply(
        7,
        {
            ONE: Settled(SharedState(0, 3, 10, None), (True, False)),
            OTHER: Settled(SharedState(0, 4, 11, (5, 6)), ()),
        },
    )


def test_a_batch_older_than_the_last_has_no_reply():
    assert settle_reply(batch_of(), 0) is None


def test_a_reply_contains_the_number_of_replaced_values():
    assert replaced([b"", 2, FULL, FULL]) == 2
    assert replaced(0) == replaced([]) == replaced(None) == 0
    assert replaced([b"", -1, FULL]) == replaced([b"", 2**62, FULL]) == 0, "more than there are"


@pytest.mark.parametrize(
    "reply",
    [
        None,
        1,
        b"OK",
        [],
        [b"\1"],
        [b"", 0, FULL],
        [b"\1\1", 0, FULL],
        [b"\1", 0],
        [b"\1", 0, FULL, FULL],
        [b"\1", 0, None],
        [b"\1", 0, COUNTED],
        [7, 0, FULL],
        [b"\1", b"0", FULL],
    ],
)
def test_a_malformed_reply_to_a_batch_is_an_error(reply):
    with pytest.raises(StoreCorruptError):
        settle_reply(batch_of(one=Update(RULE, 0, (), (Ask(1, 1),))), reply)


FIRST = StoreCheck(ONE, RULE, 1000, 2, peek=False)
SECOND = StoreCheck(OTHER, WINDOW, 1001, 3, peek=True)


def test_each_check_is_encoded_with_its_bucket_rule_and_time():
    keys, [argument] = checks_request([FIRST, SECOND])
    assert keys == [bucket_key(ONE), bucket_key(OTHER)]
    assert argument == pack("<BBQIIIIq", 1, 0, 3, 10, 20, 60, 2, 1000) + pack(
        "<BBQIIIIq", 2, 1, 4, 11, 0, 61, 3, 1001
    )


def test_a_check_may_use_the_time_of_the_store():
    _, [argument] = checks_request([FIRST._replace(now_us=STORE_TIME)])
    assert argument == pack("<BBQIIIIq", 1, 0, 3, 10, 20, 60, 2, -1)


def test_each_answer_is_an_outcome_or_a_malformed_bucket():
    reply = pack("<BBIIQ", 1, 1, 9, 0, 50) + pack("<BBIIQ", 0, 2, 0, 3, 50) + bytes(18)
    assert decided([FIRST, SECOND, FIRST], reply) == [
        (True, 9, 50, 0, Reason.WITHIN_LIMIT, None),
        (False, 0, 50, 3, Reason.LIMIT_EXCEEDED, None),
        None,
    ]


LARGEST = pack("<BBIIQ", 0, 3, 2**31 - 1, 2**31 - 1, 2**53 - 1)

NO_ANSWERS = [
    pack("<BBIIQ", *fields)
    for fields in [
        (1, 99, 9, 0, 50),
        (0, 4, 9, 0, 50),  # a reason that the store never returns
        (0, 6, 9, 0, 50),
        (0, 1, 9, 0, 50),  # denied as within the limit
        (1, 2, 0, 3, 50),
        (2, 1, 9, 0, 50),
        (1, 1, 2**31, 0, 50),
        (0, 2, 0, 2**31, 50),
        (0, 2, 0, 3, 2**53),
    ]
]


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_impossible_answer_is_an_error_of_its_check_alone(answer):
    allowed = pack("<BBIIQ", 1, 1, 9, 0, 50)
    first, none, last = decided([FIRST] * 3, allowed + answer + LARGEST)
    assert (first[:2], none, last[0]) == ((True, 9), None, False)
    _, (first, none, last) = first_checked(
        [FIRST] * 3, [0, allowed + FULL, answer + FULL, LARGEST + FULL]
    )
    assert (first[0][:2], last[0][0]) == ((True, 9), False)
    assert isinstance(none, StoreCorruptError)


@pytest.mark.parametrize("answer", [None, 7, b"", [], pack("<BBIIQ", 1, 1, 9, 0, 50)])
def test_a_malformed_first_check_answer_does_not_affect_its_neighbours(answer):
    sound = pack("<BBIIQ", 1, 1, 9, 0, 50) + FULL
    _, (first, none) = first_checked([FIRST, FIRST], [0, sound, answer])
    assert first == ((True, 9, 50, 0, Reason.WITHIN_LIMIT, None), SharedState(0, 3, 10, None))
    assert isinstance(none, StoreCorruptError)


@pytest.mark.parametrize("reply", [None, 7, b"", [], bytes(19), bytes(36)])
def test_a_malformed_reply_to_checks_is_an_error(reply):
    with pytest.raises(StoreCorruptError):
        decided([FIRST], reply)


def test_first_checks_return_outcomes_buckets_and_the_number_of_malformed_values():
    allowed, denied = pack("<BBIIQ", 1, 1, 9, 0, 50), pack("<BBIIQ", 0, 2, 0, 3, 50)
    assert first_checked([FIRST, SECOND], [1, allowed + FULL, denied + COUNTED]) == (
        1,
        [
            ((True, 9, 50, 0, Reason.WITHIN_LIMIT, None), SharedState(0, 3, 10, None)),
            ((False, 0, 50, 3, Reason.LIMIT_EXCEEDED, None), SharedState(0, 4, 11, (5, 6))),
        ],
    )


@pytest.mark.parametrize(
    "reply",
    [
        None,
        7,
        [],
        [0],
        [b"0", b""],
        [-1, pack("<BBIIQ", 1, 1, 9, 0, 50) + FULL],
        [2, pack("<BBIIQ", 1, 1, 9, 0, 50) + FULL],
        [0, pack("<BBIIQ", 1, 1, 9, 0, 50) + FULL, b""],
    ],
)
def test_a_malformed_reply_to_first_checks_is_an_error(reply):
    with pytest.raises(StoreCorruptError):
        first_checked([FIRST], reply)


@pytest.mark.parametrize(
    ("name", "rule", "fields"),
    [(ONE, RULE, (1, 3, 10, 20, 60)), (OTHER, WINDOW, (2, 4, 11, 0, 61))],
)
def test_a_reset_names_the_bucket_with_its_rule(name, rule, fields):
    keys, arguments = reset_request(name, rule, 7)
    assert keys == [bucket_key(name), holds_key(name)]
    assert arguments == [pack("<BQIII", *fields), b"7"]


@pytest.mark.parametrize("reply", [None, 0, [], [FULL]])
def test_a_malformed_reply_to_a_reset_is_an_error(reply):
    with pytest.raises(StoreCorruptError):
        bucket_of(reply, RULE)
