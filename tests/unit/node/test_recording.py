"""A node that records its checks, and the replay of the trace."""

import grpc
import pytest

from ratelimitd.backtest.replay import Replayer, Trace
from ratelimitd.backtest.report import backtest
from ratelimitd.errors import StartupError
from ratelimitd.model import Algorithm, Rule
from ratelimitd.testing import ManualClock, running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1.ratelimiter_pb2_grpc import RateLimiterConfigStub, RateLimiterStub

RULE = pb.RateLimit(
    endpoint="/orders", identifier_type="user", limit=2, window_seconds=60, algorithm="fixed_window"
)
SAME = Rule("x", "/orders", "user", limit=2, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_replay_decides_the_recorded_checks_like_the_node(transport, tmp_path):
    clock = ManualClock()
    async with (
        running_node(
            clock=clock, transport=transport, record_dir=tmp_path / "trace", record_share=1
        ) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        await RateLimiterConfigStub(channel).CreateRateLimit(
            pb.CreateRateLimitRequest(rate_limit=RULE)
        )
        checks = RateLimiterStub(channel)
        asked = [
            pb.RateLimitRequest(
                identifier=who, identifier_type="user", endpoint="/orders", tokens_requested=1
            )
            for who in ("alice", "alice", "bob", "alice", "alice")
        ]
        answers = [(await checks.CheckRateLimit(one)).allowed for one in asked]
        batch = await checks.CheckRateLimitBatch(pb.BatchRateLimitRequest(requests=asked))
        answers += [one.allowed for one in batch.responses]
    trace = Trace(tmp_path / "trace")
    assert [check[4] for check in trace] == answers
    replayer = Replayer(trace, [SAME])
    assert [replayer.judge(check)[0] for check in trace] == [check[4] for check in trace]
    assert backtest(trace, [SAME]).newly_denied == 0
    assert trace.identities == 2
    for path in (tmp_path / "trace").iterdir():
        assert b"alice" not in path.read_bytes()


async def test_a_worker_takes_its_part_of_the_bound(tmp_path):
    async with running_node(
        record_dir=tmp_path / "trace", record_bytes=64_000_000, workers=4
    ) as node:
        assert node._recorder._file_bytes == 1_000_000


async def test_an_unusable_record_directory_ends_the_start(tmp_path):
    (tmp_path / "trace").write_text("")
    with pytest.raises(StartupError, match="RECORD_DIR"):
        async with running_node(record_dir=tmp_path / "trace"):
            pytest.fail("it started")
