"""One real server of the shared state: whether a node has all permissions and settings it needs."""

import asyncio
import itertools
import time

import pytest

from ratelimitd.cli.doctor.stores import Asked, check_server, judged
from ratelimitd.cluster.redis.connection import Connection, Handshake, hand_over
from ratelimitd.cluster.redis.link import connect
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.settings.urls import NO_LOGIN, Login, Server
from tests.cluster.test_permissions import NODES
from tests.servers import Valkey

LOGIN = Login("ratelimitd", "PASSWORD")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey


@pytest.fixture
def valkey(shared):
    shared.ask(*NODES)
    yield shared
    shared.ask("FLUSHALL")
    shared.ask("ACL", "DELUSER", "ratelimitd")
    for name, value in (("maxmemory", "0"), ("maxmemory-policy", "noeviction")):
        shared.ask("CONFIG", "SET", name, value)


async def look(valkey, login=NO_LOGIN, *, timeout_ms=20, step_s=0.001, ahead_s=0.0):
    """Return findings with a clock that advances by ``step_s`` at each reading, and a wall clock that is off."""
    connection = await connect(
        Server("127.0.0.1", valkey.port),
        Handshake(login),
        None,
        lambda: Connection(hand_over, lambda _error: None, timeout_s=5),
    )
    ticks = itertools.count()
    try:
        return await check_server(
            Asked("store", connection),
            timeout_ms,
            wall_s=lambda: time.time() - ahead_s,
            monotonic_s=lambda: next(ticks) * step_s,
        )
    finally:
        connection.drop(StoreUnavailableError("looked at"))


def worst(findings):
    return [(finding.level, finding.what) for finding in findings if finding.level != "ok"]


async def test_well_configured_server_is_fine_and_left_clean(valkey):
    findings = await look(valkey)
    assert not worst(findings)
    assert any(finding.what.startswith("valkey ") for finding in findings)
    assert any("1.00 to 1.00 ms" in finding.what for finding in findings)
    assert all(0 < valkey.ask("PTTL", key) <= 1_000 for key in valkey.ask("KEYS", "*"))


async def test_documented_user_is_fine(valkey):
    findings = await look(valkey, LOGIN)
    assert not worst(findings)
    assert any("may not run INFO" in finding.what for finding in findings)


COMMANDS = sorted(word[1:] for word in NODES if word.startswith("+"))


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in {"ping", "role", "client|setname"}]
)
async def test_each_missing_permission_of_the_documented_user_is_reported(valkey, command):
    valkey.ask("ACL", "SETUSER", "ratelimitd", f"-{command}")
    found = worst(await look(valkey, LOGIN))
    assert found
    assert all(level == "problem" for level, _ in found)
    assert any(command in what for _, what in found)


async def test_missing_channels_and_keys_are_reported(valkey):
    valkey.ask("ACL", "SETUSER", "ratelimitd", "resetchannels", "resetkeys", "~other:*")
    found = [what for _, what in worst(await look(valkey, LOGIN))]
    assert any("set, get, mget" in what and "publish" in what for what in found)
    assert any("channels" in what for what in found)


async def test_evicting_policy_is_reported_and_a_problem_with_a_memory_limit(valkey):
    valkey.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    [(level, what)] = worst(await look(valkey))
    assert (level, "allkeys-lru" in what) == ("warning", True)
    valkey.ask("CONFIG", "SET", "maxmemory", "1gb")
    [(level, _)] = worst(await look(valkey))
    assert level == "problem"


async def test_nearly_full_server_is_a_warning_and_a_full_one_a_problem(valkey):
    # Client buffers are small relative to 16 MB; in an empty server they are a tenth, and may fill it.
    valkey.ask("SETRANGE", "padding", 16_000_000, "x")
    used = valkey.info("memory")["used_memory"]
    valkey.ask("CONFIG", "SET", "maxmemory", int(used * 1.1))
    assert [level for level, _ in worst(await look(valkey))] == ["warning"]
    valkey.ask("CONFIG", "SET", "maxmemory", 1)
    found = await look(valkey)
    assert any("OOM" in finding.what and "maxmemory" in finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("version", "level"),
    [("6.2.14", "problem"), ("7.0.0", "ok"), ("7.2.4", "ok"), ("7.2-rc1", "ok"), ("10.0", "ok")],
)
def test_outdated_server_is_a_problem(version, level):
    info = {"redis_version": version, "maxmemory_policy": "noeviction"}
    assert next(judged("store", info, is_cluster=False)).level == level


def test_member_of_a_cluster_is_refused_for_a_single_server_url():
    info = {"redis_version": "7.2.4", "redis_mode": "cluster", "maxmemory_policy": "noeviction"}
    assert [finding.level for finding in judged("store", info, is_cluster=False)] == [
        "ok",
        "problem",
        "ok",
    ]
    assert not worst(judged("store", info, is_cluster=True))


async def test_slow_server_is_reported_with_the_timeout_of_a_check(valkey):
    [(level, what)] = worst(await look(valkey, timeout_ms=20, step_s=0.021))
    assert (level, "21.00 ms, longer than REDIS_TIMEOUT_MS (20)" in what) == ("warning", True)


@pytest.mark.parametrize(("ahead_s", "side"), [(90.0, "ahead of"), (-90.0, "behind")])
async def test_clock_difference_is_reported(valkey, ahead_s, side):
    [(level, what)] = worst(await look(valkey, ahead_s=ahead_s))
    assert (level, side in what) == ("warning", True)


async def test_server_that_requires_a_password_is_a_problem(tmp_path):
    with Valkey(tmp_path, password="x") as guarded:
        found = worst(await look_without_greeting(guarded))
        assert any("NOAUTH" in what for _, what in found)


async def look_without_greeting(valkey):
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(hand_over, lambda _error: None, timeout_s=5), "127.0.0.1", valkey.port
    )
    try:
        return await check_server(
            Asked("store", connection), 20, wall_s=lambda: 0.0, monotonic_s=lambda: 0.0
        )
    finally:
        connection.drop(StoreUnavailableError("looked at"))
