"""A node of a cluster at the limiter's own seam, with a real Valkey on the other core.

Each figure beside its baseline in the same run: the node of its own memory, or the bare pipe with the same script.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from bench.report import Row, percentile
from bench.servers import SERVER_CORE, load_core
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SystemClock
from ratelimitd.cluster.cluster import Cluster, Options
from ratelimitd.cluster.shared_time import SharedTime
from ratelimitd.ledger.shared_state import STORE_TIME, StoreCheck
from ratelimitd.limiter import Limiter
from ratelimitd.model import Algorithm, Check, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.sharedstate.bus import Bus
from ratelimitd.sharedstate.encoding import DECIDE, checks_request
from ratelimitd.sharedstate.opening import open_shards
from ratelimitd.sharedstate.shards import Shards
from ratelimitd.sharedstate.store import RedisStore
from ratelimitd.sharedstate.url import parse_redis_url
from ratelimitd.stats import CheckStats
from tests.servers import Valkey

SECRET = b"k" * 32
HOT = 1_000
COLD_PART = 20
"""One check in so many is of a bucket that nobody has asked for."""

CHECKS_PER_TURN = 100
TURNS = 200
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
    1_000_000_000,
    86_400,
    Algorithm.TOKEN_BUCKET,
    revision=1,
)


def measure() -> list[Row]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory() as directory, Valkey(Path(directory)) as valkey:
        if len(os.sched_getaffinity(0)) > 1:
            os.sched_setaffinity(valkey.pid, {SERVER_CORE})
        with load_core():
            return asyncio.run(_measure(valkey.url))


async def _measure(url: str) -> list[Row]:
    return [*await _cached(url), *await _settled(url), *await _strict(url)]


class _Counting(RedisStore):
    """Counts the calls at the store that settle or read buckets."""

    calls = 0

    def settle(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().settle(*args, **keywords)

    def read(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().read(*args, **keywords)

    def meet(self, *args: Any, **keywords: Any) -> None:
        self.calls += 1
        super().meet(*args, **keywords)


class _Node:
    """A limiter on buckets in ``shards``, with the jobs of a node."""

    def __init__(self, shards: Shards, *, strict: bool = False) -> None:
        self.store = _Counting(shards)
        self.shards = shards
        clock, stats, keys = SystemClock(), CheckStats(), BucketKeys(SECRET)
        self.keys = keys
        self.cluster = Cluster(
            self.store,
            Bus(shards, on_message=lambda _payload: None, on_gap=lambda: None),
            Options(INTERVAL_MS, 1_000_000, 300, 5, 30, strict, False, False),  # noqa: FBT003 -- a table
            incarnation="bench/1",
            stored_name=keys.stored,
            fingerprint=keys.fingerprint,
            clock=clock,
            shared_time=SharedTime(),
            stats=stats,
            report=print,
            rules_changed=lambda: None,
        )
        self.limiter = Limiter(
            shared=self.cluster.buckets, clock=clock, stats=stats, timestamps="bounded", keys=keys
        )
        self.limiter.replace_book(RuleBook.of([RULE], 1))

    async def sync(self) -> None:
        """The sync job, until it is cancelled."""
        while True:
            await asyncio.sleep(self.cluster.step_s)
            self.cluster.sync_step()
            if not self.cluster._step:  # noqa: SLF001 -- once an interval is often enough
                self.cluster.watch()


@contextlib.asynccontextmanager
async def _node(url: str, *, strict: bool = False) -> AsyncIterator[_Node]:
    shards = open_shards(parse_redis_url(url), timeout_ms=1_000)
    await shards.start()
    node = _Node(shards, strict=strict)
    sync = asyncio.create_task(node.sync())
    try:
        yield node
    finally:
        sync.cancel()
        await asyncio.gather(sync, return_exceptions=True)
        await node.cluster.settle(5.0)
        await shards.close()


def _embedded() -> Limiter:
    stats = CheckStats()
    limiter = Limiter(
        buckets=BucketTable(1_000_000, stats),
        clock=SystemClock(),
        stats=stats,
        timestamps="bounded",
        keys=BucketKeys(SECRET),
    )
    limiter.replace_book(RuleBook.of([RULE], 1))
    return limiter


def _checks(cold: Iterator[int]) -> list[Check]:
    """What comes in one turn of the loop."""
    return [
        Check(
            b"cold-%033d" % next(cold) if index % COLD_PART == 0 else b"hot-%034d" % (index % HOT),
            RULE.identifier_type,
            RULE.endpoint,
        )
        for index in range(CHECKS_PER_TURN)
    ]


async def _cached(url: str) -> list[Row]:
    """Checks per second of CPU, as one loop answers them: what waits is answered beside the next ones."""
    cold = iter(range(10**9))
    embedded = _embedded()
    async with _node(url) as node:
        rates: dict[Limiter, float] = {embedded: 0.0, node.limiter: 0.0}
        for _ in range(ROUNDS):
            for limiter, best in rates.items():
                turns = [_checks(cold) for _ in range(TURNS)]
                rates[limiter] = max(best, await _rate(limiter, turns))
        return [
            Row(
                f"cached, {HOT:,} hot buckets, one check in {COLD_PART} cold",
                rates[node.limiter],
                "checks/s",
                "embedded",
                rates[embedded],
            )
        ]


async def _rate(limiter: Limiter, turns: list[list[Check]]) -> float:
    waiting: set[asyncio.Task[Any]] = set()
    started_s = time.process_time()
    for checks in turns:
        unanswered = [check for check in checks if limiter.check(check) is None]
        if unanswered:
            task = asyncio.create_task(limiter.wait(unanswered))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.sleep(0)
    if waiting:
        await asyncio.gather(*waiting)
    return len(turns) * CHECKS_PER_TURN / (time.process_time() - started_s)


async def _settled(url: str) -> list[Row]:
    """Calls at the store for each active bucket and second: they do not follow the rate of checks."""
    rows = []
    for buckets, checks_per_s in ((100, 1_000), (100, 20_000), (1_000, 20_000)):
        async with _node(url) as node:
            started_s = time.perf_counter()
            done = 0
            while (elapsed_s := time.perf_counter() - started_s) < SETTLED_S:
                while done < elapsed_s * checks_per_s:
                    name = b"few-%034d" % (done % buckets)
                    check = Check(name, RULE.identifier_type, RULE.endpoint)
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
        check = Check(b"hot-%034d" % number, RULE.identifier_type, RULE.endpoint)
        [decision] = await node.limiter.wait([check])
        assert decision.allowed

    return ask


def _by_pipe(node: _Node) -> Any:
    """One script call over the same link, its answer not even read."""
    loop = asyncio.get_running_loop()
    scope = node.keys.scope(RULE, RULE.endpoint)
    names = [node.keys.stored(b"hot-%034d" % number + scope) for number in range(HOT)]
    requests = [
        checks_request([StoreCheck(name, RULE, STORE_TIME, 1, peek=False)]) for name in names
    ]

    async def ask(number: int) -> None:
        answer: asyncio.Future[Any] = loop.create_future()
        keys, arguments = requests[number]
        node.shards.of_tag(names[number][0]).run(DECIDE, keys, arguments, answer.set_result)
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
