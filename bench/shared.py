"""A clustered node, driven at its limiter, with a real Valkey on the other core.

Each figure has a baseline from the same run: an embedded node, or the bare link with the same script.
"""

import asyncio
import contextlib
import math
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import accumulate, count, cycle, islice
from pathlib import Path
from typing import Any, cast

from bench.decisions import embedded
from bench.report import Row, percentile
from bench.servers import SERVER_CORE, load_core
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import SystemClock
from ratelimitd.cluster.membership import SharedTime
from ratelimitd.cluster.node import Cluster
from ratelimitd.cluster.redis.codec import DECIDE, checks_request
from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.pubsub import Bus
from ratelimitd.cluster.redis.store import RedisStore
from ratelimitd.cluster.redis.topology import Topology
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.shared_state import STORE_TIME, StoreCheck
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Algorithm, Check, IdentifierType, Rule
from ratelimitd.node.jobs import tidy
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import parse_redis_url
from tests.servers import Valkey

SECRET = b"k" * 32
HOT = 1_000
COLD_PART = 20
"""One check in this many is of a new bucket."""
SELDOM = 200_000
"""Known buckets that are checked in random order, so each less than once a second."""
PEOPLE = 1_000_000
"""Identities; number n is checked in proportion to n to the power of -1 (Zipf)."""
NODES = 3
SEEN_CHECKS = 9_000_000
"""Earlier checks of each node: those of CACHE_TTL_S at the measured rate, 30,000 a second per node. They cover about
740,000 identities, and one check in thirty misses the node's cache."""
WARM_ITERATIONS = 1_000
"""Uncounted iterations before the measurement, to reach a steady state."""
OPEN_RATE, OPEN_S = 10_000, 5.0
"""Checks per second with random due times, regardless of answers, and the duration."""

CHECKS_PER_ITERATION = 100
ITERATIONS = 3_000
ROUNDS = 5
CALLERS = 200
STRICT_CALLS = 20_000
PATIENT_CALLS = 2_000
SETTLED_S = 3.0
INTERVAL_MS = 100

RULE = Rule(
    "0b6e4f6e-5f0e-4c51-9c5e-0d1f4f2a9b11",
    "/api/orders",
    IdentifierType.USER,
    limit=1_000_000_000,
    window_seconds=86_400,
    algorithm=Algorithm.TOKEN_BUCKET,
    revision=1,
)


def measure() -> list[Row]:
    """Measure all figures."""
    with tempfile.TemporaryDirectory() as directory, Valkey(Path(directory)) as valkey:
        if len(os.sched_getaffinity(0)) > 1:
            os.sched_setaffinity(valkey.pid, {SERVER_CORE})
        with load_core():
            return asyncio.run(_measure(valkey.url))


async def _measure(url: str) -> list[Row]:
    return [
        *await _cached(url),
        *await _seldom(url),
        *await _like_people(url),
        *await _on_time(url),
        *await _settled(url),
        *await _strict(url),
    ]


_numbers = count(1)


