"""A whole node in this process: behaviour of all parts together."""

import asyncio
import logging
import re
import socket
import sqlite3
import threading
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime

import grpc
import grpc.aio
import httpx
import pytest
import trustme
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.node import node as node_module
from ratelimitd.node import startup
from ratelimitd.node.node import Node
from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.settings.table import Settings
from ratelimitd.testing import ManualClock, running_node
from ratelimitd.web import spop
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.servers import Valkey

SEED = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 3, window_seconds: 86400, algorithm: token_bucket}
"""
"""A long window without edges: spent tokens stay spent during a test."""

TOKEN_S = 86_400 // 3
"""Time to refill one token."""


class Client:
    def __init__(self, node):
        self.channel = grpc.aio.insecure_channel(node.grpc_address)
        self.checks = stubs.RateLimiterStub(self.channel)
        self.rules = stubs.RateLimiterConfigStub(self.channel)
        self.plans = stubs.RateLimiterPlansStub(self.channel)
        self.node = stubs.RateLimiterHealthStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.channel.close()

    async def allowed(self, number, identifier="u", **fields):
        """Return how many of ``number`` checks are allowed."""
        request = pb.RateLimitRequest(
            identifier=identifier, identifier_type="user", endpoint="/a", **fields
        )
        return sum([(await self.checks.CheckRateLimit(request)).allowed for _ in range(number)])

    async def reset(self, identifier):
        await self.node.ResetRateLimit(
            pb.ResetRequest(identifier=identifier, identifier_type="user", endpoint="/a")
        )


@pytest.fixture
def kept(tmp_path):
    """Settings of a node whose files persist; its empty book is seeded."""
    rules_file = tmp_path / "rules.yaml"
    rules_file.write_text(SEED)
    return {
        "rules_file": rules_file,
        "database_url": f"sqlite:///{tmp_path / 'rules.db'}",
        "state_dir": tmp_path / "state",
    }


def node_of(kept, may_listen=None, may_close=None, **settings):
    flags = {"LISTEN": "127.0.0.1:0", "HTTP_LISTEN": "127.0.0.1:0", "DRAIN_S": "1"}
    flags |= {"LOOPBACK_ADMIN": "on"}
    flags |= {name.upper(): str(value) for name, value in {**kept, **settings}.items()}
    return Node(Settings.load({}, flags), may_listen=may_listen, may_close=may_close)


def one_request_in(endpoint, *, seconds):
    return pb.RateLimit(
        endpoint=endpoint,
        identifier_type="user",
        limit=1,
        window_seconds=seconds,
        algorithm="token_bucket",
    )


async def test_a_rule_is_in_force_once_its_creation_is_answered(kept):
    kept.pop("rules_file")
    async with running_node(**kept, clock=ManualClock()) as node, Client(node) as client:
        assert await client.allowed(3) == 3
        request = pb.CreateRateLimitRequest(rate_limit=one_request_in("/a", seconds=60))
        await client.rules.CreateRateLimit(request)
        assert await client.allowed(3) == 1


async def test_an_empty_book_is_logged_and_decides_nothing(kept, caplog):
    kept.pop("rules_file")
    async with running_node(**kept) as node, Client(node) as client:
        assert await client.allowed(5) == 5
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert "no rules: every check is allowed" in warnings


async def test_a_restart_does_not_restore_deleted_rules(kept):
    async with running_node(**kept) as node, Client(node) as client:
        for rule in (await client.rules.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits:
            await client.rules.DeleteRateLimit(pb.DeleteRateLimitRequest(id=rule.id))
    async with running_node(**kept) as node, Client(node) as client:
        assert await client.allowed(5) == 5


async def test_a_restart_keeps_spends_and_resets(kept):
    clock = ManualClock()
    async with running_node(**kept, clock=clock) as node, Client(node) as client:
        assert await client.allowed(5, "spent") == 3
        assert await client.allowed(5, "reset") == 3
        await client.reset("reset")
    async with running_node(**kept, clock=clock) as node, Client(node) as client:
        assert await client.allowed(5, "spent") == 0
        assert await client.allowed(5, "reset") == 3


async def test_another_key_secret_loses_the_buckets_and_is_logged(kept, caplog):
    clock = ManualClock()
    async with running_node(**kept, clock=clock) as node, Client(node) as client:
        assert await client.allowed(5) == 3
    async with (
        running_node(**kept, clock=clock, key_secret="x" * 32) as node,
        Client(node) as client,
    ):
        assert await client.allowed(5) == 3
    assert "is not a bucket file of this node's key secret" in caplog.text


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_scraped_metrics_match_get_metrics(kept, transport):
    async with (
        running_node(**kept, transport=transport, clock=ManualClock()) as node,
        Client(node) as client,
    ):
        await client.allowed(5)
        reported = {
            metric.name: metric.value
            for metric in (await client.node.GetMetrics(pb.MetricsRequest())).metrics
            if not metric.labels and metric.kind != "histogram"
        }
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://{node.http_address}/metrics")).text
    scraped = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    assert scraped["rate_limiter_requests_allowed_total"] == 3
    assert scraped["rate_limiter_requests_blocked_total"] == 2
    assert scraped["rate_limiter_active_buckets"] == 1
    assert scraped["rate_limiter_rules"] == 1
    assert scraped["rate_limiter_rules_store_up"] == 1
    reported["rate_limiter_fail_open_total"] = reported.pop("rate_limiter.fail_open")
    assert reported.keys() <= scraped.keys()
    # Between the two, memory, the snapshot, the loop's lag and its tasks have changed. The call that reports the
    # streams is one of them.
    still = [name for name in reported if not re.search("memory|snapshot|lag|tasks|streams", name)]
    assert {name: scraped[name] for name in still} == {name: reported[name] for name in still}


async def test_health_names_the_node_and_its_rules(kept):
    async with running_node(**kept, node_id="n1") as node, Client(node) as client:
        report = await client.node.GetHealthStatus(Empty())
    assert (report.status, report.node_id, report.rules_revision) == (pb.HEALTHY, "n1", 1)
    assert report.shared_state_connected


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_draining_node_reports_it_and_accepts_no_calls(kept, transport):
    async with running_node(**kept, transport=transport) as node, Client(node) as client:
        assert node.readiness.ready
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await node.drain()
        assert node.readiness == (False, "draining")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.allowed(1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await node.drain()


async def test_a_node_is_not_ready_before_it_has_rules(kept):
    node = node_of(kept)
    assert node.readiness == (False, "no rules are loaded yet")
    await node.drain()


async def test_a_node_listens_last_and_when_it_is_allowed(kept):
    asked, may = asyncio.Event(), asyncio.Event()

    async def may_listen():
        asked.set()
        await may.wait()

    node = node_of(kept, may_listen, spoe_listen="127.0.0.1:0", trusted_proxies="127.0.0.1")
    starting = asyncio.create_task(node.start())
    await asked.wait()
    assert node.http_address
    assert not node.grpc_address
    assert not node.spoe_address
    may.set()
    await starting
    assert node.grpc_address
    assert node.spoe_address
    await node.drain()


async def test_a_draining_node_answers_http_until_it_may_close(kept):
    answered = []

    async def may_close():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*node.grpc_address.split(":"))
        async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as http:
            answered.append((await http.get("/readyz")).text)

    node = node_of(kept, may_close=may_close)
    await node.start()
    await node.drain()
    assert answered == ["not ready: draining\n"]


async def test_a_draining_node_waits_to_close_for_a_bounded_time(kept, monkeypatch):
    monkeypatch.setattr(node_module, "HTTP_END_S", 0.0)
    node = node_of(kept, may_close=asyncio.Event().wait, drain_s="0")
    await node.start()
    await node.drain()


@pytest.mark.parametrize("http_listen", ["", "127.0.0.1:0"])
async def test_a_node_without_http_or_that_cannot_start_does_not_wait_to_close(kept, http_listen):
    async def fail():
        message = "LISTEN: taken"
        raise StartupError(message)

    waits = asyncio.Event().wait
    node = node_of(kept, fail if http_listen else None, waits, http_listen=http_listen)
    if http_listen:
        with pytest.raises(StartupError):
            await node.start()
    else:
        await node.start()
    await node.drain()


async def test_http_can_be_off(kept):
    async with running_node(**kept, http_listen="") as node:
        assert node.http_address == ""


async def test_reflection_can_be_off(kept):
    async with running_node(**kept, reflection="off") as node, Client(node) as client:
        # Not as a stream: grpc.aio loses the status of a call that ends while it is still writing.
        call = client.channel.unary_unary(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tokens_guard_calls_as_configured(kept):
    async with running_node(**kept, check_token="abc") as node, Client(node) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.allowed(1)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_with_a_certificate_the_node_serves_tls(kept, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with (
        running_node(**kept, **tls) as node,
        grpc.aio.secure_channel(node.grpc_address, credentials) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_node_reports_when_its_certificate_expires(kept, tmp_path, transport):
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    expires = datetime(2040, 1, 1, tzinfo=UTC)
    certificate = trustme.CA().issue_cert("127.0.0.1", not_after=expires)
    certificate.cert_chain_pems[0].write_to_path(files["tls_cert"])
    certificate.private_key_pem.write_to_path(files["tls_key"])
    name = "rate_limiter_tls_certificate_expiry_timestamp_seconds"
    async with running_node(**kept, **files, transport=transport) as node:
        [sample] = node.metrics.samples([name])
        assert (sample.labels, sample.value) == ({"setting": "TLS_CERT"}, expires.timestamp())
    async with running_node(**kept, transport=transport) as node:
        assert not list(node.metrics.samples([name]))


async def test_an_invalid_rule_row_is_logged_and_the_others_are_served(kept, caplog, tmp_path):
    kept["rules_file"].write_text(SEED + SEED.replace("/a", "/b").replace("\nrules:\n", ""))
    async with running_node(**kept):
        pass
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE rules SET \"limit\" = 0 WHERE endpoint = '/b'")
    async with running_node(**kept, clock=ManualClock()) as node, Client(node) as client:
        assert await client.allowed(5) == 3
    assert "is not served" in caplog.text


async def test_timestamps_of_callers_may_be_used(kept):
    async with running_node(**kept, timestamps="caller") as node, Client(node) as client:
        assert await client.allowed(5, timestamp=1_000_000_000) == 3
        assert await client.allowed(5, timestamp=1_000_086_400) == 3


async def test_an_unexpected_error_in_a_check_is_logged_without_its_text(kept, caplog, monkeypatch):
    async with running_node(**kept) as node, Client(node) as client:

        def crash(*_):
            text = "user:alice"
            raise ValueError(text)

        monkeypatch.setattr(node._limiter.buckets, "apply", crash)
        assert await client.allowed(1) == 1
        (record,) = [each for each in caplog.records if "fail-open" in each.message]
        assert record.exc_info[0] is ValueError
        assert "alice" not in record.message
        assert node.stats.fail_open_error_total == 1


async def everything_is_closed(kept, threads_before):
    """Assert that a node that failed to start has left nothing open."""
    StateDir.lock(kept["state_dir"]).close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not {task.get_name() for task in others if not task.done()}
    for thread in set(threading.enumerate()) - threads_before:
        if not thread.name.startswith("asyncio_") and "(_poll_wrapper)" not in thread.name:
            thread.join(5)  # an ending thread may take a moment
            assert not thread.is_alive(), thread.name


async def test_haproxy_is_answered_at_its_own_address_until_the_drain(kept):
    async with running_node(**kept, spoe_listen="127.0.0.1:0", trusted_proxies="127.0.0.1") as node:
        host, _, port = node.spoe_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        hello = spop.pairs(
            {
                b"supported-versions": b"2.0",
                b"max-frame-size": 16_380,
                b"capabilities": b"pipelining",
            }
        )
        writer.write(spop.frame(spop.FrameType.HAPROXY_HELLO, hello))
        writer.write(spop.frame(spop.FrameType.NOTIFY, b"\x05check\x00", 1, 1))
        answers = await reader.readuntil(b"status\x03" + spop.varint(200))
        assert b"pipelining" in answers
    assert spop.FrameType.AGENT_DISCONNECT in (await reader.read())[:5]
    writer.close()


@pytest.fixture
def threads_before():
    return set(threading.enumerate())


@pytest.mark.parametrize(
    ("setting", "named"),
    [("listen", "LISTEN"), ("http_listen", "HTTP_LISTEN"), ("spoe_listen", "SPOE_LISTEN")],
)
async def test_a_port_in_use_is_a_one_line_error_that_leaves_nothing_open(
    kept, threads_before, setting, named
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartupError, match=named) as caught:
            await node_of(kept, trusted_proxies="127.0.0.1", **{setting: address}).start()
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)
    await everything_is_closed(kept, threads_before)
    async with running_node(**kept):
        pass


async def test_a_state_directory_in_use_is_a_one_line_error(kept):
    async with running_node(**kept):
        with pytest.raises(StartupError, match="in use by another node"):
            await node_of(kept).start()


async def test_a_wrong_seed_leaves_nothing_open(kept, threads_before):
    kept["rules_file"].write_text("rules: [{}]")
    with pytest.raises(StartupError, match=r"rules\.yaml: rules\[0\]"):
        await node_of(kept).start()
    await everything_is_closed(kept, threads_before)


@pytest.fixture
def impatient(monkeypatch):
    """Shorten the waits for locks."""
    monkeypatch.setattr(startup, "BUSY_TIMEOUT_S", 0.01)


@contextmanager
def locked(path):
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def damaged(path):
    whole = path.read_bytes()
    path.write_bytes(b"no database" * 1000)
    yield
    path.write_bytes(whole)


@contextmanager
def without_a_table(path):
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE secrets RENAME TO secrets_away")
        yield
        connection.execute("ALTER TABLE secrets_away RENAME TO secrets")


@contextmanager
def without_its_directory(path):
    away = path.parent.with_name("away")
    path.parent.rename(away)
    yield
    away.rename(path.parent)


TROUBLES = pytest.mark.parametrize(
    "trouble", [locked, damaged, without_a_table, without_its_directory]
)


@pytest.fixture
def elsewhere(kept, tmp_path):
    """``kept`` with the database in its own directory."""
    (tmp_path / "database").mkdir()
    return {**kept, "database_url": f"sqlite:///{tmp_path / 'database/rules.db'}"}


async def until_connected(client):
    """Wait for the feed, which retries after at least a quarter of a second."""
    wanted = pb.MetricsRequest(names=["rate_limiter_rules_store_up"])
    while (await client.node.GetMetrics(wanted)).metrics[0].value != 1:  # noqa: ASYNC110 -- real retries
        await asyncio.sleep(0.05)


@TROUBLES
async def test_a_node_starts_from_the_last_good_book_while_its_database_is_unusable(
    elsewhere, tmp_path, trouble, *, impatient, caplog
):
    clock = ManualClock()
    async with running_node(**elsewhere, clock=clock) as node, Client(node) as client:
        assert await client.allowed(2) == 2
    with trouble(tmp_path / "database/rules.db"):
        async with running_node(**elsewhere, clock=clock) as node, Client(node) as client:
            assert node.readiness.ready
            assert await client.allowed(2) == 1  # the kept key finds the earlier buckets
    assert "serving the last good rule book" in caplog.text


@TROUBLES
async def test_a_node_without_a_book_allows_checks_is_not_ready_and_keeps_trying(
    elsewhere, tmp_path, trouble, impatient
):
    async with running_node(**elsewhere):
        pass
    for file in elsewhere["state_dir"].glob("rules.last-good"):
        file.unlink()
    with trouble(tmp_path / "database/rules.db"):
        node = node_of(elsewhere)
        await node.start()
        client = Client(node)
        assert node.readiness == (False, "no rules are loaded yet")
        answer = await client.checks.CheckRateLimit(
            pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
        )
        assert (answer.allowed, answer.reason) == (True, pb.FAIL_OPEN_ERROR)
    async with client:
        await until_connected(client)
        assert node.readiness.ready
        assert await client.allowed(5) == 3
    await node.drain()


async def test_a_first_start_without_the_databases_directory_seeds_it_once_it_exists(
    kept, tmp_path, caplog
):
    kept["database_url"] = f"sqlite:///{tmp_path / 'volume/rules.db'}"
    async with running_node(**kept) as node, Client(node) as client:
        assert not node.readiness.ready
        (tmp_path / "volume").mkdir()
        await until_connected(client)
        assert await client.allowed(5) == 3
    caplog.clear()
    async with running_node(**kept) as node, Client(node) as client:
        assert await client.allowed(5) == 0  # the earlier key became the database's
    assert "foreign" not in caplog.text


async def test_a_lost_database_is_not_recreated_while_the_last_good_book_is_served(
    elsewhere, tmp_path
):
    async with running_node(**elsewhere):
        pass
    with without_its_directory(tmp_path / "database/rules.db"):
        async with running_node(**elsewhere, clock=ManualClock()) as node, Client(node) as client:
            (tmp_path / "database").mkdir()
            rule = pb.RateLimit(endpoint="/b", identifier_type="user", limit=1, window_seconds=1)
            with pytest.raises(grpc.aio.AioRpcError):
                await client.rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
            await asyncio.sleep(0.6)  # at least two attempts
            assert await client.allowed(5) == 3
        assert list((tmp_path / "database").iterdir()) == []
        (tmp_path / "database").rmdir()


async def test_no_single_edit_but_a_whole_set_takes_the_place_of_a_lost_book(kept, tmp_path):
    rule = one_request_in("/b", seconds=1)
    blocked = pb.Assignment(
        identity=pb.Identity(identifier="u", identifier_type="user"), plan="blocked"
    )
    async with running_node(**kept, clock=ManualClock()) as node, Client(node) as client:
        with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
            connection.execute("DELETE FROM rules")
            connection.execute("DELETE FROM rule_audit")
            connection.execute("UPDATE rule_revision SET revision = 0")
        for edit in (
            client.rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule)),
            client.plans.AssignPlan(pb.AssignPlanRequest(assignment=blocked)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="the rule database is empty: restore"):
                await edit
        assert await client.allowed(5) == 3
        wanted = pb.ApplyRateLimitsRequest(rate_limits=[rule], prune=True)
        await client.rules.ApplyRateLimits(wanted)
        assert await client.allowed(5) == 5, "no rule for /a"
        await client.plans.AssignPlan(pb.AssignPlanRequest(assignment=blocked))


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("UPDATE ratelimitd_schema SET version_num = '0999'", "written by a newer ratelimitd"),
        ("DROP TABLE ratelimitd_schema", "holds tables that are not ratelimitd's"),
    ],
)
async def test_a_foreign_database_is_a_one_line_error_even_with_a_last_good_book(
    kept, threads_before, tmp_path, *, statement, line
):
    async with running_node(**kept):
        pass
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
        connection.execute(statement)
    with pytest.raises(StartupError, match=line):
        await node_of(kept).start()
    await everything_is_closed(kept, threads_before)


async def test_a_drain_writes_the_buckets_before_it_closes_the_rule_book(kept, monkeypatch):
    closed = []

    def noting(owner, name):
        real = getattr(owner, name)

        async def close(self):
            closed.append(owner.__name__)
            await real(self)

        monkeypatch.setattr(owner, name, close)

    noting(SnapshotLog, "drain")
    noting(LastGoodBook, "close")
    noting(SqlRuleStore, "close")
    async with running_node(**kept):
        assert closed == []
    assert closed == ["SnapshotLog", "LastGoodBook", "SqlRuleStore"]


async def test_the_label_of_a_deleted_rule_is_released(kept):
    async with running_node(**kept) as node, Client(node) as client:
        await client.allowed(1)
        (rule,) = (await client.rules.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits
        assert list(node.stats.by_rule) == [rule.id]
        await client.rules.DeleteRateLimit(pb.DeleteRateLimitRequest(id=rule.id))
        assert list(node.stats.by_rule) == []


async def test_an_endpoint_that_gets_a_rule_is_no_longer_listed_as_without_one(kept):
    kept.pop("rules_file")
    async with running_node(**kept) as node, Client(node) as client:
        await client.allowed(1)
        for endpoint, listed in (("/b", ["/a"]), ("/a", [])):
            rule = one_request_in(endpoint, seconds=60)
            await client.rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
            found = await client.node.ListUnmatched(pb.ListUnmatchedRequest())
            assert [one.endpoint for one in found.endpoints] == listed


async def test_a_cancelled_start_leaves_nothing_open(kept, threads_before):
    reached = asyncio.Event()

    async def hang():
        reached.set()
        await asyncio.Event().wait()

    node = node_of(kept, may_listen=hang)
    starting = asyncio.create_task(node.start())
    await reached.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await everything_is_closed(kept, threads_before)


async def test_malformed_state_files_are_logged(kept, caplog):
    kept["state_dir"].mkdir()
    (kept["state_dir"] / "rules.last-good").write_bytes(b"not ours")
    (kept["state_dir"] / "buckets-00000001.log").write_bytes(b"not ours")
    with caplog.at_level(logging.WARNING):
        async with running_node(**kept):
            pass
    assert "renamed to *.foreign" in caplog.text


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


class TestInACluster:
    """Nodes that share buckets in a real Valkey."""

    @pytest.fixture(autouse=True)
    def in_cluster(self, kept, valkey):
        valkey.ask("FLUSHALL")
        # Long timeouts, so that a busy machine does not affect the tests.
        kept |= {"redis_url": valkey.url, "redis_timeout_ms": 1_000}

    async def test_nodes_with_one_rules_database_share_their_limits(self, kept, tmp_path):
        async with running_node(**kept) as one, Client(one) as client_of_one:
            assert await client_of_one.allowed(2) == 2
            kept["state_dir"] = tmp_path / "state of two"
            async with running_node(**kept) as two, Client(two) as client_of_two:
                await until(lambda: one._cluster.unsettled_buckets == 0)
                assert await client_of_two.allowed(5) == 1
                assert (await client_of_two.node.GetHealthStatus(Empty())).shared_state_connected

    async def test_a_drain_settles_spends_for_the_next_start(self, kept, caplog):
        for allowed in (2, 1):
            async with running_node(**kept) as node, Client(node) as client:
                assert await client.allowed(2) == allowed
        assert "some spends did not reach" not in caplog.text

    async def test_a_node_stores_no_buckets_on_disk(self, kept):
        async with running_node(**kept) as node, Client(node) as client:
            await client.allowed(3)
            metrics = (await client.node.GetMetrics(pb.MetricsRequest())).metrics
        names = {metric.name for metric in metrics}
        assert "rate_limiter_cluster_nodes" in names
        assert "rate_limiter_snapshot_age_seconds" not in names
        assert not [*kept["state_dir"].glob("buckets-*")]

    async def test_a_reset_applies_to_the_shared_bucket(self, kept):
        async with running_node(**kept) as node, Client(node) as client:
            assert await client.allowed(5) == 3
            await client.reset("u")
            assert await client.allowed(5) == 3

    async def test_the_node_uses_the_stores_clock_from_the_start(self, kept, monkeypatch):
        machine_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: machine_ns() - 3_600 * 10**9)
        async with running_node(**kept) as node, Client(node) as client:
            request = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
            answer = await client.checks.CheckRateLimit(request)
        assert abs(answer.reset_time - TOKEN_S - machine_ns() / 10**9) < 120

    async def test_another_secret_is_a_one_line_start_error(self, kept, threads_before, tmp_path):
        async with running_node(**kept):
            stranger = {**kept, "state_dir": tmp_path / "other", "key_secret": "x" * 32}
            with pytest.raises(StartupError, match="KEY_SECRET") as caught:
                await node_of(stranger).start()
            assert "\n" not in str(caught.value)

    async def test_a_node_starts_without_the_shared_state_serves_and_recovers(self, kept, tmp_path):
        with Valkey(tmp_path / "valkey of its own") as server:
            port = server.port
        kept |= {"redis_url": f"redis://127.0.0.1:{port}", "breaker_recovery_s": 1}
        async with running_node(**kept) as node, Client(node) as client:
            assert await client.allowed(20) == 20
            report = await client.node.GetHealthStatus(Empty())
            assert (report.status, report.shared_state_connected) == (pb.DEGRADED, False)
            assert node.stats.fail_open_breaker_total > 0
            with Valkey(tmp_path / "valkey again", port=port):
                await until(lambda: node._cluster.shared_state.connected)
                assert await client.allowed(20) == 3

    async def test_a_late_key_from_the_rules_database_is_shared(self, kept, tmp_path, monkeypatch):
        database = tmp_path / "volume/rules.db"
        database.parent.mkdir()
        kept["database_url"] = f"sqlite:///{database}"
        async with running_node(**kept) as one, Client(one) as client_of_one:
            assert await client_of_one.allowed(2) == 2
            await until(lambda: one._cluster.unsettled_buckets == 0)
            kept["state_dir"] = tmp_path / "state of two"
            with without_its_directory(database):
                two = node_of(kept)
                await two.start()
            async with Client(two) as client_of_two:
                assert not two.readiness.ready
                await until(lambda: two.readiness.ready)
                assert await client_of_two.allowed(5) == 1
            await two.drain()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - of a real server and a real feed
        await asyncio.sleep(0.02)


async def test_a_node_generates_its_admin_token_and_a_login_link(kept, caplog):
    token_file = kept["state_dir"] / "admin-token"
    async with running_node(**kept, loopback_admin="off") as node:
        token = token_file.read_text().strip()
        async with Client(node) as client:
            with pytest.raises(grpc.aio.AioRpcError, match=r"in STATE_DIR/admin-token"):
                await client.rules.ListRateLimits(pb.ListRateLimitsRequest())
            metadata = [("authorization", f"Bearer {token}")]
            await client.rules.ListRateLimits(pb.ListRateLimitsRequest(), metadata=metadata)
        assert node.login_link.startswith(f"http://{node.http_address}/login?code=")
        async with httpx.AsyncClient(headers={"Accept": "text/html"}) as http:
            assert (await http.get(f"http://{node.http_address}/rules")).status_code == 303
            assert (await http.get(node.login_link)).headers["location"] == "/"
            assert (await http.get(f"http://{node.http_address}/rules")).status_code == 200
            assert (await http.get(node.login_link)).status_code == 401
        code = node.login_link.partition("code=")[2]
    async with running_node(**kept, loopback_admin="off") as node:
        assert token_file.read_text().strip() == token
    assert token not in caplog.text
    assert code not in caplog.text


@pytest.mark.parametrize(
    "given", [{"admin_token": "set"}, {"loopback_admin": "on"}, {"http_listen": ""}]
)
async def test_without_a_generated_token_or_pages_there_is_no_link(kept, given):
    async with running_node(**kept, **{"loopback_admin": "off"} | given) as node:
        assert node.login_link == ""
        assert (kept["state_dir"] / "admin-token").exists() is ("http_listen" in given)


async def test_an_unusable_admin_token_ends_the_start(kept):
    kept["state_dir"].mkdir()
    (kept["state_dir"] / "admin-token").mkdir()
    with pytest.raises(StartupError, match="is a directory"):
        await node_of(kept, loopback_admin="off").start()


async def test_loopback_as_a_credential_logs_a_warning_at_each_start(kept, caplog):
    for _ in range(2):
        async with running_node(**kept, loopback_admin="on"):
            pass
    assert caplog.text.count("LOOPBACK_ADMIN is on") == 2
