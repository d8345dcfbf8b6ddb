"""Many calls in one write on one connection of the native transport: each stream gets exactly one correct answer."""

import asyncio
import random
from collections import Counter

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.messages import framed
from ratelimitd.services.rate_limiter import RateLimiterService
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.http2_peer import DATA, END_STREAM, HEADERS, PING, ping
from tests.one_by_one import OneByOne
from tests.property.spelled_checks import canonical
from tests.rpc.abuse import line_to
from tests.rpc.node import running_node
from tests.unit.services.fake_call import FakeCall

CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
HEALTH = "/grpc.health.v1.Health/Check"
OK, INVALID_ARGUMENT, UNIMPLEMENTED = 0, 3, 12


@pytest.fixture
async def node(tmp_path):
    async with running_node(tmp_path, transport="native") as running:
        await running.rule("/a")
        await running.rule("*", "ip", algorithm="token_bucket")
        yield running


async def outcomes(line, calls, pieces=1):
    """Return (status, body) of each call, in order; all are written at once, or cut into this number of pieces."""
    timeouts = ({}, {"grpc_timeout": "9S"}, {"grpc_timeout": "20S"})
    octets = b"".join(
        line.call_octets(2 * place + 1, path, message, **timeouts[place % 3])
        for place, (path, message) in enumerate(calls)
    )
    size = -(-len(octets) // pieces)
    for start in range(0, len(octets), size):
        line.send(octets[start : start + size])
        await line.writer.drain()
        await asyncio.sleep(0)
    bodies = [b""] * len(calls)
    ends = Counter[int]()
    statuses = {}
    while len(statuses) < len(calls):
        frame = await line.frame()
        place = frame.stream_id // 2
        if frame.type == DATA:
            bodies[place] += frame.payload
        elif frame.type == HEADERS:
            fields = dict(line.peer.fields(frame.payload))
            if frame.flags & END_STREAM:
                ends[place] += 1
                statuses[place] = int(fields[b"grpc-status"])
    # All other frames of the server precede the answer to a PING.
    line.send(ping(b"the end."))
    while (frame := await line.frame()).type != PING:
        assert frame.type not in (DATA, HEADERS)
    assert set(ends.values()) == {1}
    return [(statuses[place], body) for place, body in enumerate(bodies)]


def checks_of_all_kinds():
    """A check of each kind, each with its own bucket."""
    names = (f"n{number}" for number in range(1_000))
    plain = [canonical(next(names), "user", "/a", cost) for cost in (0, 1, 2, 10, 11)]
    addresses = [canonical(f"10.0.0.{number}", "ip", "/b") for number in range(5)]
    odd = [
        canonical(next(names), "user", "/a", 0, 1_700_006_399),
        canonical(next(names), "user", "/a", peek=True),
        canonical(next(names), "user", "/a") + b"\x20\x02",
        canonical(next(names), "user", "/a") + b"\x20\x00",
        canonical(next(names), "user", "/a") + b"\x7a\x01x",
        canonical("n" * 128, "user", "/a"),
        canonical("é", "user", "/a"),
        canonical("2001:DB8::1", "ip", "/b"),
        canonical(next(names), "api_key", "/a"),
    ]
    invalid = [
        b"",
        b"\xff",
        canonical(next(names), "User", "/a"),
        canonical(next(names), "user", "*"),
        canonical(next(names), "user", "/a", -1),
        canonical("fe80::1%eth0", "ip", "/b"),
    ]
    return plain + addresses + odd + invalid


def expected_of(node):
    """Answers of a service that handles one check at a time, with its own buckets."""
    stats = CheckStats()
    limiter = OneByOne(
        buckets=BucketTable(1_000),
        clock=node.clock,
        stats=stats,
        timestamps="bounded",
        keys=BucketKeys(b"k" * 32),
    )
    limiter.replace_book(node.limiter.book)
    service = RateLimiterService(limiter, stats, lambda: 0.0, FairQueue(lambda: 0.0))

    def expected(message):
        try:
            return OK, framed(service.check_rate_limit(message, FakeCall()))
        except InvalidInputError:
            return INVALID_ARGUMENT, b""

    return stats, expected


@pytest.mark.parametrize("pieces", [1, 2, 9, 200])
async def test_checks_of_all_kinds_among_other_methods_are_each_answered_once(node, pieces):
    checks = checks_of_all_kinds()
    batch = pb.BatchRateLimitRequest(
        requests=[pb.RateLimitRequest(identifier="b", identifier_type="user", endpoint="/a")] * 3
    )
    others = [
        (BATCH, batch.SerializeToString()),
        (HEALTH, b""),
        (LIST, b""),
        ("/RateLimiter/Nope", b""),
    ]
    calls = [(CHECK, message) for message in checks] + others * 2
    calls += [("/RateLimiter/CheckRateLimit", canonical(f"m{n}", "user", "/a")) for n in range(5)]
    random.Random(pieces).shuffle(calls)
    stats, expected = expected_of(node)
    async with line_to(node.address) as line:
        answers = await outcomes(line, calls, pieces)
    for (path, message), answer in zip(calls, answers, strict=True):
        if path.endswith("CheckRateLimit"):
            assert answer == expected(message)
        else:
            assert answer[0] == (UNIMPLEMENTED if path.endswith("Nope") else OK)
    assert node.stats.invalid_total == stats.invalid_total == 6
    assert node.stats.allowed_total == stats.allowed_total + 6
    assert node.stats.blocked_total == stats.blocked_total
    assert sum(node.stats.latency_counts) == sum(stats.latency_counts) + 6


@pytest.mark.parametrize("pieces", [1, 3])
async def test_checks_sent_together_never_exceed_the_limit(node, pieces):
    one = canonical("ada", "user", "/a")
    spellings = [one, one, one + b"\x20\x01", one + b"\x28\x00", one[5:] + one[:5]]
    async with line_to(node.address) as line:
        answers = await outcomes(line, [(CHECK, message) for message in spellings * 12], pieces)
    bodies = [pb.RateLimitResponse.FromString(body[5:]) for _, body in answers]
    left = sorted(body.remaining_tokens for body in bodies if body.allowed)
    assert left == [*range(10)]
    assert (node.stats.allowed_total, node.stats.blocked_total) == (10, 50)


@pytest.mark.parametrize("broken", ["all", "some"])
async def test_checks_that_fail_are_answered_fail_open_and_counted_once(node, broken, monkeypatch):
    table, errors = node.limiter.buckets, []
    apply = table.apply

    def fail(key, *arguments):
        if broken == "all" or key.startswith(b"broken"):
            raise ZeroDivisionError
        return apply(key, *arguments)

    monkeypatch.setattr(table, "apply", fail)
    monkeypatch.setattr(node.limiter, "_on_error", errors.append)
    names = [f"{'broken' if n % 3 else 'whole'}{n}" for n in range(60)]
    calls = [(CHECK, canonical(name, "user", "/a")) for name in names]
    async with line_to(node.address) as line:
        answers = await outcomes(line, calls)
    failed = [broken == "all" or name.startswith("broken") for name in names]
    for fails, (status, body) in zip(failed, answers, strict=True):
        answer = pb.RateLimitResponse.FromString(body[5:])
        assert (status, answer.allowed) == (OK, True)
        assert answer.reason == (pb.FAIL_OPEN_ERROR if fails else pb.WITHIN_LIMIT)
    assert node.fail_opens() == (0, sum(failed))
    assert len(errors) == sum(failed)
    stats = node.stats
    assert (stats.allowed_total, stats.blocked_total, sum(stats.latency_counts)) == (60, 0, 60)
    # The node's memory is the whole state, so a new bucket is not a miss.
    assert (stats.bucket_looked_total, stats.bucket_missed_total) == (60 - sum(failed), 0)
