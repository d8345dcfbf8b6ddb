"""Checks of one event-loop iteration that share a script call, with a real Valkey."""

import asyncio
from dataclasses import replace

import pytest

from ratelimitd.cluster.redis.codec import DECIDE, JOINED, decided
from ratelimitd.cluster.redis.connection import error_of
from ratelimitd.cluster.redis.link import Link
from ratelimitd.cluster.redis.store import CHECKS_PER_CALL, CHECKS_PER_WEIGHT, Combiner
from ratelimitd.cluster.redis.topology import standalone
from ratelimitd.errors import StoreCorruptError, StoreUnavailableError
from ratelimitd.ledger.shared_state import StoreCheck
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.settings.urls import parse_redis_url
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


@pytest.fixture
async def combiner(topology):
    """A combiner that has sent nothing yet; the server has the script."""
    await decide(Combiner(topology, DECIDE, decided), 4)
    return Combiner(topology, DECIDE, decided)


def decide(combiner, cost=1, *, name=NAME, rule=RULE):
    return asked(combiner.add, StoreCheck(name, rule, 1_700_006_400_000_000, cost, peek=False))


def script_calls(valkey):
    return valkey.info("commandstats")["cmdstat_evalsha"]["calls"]


async def test_checks_of_one_iteration_share_a_call_with_an_answer_each(combiner, valkey):
    before = script_calls(valkey)
    names = [b"a%015d" % number for number in range(CHECKS_PER_CALL)]
    outcomes = await asyncio.gather(*(decide(combiner, name=name) for name in (*names, NAME)))
    assert [outcome[1] for outcome in outcomes] == [9] * CHECKS_PER_CALL + [5]
    assert script_calls(valkey) == before + 2


async def test_checks_of_one_bucket_are_decided_in_order(combiner):
    outcomes = await asyncio.gather(decide(combiner, 4), decide(combiner, 3), decide(combiner, 2))
    assert [outcome[:2] for outcome in outcomes] == [(True, 2), (False, 2), (True, 0)]


async def test_in_a_cluster_checks_of_one_hash_tag_share_a_call(
    combiner, topology, valkey, monkeypatch
):
    monkeypatch.setattr(topology, "is_cluster", True, raising=False)
    before = script_calls(valkey)
    names = [bytes([tag, number]) * 8 for number in range(3) for tag in (1, 2)]
    costs = range(1, 7)
    flushed = []
    monkeypatch.setattr(Link, "flush", lambda link: flushed.append(link.in_flight))
    asking = [decide(combiner, cost, name=name) for name, cost in zip(names, costs, strict=True)]
    assert [outcome[1] for outcome in await asyncio.gather(*asking)] == [9, 8, 7, 6, 5, 4]
    assert script_calls(valkey) == before + 2
    assert flushed == [2], "both in one write"


async def test_the_weight_of_a_call_grows_with_its_checks(topology, monkeypatch):
    weights = []

    def run(_link, _script, _keys, _arguments, _done, weight):
        weights.append(weight)

    monkeypatch.setattr(Link, "run", run)
    combiner = Combiner(topology, DECIDE, decided)
    for number in range(CHECKS_PER_CALL + 1):
        decide(combiner, name=b"a%015d" % number)
    await asyncio.sleep(0)
    assert weights == [1 + CHECKS_PER_CALL // CHECKS_PER_WEIGHT, 1]


async def test_checks_are_sent_at_the_end_of_their_iteration(combiner, monkeypatch):
    sent = []
    monkeypatch.setattr(Link, "flush", lambda link: sent.append(link.in_flight))
    answer = decide(combiner)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [1]
    assert (await answer)[1] == 5


async def test_a_single_check_is_sent_at_once_after_a_single_one(combiner, monkeypatch):
    await decide(combiner)
    sent, flush = [], Link.flush

    def counted(link):
        sent.append(link.in_flight)
        flush(link)

    monkeypatch.setattr(Link, "flush", counted)
    first = decide(combiner)
    assert sent == [1]
    others = [decide(combiner), decide(combiner)]
    assert sent == [1]
    await asyncio.gather(first, *others)
    assert len(sent) == 2
    last = [decide(combiner), decide(combiner)]
    assert len(sent) == 2, "for those before were several"
    assert [outcome[1] for outcome in await asyncio.gather(*last)] == [1, 0]
    assert len(sent) == 3


async def test_repeated_pairs_of_checks_share_calls(combiner, valkey):
    await decide(combiner)
    before = script_calls(valkey)
    for _ in range(3):
        await asyncio.gather(decide(combiner), decide(combiner))
    assert script_calls(valkey) == before + 4


async def test_checks_of_a_migrating_slot_are_sent_again_one_by_one(combiner, monkeypatch):
    run, lengths = Link.run, []

    def moving(link, script, keys, arguments, done, weight):  # noqa: PLR0917 - as run
        lengths.append(len(keys))
        if len(keys) > 1:
            asyncio.get_running_loop().call_soon(
                done, error_of("TRYAGAIN keys of a slot that moves")
            )
        else:
            run(link, script, keys, arguments, done, weight)

    monkeypatch.setattr(Link, "run", moving)
    outcomes = await asyncio.gather(decide(combiner, 4), decide(combiner, 3), decide(combiner, 2))
    assert [outcome[:2] for outcome in outcomes] == [(True, 2), (False, 2), (True, 0)]
    assert lengths == [3, 1, 1, 1]


async def test_an_encoding_error_fails_all_checks_of_the_call(combiner):
    unheard_of = decide(combiner, rule=replace(RULE, limit=2**40))
    answers = await asyncio.gather(unheard_of, decide(combiner))
    assert [type(answer) for answer in answers] == [StoreCorruptError] * 2
    await decide(combiner)
    assert type(await decide(combiner, rule=replace(RULE, limit=2**40))) is StoreCorruptError


async def test_a_decoding_error_fails_all_checks_of_the_call(topology):
    def read(_checks, _reply):
        message = "no reply"
        raise StoreCorruptError(message)

    combiner = Combiner(topology, DECIDE, read)
    answers = await asyncio.gather(decide(combiner), decide(combiner))
    assert [type(answer) for answer in answers] == [StoreCorruptError] * 2


async def test_without_a_connection_each_check_gets_the_error(valkey):
    combiner = Combiner(standalone(parse_redis_url(valkey.url), PATIENT), DECIDE, decided)
    answers = await asyncio.gather(decide(combiner), decide(combiner))
    assert [type(answer) for answer in answers] == [StoreUnavailableError] * 2


async def test_a_check_on_several_buckets_is_never_split(combiner, valkey):
    await decide(combiner, name=b"b" * 16)  # a single check, so the next would be sent at once
    before = script_calls(valkey)
    names = [b"a%015d" % number for number in range(CHECKS_PER_CALL + 5)]
    asking = [
        asked(
            combiner.add,
            StoreCheck(
                name, RULE, 1_700_006_400_000_000, 1, JOINED if number < len(names) - 1 else 0
            ),
        )
        for number, name in enumerate(names)
    ]
    outcomes = await asyncio.gather(*asking, decide(combiner, name=names[0]))
    assert [outcome[1] for outcome in outcomes] == [9] * len(names) + [8]
    assert script_calls(valkey) == before + 2
