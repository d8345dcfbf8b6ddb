"""Sends checks to a node: as fast as a number of callers get answers (closed loop), or at set times (open loop).

In an open loop the latency of a check counts from its due time, not from when it was sent, so the percentiles include
checks that a stalled node delays (no coordinated omission). Delays of sending are reported as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import grpc

from ratelimitd.cli.bench.workload import Arrivals, Keys, Latencies, Timeline
from ratelimitd.cli.check import NOT_CHECKED
from ratelimitd.model import US_PER_S
from ratelimitd_client import Tls, open_async_channel
from ratelimitd_client.transport.grpc_channel import Metadata
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

TIMER_S: Final = 0.002
"""Timers of the event loop are late by a millisecond or more, a node's whole latency: this long before a check is due,
the loop spins without sleeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load to send for ``seconds``. Without ``arrivals``: ``concurrency`` callers, as fast as they get answers."""

    check_of: Callable[[int], pb.RateLimitRequest]
    """Returns the check of a key."""
    keys: Keys
    seconds: float
    concurrency: int
    """Maximum number of checks in flight."""
    arrivals: Arrivals | None
    timeout_s: float


@dataclass(slots=True)
class Result:
    """The answers and their timing."""

    timeline: Timeline
    latencies: Latencies = field(default_factory=Latencies)
    """Measured from a check's due time in an open loop, from its sending in a closed one."""
    delays: Latencies = field(default_factory=Latencies)
    """In an open loop: time from due to sent, which the latencies include."""
    waited: int = 0
    """In an open loop: checks sent late because ``concurrency`` checks were in flight."""
    unsent: int = 0
    """In an open loop: approximate number of checks never sent, because the time had ended a whole timeout ago."""
    seconds: float = 0.0
    allowed: int = 0
    denied: int = 0
    fail_open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Failed calls by status name; their latencies are not counted."""


def channels(target: str, tls: Tls | None, count: int) -> list[grpc.aio.Channel]:
    """Open separate connections."""
    # Without a local subchannel pool, gRPC would share one connection among identical channels.
    options = {"grpc.use_local_subchannel_pool": 1}
    return [open_async_channel(target, tls=tls, options=options) for _ in range(count)]


class Sender:
    """Sends a load once over the channels, until its time is over or ``stop`` is set."""

    def __init__(
        self,
        load: Load,
        open_channels: Sequence[grpc.aio.Channel],
        metadata: Metadata,
        *,
        stop: asyncio.Event,
        time_s: Callable[[], float],
    ) -> None:
        self._result = Result(Timeline(load.seconds))
        self._load = load
        self._asks = [stubs.RateLimiterStub(channel).CheckRateLimit for channel in open_channels]
        self._metadata = metadata
        self._stop = stop
        self._time_s = time_s
        self._keys = load.keys.drawn()
        self._began_s = 0.0
        self._end_s = 0.0

    async def run(self) -> Result:
        """Connect, send the load, and return what came back.

        Raises:
            grpc.RpcError: the first check of a channel, which also connects it, is not answered.
        """
        peek = self._load.check_of(0)
        peek.peek = True
        for ask in self._asks:
            await ask(peek, timeout=self._load.timeout_s, metadata=self._metadata)
        self._began_s = self._time_s()
        self._end_s = self._began_s + self._load.seconds
        async with asyncio.TaskGroup() as under_way:
            if self._load.arrivals is None:
                for caller in range(self._load.concurrency):
                    under_way.create_task(self._call_repeatedly(caller))
            else:
                await self._send_when_due(self._load.arrivals, under_way)
        self._result.seconds = self._time_s() - self._began_s
        return self._result

    async def _call_repeatedly(self, caller: int) -> None:
        while not self._stop.is_set() and (now_s := self._time_s()) < self._end_s:
            await self._ask(caller, now_s)

    async def _send_when_due(self, arrivals: Arrivals, under_way: asyncio.TaskGroup) -> None:
        free = asyncio.Semaphore(self._load.concurrency)

        async def send(number: int, due_s: float) -> None:
            self._result.delays.add(max(0, round((self._time_s() - due_s) * US_PER_S)))
            await self._ask(number, due_s)
            free.release()

        is_behind = False
        for number, offset_s in enumerate(arrivals.due_s()):
            due_s = self._began_s + offset_s
            if due_s >= self._end_s:
                return
            is_behind |= free.locked()
            await free.acquire()
            # Late checks after one that had to wait count as delayed by it, until one is on time again.
            is_behind &= self._time_s() > due_s
            self._result.waited += is_behind
            await self._wait_until(due_s)
            if self._stop.is_set():
                return
            if self._time_s() > self._end_s + self._load.timeout_s:
                self._result.unsent = max(1, round((self._end_s - due_s) * arrivals.rate))
                return
            under_way.create_task(send(number, due_s))

    async def _wait_until(self, due_s: float) -> None:
        """Return at the due time, or at once when the load is stopped; always yields to other tasks."""
        await asyncio.sleep(0)
        while (early_s := due_s - self._time_s()) > 0 and not self._stop.is_set():
            if early_s <= TIMER_S:
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(early_s - TIMER_S):
                    await self._stop.wait()

    async def _ask(self, caller: int, due_s: float) -> None:
        result = self._result
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
        result.allowed += answer.allowed
        result.denied += not answer.allowed
        result.fail_open += answer.reason in NOT_CHECKED
