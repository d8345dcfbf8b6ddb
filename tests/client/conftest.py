"""What the tests of the clients ask: a real node in this process, on an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import pytest

from ratelimitd import testing
from ratelimitd.node.node import Node
from ratelimitd_client import AsyncRateLimiterClient, NodeClient
from ratelimitd_client.async_sessions import Transport
from ratelimiter.v1 import ratelimiter_pb2 as pb

NOON_US = 1_700_006_400_000_000


@contextmanager
def node_in_a_thread(**settings: Any) -> Iterator[Node]:
    """A node whose loop runs beside the test, so that a client which blocks can be tested."""
    started: Future[Node] = Future()
    stopping: list[Any] = []

    async def serve() -> None:
        stop = asyncio.Event()
        stopping.append((asyncio.get_running_loop(), stop))
        async with testing.running_node(log_level="error", **settings) as node:
            started.set_result(node)
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield started.result()
    finally:
        loop, stop = stopping[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(scope="module")
def real_node() -> Iterator[Node]:
    """A node of a module, whose time stands still: five a minute for users on /five, none elsewhere."""
    with node_in_a_thread(clock=testing.ManualClock(NOON_US)) as node:
        with NodeClient(node.grpc_address, timeout_s=30) as client:
            client.create_rule(
                pb.RateLimit(
                    endpoint="/five",
                    identifier_type="user",
                    limit=5,
                    window_seconds=60,
                    algorithm="fixed_window",
                )
            )
        yield node


@pytest.fixture(params=get_args(Transport))
def transport(request, monkeypatch):
    """Makes the clients for asyncio of a module ones of each transport in turn."""
    made = partial(AsyncRateLimiterClient, transport=request.param)
    monkeypatch.setattr(request.module, "AsyncRateLimiterClient", made)
    return request.param
