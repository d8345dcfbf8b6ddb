"""The log of a whole node under a repeated fault: limited lines, and no data of callers."""

import io
import json
import logging

import grpc
import pytest

from ratelimitd.observe import logs
from ratelimitd.observe.logs import LogContext
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

IDENTIFIER, TOKEN, ENDPOINT = "alice-wonderland", "word-of-the-admin", "/private-place"
CALLS = 40


@pytest.fixture
def log():
    """The log from now on, configured as by `serve`."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in logs.QUIET}
    stream = io.StringIO()
    logs.configure(level="info", log_format="json", context=LogContext("n1"), stream=stream)
    yield stream
    root.handlers[:], root.level = handlers, level
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    logging.captureWarnings(capture=False)


async def test_an_unavailable_database_is_logged_at_most_once_per_second(tmp_path, log):
    rule = pb.RateLimit(
        endpoint=ENDPOINT,
        identifier_type="user",
        limit=1,
        window_seconds=60,
        algorithm="token_bucket",
    )
    check = pb.RateLimitRequest(identifier=IDENTIFIER, identifier_type="user", endpoint=ENDPOINT)
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    url = f"sqlite:///{tmp_path}/none/rules.db"
    async with (
        running_node(database_url=url, admin_token=TOKEN) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        create = stubs.RateLimiterConfigStub(channel).CreateRateLimit
        for _ in range(CALLS):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await create(pb.CreateRateLimitRequest(rate_limit=rule), metadata=metadata)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            answer = await stubs.RateLimiterStub(channel).CheckRateLimit(check)
            assert answer.reason == pb.FAIL_OPEN_ERROR
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert all(line["node_id"] == "n1" and line["rules_revision"] == 0 for line in lines)
    refused = [line for line in lines if "was answered UNAVAILABLE" in line["event"]]
    # One per elapsed second, even on a slow machine; the others are counted.
    assert 1 <= len(refused) < CALLS / 4
    assert sum(line.get("left_out", 0) for line in refused) <= CALLS - len(refused)
    for secret in (IDENTIFIER, TOKEN, ENDPOINT):
        assert secret not in log.getvalue()
