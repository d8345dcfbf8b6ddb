"""The scripts in a real server: what lies there and for how long, what is not ours, and the ends of the numbers.

What they decide is compared with the ledger in tests/property/test_scripts_against_the_ledger.py.
"""

from __future__ import annotations

import random
from struct import pack

import pytest
import redis

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.cluster.redis.codec import (
    RESET,
    SETTLE,
    bucket_key,
    bucket_of,
    replaced,
    reset_request,
    settle_reply,
    settle_request,
    state_of,
)
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.protocol import Batch
from ratelimitd.ledger.shared_state import STORE_TIME, Ask, SharedState, StoreCheck, Update
from ratelimitd.model import INT32_MAX, MAX_TIME_US, US_PER_S, Algorithm, Reason
from tests import ledger_model, store_scripts
from tests.outcomes import runs_of
from tests.servers import Valkey
from tests.store_scripts import TAG, key_of, log_of, plain, rule_of, run, settle, value_of

T = 1_700_000_000 * US_PER_S
KEY = key_of(1)
STORED_KEY = bucket_key(KEY)
RECORD_KEY = b"rl1:{a7}:s:node"
algorithms = pytest.mark.parametrize("algorithm", ACCOUNTS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield redis.Redis(unix_socket_path=str(valkey.unix_path))


@pytest.fixture
def store(server):
    yield server
    server.config_set("maxmemory", 0)
    server.flushall()


def batch_of(*updates, number=1):
    return Batch("node", number, 0, {key_of(at): one for at, one in enumerate(updates, start=1)})


def spend(rule, at_us=T, tokens=1, generation=None):
    return Update(rule, generation, ((at_us, tokens),))


def decide(store, rule, now_us=T, *, cost=1, peek=False):
    (outcome,) = store_scripts.decide(store, StoreCheck(KEY, rule, now_us, cost, peek))
    return outcome


def writes(store):
    return store.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"]


# How long, how much


@pytest.mark.parametrize(
    ("rule", "ttl_s"),
    [
        *[
            (rule_of(algorithm, 10, window_s), max(3600, 2 * window_s))
            for algorithm in ACCOUNTS
            for window_s in (1, 1800, 1801, 7200)
        ],
        (rule_of(Algorithm.TOKEN_BUCKET, 10, 60, burst=100), 3600),
        (
            rule_of(Algorithm.TOKEN_BUCKET, 10, 60, burst=3_001),
            36_014,
        ),  # 18,006 s and a fraction, rounded up
        (rule_of(Algorithm.TOKEN_BUCKET, 10, 7200, burst=5), 7200),
        (rule_of(Algorithm.TOKEN_BUCKET, 10, INT32_MAX, burst=10), 2 * INT32_MAX),
    ],
)
def test_a_bucket_is_kept_until_it_has_long_been_full_again(store, rule, ttl_s):
    settle(store, batch_of(spend(rule)))
    assert ttl_s - 5 < store.ttl(STORED_KEY) <= ttl_s
    store.persist(STORED_KEY)
    decide(store, rule)
    assert ttl_s - 5 < store.ttl(STORED_KEY) <= ttl_s
    store.persist(STORED_KEY)
    run(store, RESET, reset_request(KEY, rule, 0))
    assert ttl_s - 5 < store.ttl(STORED_KEY) <= ttl_s


def test_the_longest_window_has_a_ttl_that_the_server_takes(store):
    settle(store, batch_of(spend(rule_of(Algorithm.TOKEN_BUCKET, 10, INT32_MAX))))
    assert store.ttl(STORED_KEY) > INT32_MAX


def test_a_foreign_burst_that_takes_for_ever_has_a_ttl_that_the_server_takes(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET, 1, INT32_MAX, burst=1)
    store.set(STORED_KEY, value_of(SharedState(0, 2, 1, (1, T), INT32_MAX), rule))
    assert decide(store, rule)[0]
    assert store.ttl(STORED_KEY) > INT32_MAX


def test_only_a_burst_adds_to_the_octets_of_a_bucket(store):
    for burst, size in ((0, 42), (20, 46)):
        rule = rule_of(Algorithm.TOKEN_BUCKET, burst=burst)
        store.flushall()
        settle(store, batch_of(spend(rule)))
        assert store.strlen(STORED_KEY) == size
        run(store, RESET, reset_request(KEY, rule, 0))
        assert store.strlen(STORED_KEY) == size - 24


def test_a_bucket_of_before_there_were_bursts_is_taken_over_with_what_it_spent(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    settle(store, batch_of(spend(rule, tokens=8)))
    bursting = rule_of(Algorithm.TOKEN_BUCKET, revision=2, burst=20)
    assert decide(store, bursting, cost=12)[:2] == (True, 0)
    back = rule_of(Algorithm.TOKEN_BUCKET, revision=3)
    assert decide(store, back)[:2] == (False, 0)
    assert store.strlen(STORED_KEY) == 42


def test_a_calendar_window_is_kept_until_its_end(store):
    rule, left_s = rule_of(Algorithm.FIXED_WINDOW, 10, 1_800_000_000), 86_400
    at_us = (1_800_000_000 - left_s) * US_PER_S
    settle(store, batch_of(spend(rule, at_us=at_us)))
    assert left_s < store.ttl(STORED_KEY) <= left_s + 3600
    store.persist(STORED_KEY)
    decide(store, rule, at_us)
    assert left_s < store.ttl(STORED_KEY) <= left_s + 3600


def test_a_calendar_window_that_was_reset_is_kept_for_its_longest_length(store):
    rule = rule_of(Algorithm.FIXED_WINDOW, 10, 1_800_000_000)
    run(store, RESET, reset_request(KEY, rule, 0))
    assert store.ttl(STORED_KEY) > 31 * 86_400


def test_the_record_of_a_sender_is_kept_for_an_hour(store):
    settle(store, batch_of())
    assert 3595 < store.ttl(RECORD_KEY) <= 3600


@pytest.mark.parametrize(
    ("algorithm", "entries", "most"),
    [
        (Algorithm.TOKEN_BUCKET, 1, 130),
        (Algorithm.FIXED_WINDOW, 1, 120),  # of Redis 7.0
        (Algorithm.SLIDING_WINDOW, 45, 1024),
    ],
)
def test_a_bucket_takes_little_memory(store, algorithm, entries, most):
    rule = rule_of(algorithm, INT32_MAX, 3600)
    runs = [(T + at, 1) for at in range(entries)]
    settle(store, batch_of(Update(rule, None, runs)))
    assert store.memory_usage(STORED_KEY, samples=0) <= most


def test_a_server_without_memory_refuses_a_batch_as_a_whole(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    settle(store, batch_of(spend(rule)))
    before = store.get(STORED_KEY)
    store.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        settle(store, batch_of(spend(rule), spend(rule), number=2))
    store.config_set("maxmemory", 0)
    assert store.get(STORED_KEY) == before
    settled = settle(store, batch_of(spend(rule), spend(rule), number=2)).settled[KEY]
    assert settled.shared.state == (2 * rule.window_us, T)


# What is written


@algorithms
def test_a_bucket_that_does_not_change_is_not_written(store, algorithm):
    rule = rule_of(algorithm, 1)
    settle(store, batch_of(spend(rule)))
    store.config_resetstat()
    denied = Update(rule, 0, (), (Ask(T, 1),))
    settled = settle(store, batch_of(denied, number=2)).settled[KEY]
    assert settled.grants == (False,)
    assert writes(store) == 1  # the record of the sender


@algorithms
def test_a_full_bucket_that_nobody_spent_from_is_not_written(store, algorithm):
    rule = rule_of(algorithm, 7, revision=5)
    reply = settle(store, batch_of(Update(rule, None)))
    assert reply.settled[KEY].shared == SharedState(0, 5, 7, None)
    assert store.keys() == [RECORD_KEY]


@algorithms
def test_a_peek_and_a_denial_write_nothing(store, algorithm):
    rule = rule_of(algorithm, 2)
    assert decide(store, rule, peek=True)[:2] == (True, 1)
    assert store.keys() == []
    assert decide(store, rule, cost=2)[:2] == (True, 0)
    store.config_resetstat()
    assert decide(store, rule)[0] is False
    newer = rule_of(algorithm, 2, revision=2)
    assert decide(store, newer, cost=3)[4] is Reason.COST_EXCEEDS_LIMIT
    assert writes(store) == 0


@algorithms
@pytest.mark.parametrize("revision", [1, 2], ids=["of another plan", "edited"])
def test_a_denial_under_a_newer_limit_writes_that_limit_once(store, algorithm, revision):
    rule = rule_of(algorithm, 2)
    assert decide(store, rule, cost=2)[0] is True
    store.config_resetstat()
    edited = rule_of(algorithm, 1, revision=revision)
    assert decide(store, edited, peek=True)[0] is False
    assert writes(store) == 0
    for _ in range(2):
        assert decide(store, edited)[0] is False
    assert writes(store) == 1


@algorithms
def test_without_a_time_a_check_is_judged_at_that_of_the_store(store, algorithm):
    earliest_s, _ = store.time()
    decide(store, rule_of(algorithm), STORE_TIME)
    latest_s, _ = store.time()
    state = state_of(store.get(STORED_KEY), rule_of(algorithm)).state
    at_us = runs_of(state)[0][0] if isinstance(state, bytes) else state[1]
    assert earliest_s * US_PER_S <= at_us < (latest_s + 1) * US_PER_S


@algorithms
def test_checks_of_one_call_are_decided_one_after_the_other(store, algorithm):
    rule, other = rule_of(algorithm, 3), key_of(2)
    check, peek = StoreCheck(KEY, rule, T, 2, peek=False), StoreCheck(KEY, rule, T, 1, peek=True)
    checks = (check, check._replace(name=other), peek, check, check._replace(cost=1), peek)
    outcomes = store_scripts.decide(store, *checks)
    assert [outcome[:2] for outcome in outcomes] == [
        (True, 1),
        (True, 1),
        (True, 0),
        (False, 1),
        (True, 0),
        (False, 0),
    ]


# Batches


def test_a_repeated_batch_is_answered_with_its_grants_and_the_states_of_now(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET, 1)
    batch = batch_of(Update(rule, None, (), (Ask(T, 1), Ask(T, 1))))
    assert settle(store, batch).settled[KEY].grants == (True, False)
    run(store, RESET, reset_request(KEY, rule, 0))
    settled = settle(store, batch).settled[KEY]
    assert settled == (SharedState(1, 1, 1), (True, False))


def test_a_repeated_batch_writes_nothing(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    batch = batch_of(spend(rule), spend(rule))
    settle(store, batch)
    store.delete(STORED_KEY)
    store.config_resetstat()
    settle(store, batch)
    assert writes(store) == 0


def test_a_batch_that_is_older_than_the_last_is_not_applied(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    settle(store, batch_of(number=7))
    assert settle(store, batch_of(spend(rule), number=6)) is None
    assert store.get(STORED_KEY) is None


def test_senders_have_numbers_of_their_own(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    settle(store, batch_of(number=7))
    other = batch_of(spend(rule))._replace(sender="other")
    assert settle(store, other).settled[KEY].shared.state == (rule.window_us, T)


# What is not ours

garbage = pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        bytes(200),
        b"\xff" * 42,
        b"\1\1" + b"\xff" * 40,
        b"\1\2" + b"\xff" * 32,
        b"\1\3" + b"\xff" * 40,
        b"\1\3" + bytes(16) + pack("<5Q", 0, 9, 1, 7, 2),
        value_of(SharedState(0, 1, 10), rule_of(Algorithm.SLIDING_WINDOW)) + pack("<3Q", 2, 9, 1),
        b"\2" + value_of(SharedState(0, 1, 10), rule_of(Algorithm.TOKEN_BUCKET))[1:],
        value_of(SharedState(0, 1, 0), rule_of(Algorithm.TOKEN_BUCKET)),
        value_of(SharedState(INT32_MAX + 1, 1, 10), rule_of(Algorithm.TOKEN_BUCKET)),
        value_of(SharedState(0, 1, 10, None, INT32_MAX + 1), rule_of(Algorithm.TOKEN_BUCKET)),
        value_of(SharedState(0, 1, 10, (1, T), 20), rule_of(Algorithm.FIXED_WINDOW)),
        value_of(SharedState(0, 1, 10, log_of([(T, 1)]), 20), rule_of(Algorithm.SLIDING_WINDOW)),
        value_of(SharedState(0, 1, 10, (1, MAX_TIME_US + 1)), rule_of(Algorithm.TOKEN_BUCKET)),
        value_of(SharedState(0, 1, 10, (1, MAX_TIME_US + 1)), rule_of(Algorithm.FIXED_WINDOW)),
        value_of(SharedState(0, 1, 10, (1, T, MAX_TIME_US + 1)), rule_of(Algorithm.FIXED_WINDOW)),
        None,
    ],
)


def put(store, value):
    if value is None:
        store.rpush(STORED_KEY, "a list")
    else:
        store.set(STORED_KEY, value)


@algorithms
@garbage
def test_what_is_no_bucket_is_replaced_and_told(store, algorithm, value):
    rule = rule_of(algorithm)
    put(store, value)
    batch = batch_of(spend(rule, generation=3), spend(rule))
    reply = run(store, SETTLE, settle_request(TAG, batch))
    assert replaced(reply) == 1
    fresh = ledger_model.settle(None, batch.updates[KEY]).shared
    assert plain(settle_reply(batch, reply).settled[KEY].shared) == plain(fresh)
    assert plain(state_of(store.get(STORED_KEY), rule)) == plain(fresh)
    assert state_of(store.get(bucket_key(key_of(2))), rule).state is not None
    assert replaced(run(store, SETTLE, settle_request(TAG, batch._replace(number=2)))) == 0


@garbage
def test_what_is_no_bucket_is_told_to_who_repeats_a_batch(store, value):
    batch = batch_of(spend(rule_of(Algorithm.TOKEN_BUCKET)))
    settle(store, batch)
    store.delete(STORED_KEY)
    put(store, value)
    reply = run(store, SETTLE, settle_request(TAG, batch))
    assert replaced(reply) == 1
    assert settle_reply(batch, reply).settled[KEY].shared == SharedState(0, 1, 10, None)


@algorithms
@garbage
def test_a_check_meets_what_is_no_bucket_once(store, algorithm, value):
    rule = rule_of(algorithm)
    put(store, value)
    for peek in (True, True, False):
        assert decide(store, rule, peek=peek) is None
    assert decide(store, rule)[:2] == (True, 9)


@algorithms
@garbage
def test_a_reset_replaces_what_is_no_bucket(store, algorithm, value):
    put(store, value)
    rule = rule_of(algorithm)
    reply = run(store, RESET, reset_request(KEY, rule, 0))
    assert bucket_of(reply, rule) == SharedState(1, 1, 10, None)
    assert decide(store, rule)[0] is True


@pytest.mark.parametrize("record", [b"", b"garbage", b"\2" + b"\xff" * 9])
def test_a_record_that_is_none_is_that_of_a_new_sender(store, record):
    store.set(RECORD_KEY, record)
    rule = rule_of(Algorithm.TOKEN_BUCKET)
    assert settle(store, batch_of(spend(rule))).settled[KEY].shared.state == (rule.window_us, T)
    assert settle(store, batch_of(number=0)) is None


def test_a_record_of_another_type_is_that_of_a_new_sender(store):
    store.rpush(RECORD_KEY, "a list")
    assert settle(store, batch_of()) is not None
    assert settle(store, batch_of(number=0)) is None


# The ends of the numbers


def test_what_is_overdrawn_beyond_all_numbers_stays_where_they_end(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET, INT32_MAX, INT32_MAX)
    most = MAX_TIME_US * rule.window_us
    store.set(STORED_KEY, value_of(SharedState(0, 1, INT32_MAX, (most, MAX_TIME_US)), rule))
    settled = settle(store, batch_of(spend(rule, MAX_TIME_US, INT32_MAX))).settled[KEY]
    assert settled.shared.state == (most, MAX_TIME_US)


def test_a_time_of_reset_beyond_all_numbers_is_told_as_the_last_of_them(store):
    rule = rule_of(Algorithm.TOKEN_BUCKET, 1, INT32_MAX)
    spent = MAX_TIME_US * rule.window_us
    store.set(STORED_KEY, value_of(SharedState(0, 1, 1, (spent, T)), rule))
    outcome = (False, 0, MAX_TIME_US, INT32_MAX, Reason.LIMIT_EXCEEDED, None)
    assert decide(store, rule) == outcome


@algorithms
def test_a_delay_beyond_what_an_answer_holds_is_told_as_the_longest(store, algorithm):
    rule = rule_of(algorithm, 2)
    decide(store, rule, MAX_TIME_US)
    allowed, remaining, _, retry_after, *_ = decide(store, rule, 0)
    assert (allowed, remaining, retry_after) == (True, 0, INT32_MAX)
    allowed, _, _, retry_after, *_ = decide(store, rule, 0)
    assert (allowed, retry_after) == (False, INT32_MAX)


@pytest.mark.parametrize("count", [MAX_TIME_US, MAX_TIME_US - 1])
def test_a_count_beyond_all_numbers_stays_where_they_end(store, count):
    rule = rule_of(Algorithm.FIXED_WINDOW)
    store.set(STORED_KEY, value_of(SharedState(0, 1, 10, (count, T)), rule))
    settled = settle(store, batch_of(spend(rule, T, 5))).settled[KEY]
    assert settled.shared.state == (MAX_TIME_US, T)


def test_a_count_of_the_window_before_may_be_the_largest_number(store):
    rule = rule_of(Algorithm.FIXED_WINDOW)
    store.set(STORED_KEY, value_of(SharedState(0, 1, 10, (1, T, MAX_TIME_US)), rule))
    assert replaced(run(store, SETTLE, settle_request(TAG, batch_of(spend(rule, T))))) == 0


def test_the_sums_of_a_log_begin_anew_before_they_end(store):
    rule = rule_of(Algorithm.SLIDING_WINDOW, INT32_MAX)
    start = 2**52
    log = SharedState(0, 1, INT32_MAX, log_of([(T, 3), (T + 1, 4)]))
    value = value_of(log, rule)
    head = len(value) - 40
    store.set(STORED_KEY, value[:head] + pack("<5Q", start, T, start + 3, T + 1, start + 7))
    settled = settle(store, batch_of(spend(rule, T + 2, 5))).settled[KEY]
    assert plain(settled.shared) == (0, 1, INT32_MAX, [(T, 3), (T + 1, 4), (T + 2, 5)], 0)
    assert store.get(STORED_KEY)[head : head + 8] == bytes(8)


def test_a_log_that_is_overdrawn_beyond_all_numbers_stays_where_they_end(store):
    rule = rule_of(Algorithm.SLIDING_WINDOW)
    value = value_of(SharedState(0, 1, 10, log_of([(T, MAX_TIME_US - 1)])), rule)
    store.set(STORED_KEY, value)
    settled = settle(store, batch_of(spend(rule, T + 1, 5))).settled[KEY]
    assert plain(settled.shared) == (0, 1, 10, [(T, MAX_TIME_US - 1), (T + 1, 1)], 0)


# Long logs


@pytest.mark.parametrize(
    ("before", "runs"),
    [
        (0, MAX_RUNS),
        (0, MAX_RUNS + 1),
        (2, 2 * MAX_RUNS + 7),
        (MAX_RUNS - 1, 1),
        (MAX_RUNS - 1, 2),
        (MAX_RUNS - 1, 5),
        (MAX_RUNS, 1),
        (MAX_RUNS, 2),
        (MAX_RUNS, 100),
    ],
)
def test_neighbours_in_a_log_that_is_too_long_merge_as_in_the_ledger(store, before, runs):
    chance = random.Random(before + runs)
    rule = rule_of(Algorithm.SLIDING_WINDOW, INT32_MAX, 1)
    shared = None
    if before:
        times = sorted(chance.sample(range(T, T + 4 * MAX_RUNS), before))
        shared = SharedState(0, 1, INT32_MAX, log_of([(at, chance.randint(1, 9)) for at in times]))
        store.set(STORED_KEY, value_of(shared, rule))
    spent = [(T + chance.randrange(5 * MAX_RUNS), chance.randint(1, 9)) for _ in range(runs)]
    asks = [Ask(T + 5 * MAX_RUNS + at, 1) for at in range(3)]
    update = Update(rule, None, sorted(spent), asks)
    settled = settle(store, batch_of(update)).settled[KEY]
    expected = ledger_model.settle(shared, update)
    assert plain(settled.shared) == plain(expected.shared)
    assert settled.grants == expected.grants
