"""The scripts, in a real server, against the pure ledger: the same traces end in the same states and answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.cluster.redis import codec
from ratelimitd.cluster.redis.codec import state_of
from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import (
    Ask,
    Settled,
    SharedState,
    StoreCheck,
    Update,
    refund_of,
)
from ratelimitd.model import INT32_MAX, MAX_TIME_US, US_PER_S, Algorithm
from tests import ledger_model
from tests.ledger_model import Ledger
from tests.store_scripts import TAG, decide, key_of, plain, rule_of, run, settle, value_of

KEYS = tuple(key_of(number) for number in range(3))
REVISIONS = 3


# The ledger with the differences of the store: it drops full buckets, and repeats grants beside current states.


@dataclass
class Model:
    buckets: dict[bytes, SharedState] = field(default_factory=dict)
    last: tuple[int, dict[bytes, tuple[bool, ...]]] = (0, {})

    def keep(self, key, shared):
        if key in self.buckets or shared.state is not None or shared.generation:
            self.buckets[key] = shared

    def apply(self, batch):
        number, grants = self.last
        if batch.number < number:
            return None
        settled = {}
        for key, update in batch.updates.items():
            if batch.number == number:
                now = (
                    self.buckets.get(key)
                    or ledger_model.settle(None, update._replace(runs=(), asks=())).shared
                )
                settled[key] = Settled(now, grants[key])
            else:
                settled[key] = one = ledger_model.settle(self.buckets.get(key), update)
                self.keep(key, one.shared)
        self.last = batch.number, {key: one.grants for key, one in settled.items()}
        return Reply(batch.number, settled)

    def reset(self, key, rule):
        self.buckets[key] = ledger_model.reset(self.buckets.get(key), rule)
        return self.buckets[key]

    def decide(self, check):
        key, rule, now_us, cost, peek = check
        stored = self.buckets.get(key)
        shared = ledger_model.settle(stored, Update(rule, None)).shared
        is_edited = stored is not None and shared[2::2] != stored[2::2]
        ruling = ledger_model.ruling_of(shared, rule)
        *outcome, state = ACCOUNTS[rule.algorithm].judge(shared.state, ruling, now_us, cost)
        if (outcome[0] or is_edited) and not peek:
            self.buckets[key] = shared._replace(state=state)
        outcome[2] = min(outcome[2], MAX_TIME_US)
        return (*outcome, None)

    def first_check(self, check):
        ledger = Ledger()
        ledger.buckets = self.buckets
        outcome, shared = ledger.first_check(check)
        return (*outcome[:2], min(outcome[2], MAX_TIME_US), *outcome[3:]), plain(shared)


def plain_reply(reply):
    if reply is None:
        return None
    return {key: (plain(one.shared), one.grants) for key, one in reply.settled.items()}


def same_buckets(client, model, rules):
    for key, (rule, *_) in zip(KEYS, rules, strict=True):
        value = client.get(codec.bucket_key(key))
        assert plain(state_of(value, rule)) == plain(model.buckets.get(key))


# Parts of a trace

sizes = st.one_of(
    st.integers(1, 5), st.integers(1, 1000), st.integers(1, INT32_MAX), st.just(INT32_MAX)
)


@st.composite
def rule_books(draw):
    """Draw the rule of each key at each revision; only limit and burst are edited, since the rest changes the key."""
    book = []
    for _ in KEYS:
        algorithm, window_s = draw(st.sampled_from([*ACCOUNTS])), draw(sizes)
        limits = draw(st.lists(sizes, min_size=REVISIONS, max_size=REVISIONS))
        bursts = [0] * REVISIONS
        if algorithm is Algorithm.TOKEN_BUCKET and draw(st.booleans()):
            bursts = [draw(st.one_of(st.just(0), sizes)) for _ in bursts]
        if draw(st.booleans()):
            limits[1] = limits[0]
        if draw(st.booleans()):
            bursts[1] = bursts[0]
        book.append(
            [
                rule_of(
                    algorithm, limit, window_s, number + 1, burst=refillable(burst, limit, window_s)
                )
                for number, (limit, burst) in enumerate(zip(limits, bursts, strict=True))
            ]
        )
    return book


def refillable(burst, limit, window_s):
    """Return the burst, or the largest allowed one."""
    return min(burst, INT32_MAX * limit // window_s)


@st.composite
def times(draw, rule, around_us):
    window_us = rule.window_us
    step_us = draw(
        st.one_of(
            st.integers(-3, 3),
            st.integers(-window_us // rule.limit - 2, window_us // rule.limit + 2),
            st.integers(-window_us, 2 * window_us),
            st.sampled_from(
                (-window_us, window_us, window_us - 1, 10 * window_us, -(2**53), 2**53)
            ),
        )
    )
    return max(0, min(MAX_TIME_US, around_us + step_us))


def costs(rule):
    return st.one_of(
        st.integers(1, 3),
        st.integers(1, rule.capacity),
        st.integers(max(1, rule.capacity - 2), min(INT32_MAX, rule.capacity + 2)),
        st.integers(1, INT32_MAX),
    )


@st.composite
def updates(draw, rules, around_us):
    rule = draw(st.sampled_from(rules))
    run = st.tuples(times(rule, around_us), costs(rule))
    runs = sorted(draw(st.lists(run, max_size=4)))
    asks = [Ask(*ask) for ask in draw(st.lists(run, max_size=3))]
    given_back = draw(st.lists(refunds(rule, around_us), max_size=2))
    return Update(rule, draw(st.sampled_from((None, 0, 0, 1, 2))), runs, asks, given_back)


@st.composite
def refunds(draw, rule, around_us):
    generation, revision = draw(st.sampled_from((0, 0, 1))), draw(st.integers(1, REVISIONS))
    tokens, spent = draw(costs(rule)), draw(costs(rule))
    at_us, before = draw(times(rule, around_us)), draw(st.sampled_from((0, 0, 1, 5)))
    return Refund(generation, revision, at_us, tokens, spent, before)


@st.composite
def store_checks(draw, name, rules, around_us):
    rule = draw(st.sampled_from(rules))
    now_us = draw(times(rule, around_us))
    return StoreCheck(name, rule, now_us, draw(costs(rule)), draw(st.booleans()))


starts = st.one_of(
    st.just(1_700_000_000 * US_PER_S),
    st.integers(0, MAX_TIME_US),
    st.sampled_from((0, MAX_TIME_US)),
)

every_trace = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@every_trace
@given(data=st.data(), rules=rule_books(), around_us=starts)
def test_a_trace_matches_the_ledger(store, data, rules, around_us):
    store.flushall()
    model = Model()
    number = 0
    batch = None
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        step = data.draw(
            st.sampled_from(
                (
                    "batch",
                    "batch",
                    "batch",
                    "again",
                    "older",
                    "gap",
                    "reset",
                    "decide",
                    "decide",
                    "meet",
                    "meet",
                    "lost",
                )
            )
        )
        which = data.draw(st.integers(0, len(KEYS) - 1))
        key, versions = KEYS[which], rules[which]
        if step in {"batch", "gap"}:
            number += 1 if step == "batch" else 5
            told = data.draw(st.lists(st.sampled_from(range(len(KEYS))), unique=True))
            batch = Batch(
                "node",
                number,
                0,
                {KEYS[one]: data.draw(updates(rules[one], around_us)) for one in told},
            )
        if step in {"batch", "gap", "again", "older"} and batch is not None:
            sent = batch._replace(number=number - 1) if step == "older" else batch
            reply = run(store, codec.SETTLE, codec.settle_request(TAG, sent))
            assert codec.replaced(reply) == 0
            expected = model.apply(sent)
            assert plain_reply(codec.settle_reply(sent, reply)) == plain_reply(expected)
        elif step == "reset":
            rule = data.draw(st.sampled_from(versions))
            reply = run(store, codec.RESET, codec.reset_request(key, rule, 0))
            assert codec.bucket_of(reply, rule) == model.reset(key, rule)
        elif step == "decide":
            told = data.draw(st.lists(st.sampled_from(range(len(KEYS))), min_size=1))
            checks = [data.draw(store_checks(KEYS[one], rules[one], around_us)) for one in told]
            assert decide(store, *checks) == [*map(model.decide, checks)]
        elif step == "meet":
            told = data.draw(st.lists(st.sampled_from(range(len(KEYS))), min_size=1, unique=True))
            checks = [data.draw(store_checks(KEYS[one], rules[one], around_us)) for one in told]
            reply = run(store, codec.FIRST_CHECK, codec.checks_request(checks))
            corrupt, results = codec.first_checked(checks, reply)
            assert corrupt == 0
            assert [(outcome, plain(shared)) for outcome, shared in results] == [
                *map(model.first_check, checks)
            ]
        elif step == "lost":
            store.delete(codec.bucket_key(key))
            model.buckets.pop(key, None)
        same_buckets(store, model, rules)


# Numbers of all sizes


def any_size(chance, most):
    """Draw small and large numbers alike, sometimes the largest."""
    return most if chance.random() < 0.05 else min(most, int(most ** chance.random()))


def bucket_of_any_size(chance):
    """Draw a rule, a state of it that is not full and may exceed its bounds, and a time before it is full."""
    algorithm = chance.choice((Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW))
    limit, window_s = any_size(chance, INT32_MAX), any_size(chance, INT32_MAX)
    burst = 0
    if algorithm is Algorithm.TOKEN_BUCKET and chance.random() < 0.5:
        burst = refillable(any_size(chance, INT32_MAX), limit, window_s)
    rule = rule_of(algorithm, limit, window_s, burst=burst)
    latest_us = any_size(chance, MAX_TIME_US)
    most = rule.capacity * chance.choice((1, 1, 1, 3))
    if algorithm is Algorithm.TOKEN_BUCKET:
        spent = chance.randint(0, most * rule.window_us)
        refilled_us = spent // rule.limit
    else:
        spent, refilled_us = chance.randint(0, most), rule.window_us
    now_us = latest_us + chance.choice((0, 1, -1, -latest_us, chance.randint(0, refilled_us + 2)))
    shared = SharedState(0, rule.revision, rule.limit, (spent, latest_us), burst)
    return rule, shared, max(0, min(MAX_TIME_US, now_us))


def bucket_with_nearly_whole_tokens_refilled(chance):
    """Draw the same at a time when a few units decide about a token, and doubles cannot distinguish them."""
    limit, window_s = 0, 0
    while gcd(limit, window_s * US_PER_S) != 1:
        limit, window_s = (chance.randrange(2**20, INT32_MAX) for _ in range(2))
    rule = rule_of(Algorithm.TOKEN_BUCKET, limit, window_s)
    # The rate is coprime to the units of a token, so some time refills to any remainder.
    elapsed_us = chance.randint(-3, 3) * pow(limit, -1, rule.window_us) % rule.window_us
    shared = SharedState(0, rule.revision, limit, (limit * rule.window_us, 0))
    return rule, shared, elapsed_us


def bucket_that_is_full_at_about_a_whole_second(chance):
    """Draw the same at a time from which the refill takes whole seconds, up to a unit."""
    limit, window_s = (chance.randrange(2**20, INT32_MAX) for _ in range(2))
    rule = rule_of(Algorithm.TOKEN_BUCKET, limit, window_s)
    spent = chance.randint(1, window_s) * US_PER_S * limit + chance.randint(-1, 1)
    latest_us = chance.randrange(MAX_TIME_US // US_PER_S) * US_PER_S
    return rule, SharedState(0, rule.revision, limit, (spent, latest_us)), latest_us


@pytest.mark.parametrize(
    "bucket",
    [
        bucket_of_any_size,
        bucket_with_nearly_whole_tokens_refilled,
        bucket_that_is_full_at_about_a_whole_second,
    ],
)
@pytest.mark.parametrize("seed", range(15))
def test_numbers_of_all_sizes_are_exact(store, bucket, seed):
    store.flushall()
    chance = Random(seed)
    cases = {key_of(number): bucket(chance) for number in range(100)}
    store.mset(
        {codec.bucket_key(key): value_of(shared, rule) for key, (rule, shared, _) in cases.items()}
    )
    model = Model({key: shared for key, (_, shared, _) in cases.items()})
    for key, (rule, _, now_us) in cases.items():
        for cost in (rule.capacity, any_size(chance, rule.capacity)):
            check = StoreCheck(key, rule, now_us, cost, peek=True)
            assert decide(store, check) == [model.decide(check)]
    batch = Batch(
        "node",
        1,
        0,
        {
            key: Update(
                rule,
                None,
                ((now_us, any_size(chance, rule.capacity)),),
                (Ask(now_us, any_size(chance, rule.capacity)),),
            )
            for key, (rule, _, now_us) in cases.items()
        },
    )
    assert plain_reply(settle(store, batch)) == plain_reply(model.apply(batch))


def refunds_to(shared, rule, chance):
    """Draw refunds of possible charges of a bucket, some from before its latest spend."""
    if shared is None:
        return []
    latest_us, _ = ACCOUNTS[rule.algorithm].standing(shared.state)
    now_us = max(0, latest_us - chance.choice((0, 0, 1, US_PER_S // 4, US_PER_S)))
    return [
        refund_of(shared, rule, chance.randint(1, 4))._replace(
            at_us=now_us, refunded=max(0, shared.refunded - chance.choice((0, 0, 1)))
        )
        for _ in range(chance.choice((0, 1, 1, 2)))
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("algorithm", "bursts"),
    [
        *((algorithm, (0, 0, 0, 0)) for algorithm in ACCOUNTS),
        (Algorithm.TOKEN_BUCKET, (7, 2, 3, 3)),
    ],
)
def test_small_numbers_cover_every_boundary(store, algorithm, bursts, seed):
    store.flushall()
    chance = Random(seed)
    model = Model()
    [key, *_] = KEYS
    now_us = 1_700_000_000 * US_PER_S
    # The last one contradicts its revision: the stored limit applies. Of spends under an older revision, only those
    # under another limit are capped.
    rules = [
        rule_of(algorithm, limit, 1, revision, burst=burst)
        for (limit, revision), burst in zip(((5, 1), (3, 2), (3, 3), (4, 3)), bursts, strict=True)
    ]

    def time_us():
        return now_us + chance.randint(-3, 1) * US_PER_S // 4 + chance.choice((0, 0, 0, -1, 1))

    for number in range(1, 150):
        now_us += chance.choice((0, 1, 2, 4, 9)) * US_PER_S // 4
        if number % 50 == 0:
            store.delete(codec.bucket_key(key))
            model.buckets.clear()
        rule, cost = chance.choice(rules), chance.randint(1, 4)
        if chance.random() < 0.5:
            at_us = time_us()
            check = StoreCheck(key, rule, at_us, cost, peek=False)
            assert decide(store, check) == [model.decide(check)]
        else:
            runs = sorted((time_us(), chance.randint(1, 3)) for _ in range(chance.randint(0, 3)))
            asks = [Ask(time_us(), cost) for _ in range(chance.randint(0, 2))]
            given_back = refunds_to(model.buckets.get(key), rule, chance)
            batch = Batch("node", number, 0, {key: Update(rule, None, runs, asks, given_back)})
            assert plain_reply(settle(store, batch)) == plain_reply(model.apply(batch))
        assert plain(state_of(store.get(codec.bucket_key(key)), rule)) == plain(
            model.buckets.get(key)
        )


@pytest.mark.parametrize("seed", range(4))
def test_a_log_with_refunded_runs_answers_like_the_ledger(store, seed):
    store.flushall()
    chance = Random(seed)
    for number in range(250):
        rule, now_us = rule_of(Algorithm.SLIDING_WINDOW, 6, 60), 1_700_000_060 * US_PER_S
        times_us = sorted(now_us - chance.randrange(80) * US_PER_S for _ in range(3))
        sums = accumulate(chance.choice((0, 0, 1, 2)) for _ in times_us)
        log = array("q", [*times_us, 0, *sums]).tobytes()
        shared = SharedState(0, rule.revision, rule.limit, log)
        key = key_of(number)
        store.set(codec.bucket_key(key), value_of(shared, rule))
        model = Model({key: shared})
        for cost in range(1, 7):
            check = StoreCheck(key, rule, now_us, cost, peek=True)
            assert decide(store, check) == [model.decide(check)]
