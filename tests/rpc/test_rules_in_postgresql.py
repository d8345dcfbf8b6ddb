"""Whole nodes with their rules on one PostgreSQL that stops, crashes and hangs."""

from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
from google.protobuf import empty_pb2

from ratelimitd.errors import StartupError
from ratelimitd.node import node as app
from ratelimitd.rules import feed as rule_feed
from ratelimitd.rules.sql.database import open_database
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as pb_grpc

CHECK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")


class Caller:
    """A client of a node, as its callers and its operator use it."""

    def __init__(self, channel):
        self._checks = pb_grpc.RateLimiterStub(channel)
        self.config = pb_grpc.RateLimiterConfigStub(channel)
        self.plans = pb_grpc.RateLimiterPlansStub(channel)
        self._health = pb_grpc.RateLimiterHealthStub(channel)

    async def check(self):
        answer = await self._checks.CheckRateLimit(CHECK)
        return pb.Reason.Name(answer.reason)

    async def checked_until(self, reason):
        """Check until the answer has this reason; the timeout of the test bounds it."""
        while (found := await self.check()) != reason:
            assert found in {"NO_RULE", "FAIL_OPEN_ERROR", "WITHIN_LIMIT"}

    async def create(self, endpoint="/a"):
        rule = pb.RateLimit(
            endpoint=endpoint,
            identifier_type="user",
            limit=1_000_000,
            window_seconds=60,
            algorithm="fixed_window",
        )
        return await self.config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))

    async def status_of_create(self, endpoint):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.create(endpoint)
        return caught.value.code()

    async def metric(self, name):
        """Return a metric of the node."""
        reported = await self._health.GetMetrics(empty_pb2.Empty())
        [value] = [metric.value for metric in reported.metrics if metric.name == name]
        return value

    async def endpoints(self):
        listed = await self.config.ListRateLimits(pb.ListRateLimitsRequest())
        return [rule.endpoint for rule in listed.rate_limits]


@pytest.fixture
def serve(postgresql_url, tmp_path, monkeypatch):
    """Run a node with a state directory of its own."""
    monkeypatch.setattr(app, "open_database", partial(open_database, command_timeout_s=1.0))
    # Only polling shows a node the edits of others.
    monkeypatch.setattr(rule_feed, "POLL_S", 0.05)

    @asynccontextmanager
    async def serve(name="a", **settings):
        options = {"database_url": postgresql_url, "state_dir": tmp_path / name, **settings}
        async with (
            running_node(**options) as node,
            grpc.aio.insecure_channel(node.grpc_address) as channel,
        ):
            yield Caller(channel)

    return serve


async def test_a_rule_made_on_one_node_is_in_force_on_another(serve):
    async with serve("a") as one, serve("b") as two:
        assert await two.check() == "NO_RULE"
        created = await one.create()
        await two.checked_until("WITHIN_LIMIT")
        await two.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=created.id))
        await one.checked_until("NO_RULE")


async def test_the_same_rule_made_on_two_nodes_exists_once(serve):
    async with serve("a") as one, serve("b") as two:
        await one.create()
        assert await two.status_of_create("/a") is grpc.StatusCode.ALREADY_EXISTS
        assert await two.endpoints() == ["/a"]


@pytest.mark.parametrize(("goes", "returns"), [("pause", "resume"), ("crash", "start")])
async def test_without_its_server_edits_are_unavailable_and_checks_go_on(
    serve, postgres, goes, returns
):
    async with serve() as node:
        await node.create()
        getattr(postgres, goes)()
        assert await node.status_of_create("/b") is grpc.StatusCode.UNAVAILABLE
        assert await node.check() == "WITHIN_LIMIT"
        getattr(postgres, returns)()
        assert await node.endpoints() == ["/a"]
        await node.create("/b")


