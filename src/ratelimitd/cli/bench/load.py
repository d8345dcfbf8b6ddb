"""Checks sent to a node: as fast as it answers so many callers, or at a rate of one's own.

At a rate a check's latency counts from when it was due, not from when it could be sent: a node that stalls is not
spared the checks that would have come meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from ratelimitd.cli.bench.latencies import Latencies
from ratelimitd_client.channel import CHANNEL_OPTIONS, Tls
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

FAIL_OPEN: Final = frozenset({pb.FAIL_OPEN_BREAKER, pb.FAIL_OPEN_ERROR})

US_PER_S: Final = 1_000_000

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Result:
    """What came back, and how fast."""

    latencies: Latencies = field(default_factory=Latencies)
    seconds: float = 0.0
    allowed: int = 0
    denied: int = 0
    fail_open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that ended with another status than OK, by its name; their latencies are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. ``rate`` in checks a second, ``None``: as fast as ``concurrency`` callers get their answers."""

    checks: Sequence[pb.RateLimitRequest]
    """Sent in turn, again and again."""
    seconds: float
    concurrency: int
    rate: float | None
    timeout_s: float


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
    asked = [stubs.RateLimiterStub(channel).CheckRateLimit for channel in open_channels]
    peek = pb.RateLimitRequest()
    peek.CopyFrom(load.checks[0])
    peek.peek = True
    for ask in asked:
        await ask(peek, timeout=load.timeout_s, metadata=metadata)
    result = Result()
    numbers = itertools.count()
    began_s = time_s()
    end_s = began_s + load.seconds

    async def send(caller: int) -> None:
        ask = asked[caller % len(asked)]
        while not stop.is_set():
            number = next(numbers)
            due_s = time_s() if load.rate is None else began_s + number / load.rate
            if due_s >= end_s:
                return
            if (early_s := due_s - time_s()) > 0 and await _is_set_within(stop, early_s):
                return
            check = load.checks[number % len(load.checks)]
            try:
                answer = await ask(check, timeout=load.timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                result.errors[error.code().name] += 1
                continue
            result.latencies.add(max(0, round((time_s() - due_s) * US_PER_S)))
            _count(answer, result)

    await asyncio.gather(*(send(caller) for caller in range(load.concurrency)))
    result.seconds = time_s() - began_s
    return result


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _count(answer: pb.RateLimitResponse, result: Result) -> None:
    if answer.allowed:
        result.allowed += 1
    else:
        result.denied += 1
    if answer.reason in FAIL_OPEN:
        result.fail_open += 1