class _Counting(RedisStore):
    """Counts the store calls that settle or read buckets."""

    calls = 0

    def settle(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().settle(*args, **keywords)

    def read(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().read(*args, **keywords)

    def first_check(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().first_check(*args, **keywords)


class _Node:
    """A limiter on buckets in ``topology``, with the background jobs of a node."""

    def __init__(self, topology: Topology, *, strict: bool = False) -> None:
        self.store = _Counting(topology)
        self.topology = topology
        clock, stats, keys = SystemClock(), CheckStats(), BucketKeys(SECRET)
        self.keys = keys
        self.cluster = Cluster(
            self.store,
            Bus(topology),
            Settings.load(
                {},
                {
                    "REDIS_URL": "redis://127.0.0.1",
                    "SYNC_INTERVAL_MS": str(INTERVAL_MS),
                    "CONSISTENCY": "strict" if strict else "eventual",
                },
            ),
            incarnation=f"bench/{next(_numbers)}",
            stored_name=keys.stored,
            fingerprint=keys.fingerprint,
            clock=clock,
            shared_time=SharedTime(),
            stats=stats,
            feed=cast("RuleFeed", None),  # rules do not change
        )
        self.limiter = Limiter(
            shared=self.cluster.buckets, clock=clock, stats=stats, timestamps="bounded", keys=keys
        )
        self.limiter.replace_book(RuleBook.of([RULE], 1))

    async def sync(self) -> None:
        """Run the sync job until cancelled."""
        while True:
            await asyncio.sleep(self.cluster.step_s)
            self.cluster.sync_step()
            if not self.cluster._step:  # noqa: SLF001 -- once an interval is often enough
                self.cluster.watch()


@contextlib.asynccontextmanager
async def _node(url: str, *, strict: bool = False) -> AsyncIterator[_Node]:
    topology = open_topology(parse_redis_url(url), timeout_ms=1_000)
    await topology.start()
    node = _Node(topology, strict=strict)
    sync = asyncio.create_task(node.sync())
    try:
        yield node
    finally:
        sync.cancel()
        await asyncio.gather(sync, return_exceptions=True)
        await node.cluster.settle(5.0)
        await topology.close()


def _check(name: bytes) -> Check:
    return Check(name, RULE.identifier_type, RULE.endpoint)


def _mixed() -> Iterator[Check]:
    """Yield checks of the hot buckets in rotation, and occasionally one of a bucket of its own."""
    hot = _hot()
    for number in count():
        yield _check(b"cold-%033d" % number)
        yield from islice(hot, COLD_PART - 1)


def _in_no_order() -> Iterator[Check]:
    checks = [_check(b"seldom-%031d" % number) for number in range(SELDOM)]
    source = random.Random(SELDOM)
    while True:
        yield from source.sample(checks, SELDOM)


def _zipf() -> Iterator[Check]:
    weights = [*accumulate(1 / rank for rank in range(1, PEOPLE + 1))]
    source = random.Random(PEOPLE)
    while True:
        for rank in source.choices(range(PEOPLE), cum_weights=weights, k=10_000):
            yield _check(b"person-%031d" % rank)


def _hot() -> Iterator[Check]:
    return cycle([_check(b"hot-%034d" % number) for number in range(HOT)])


async def _cached(url: str) -> list[Row]:
    """Measure checks per second of CPU."""
    name = f"cached, {HOT:,} hot buckets"
    return [
        await _beside_embedded(name, url, _hot, known=HOT),
        await _beside_embedded(f"{name}, one check in {COLD_PART} cold", url, _mixed),
    ]


async def _seldom(url: str) -> list[Row]:
    """Measure the same with buckets that are all known, but idle again before their next check."""
    name = f"cached, {SELDOM:,} buckets, each asked less than once a second"
    return [await _beside_embedded(name, url, _in_no_order, known=SELDOM)]


async def _like_people(url: str) -> list[Row]:
    """Measure checks of a million identities, few of them frequent, each on a random one of several nodes."""
    name = f"cached, Zipf over {PEOPLE:,} identities, {NODES} nodes"
    known = WARM_ITERATIONS * CHECKS_PER_ITERATION
    return [await _beside_embedded(name, url, _zipf, known=known, nodes=NODES, warm_up=_people)]


def _people(source: random.Random) -> Iterator[Check]:
    """Yield one check of each identity that occurs in :data:`SEEN_CHECKS` checks, in random order."""
    often = SEEN_CHECKS / sum(1 / rank for rank in range(1, PEOPLE + 1))
    ranks = [rank for rank in range(PEOPLE) if source.random() > math.exp(-often / (rank + 1))]
    source.shuffle(ranks)
    return (_check(b"person-%031d" % rank) for rank in ranks)


async def _on_time(url: str) -> list[Row]:
    """Measure the latency of checks from their due time, which does not depend on answers."""
    source, waited_s = random.Random(OPEN_RATE), list[float]()
    checks = [*islice(_zipf(), int(OPEN_RATE * OPEN_S))]
    due_s = [*accumulate(source.expovariate(OPEN_RATE) for _ in checks)]

    async def answered(check: Check, due_s: float) -> None:
        await node.limiter.wait([check])
        waited_s.append(time.perf_counter() - due_s)

    async with _node(url) as node, asyncio.TaskGroup() as waiting:
        tidy()
        started_s, done = time.perf_counter(), 0
        while done < len(checks):
            await asyncio.sleep(0)
            until_s = time.perf_counter() - started_s
            while done < len(checks) and due_s[done] <= until_s:
                if node.limiter.check(checks[done]) is None:
                    waiting.create_task(answered(checks[done], started_s + due_s[done]))
                else:
                    waited_s.append(time.perf_counter() - started_s - due_s[done])
                done += 1
    name = f"Zipf, {OPEN_RATE:,} checks/s at random:"
    return [
        Row(f"{name} p{share * 100:g}", percentile(waited_s, share) * 1e6, "µs")
        for share in (0.5, 0.99, 0.999)
    ]


async def _beside_embedded(
    name: str,
    url: str,
    load: Callable[[], Iterator[Check]],
    *,
    known: int = 0,
    nodes: int = 1,
    warm_up: Callable[[random.Random], Iterator[Check]] = lambda _: iter(()),
) -> Row:
    """Return both rates, the embedded one from before and after; excludes the first ``known`` checks of the load.

    Also excludes the checks in ``warm_up``, which each limiter answers before.
    """
    alone, checks, source = [embedded(RULE)], load(), random.Random(nodes)
    await _warm_up(alone, warm_up(source))
    rates = [await _rate(alone, checks, known)]
    async with contextlib.AsyncExitStack() as stack:
        started = [await stack.enter_async_context(_node(url)) for _ in range(nodes)]
        for node in started:
            await _warm_up([node.limiter], warm_up(source))
        shared = await _rate([node.limiter for node in started], load(), known)
    rates.append(await _rate(alone, checks, 0))
    return Row(name, shared, "checks/s", "embedded", sum(rates) / len(rates))


async def _warm_up(limiters: Sequence[Limiter], checks: Iterator[Check]) -> None:
    while iteration := _iterations(checks, 1)[0]:
        await _answer(limiters, [iteration])


async def _rate(limiters: Sequence[Limiter], checks: Iterator[Check], known: int) -> float:
    """Return checks per second of CPU, including background work: the run is long enough for it to recur."""
    await _answer(limiters, _iterations(checks, known // CHECKS_PER_ITERATION))
    iterations = _iterations(checks, ITERATIONS)
    tidy()  # as a node does before it serves
    started_s = time.process_time()
    await _answer(limiters, iterations)
    return ITERATIONS * CHECKS_PER_ITERATION / (time.process_time() - started_s)


def _iterations(checks: Iterator[Check], count: int) -> list[list[Check]]:
    """Return the checks of ``count`` event-loop iterations."""
    return [[*islice(checks, CHECKS_PER_ITERATION)] for _ in range(count)]


async def _answer(limiters: Sequence[Limiter], iterations: list[list[Check]]) -> None:
    """Answer as one loop does, pending checks concurrently with later ones; each iteration uses a random limiter."""
    waiting: set[asyncio.Task[Any]] = set()
    source = random.Random(len(iterations))
    for checks in iterations:
        limiter = source.choice(limiters)
        unanswered = [check for check in checks if limiter.check(check) is None]
        if unanswered:
            task = asyncio.create_task(limiter.wait(unanswered))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.sleep(0)
    if waiting:
        await asyncio.gather(*waiting)


async def _settled(url: str) -> list[Row]:
    """Measure store calls per active bucket and second: they do not depend on the rate of checks."""
    rows = []
    for buckets, checks_per_s in ((100, 1_000), (100, 20_000), (1_000, 20_000)):
        async with _node(url) as node:
            started_s = time.perf_counter()
            done = 0
            while (elapsed_s := time.perf_counter() - started_s) < SETTLED_S:
                while done < elapsed_s * checks_per_s:
                    check = _check(b"few-%034d" % (done % buckets))
                    if node.limiter.check(check) is None:
                        await node.limiter.wait([check])
                    done += 1
                await asyncio.sleep(0.001)
            calls = node.store.calls / SETTLED_S / buckets
        name = f"store calls per bucket, {buckets:,} buckets, {checks_per_s:,} checks/s"
        interval = 1_000 / INTERVAL_MS
        rows.append(Row(name, calls, "1/s", "a call an interval for each", interval))
    return rows


async def _strict(url: str) -> list[Row]:
    async with _node(url, strict=True) as node:
        rates = {"limiter": 0.0, "pipe": 0.0}
        waits: dict[str, list[float]] = {"limiter": [], "pipe": []}
        ways = {"limiter": _by_limiter(node), "pipe": _by_pipe(node)}
        for _ in range(ROUNDS):
            for name, ask in ways.items():
                rates[name] = max(rates[name], await _rate_of(ask))
        for name, ask in ways.items():
            for number in range(PATIENT_CALLS):
                started_s = time.perf_counter()
                await ask(number % HOT)
                waits[name].append(time.perf_counter() - started_s)
    patient_us = {name: percentile(found, 0.5) * 1e6 for name, found in waits.items()}
    return [
        Row(
            f"strict, {CALLERS} callers",
            rates["limiter"],
            "checks/s",
            "the bare pipe, same script",
            rates["pipe"],
        ),
        Row(
            "strict, one caller, p50",
            patient_us["limiter"],
            "µs",
            "the bare pipe",
            patient_us["pipe"],
        ),
    ]


def _by_limiter(node: _Node) -> Any:
    async def ask(number: int) -> None:
        check = _check(b"hot-%034d" % number)
        [decision] = await node.limiter.wait([check])
        assert decision.allowed

    return ask


def _by_pipe(node: _Node) -> Any:
    """Measure one script call over the same link, without parsing its answer."""
    loop = asyncio.get_running_loop()
    scope = node.keys.scope(RULE, RULE.endpoint)
    names = [node.keys.stored(b"hot-%034d" % number + scope) for number in range(HOT)]
    requests = [
        checks_request([StoreCheck(name, RULE, STORE_TIME, 1, peek=False)]) for name in names
    ]

    async def ask(number: int) -> None:
        answer: asyncio.Future[Any] = loop.create_future()
        keys, arguments = requests[number]
        node.topology.of_tag(names[number][0]).run(DECIDE, keys, arguments, answer.set_result)
        assert isinstance(await answer, bytes)

    return ask


async def _rate_of(ask: Any) -> float:
    left = iter(range(STRICT_CALLS))

    async def caller() -> None:
        for number in left:
            await ask(number % HOT)

    started_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return STRICT_CALLS / (time.perf_counter() - started_s)
