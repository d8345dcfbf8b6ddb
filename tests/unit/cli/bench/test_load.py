"""Load on a real node: the checks sent, the counts, and the end."""

import asyncio
import time

import grpc
import pytest

from ratelimitd.cli.bench import load
from ratelimitd.cli.bench.load import Load, Sender, channels
from ratelimitd.cli.bench.workload import Arrivals, Keys
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

RULE = pb.RateLimit(
    endpoint="/b", identifier_type="user", limit=3, window_seconds=3_600, algorithm="fixed_window"
)


def check_of(key):
    return pb.RateLimitRequest(identifier="ab"[key], identifier_type="user", endpoint="/b")


class SteppingClock:
    """A clock that advances by a fixed step at each reading."""

    def __init__(self, step_s):
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


async def sent(
    address, *, metadata=(), stop=None, time_s=None, connections=1, rate=None, **changes
):
    settings = {
        "check_of": check_of,
        "keys": Keys(count=2),
        "seconds": 1.0,
        "concurrency": 4,
        "arrivals": None if rate is None else Arrivals(rate=rate),
        "timeout_s": 5.0,
    }
    opened = channels(address, None, connections)
    try:
        return await Sender(
            Load(**{**settings, **changes}),
            opened,
            metadata,
            stop=stop or asyncio.Event(),
            time_s=time_s or SteppingClock(0.01),
        ).run()
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


async def test_all_checks_are_counted_and_identifiers_rotate(address):
    result = await sent(address, metadata=TOKEN, connections=2)
    assert result.latencies.count == result.allowed + result.denied > 6
    assert (result.allowed, result.fail_open, result.errors) == (6, 0, {})
    assert result.seconds > 1.0


async def test_refused_credentials_end_the_load_before_it_begins(address):
    with pytest.raises(grpc.RpcError) as refused:
        await sent(address)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_stop_ends_a_closed_loop(address):
    stop = asyncio.Event()
    stop.set()
    result = await sent(address, metadata=TOKEN, stop=stop, seconds=3_600)
    assert result.latencies.count == 0


async def test_stop_ends_an_open_loop_with_a_distant_due_time(address):
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


async def test_open_loop_sends_at_the_rate(address):
    result = await sent(
        address, metadata=TOKEN, seconds=0.2, rate=100, time_s=time.perf_counter, concurrency=3
    )
    assert result.latencies.count == result.delays.count == 20
    assert result.unsent == 0
    assert sum(slot.answers for slot in result.timeline.slots(result.seconds)) == 20


async def test_open_loop_counts_latency_from_the_due_time(address):
    # Time advances fast: the second check was due 0.01 s after the first, and is sent only seconds later.
    result = await sent(
        address,
        metadata=TOKEN,
        seconds=0.05,
        rate=100,
        concurrency=1,
        time_s=SteppingClock(1.0),
        timeout_s=100.0,
    )
    assert result.latencies.count == 5
    assert result.latencies.max_us > 5_000_000
    assert result.latencies.max_us > result.delays.max_us > 4_000_000
    assert result.waited == 4


async def test_unreachable_rate_ends_after_a_timeout_with_the_number_of_unsent_checks(
    address,
):
    result = await sent(
        address, metadata=TOKEN, seconds=2.0, rate=1_000, concurrency=1, time_s=SteppingClock(0.5)
    )
    assert result.latencies.count < 20
    assert result.latencies.count + result.unsent == 2_000
    assert result.seconds < 10


async def test_check_is_not_sent_before_its_due_time(address, monkeypatch):
    # Due after 0.1 s; the clock advances 0.001 s per reading, and no timer waits for it.
    monkeypatch.setattr(load, "TIMER_S", 1.0)
    result = await sent(address, metadata=TOKEN, seconds=0.15, rate=10, time_s=SteppingClock(0.001))
    assert result.latencies.count == 2
    assert result.delays.max_us < 20_000


async def test_unanswered_checks_are_counted_by_status(address):
    def wrong_of(key):
        return pb.RateLimitRequest(identifier="ab"[key:], identifier_type="user", endpoint="/b")

    result = await sent(address, metadata=TOKEN, check_of=wrong_of, keys=Keys(count=3))
    assert set(result.errors) == {"INVALID_ARGUMENT"}
    assert result.latencies.count == result.allowed + result.denied
    assert sum(slot.errors for slot in result.timeline.slots(result.seconds)) == sum(
        result.errors.values()
    )


async def test_node_without_rules_fails_open_and_is_counted(tmp_path):
    database = f"sqlite:///{tmp_path}/none/rules.db"
    async with running_node(database_url=database) as node:
        result = await sent(node.grpc_address)
    assert result.fail_open == result.allowed > 0