async def test_a_read_only_server_refuses_edits_and_nothing_else(serve, postgres, postgresql_url):
    """The first lists of a store are what reads the key of page tokens, which is not there yet."""
    name = postgresql_url.rpartition("/")[2]
    async with serve() as node:
        await node.create()
        postgres.sql(
            f"ALTER DATABASE {name} SET default_transaction_read_only = on",
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",  # noqa: S608
        )
        assert await node.status_of_create("/b") is grpc.StatusCode.UNAVAILABLE
        assert await node.endpoints() == ["/a"]
        assert not (await node.plans.ListAssignments(pb.ListAssignmentsRequest())).assignments
        assert await node.check() == "WITHIN_LIMIT"


async def test_a_node_starts_without_the_server_and_fails_open_until_it_is_up(serve, postgres):
    postgres.stop()
    async with serve() as node:
        assert await node.check() == "FAIL_OPEN_ERROR"
        assert await node.status_of_create("/a") is grpc.StatusCode.UNAVAILABLE
        postgres.start()
        await node.checked_until("NO_RULE")
        await node.create()
        assert await node.check() == "WITHIN_LIMIT"


async def test_a_node_that_starts_without_the_server_serves_its_last_good_book(serve, postgres):
    async with serve() as node:
        await node.create()
    postgres.stop()
    async with serve() as node:
        assert await node.check() == "WITHIN_LIMIT"


async def test_a_node_without_the_schema_names_the_command_and_keeps_retrying(
    serve, postgres, caplog
):
    async with serve(database_url=postgres.new_database("template0")) as node:
        assert await node.check() == "FAIL_OPEN_ERROR"
    assert "run `ratelimitd db upgrade`" in caplog.text


async def test_a_foreign_database_prevents_the_start(serve, postgres):
    url = postgres.new_database("template0")
    postgres.sql("CREATE TABLE customers (name TEXT)", database=url.rpartition("/")[2])
    with pytest.raises(StartupError, match="holds tables that are not ratelimitd's"):
        async with serve(database_url=url):
            pytest.fail("it started")


NO_GUARDS = (
    *(
        f"ALTER TABLE rules DROP CONSTRAINT rules_{name}"
        for name in ("limit", "endpoint_length", "algorithm", "window_seconds")
    ),
    *(
        f'ALTER TABLE rules ALTER "{name}" DROP NOT NULL'
        for name in ("endpoint", "limit", "algorithm", "window_seconds")
    ),
    'ALTER TABLE rules ALTER "limit" TYPE bigint, ALTER endpoint TYPE text, ALTER algorithm TYPE text',
)
"""Statements of an operator who removes the database's constraints."""

BAD_ROWS = {
    '"limit"': ("NULL", "0", "-1", "2147483648"),
    "endpoint": ("NULL", "''", "repeat('x', 1000)"),
    "algorithm": ("NULL", "'leaky'", "repeat('x', 10000000)"),
    "window_seconds": ("NULL", "0"),
}


async def test_invalid_rows_are_skipped_and_valid_ones_served(serve, postgres, caplog):
    url = postgres.new_database()
    behind = partial(postgres.sql, database=url.rpartition("/")[2])
    behind(*NO_GUARDS)
    bad = [(column, value) for column, values in BAD_ROWS.items() for value in values]
    async with serve(database_url=url) as node:
        await node.create()
        made = [await node.create(f"/bad/{number}") for number in range(len(bad))]
        changes = [
            f"UPDATE rules SET {column} = {value}, revision = 100 WHERE id = '{rule.id}'"  # noqa: S608
            for (column, value), rule in zip(bad, made, strict=True)
        ]
        behind(*changes, "UPDATE rule_revision SET revision = 100")
        while await node.metric("rate_limiter_rules_skipped_total") < len(bad):
            assert await node.check() == "WITHIN_LIMIT"
        await node.create("/b")  # edits go on
    async with serve("another", database_url=url) as node:
        assert await node.check() == "WITHIN_LIMIT"
        assert await node.endpoints() == ["/a", "/b"]
    assert "is not served: limit: " in caplog.text
    assert "xxx" not in caplog.text
