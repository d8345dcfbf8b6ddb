"""Holds in a real Valkey: foreign values at their keys, expiry, lost data, and required permissions."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ratelimitd.cluster.redis.codec import bucket_key, holds_key, prefix
from ratelimitd.cluster.redis.store import RedisStore
from ratelimitd.cluster.redis.topology import standalone
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.shared_holds import HoldCall, Made, Step, StepCall, Stepped
from ratelimitd.ledger.shared_state import STORE_TIME, StoreCheck
from ratelimitd.model import US_PER_S, Algorithm
from ratelimitd.settings.urls import parse_redis_url
from tests.store_scripts import TAG, key_of, rule_of
from tests.unit.cluster.redis.asking import PATIENT, asked

CLUSTER_PAGE = Path(__file__).resolve().parents[4] / "docs/cluster.md"
NUMBER, OTHER_NUMBER = b"a number of 16 B", b"another number.."
WINDOW = rule_of(Algorithm.FIXED_WINDOW, 10, 2**31 - 1)
SLOTS = rule_of(Algorithm.CONCURRENCY, 2, 600)
A, S = key_of(1), key_of(2)
RECORD = prefix(TAG) + b"hold:" + NUMBER
RULES = {A: WINDOW, S: SLOTS}


class Scene:
    """A store, and requests to it."""

    def __init__(self, topology):
        self.store = RedisStore(topology)

    async def hold(self, *names, number=NUMBER, cost=6, ttl_s=60, attempt=b"attempt1"):
        checks = [StoreCheck(name, RULES[name], STORE_TIME, cost, 0) for name in names]
        call = HoldCall(number, b"digest01", attempt, checks, ttl_s * US_PER_S, 100)
        return await asked(self.store.hold, TAG, call)

    async def step(self, step, *names, amount=0, number=NUMBER, attempt=bytes(8), **fields):
        call = StepCall(step, number, names, amount, STORE_TIME, attempt, **fields)
        return await asked(self.store.step_hold, TAG, call)

    async def settle(self, actual, *names, **fields):
        return await self.step(Step.SETTLE, *names, amount=actual, **fields)

    async def left(self, name, cost=1):
        """Return the tokens left, by a peek."""
        check = StoreCheck(name, RULES[name], STORE_TIME, cost, 1)
        outcome = await asked(self.store.decide, check)
        return outcome if isinstance(outcome, Exception) else outcome[1]


@pytest.fixture
async def scene(topology):
    return Scene(topology)


async def test_a_hold_is_made_and_settled_once(scene):
    held = await scene.hold(A, S)
    assert (held.made, [one[:2] for one in held.outcomes]) == (Made.MADE, [(True, 4), (True, 1)])
    settled = await scene.settle(2, A, S)
    assert settled[:1] + settled[2:4] == (Stepped.DONE, 4, 0)
    assert [one[:2] for one in settled.outcomes] == [(True, 8), (True, 2)]
    assert (await scene.settle(2, A, S)).stepped is Stepped.AS_BEFORE
    assert (await scene.settle(3, A, S)).stepped is Stepped.SETTLED
    assert (await scene.left(A), await scene.left(S)) == (7, 2)
    assert scene.store.corrupt_total == 0


async def test_a_settle_is_answered_by_the_limits_in_force(scene):
    await scene.hold(A, S)
    edited = {name: replace(rule, limit=5, revision=2) for name, rule in RULES.items()}
    limits = edited | {S: replace(RULES[S], algorithm=Algorithm.FIXED_WINDOW)}
    settled = await scene.settle(2, A, S, limits=limits)
    assert [one[1] for one in settled.outcomes] == [3, 2]  # the other algorithm has another bucket
    assert [one[1] for one in (await scene.settle(2, A, S, limits=edited)).outcomes] == [3, 5]


async def test_all_keys_of_a_hold_expire(valkey, scene):
    await scene.hold(A, S, ttl_s=600)
    expected = {RECORD: 660, bucket_key(S): 3_660, holds_key(A): 3_660}
    for key, seconds in expected.items():
        assert seconds - 5 <= valkey.ask("TTL", key) <= seconds
    await scene.step(Step.EXTEND, A, S, amount=3_600 * US_PER_S)
    assert (
        655 <= valkey.ask("TTL", RECORD) <= 660
    )  # with slots: at most one window after the hold was made
    await scene.settle(0, A, S)
    assert {*valkey.ask("KEYS", "*")} == {RECORD, bucket_key(A)}


async def test_an_extended_hold_extends_the_life_of_its_bucket(valkey, scene):
    await scene.hold(A)
    valkey.ask("EXPIRE", bucket_key(A), 100)
    await scene.step(Step.EXTEND, A, amount=3_600 * US_PER_S)
    assert valkey.ask("TTL", bucket_key(A)) >= 3_595


async def test_a_repeated_call_gets_the_first_answer(scene):
    held = await scene.hold(A, S)
    assert await scene.hold(A, S) == held
    assert await scene.hold(A, S, attempt=b"attempt2") == held._replace(made=Made.FOUND)
    assert (await scene.left(A), await scene.left(S)) == (3, 1)


async def test_a_settled_hold_is_not_made_again(scene):
    await scene.hold(A, S)
    await scene.settle(0, A, S)
    assert await scene.hold(A, S) == (Made.OVER, 0, (), ())
    assert (await scene.left(A), await scene.left(S)) == (9, 2)


async def test_a_denied_hold_leaves_nothing(valkey, scene):
    await scene.hold(A, S)
    keys = {key: valkey.ask("DUMP", key) for key in valkey.ask("KEYS", "*")}
    assert (await scene.hold(A, S, number=OTHER_NUMBER)).made is Made.DENIED
    assert {key: valkey.ask("DUMP", key) for key in valkey.ask("KEYS", "*")} == keys


async def test_a_withdrawn_attempt_leaves_no_record(valkey, scene):
    await scene.hold(A, S, attempt=b"attempt1")
    await scene.hold(A, S, attempt=b"attempt2")
    for attempt, is_gone in ((b"attempt3", False), (b"attempt1", False), (b"attempt2", True)):
        await scene.step(Step.WITHDRAW, A, S, attempt=attempt)
        assert (valkey.ask("EXISTS", RECORD) == 0) is is_gone
    assert (await scene.left(A), await scene.left(S)) == (9, 2)


async def test_a_hold_with_too_many_attempts_is_not_withdrawn(scene):
    attempts = [b"attempt%d" % number for number in range(9)]
    for attempt in attempts:
        await scene.hold(A, attempt=attempt)
    for attempt in attempts:
        await scene.step(Step.WITHDRAW, A, attempt=attempt)
    assert (await scene.settle(6, A)).stepped is Stepped.DONE


GARBAGE = {
    "a list": ("RPUSH", "x"),
    "a text": ("SET", "x"),
    "a long text": ("SET", "\x01" * 400),
    "a hash": ("HSET", "x", "y"),
    "a sorted set": ("ZADD", 5, "x"),
    "a sorted set with a count of nothing": ("ZADD", 0, ""),
    "a sorted set with too high a count": ("ZADD", -(2**40), ""),
    "a sorted set without an end": ("ZADD", "-inf", ""),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("key", [RECORD, bucket_key(A), holds_key(A), bucket_key(S), holds_key(S)])
async def test_a_foreign_value_at_a_key_is_replaced_and_affects_no_other(
    valkey, scene, key, garbage
):
    command, *values = garbage
    valkey.ask(command, key, *values)
    held = await scene.hold(A, S)
    assert (held.made, [one[:2] for one in held.outcomes]) == (Made.MADE, [(True, 4), (True, 1)])
    assert scene.store.corrupt_total == (key not in {RECORD, holds_key(S)})
    assert (await scene.hold(A, S, attempt=b"attempt2")).made is Made.FOUND
    settled = await scene.settle(2, A, S)
    assert [one[:2] for one in settled.outcomes] == [(True, 8), (True, 2)]


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_foreign_value_set_after_the_hold_gets_no_refund(valkey, scene, garbage):
    command, *values = garbage
    for key in (bucket_key(A), holds_key(A), bucket_key(S)):
        await scene.hold(A, S, number=OTHER_NUMBER, cost=1)
        valkey.ask("DEL", key)
        valkey.ask(command, key, *values)
        reply = await scene.settle(0, A, S, number=OTHER_NUMBER)
        assert reply.stepped is Stepped.DONE
        assert reply.given_back == (key != bucket_key(A))
        valkey.ask("FLUSHALL")


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_malformed_record_is_an_unknown_hold(valkey, scene, garbage):
    command, *values = garbage
    valkey.ask(command, RECORD, *values)
    for step in Step:
        assert (await scene.step(step, A, S)).stepped is Stepped.UNKNOWN


async def test_a_check_reports_a_foreign_value_of_slots_once(valkey, scene):
    valkey.ask("SET", bucket_key(S), "x")
    assert isinstance(await scene.left(S), StoreCorruptError)
    assert (await scene.left(S), scene.store.corrupt_total) == (2, 1)


async def test_a_set_with_missing_slots_denies_until_it_expires(valkey, scene):
    valkey.ask("ZADD", bucket_key(S), -2, "")
    check = StoreCheck(S, SLOTS, STORE_TIME, 1, 1)
    assert (await asked(scene.store.decide, check))[:2] == (False, 0)


async def test_flushed_scripts_are_loaded_again(valkey, scene):
    await scene.hold(A, S)
    valkey.ask("SCRIPT", "FLUSH")
    assert (await scene.hold(A, S)).made is Made.MADE
    assert await scene.left(A) == 3
    valkey.ask("SCRIPT", "FLUSH")
    assert (await scene.settle(0, A, S)).given_back == 6


async def test_a_hold_with_an_evicted_record_is_unknown_and_stays_charged(valkey, scene):
    await scene.hold(A, S)
    valkey.ask("DEL", RECORD)
    assert (await scene.settle(0, A, S)).stepped is Stepped.UNKNOWN
    assert (await scene.left(A), await scene.left(S)) == (3, 1)
    # A repeated hold takes no second slot.
    assert (await scene.hold(A, S, cost=2)).made is Made.MADE
    assert await scene.left(S) == 1


async def test_an_evicted_bucket_gets_no_refund(valkey, scene):
    await scene.hold(A, S)
    valkey.ask("DEL", bucket_key(A), bucket_key(S))
    assert (await scene.hold(A, number=OTHER_NUMBER, cost=6)).made is Made.MADE
    settled = await scene.settle(0, A, S)
    assert (settled.stepped, settled.given_back) == (Stepped.DONE, 0)
    assert (await scene.left(A), await scene.left(S)) == (3, 2)
    assert (await scene.settle(0, A, number=OTHER_NUMBER)).given_back == 6


async def test_a_lost_bucket_has_no_outcome(valkey, scene):
    await scene.hold(A, S)
    valkey.ask("DEL", bucket_key(A))
    assert [one and one[:2] for one in (await scene.settle(9, A, S)).outcomes] == [None, (True, 2)]


async def test_a_reset_frees_slots_and_ends_refunds(scene):
    await scene.hold(A, S)
    for name, rule in RULES.items():
        shared = await asked(scene.store.reset, name, rule, 7)
        assert (shared.generation, shared.state) == (7, None)
    assert (await scene.left(A), await scene.left(S)) == (9, 2)
    await scene.step(Step.EXTEND, A, S, amount=60 * US_PER_S)
    assert await scene.left(S) == 2
    settled = await scene.settle(9, A, S)
    assert settled[:1] + settled[2:4] == (Stepped.DONE, 0, 0)
    assert await scene.left(A) == 9


async def test_the_documented_user_may_use_holds(valkey, topology):
    [command] = re.findall(
        r"^(ACL SETUSER ratelimitd on >PASSWORD resetkeys .+)$",
        CLUSTER_PAGE.read_text("utf-8"),
        re.MULTILINE,
    )[:1]
    valkey.ask(*command.split())
    url = valkey.url.replace("://", "://ratelimitd:PASSWORD@")
    of_user = standalone(parse_redis_url(url), PATIENT)
    await of_user.start()
    try:
        scene = Scene(of_user)
        valkey.ask("SET", holds_key(A), "x")
        await scene.hold(A, S)
        await scene.hold(A, S, number=OTHER_NUMBER, cost=1)
        await scene.step(Step.EXTEND, A, S, amount=90 * US_PER_S)
        await scene.step(Step.WITHDRAW, A, S, number=OTHER_NUMBER, attempt=b"attempt1")
        await scene.settle(0, A, S)
        await asked(scene.store.reset, S, SLOTS, 7)
        assert (await scene.left(A), await scene.left(S)) == (9, 2)
    finally:
        await of_user.close()
        assert valkey.ask("ACL", "LOG") == []
        valkey.ask("ACL", "DELUSER", "ratelimitd")
