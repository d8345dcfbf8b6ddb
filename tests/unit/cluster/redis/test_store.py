"""Requests of a node to the shared state, in a real Valkey."""

import asyncio
from dataclasses import replace
from struct import pack

import pytest

from ratelimitd.cluster.redis.codec import bucket_key
from ratelimitd.cluster.redis.store import READS_PER_COMMAND, TAGS_PER_BATCH, RedisStore
from ratelimitd.cluster.redis.topology import TAGS, standalone
from ratelimitd.errors import (
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.ledger.protocol import Reply, Sender
from ratelimitd.ledger.shared_holds import Step, StepCall, Stepped
from ratelimitd.ledger.shared_state import STORE_TIME, Ask, SharedState, StoreCheck, Update
from ratelimitd.model import LIMIT_EXCEEDED, WITHIN_LIMIT, Algorithm, IdentifierType, Rule
from ratelimitd.settings.urls import parse_redis_url
from tests.chaos_proxy import ChaosProxy
from tests.outcomes import runs_of
from tests.servers import free_port
from tests.unit.cluster.redis.asking import PATIENT, asked

RULE = Rule(
    "1",
    "/a",
    IdentifierType.USER,
    limit=10,
    window_seconds=3_600,
    algorithm=Algorithm.FIXED_WINDOW,
    revision=3,
)
NAME = b"a" * 16
NOW_US = 1_700_006_400_000_000


@pytest.fixture
async def store(topology):
    return RedisStore(topology)


class Liar:
    """Topology whose only server answers every request with ``reply``."""

    is_cluster = False
    name = "liar:1"

    def __init__(self, reply):
        self.reply = reply

    def of_tag(self, _tag):
        return self

    def send(self, _command, done, **_options):
        asyncio.get_running_loop().call_soon(done, self.reply)

    def run(self, _script, _keys, _arguments, done, _weight=1, **_options):
        self.send((), done)

    def flush(self):
        pass


def update(tokens=0, *asks):
    return Update(RULE, None, [(NOW_US, tokens)] if tokens else (), [Ask(NOW_US, n) for n in asks])


async def settle(store, sender, *updates):
    batch = sender.freeze(list(updates), NOW_US)
    return await asked(store.settle, NAME[0], batch)


async def decide(store, cost, *, peek=False, now_us=NOW_US):
    return await asked(store.decide, StoreCheck(NAME, RULE, now_us, cost, peek))


async def first_check(store, cost=1, *, name=NAME, peek=False):
    return await asked(store.first_check, StoreCheck(name, RULE, NOW_US, cost, peek))


async def beat(store, name, ttl_us=5_000_000, fingerprint="ours"):
    return await asked(store.beat, name, ttl_us, fingerprint)


async def test_one_server_is_named_and_takes_batches_of_several_tags(store, valkey):
    assert {store.server_of(tag) for tag in range(TAGS)} == {valkey.address}
    assert store.tags_per_batch == TAGS_PER_BATCH
    assert store.is_connected(7)


async def test_a_repeated_batch_is_applied_once_and_gets_the_same_answer(store):
    sender = Sender("node/1")
    first = await settle(store, sender, (NAME, update(4)))
    again = await asked(store.settle, NAME[0], sender.outstanding)
    assert first == again
    assert first.settled[NAME].shared == SharedState(0, 3, 10, (4, NOW_US))
    assert await asked(store.read, NAME, RULE) == first.settled[NAME].shared


async def test_a_batch_older_than_the_last_of_its_sender_is_refused(store):
    sender = Sender("node/1")
    reply = await settle(store, sender, (NAME, update(1)))
    old = sender.acknowledged(reply)
    await settle(store, sender, (NAME, update(1)))
    assert await asked(store.settle, NAME[0], old) is None


async def test_checks_in_a_batch_are_decided(store):
    reply = await settle(store, Sender("node/1"), (NAME, update(8, 2, 1)))
    assert reply.settled[NAME].grants == (True, False)


async def test_reads_of_one_iteration_share_a_command_with_an_answer_each(store, valkey):
    await settle(store, Sender("node/1"), (NAME, update(4)))
    names = [b"a%015d" % number for number in range(READS_PER_COMMAND)]
    states = await asyncio.gather(*(asked(store.read, name, RULE) for name in (*names, NAME)))
    assert states == [None] * READS_PER_COMMAND + [SharedState(0, 3, 10, (4, NOW_US))]
    assert valkey.info("commandstats")["cmdstat_mget"]["calls"] == 2


async def test_in_a_cluster_each_bucket_is_read_separately(topology, valkey, monkeypatch):
    monkeypatch.setattr(topology, "is_cluster", True, raising=False)
    store = RedisStore(topology)
    assert store.tags_per_batch == 1
    names = [bytes([number]) * 16 for number in range(3)]
    states = await asyncio.gather(*(asked(store.read, name, RULE) for name in names))
    assert states == [None] * 3
    assert valkey.info("commandstats")["cmdstat_mget"]["calls"] == 3


async def test_a_first_check_returns_its_outcome_and_the_bucket(store):
    await settle(store, Sender("node/1"), (NAME, update(4)))
    outcome, shared = await first_check(store, 5)
    assert outcome == (True, 1, 1_700_006_400 + 3_600, 0, WITHIN_LIMIT, None)
    assert shared == SharedState(0, 3, 10, (9, NOW_US))
    assert await asked(store.read, NAME, RULE) == shared
    outcome, same = await first_check(store, 2)
    assert (outcome[4], same) == (LIMIT_EXCEEDED, shared)


async def test_a_first_peek_writes_nothing(store, valkey):
    outcome, shared = await first_check(store, 3, peek=True)
    assert (outcome[:2], shared) == ((True, 7), SharedState(0, 3, 10))
    assert valkey.ask("EXISTS", bucket_key(NAME)) == 0


async def test_a_denial_writes_a_newer_limit_and_nothing_else(store, valkey):
    await settle(store, Sender("node/1"), (NAME, update(4)))
    lower = StoreCheck(NAME, replace(RULE, limit=3, revision=4), NOW_US, 1, peek=False)
    value = valkey.ask("GET", bucket_key(NAME))
    assert (await first_check(store, 8))[0][0] is False
    outcome, shared = await asked(store.first_check, lower._replace(peek=True))
    assert (outcome[0], shared) == (False, SharedState(0, 3, 10, (4, NOW_US)))
    assert valkey.ask("GET", bucket_key(NAME)) == value
    outcome, shared = await asked(store.first_check, lower)
    assert (outcome[0], shared) == (False, SharedState(0, 4, 3, (3, NOW_US)))
    assert await asked(store.read, NAME, RULE) == shared


async def test_a_first_check_replaces_a_malformed_bucket(store, valkey):
    valkey.ask("SET", bucket_key(NAME), b"not ours")
    outcome, _ = await first_check(store, 4)
    assert (outcome[:2], store.corrupt_total) == ((True, 6), 1)
    assert (await asked(store.read, NAME, RULE)).state == (4, NOW_US)


async def test_a_check_of_a_malformed_bucket_is_an_error_once(store, valkey):
    valkey.ask("SET", bucket_key(NAME), b"not ours")
    first, second = await asyncio.gather(decide(store, 4), decide(store, 4))
    assert (type(first), second[:2], store.corrupt_total) == (StoreCorruptError, (True, 6), 1)


async def test_a_malformed_first_check_answer_does_not_affect_those_beside_it():
    answer = pack("<BBIIQ", 1, 1, 9, 0, 50) + pack("<BBIQI", 1, 2, 0, 3, 10)
    store = RedisStore(Liar([0, answer, b"not ours"]))
    first, second = await asyncio.gather(first_check(store), first_check(store))
    assert (first[0][:2], type(second)) == ((True, 9), StoreCorruptError)
    assert store.corrupt_total == 1


async def test_a_malformed_bucket_counts_as_full_and_the_next_batch_replaces_it(store, valkey):
    valkey.ask("SET", bucket_key(NAME), b"not ours")
    assert await asked(store.read, NAME, RULE) is None
    assert store.corrupt_total == 1
    reply = await settle(store, Sender("node/1"), (NAME, update(4)))
    assert store.corrupt_total == 2
    assert await asked(store.read, NAME, RULE) == reply.settled[NAME].shared


@pytest.mark.parametrize("gone", [2**40, 2])
async def test_a_log_with_impossible_sums_starts_full(store, valkey, gone):
    rule = replace(RULE, algorithm=Algorithm.SLIDING_WINDOW, window_seconds=60)
    check = StoreCheck(NAME, rule, NOW_US, 4, peek=False)
    times_us = NOW_US - 61_000_000, NOW_US
    log = pack("<BBIQIQQQQQ", 1, 3, 0, 3, 10, 3, times_us[0], gone, times_us[1], 9)
    valkey.ask("SET", bucket_key(NAME), log)
    too_much = await asked(store.decide, check._replace(cost=11))
    assert too_much[:2] == (False, 10)
    assert [(await asked(store.decide, check))[:2] for _ in range(2)] == [(True, 6), (True, 2)]
    shared = await asked(store.read, NAME, rule)
    assert runs_of(shared.state) == [(NOW_US, 8)]


@pytest.mark.parametrize("ask", ["decide", "first_check"])
@pytest.mark.parametrize(
    "broken",
    [
        (4, (NOW_US - 3, 1), (NOW_US - 2, 2), (5, 9)),
        (4, (NOW_US - 3, 1), (NOW_US - 2, 2), (2**52, 9)),
        (1, (NOW_US - 61_000_000, 1), (2**52, 9)),
    ],
)
async def test_a_log_whose_times_do_not_ascend_starts_full(store, valkey, broken, ask):
    cost, *entries = broken
    rule = replace(RULE, algorithm=Algorithm.SLIDING_WINDOW, window_seconds=60)
    check = StoreCheck(NAME, rule, NOW_US, cost, peek=False)
    entries.append((NOW_US, 10))
    log = pack("<BBIQIQ", 1, 3, 0, 3, 10, 0) + b"".join(pack("<QQ", *entry) for entry in entries)
    valkey.ask("SET", bucket_key(NAME), log)
    answer = await asked(getattr(store, ask), check)
    outcome = answer[0] if ask == "first_check" else answer
    assert outcome[0]
    assert 0 <= outcome[3] <= 61
    shared = await asked(store.read, NAME, rule)
    assert runs_of(shared.state)[-1] == (NOW_US, cost)


async def test_the_store_decides_a_check(store):
    allowed = await decide(store, 7)
    assert allowed[:2] == (True, 3)
    assert (await decide(store, 3, peek=True))[:2] == (True, 0)
    assert (await decide(store, 4))[4] is LIMIT_EXCEEDED


async def test_without_a_time_the_store_uses_its_own(store, valkey):
    await decide(store, 7, now_us=STORE_TIME)
    state = (await asked(store.read, NAME, RULE)).state
    seconds, _ = valkey.ask("TIME")
    assert abs(state[1] // 1_000_000 - seconds) < 60


async def test_a_reset_is_a_full_bucket_of_the_next_generation(store):
    await settle(store, Sender("node/1"), (NAME, update(4)))
    shared = await asked(store.reset, NAME, RULE, 0)
    assert shared == SharedState(1, 3, 10)
    assert await asked(store.read, NAME, RULE) == shared
    assert (await asked(store.reset, NAME, RULE, 50)).generation == 50
    assert (await asked(store.reset, NAME, RULE, 50)).generation == 51


async def test_a_probe_succeeds_if_the_server_writes(store, valkey):
    assert [await asked(store.probe, 7) for _ in range(2)] == [Reply(1, {}), Reply(2, {})]


async def test_a_probe_fails_if_the_server_does_not_write(store, valkey):
    valkey.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        assert isinstance(await asked(store.probe, 7), StoreUnavailableError)
    finally:
        valkey.ask("CONFIG", "SET", "min-replicas-to-write", 0)


async def test_late_answers_are_taken_unless_a_check_waits_for_them(valkey):
    valkey.ask("SCRIPT", "FLUSH")
    with ChaosProxy(valkey.port) as proxy:
        topology = standalone(parse_redis_url(proxy.url), PATIENT._replace(timeout_s=0.01))
        await topology.start()
        store = RedisStore(topology)
        proxy.down.latency_ms = 50
        # Once, although the server says late that it does not know the script.
        assert await asked(store.reset, NAME, RULE, 5) == SharedState(5, 3, 10)
        assert await asked(store.probe, 7) == Reply(1, {})
        settle = StepCall(Step.SETTLE, b"n" * 16, [NAME])
        assert (await asked(store.step_hold, NAME[0], settle)).stepped is Stepped.UNKNOWN
        assert await asked(store.read_statuses, ["n1/a"]) == [None]
        assert (await beat(store, "n1/a"))[2] == ("n1/a",)
        assert isinstance(await first_check(store), StoreSlowError)
        await topology.close()


async def test_heartbeats_return_the_nodes_alive_and_the_stores_time(store, valkey):
    now_us, fingerprint, names = await beat(store, "one/1")
    assert (fingerprint, names) == ("ours", ("one/1",))
    seconds, _ = valkey.ask("TIME")
    assert abs(now_us // 1_000_000 - seconds) < 60
    _, fingerprint, names = await beat(store, "two/2", fingerprint="theirs")
    assert (fingerprint, {*names}) == ("ours", {"one/1", "two/2"})
    await beat(store, "two/2", ttl_us=0)
    _, _, names = await beat(store, "one/1")
    assert names == ("one/1",)


async def test_a_node_may_bring_another_secret_when_no_other_node_is_alive(store):
    await beat(store, "one/1")
    await beat(store, "one/1", ttl_us=0)
    assert (await beat(store, "two/2", fingerprint="theirs"))[1] == "theirs"
    assert (await beat(store, "one/3"))[1] == "theirs"


async def test_heartbeats_from_before_a_clock_step_back_are_dropped(store, valkey):
    seconds, _ = valkey.ask("TIME")
    valkey.ask("ZADD", "rl1:{00}:members", (seconds + 3_600) * 1_000_000, "dead/1")
    assert (await beat(store, "one/1"))[2] == ("one/1",)


async def test_a_name_with_invalid_utf_8_is_counted(store, valkey):
    seconds, _ = valkey.ask("TIME")
    valkey.ask("ZADD", "rl1:{00}:members", seconds * 1_000_000, b"\xff")
    assert len((await beat(store, "one/1"))[2]) == 2


@pytest.mark.parametrize("kind", ["list", "text"])
async def test_foreign_values_at_the_heartbeat_keys_are_removed(store, valkey, kind):
    for key in ("rl1:{00}:members", "rl1:{00}:secret"):
        valkey.ask(*(("RPUSH", key, "x") if kind == "list" else ("SET", key, b"\xff no text")))
    _, fingerprint, names = await beat(store, "one/1")
    assert (fingerprint, names) == ("ours", ("one/1",))
    assert (await beat(store, "one/1"))[1:] == ("ours", ("one/1",))


@pytest.mark.parametrize("command", ["get", "set"])
async def test_a_user_without_a_permission_of_the_scripts_is_refused_and_changes_no_bucket(
    store, valkey, command
):
    sender = Sender("node/1")
    await settle(store, sender, (NAME, update(7)))
    before = valkey.ask("GET", bucket_key(NAME))
    valkey.ask("ACL", "SETUSER", "default", f"-{command}")
    try:
        answers = [
            await settle(store, Sender("node/2"), (NAME, update(1))),
            await decide(store, 1),
            await first_check(store),
            await asked(store.reset, NAME, RULE, 0),
            await asked(store.probe, 7),
            await beat(store, "one/1"),
        ]
    finally:
        valkey.ask("ACL", "SETUSER", "default", f"+{command}")
    assert {type(answer) for answer in answers} == {StoreMisconfiguredError}
    assert valkey.ask("GET", bucket_key(NAME)) == before


async def ask_everything(store):
    return [
        await asked(store.read, NAME, RULE),
        await settle(store, Sender("node/1"), (NAME, update(4))),
        await decide(store, 1),
        await first_check(store),
        await asked(store.reset, NAME, RULE, 0),
        await asked(store.probe, 7),
        await beat(store, "one/1"),
    ]


async def test_an_unavailable_server_is_an_error_of_each_request():
    topology = standalone(parse_redis_url(f"redis://127.0.0.1:{free_port()}"), PATIENT)
    await topology.start()
    store = RedisStore(topology)
    assert not store.is_connected(7)
    answers = await ask_everything(store)
    await topology.close()
    assert all(isinstance(answer, StoreUnavailableError) for answer in answers)


@pytest.mark.parametrize("reply", [b"not ours", [], 7, None])
async def test_a_foreign_reply_is_an_error_of_each_request(reply):
    answers = await ask_everything(RedisStore(Liar(reply)))
    assert all(isinstance(answer, StoreCorruptError) for answer in answers)


@pytest.mark.parametrize(
    "reply",
    [
        [b"1" * 17, b"ours", []],
        [b"1" * 5_000, b"ours", []],
        [b"-1", b"ours", []],
        [b"1", b"ours", [b"one/1", 7]],
    ],
)
async def test_an_impossible_time_or_name_is_no_reply_to_a_heartbeat(reply):
    assert type(await beat(RedisStore(Liar(reply)), "one/1")) is StoreCorruptError


async def test_a_failing_callback_of_a_read_does_not_affect_others_of_the_iteration(store):
    reported = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["exception"])
    )
    error = ValueError("defect")

    def fails(_shared):
        raise error

    store.read(NAME, RULE, fails)
    assert await asked(store.read, b"b" * 16, RULE) is None
    assert reported == [error]
