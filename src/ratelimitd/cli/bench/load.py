"""Checks sent to a node: as fast as it answers so many callers (a closed loop), or when they are due (an open one).

In an open loop a check's latency counts from when it was due, not from when it could be sent: a node that stalls is not
spared the checks that would have come meanwhile, and what that does to them is in the percentiles (no coordinated
omission). How late checks were sent is told as well.
"""

from __future__ import annotations

import asyncio
import enum
import math
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, cycle
from random import Random
from typing import Final, NamedTuple, assert_never

import grpc

from ratelimitd_client import Tls
from ratelimitd_client.transport.grpc_channel import CHANNEL_OPTIONS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs


class Distribution(enum.StrEnum):
    """How checks are spread over keys."""

    IN_TURN = "in-turn"
    UNIFORM = "uniform"
    ZIPF = "zipf"
    HOT = "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """So many keys, numbered from 0.

    ``exponent`` is of ``ZIPF``: key n is asked for in proportion to 1 / (n + 1) ** exponent. ``hot_share`` is of
    ``HOT``: key 0 has that share of all checks, and the others have the rest alike.
    """

    count: int
    distribution: Distribution = Distribution.IN_TURN
    exponent: float = 1.0
    hot_share: float = 0.5
    seed: int = 1

    def drawn(self) -> Iterator[int]:
        """Yield keys without end. Holds 8 bytes for each key where the distribution is ``ZIPF``, and nothing else."""
        chance = Random(f"keys {self.seed}")  # noqa: S311 -- load, no secret
        match self.distribution:
            case Distribution.IN_TURN:
                return cycle(range(self.count))
            case Distribution.UNIFORM:
                return _uniform(chance, self.count)
            case Distribution.ZIPF:
                return _zipf(chance, self.count, self.exponent)
            case Distribution.HOT:
                return _hot(chance, self.count, self.hot_share)
        assert_never(self.distribution)


def _uniform(chance: Random, count: int) -> Iterator[int]:
    while True:
        yield chance.randrange(count)


def _zipf(chance: Random, count: int, exponent: float) -> Iterator[int]:
    up_to = array("d", accumulate((rank + 1) ** -exponent for rank in range(count)))
    total = up_to[-1]
    while True:
        # random() is below 1, but the product may be rounded up to the total.
        yield min(bisect(up_to, chance.random() * total), count - 1)


def _hot(chance: Random, count: int, hot_share: float) -> Iterator[int]:
    while True:
        is_hot = count == 1 or chance.random() < hot_share
        yield 0 if is_hot else chance.randrange(1, count)


class Arrival(enum.StrEnum):
    """How checks are spread over time."""

    CONSTANT = "constant"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """``rate`` checks a second on average."""

    rate: float
    arrival: Arrival = Arrival.CONSTANT
    seed: int = 1

    def due_s(self) -> Iterator[float]:
        """Yield when each check is due, in seconds from the beginning, without end."""
        if self.arrival is Arrival.CONSTANT:
            return (number / self.rate for number in count())
        return _poisson(Random(f"arrivals {self.seed}"), self.rate)  # noqa: S311 -- load, no secret


def _poisson(chance: Random, rate: float) -> Iterator[float]:
    due_s = 0.0
    while True:
        due_s += chance.expovariate(rate)
        yield due_s


DIGITS: Final = 6
"""Binary digits of a latency that are kept: it is told too high by 1/32 at most."""

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)

US_PER_MS: Final = 1_000

_STEPS: Final = (1, 2, 5)


class Bar(NamedTuple):
    """Answers that took up to so long, and longer than the bar before."""

    up_to_us: int
    checks: int


class Point(NamedTuple):
    """The share of answers that took up to so long."""

    share: float
    up_to_us: int


class Latencies:
    """Latencies in µs."""

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self.min_us = 0
        self._sum_us = 0
        self._counts: Counter[int] = Counter()
        """By the highest latency of the bucket."""

    def add(self, latency_us: int) -> None:
        """One answer came after so long."""
        shift = max(0, latency_us.bit_length() - DIGITS)
        self._counts[((latency_us >> shift) + 1 << shift) - 1] += 1
        self.min_us = min(self.min_us, latency_us) if self.count else latency_us
        self.max_us = max(self.max_us, latency_us)
        self._sum_us += latency_us
        self.count += 1

    @property
    def mean_us(self) -> float:
        """The mean, 0 without answers."""
        return self._sum_us / self.count if self.count else 0.0

    def quantile_us(self, share: float) -> int:
        """What ``share`` of the answers took at most, 0 without answers."""
        wanted, seen = math.ceil(share * self.count), 0
        for up_to_us, number in sorted(self._counts.items()):
            seen += number
            if seen >= wanted:
                return min(up_to_us, self.max_us)
        return 0

    def curve(self) -> list[Point]:
        """All buckets with something in them, from the shortest latencies to the longest."""
        points, seen = [], 0
        for up_to_us, number in sorted(self._counts.items()):
            seen += number
            points.append(Point(seen / self.count, min(up_to_us, self.max_us)))
        return points

    def bars(self) -> list[Bar]:
        """Coarse buckets of 1, 2, 5, 10 … µs, from the first that is not empty to the last."""
        counts = Counter[int]()
        for up_to_us, number in self._counts.items():
            counts[next(step for step in _steps() if step >= up_to_us)] += number
        if not counts:
            return []
        within = (step for step in _steps() if step >= min(counts))
        bars = []
        for step in within:
            bars.append(Bar(step, counts[step]))
            if step >= max(counts):
                break
        return bars


def _steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (step * scale for step in _STEPS)
        scale *= 10


SLOTS: Final = 100
"""Of the time that was planned; as many again at most for answers that come after its end."""


class Slot(NamedTuple):
    """What came between two moments, in seconds from the beginning."""

    from_s: float
    to_s: float
    answers: int
    errors: int
    max_us: int
    """The longest latency of an answer, in µs."""

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answers / (self.to_s - self.from_s)


class Timeline:
    """Answers over ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._width_s = seconds / SLOTS
        self._answers = [0] * (2 * SLOTS)
        self._errors = [0] * (2 * SLOTS)
        self._max_us = [0] * (2 * SLOTS)

    def answered(self, at_s: float, latency_us: int) -> None:
        """An answer came."""
        slot = self._slot(at_s)
        self._answers[slot] += 1
        self._max_us[slot] = max(self._max_us[slot], latency_us)

    def failed(self, at_s: float) -> None:
        """A call ended without one."""
        self._errors[self._slot(at_s)] += 1

    def slots(self, ended_s: float) -> list[Slot]:
        """All slots up to the end, also empty ones. What remains behind the last whole slot is part of that."""
        last = max(0, self._slot(ended_s) - 1)
        slots = []
        for number in range(last + 1):
            until = None if number == last else number + 1
            from_s = number * self._width_s
            slots.append(
                Slot(
                    from_s,
                    ended_s if until is None else until * self._width_s,
                    sum(self._answers[number:until]),
                    sum(self._errors[number:until]),
                    max(self._max_us[number:until]),
                )
            )
        return slots if ended_s else []

    def _slot(self, at_s: float) -> int:
        return min(int(at_s / self._width_s), 2 * SLOTS - 1)


