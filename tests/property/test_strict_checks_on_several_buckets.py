"""Strict checks on several buckets, in a real server, against the pure algorithms: all are charged, or none is."""

from dataclasses import replace
from random import Random

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.several import decide_all
from ratelimitd.cluster.redis.codec import JOINED, bucket_key
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.shared_state import OBSERVES, StoreCheck
from ratelimitd.model import US_PER_S, Algorithm, Enforcement
from tests.store_scripts import decide, key_of, rule_of

NOW = 1_700_000_000 * US_PER_S


def joined(rules, keys, now_us, cost, *, peek):
    """Return one check on several buckets."""
    last = len(keys) - 1
    return [
        StoreCheck(
            key_of(key),
            rules[key],
            now_us,
            cost,
            int(peek)
            | (JOINED if place < last else 0)
            | (OBSERVES if rules[key].enforcement is Enforcement.OBSERVE else 0),
        )
        for place, key in enumerate(keys)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_trace_matches_the_algorithms(store, seed):
    store.flushall()
    chance = Random(seed)
    rules = [
        replace(
            rule_of(chance.choice([*ACCOUNTS]), chance.randint(3, 9), 2),
            enforcement=chance.choice([Enforcement.ENFORCE] * 3 + [Enforcement.OBSERVE]),
        )
        for _ in range(4)
    ]
    states = {}
    now_us = NOW
    for _ in range(40):
        now_us += chance.choice((0, 1, US_PER_S // 5, US_PER_S))
        calls, expected = [], []
        for _ in range(chance.randint(1, 3)):
            keys = chance.sample(range(4), chance.randint(1, 4))
            cost, peek = chance.randint(1, 4), chance.random() < 0.2
            calls += joined(rules, keys, now_us, cost, peek=peek)
            buckets = [(states.get(key), rules[key], DECIDE[rules[key].algorithm]) for key in keys]
            outcomes = decide_all(buckets, now_us, [cost] * len(buckets))
            expected += [(*outcome[:5], None) for outcome in outcomes]
            if not peek:
                states |= {key: outcome[5] for key, outcome in zip(keys, outcomes, strict=True)}
        assert decide(store, *calls) == expected


def test_a_key_that_is_not_a_bucket_is_reported_once_and_denies_nothing(store):
    store.flushall()
    rules = [rule_of(Algorithm.FIXED_WINDOW, 5, 60)] * 2
    store.set(bucket_key(key_of(0)), b"something else")
    broken, sound = decide(store, *joined(rules, [0, 1], NOW, 2, peek=False))
    assert (broken, sound[:2]) == (None, (True, 3))
    again = decide(store, *joined(rules, [0, 1], NOW, 2, peek=False))
    assert [one[:2] for one in again] == [(True, 3), (True, 1)]
