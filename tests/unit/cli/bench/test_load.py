"""Load on a real node: what is sent, what is counted, and when it ends."""

import asyncio
import time

import grpc
import pytest

from ratelimitd.cli.bench.load import Load, channels, run
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

RULE = pb.RateLimit(
    endpoint="/b", identifier_type="user", limit=3, window_seconds=3_600, algorithm="fixed_window"
)
CHECKS = [
    pb.RateLimitRequest(identifier=name, identifier_type="user", endpoint="/b") for name in "ab"
]


class SteppingClock:
    """Time that passes by so much whenever it is read."""

    def __init__(self, step_s):
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


async def sent(address, *, metadata=(), stop=None, time_s=None, connections=1, **changes):
    settings = {"checks": CHECKS, "seconds": 1.0, "concurrency": 4, "rate": None, "timeout_s": 5.0}
    opened = channels(address, None, connections)
    try:
        return await run(
            Load(**{**settings, **changes}),
            opened,
            metadata,
            stop=stop or asyncio.Event(),
            time_s=time_s or SteppingClock(0.01),
        )
    finally:
        for channel in opened:
            await channel.close()


@pytest.fixture
async def address():
    async with running_node(check_token="word") as node:
        async with grpc.aio.insecure_channel(node.grpc_address) as channel:
            rules = stubs.RateLimiterConfigStub(channel)
            await rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=RULE))
        yield node.grpc_address


TOKEN = (("authorization", "Bearer word"),)


async def test_all_checks_are_counted_and_each_identifier_has_its_turn(address):
    result = await sent(address, metadata=TOKEN, connections=2)
    assert result.latencies.count == result.allowed + result.denied > 6
    assert (result.allowed, result.fail_open, result.errors) == (6, 0, {})
    assert result.seconds > 1.0


async def test_one_that_is_not_let_in_ends_before_it_begins(address):
    with pytest.raises(grpc.RpcError) as refused:
        await sent(address)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stop_ends_it(address):
    stop = asyncio.Event()
    stop.set()
    result = await sent(address, metadata=TOKEN, stop=stop, seconds=3_600)
    assert result.latencies.count == 0


async def test_a_stop_ends_it_also_where_the_next_check_is_due_in_an_hour(address):
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    result = await sent(
        address,
        metadata=TOKEN,
        stop=stop,
        seconds=36_000,
        rate=1 / 3_600,
        time_s=time.perf_counter,
        concurrency=2,
    )
    assert result.latencies.count == 1


async def test_at_a_rate_so_many_are_sent(address):
    result = await sent(
        address, metadata=TOKEN, seconds=0.2, rate=100, time_s=time.perf_counter, concurrency=3
    )
    assert result.latencies.count == 20


async def test_at_a_rate_a_check_that_had_to_wait_is_as_late_as_it_is(address):
    # Time runs away: the second check was due 0.01 s after the first, and can be sent only seconds later.
    result = await sent(
        address, metadata=TOKEN, seconds=0.05, rate=100, concurrency=1, time_s=SteppingClock(1.0)
    )
    assert result.latencies.count == 5
    assert result.latencies.max_us > 5_000_000


async def test_checks_that_are_not_answered_are_counted_by_why(address):
    wrong = [*CHECKS, pb.RateLimitRequest(identifier_type="user", endpoint="/b")]
    result = await sent(address, metadata=TOKEN, checks=wrong)
    assert set(result.errors) == {"INVALID_ARGUMENT"}
    assert result.latencies.count == result.allowed + result.denied


async def test_a_node_without_rules_for_a_time_is_fail_open_and_told(tmp_path):
    database = f"sqlite:///{tmp_path}/none/rules.db"
    async with running_node(database_url=database) as node:
        result = await sent(node.grpc_address)
    assert result.fail_open == result.allowed > 0
