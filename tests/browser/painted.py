"""The pages of a real node whose live numbers are made up, for pictures: the same in each run, and a quarter of an hour
that nobody has to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import cast
from unittest.mock import patch

from starlette.types import ASGIApp

from ratelimitd.counters import LATENCY_BOUNDS_S
from ratelimitd.model import US_PER_S
from ratelimitd.node.node import Node
from ratelimitd.observe.denials import DeniedEndpoint, DeniedIdentifier
from ratelimitd.observe.history import History, Sample, summed
from ratelimitd.observe.live import Listener, Live, NodeView, Overview
from ratelimitd.observe.node_status import HeldLimit, NodeStatus
from ratelimitd.testing import running_node
from ratelimitd.web.app import application
from ratelimitd.web.parts import Parts
from tests.system.process import START_S
from tests.unit.observe.test_live import status_of

RULES = Path(__file__).parents[2] / "examples/rules.yaml"
PEAK_PER_S = 4_200.0
KEPT_S = 900
AGO_S = [*range(86_400 - 60, KEPT_S, -60), *range(KEPT_S - 2, -1, -2)]
"""When samples were taken: each minute of a day, and every two seconds of the last quarter of an hour."""
OUTAGE = range(210, 222)
"""Samples in which the shared state was away."""

ENDPOINTS = ("/login", "/search", "/v1/exports/{id}", "/orders", "/checkout")
IDENTIFIERS = (("user", "mall…"), ("ip", "203.0.113.…"), ("api_key", "pk_l…"), ("user", "test…"))


class PaintedLive:
    """``count`` nodes, as :class:`ratelimitd.observe.live.Live` shows them.

    ``strained``: with the longest names and figures that there may be, and everything in trouble.
    """

    ended = False

    def __init__(self, count: int, *, strained: bool = False) -> None:
        self._strained = strained
        chance = random.Random(1)
        now_ms = int(time.time() * 1_000)
        self._samples = [
            [_sample(ago_s, now_ms, 1 / count, chance) for ago_s in AGO_S] for _ in range(count)
        ]
        self._history = History(summed(samples) for samples in zip(*self._samples, strict=True))
        self.history = self._history.samples

    def listen(self, listener: Listener) -> None:
        """There are no more steps, but one at once, which the page waits for."""
        self._step = asyncio.ensure_future(listener())

    def unlisten(self, _: Listener) -> None:
        """Nothing was kept."""

    async def refresh(self) -> None:
        """Nothing changes."""

    def overview(self, *, named: bool = False) -> Overview:
        """The last moment of the history."""
        assert not named
        total = summed([samples[-1] for samples in self._samples])
        nodes = [
            NodeView(_status(number, samples), is_this=number == 0, age_s=0.0, gone=False)
            for number, samples in enumerate(self._samples)
        ]
        if self._strained:
            return _strained(total, nodes)
        return Overview(
            total=total,
            nodes=nodes,
            stale_s=None,
            shares=True,
            endpoints=[
                DeniedEndpoint(endpoint, 9_000 / 2.2**number)
                for number, endpoint in enumerate(ENDPOINTS)
            ],
            identifiers=[
                DeniedIdentifier(str(number), kind, masked, 4_000 / 2.6**number)
                for number, (kind, masked) in enumerate(IDENTIFIERS)
            ],
            holds=(),
        )


@contextlib.contextmanager
def painted(count: int, *, strained: bool = False) -> Iterator[str]:
    """``host:port`` of a page that shows so many nodes, as :class:`PaintedLive` does."""
    addresses: list[str] = []
    ready, done = Event(), Event()

    def with_paint(parts: Parts) -> ASGIApp:
        live = cast("Live", PaintedLive(count, strained=strained))
        return application(replace(parts, live=live))

    async def run() -> None:
        with patch("ratelimitd.node.serving.application", with_paint):
            async with running_node(node_id="n1", rules_file=RULES) as node:
                await _paint_rules(node)
                addresses.append(node.http_address)
                ready.set()
                await asyncio.to_thread(done.wait)

    thread = Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(START_S)
    yield addresses[0]
    done.set()
    thread.join()


async def _paint_rules(node: Node) -> None:
    """An hour of traffic of all rules but the last, the second of which blocks much."""
    limiter, traffic, chance = node._limiter, node._rule_traffic, random.Random(2)
    assert limiter is not None
    assert limiter.book is not None
    now_us = int(time.time() * 1e6)
    rules = sorted(limiter.book.rules(), key=lambda rule: rule.endpoint, reverse=True)[1:]
    for number in range(361):
        at_us = now_us - (360 - number) * 10 * US_PER_S
        traffic._now_us = partial(int, at_us)
        for place, rule in enumerate(rules):
            wave = 1 + 0.5 * math.sin(number / 13 + place)
            counters = node.stats.rule_counters(rule.id)
            node.stats.used_rules.add(rule.id)
            counters[0] += round(10 * wave * 40 / (place + 1) * chance.uniform(0.9, 1.1))
            counters[1] += round(9 * wave * 20 * (place == 1) * chance.uniform(0.5, 1.5))
        await traffic.sample()


def _sample(ago_s: int, now_ms: int, share: float, chance: random.Random) -> Sample:
    """One of a load that comes in two waves, with a burst that is mostly denied."""
    number = (KEPT_S - 2 - ago_s) // 2
    wave = 0.62 + 0.22 * math.sin(number / 47) + 0.1 * math.sin(number / 11)
    asked = share * PEAK_PER_S * wave * chance.uniform(0.94, 1.06)
    burst = math.exp(-(((number - 330) / 22) ** 2))
    blocked = asked * (0.04 + 0.35 * burst) * chance.uniform(0.9, 1.1)
    away = number in OUTAGE
    checks = round(2 * asked)
    fast = 0.93 - 0.1 * burst - 0.15 * away
    shares = [
        fast * 0.7,
        fast * 0.3,
        *(((1 - fast) * part) for part in (0.55, 0.3, 0.1, 0.04, 0.01)),
    ]
    counts = [round(checks * part) for part in shares]
    counts += [0] * (len(LATENCY_BOUNDS_S) + 1 - len(counts))
    return Sample(
        at_ms=now_ms - 1_000 * ago_s,
        allowed_per_s=asked - blocked,
        blocked_per_s=blocked,
        fail_open_per_s=asked * 0.3 if away else 0.0,
        looked_per_s=asked,
        known_per_s=asked * (0.991 - 0.03 * burst),
        latency_counts=tuple(counts),
        buckets=round(share * (70_000 + 9_000 * math.sin(number / 300) + 6_000 * burst)),
        memory_bytes=round(136e6 + 4e6 * math.sin(number / 300)),
        loop_lag_s=0.0004,
    )


def _status(number: int, samples: Sequence[Sample]) -> NodeStatus:
    status = status_of(
        f"n{number + 1}",
        grpc_address=f"10.0.0.{number + 11}:9090",
        http_address=f"10.0.0.{number + 11}:8080",
        rules_revision=42,
        hit_ratio=0.987 + number / 1_000,
        average_latency_ms=0.021,
        sync_lag_s=0.05,
        clock_error_s=0.0001 * (number - 1),
        excess_ratio=0.002,
        excess_bound_ratio=0.06,
    )
    return replace(status, sample=samples[-1])


LONG = "/v1/" + "a-very-long-name-of-a-service/" * 8


def _strained(total: Sample, nodes: Sequence[NodeView]) -> Overview:
    def trouble(node: NodeView) -> NodeView:
        status = replace(
            node.status,
            node_id=f"{node.status.node_id}-ratelimitd-7f9c6d5b8-x2x9q",
            grpc_address="ratelimitd-7f9c6d5b8-x2x9q.ratelimitd.svc.cluster.local:9090",
            http_address="ratelimitd-7f9c6d5b8-x2x9q.ratelimitd.svc.cluster.local:8080",
            rules_revision=12_345_678,
            healthy=False,
            shared_state_connected=False,
            hit_ratio=0.1234,
            hit_ratio_met=False,
            breaker_state="half_open",
            retry_s=29.6,
            sync_lag_s=12_345.6,
            clock_error_s=-12_345.6,
            excess_ratio=12.345,
            sample=total._replace(allowed_per_s=1_234_567.8, fail_open_per_s=1_234_567.8),
        )
        gone = not node.is_this
        return node._replace(status=status, gone=gone, age_s=59.0 if gone else 0.0)

    return Overview(
        total=total,
        nodes=[trouble(node) for node in nodes],
        stale_s=None,
        shares=True,
        endpoints=[DeniedEndpoint(LONG, 1_234_567.0)],
        identifiers=[DeniedIdentifier("0", "api_key+session+user", "m" * 64, 1_234_567.0)],
        holds=[HeldLimit(LONG, "api_key+session+user", "n" * 32, 1_234_567, 1_234_567_890)],
        unmatched=[DeniedEndpoint(LONG, 1_234_567.0)],
    )