FAIL_OPEN: Final = frozenset({pb.FAIL_OPEN_BREAKER, pb.FAIL_OPEN_ERROR})

US_PER_S: Final = 1_000_000

TIMER_S: Final = 0.002
"""The event loop's timers are late by a millisecond and more, which is a node's whole latency: so long before a check
is due, the loop goes round without sleeping."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send for ``seconds``. Without ``arrivals``: as fast as ``concurrency`` callers get their answers."""

    check_of: Callable[[int], pb.RateLimitRequest]
    """The check of a key."""
    keys: Keys
    seconds: float
    concurrency: int
    """Most checks that are under way at a time."""
    arrivals: Arrivals | None
    timeout_s: float


@dataclass(slots=True)
class Result:
    """What came back, and how fast."""

    timeline: Timeline
    latencies: Latencies = field(default_factory=Latencies)
    """From when a check was due in an open loop, from when it was sent in a closed one."""
    delays: Latencies = field(default_factory=Latencies)
    """In an open loop: from when a check was due until it was sent. They are in the latencies."""
    waited: int = 0
    """In an open loop: checks that were sent late because as many as may be were under way."""
    unsent: int = 0
    """In an open loop: about how many were due, and never sent: it was over a whole timeout ago."""
    seconds: float = 0.0
    allowed: int = 0
    denied: int = 0
    fail_open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that ended with another status than OK, by its name; their latencies are not counted."""


def channels(target: str, tls: Tls | None, count: int) -> list[grpc.aio.Channel]:
    """So many connections of their own."""
    # Without a pool of its own for each, gRPC would share one connection among channels that are alike.
    options = [*CHANNEL_OPTIONS.items(), ("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return [grpc.aio.insecure_channel(target, options) for _ in range(count)]
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return [grpc.aio.secure_channel(target, credentials, options) for _ in range(count)]


async def run(
    load: Load,
    open_channels: Sequence[grpc.aio.Channel],
    metadata: Metadata,
    *,
    stop: asyncio.Event,
    time_s: Callable[[], float],
) -> Result:
    """Send the load over the channels, until its time is over or ``stop`` is set.

    Raises:
        grpc.RpcError: the first check of a channel, which also connects it, is not answered.
    """
    sender = _Sender(load, open_channels, metadata, stop=stop, time_s=time_s)
    await sender.connect()
    await sender.send()
    return sender.result


class _Sender:
    """Sends a load once."""

    def __init__(
        self,
        load: Load,
        open_channels: Sequence[grpc.aio.Channel],
        metadata: Metadata,
        *,
        stop: asyncio.Event,
        time_s: Callable[[], float],
    ) -> None:
        self.result = Result(Timeline(load.seconds))
        self._load = load
        self._asks = [stubs.RateLimiterStub(channel).CheckRateLimit for channel in open_channels]
        self._metadata = metadata
        self._stop = stop
        self._time_s = time_s
        self._keys = load.keys.drawn()
        self._began_s = 0.0
        self._end_s = 0.0

    async def connect(self) -> None:
        peek = self._load.check_of(0)
        peek.peek = True
        for ask in self._asks:
            await ask(peek, timeout=self._load.timeout_s, metadata=self._metadata)

    async def send(self) -> None:
        self._began_s = self._time_s()
        self._end_s = self._began_s + self._load.seconds
        async with asyncio.TaskGroup() as under_way:
            if self._load.arrivals is None:
                for caller in range(self._load.concurrency):
                    under_way.create_task(self._call_again_and_again(caller))
            else:
                await self._send_when_due(self._load.arrivals, under_way)
        self.result.seconds = self._time_s() - self._began_s

    async def _call_again_and_again(self, caller: int) -> None:
        while not self._stop.is_set() and (now_s := self._time_s()) < self._end_s:
            await self._ask(caller, now_s)

    async def _send_when_due(self, arrivals: Arrivals, under_way: asyncio.TaskGroup) -> None:
        free = asyncio.Semaphore(self._load.concurrency)

        async def send(number: int, due_s: float) -> None:
            self.result.delays.add(max(0, round((self._time_s() - due_s) * US_PER_S)))
            await self._ask(number, due_s)
            free.release()

        is_behind = False
        for number, offset_s in enumerate(arrivals.due_s()):
            due_s = self._began_s + offset_s
            if due_s >= self._end_s:
                return
            is_behind |= free.locked()
            await free.acquire()
            # Late ones after one that had to wait are late because of it, until one is in time again.
            is_behind &= self._time_s() > due_s
            self.result.waited += is_behind
            await self._wait_until(due_s)
            if self._stop.is_set():
                return
            if self._time_s() > self._end_s + self._load.timeout_s:
                self.result.unsent = max(1, round((self._end_s - due_s) * arrivals.rate))
                return
            under_way.create_task(send(number, due_s))

    async def _wait_until(self, due_s: float) -> None:
        """Return when it is time, or at once when the load is stopped; others have their turn in any case."""
        await asyncio.sleep(0)
        while (early_s := due_s - self._time_s()) > 0 and not self._stop.is_set():
            if early_s <= TIMER_S:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(early_s - TIMER_S):
                    await self._stop.wait()
            except TimeoutError:
                continue

    async def _ask(self, caller: int, due_s: float) -> None:
        result = self.result
        check = self._load.check_of(next(self._keys))
        ask = self._asks[caller % len(self._asks)]
        try:
            answer = await ask(check, timeout=self._load.timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            result.errors[error.code().name] += 1
            result.timeline.failed(self._time_s() - self._began_s)
            return
        now_s = self._time_s()
        latency_us = max(0, round((now_s - due_s) * US_PER_S))
        result.latencies.add(latency_us)
        result.timeline.answered(now_s - self._began_s, latency_us)
        _count(answer, result)


def _count(answer: pb.RateLimitResponse, result: Result) -> None:
    if answer.allowed:
        result.allowed += 1
    else:
        result.denied += 1
    if answer.reason in FAIL_OPEN:
        result.fail_open += 1
