"""The parent in this process. Except in one test, its workers are real processes that run scripted programs."""

import asyncio
import dataclasses
import importlib.util
import os
import signal
import socket
from typing import ClassVar

import grpc.aio
import httpx
import pytest
from google.protobuf.empty_pb2 import Empty

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.node import process as mainloop
from ratelimitd.node.admin_token import find_admin_token, own_admin_token
from ratelimitd.observe import logs
from ratelimitd.settings.parsing import Address
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import Server, parse_redis_url
from ratelimitd.workers import parent
from ratelimitd.workers.child import WorkerProcess
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.fake_worker import ANSWERING, command


@pytest.fixture
def settings(tmp_path):
    """Settings of two workers, with an unreachable shared state."""
    flags = {
        "NODE_ID": "n",
        "LISTEN": "127.0.0.1:0",
        "HTTP_LISTEN": "127.0.0.1:0",
        "STATE_DIR": str(tmp_path / "state"),
        "DATABASE_URL": f"sqlite:///{tmp_path / 'rules.db'}",
        "REDIS_URL": "unix:///nowhere/valkey.sock",
        "WORKERS": "2",
    }
    return Settings.load({}, flags)


@pytest.fixture
def started(monkeypatch):
    """Record each started process with its settings; ``program`` is what they run."""

    class Started(WorkerProcess):
        command = command(ANSWERING)
        all: ClassVar = []

        @classmethod
        async def start(cls, settings, guard, on_report):
            found = await super().start(settings, guard, on_report, cls.command)
            found.settings = settings
            cls.all.append(found)
            return found

    Started.all = []
    monkeypatch.setattr(parent, "WorkerProcess", Started)
    return Started


@pytest.fixture
async def announced(monkeypatch):
    """Return the ready line, once it is written."""
    found = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(mainloop, "leave", None)  # it would end the test run
    monkeypatch.setattr(mainloop, "announce", lambda *line: found.set_result(line))
    return found


async def ended(serving):
    os.kill(os.getpid(), signal.SIGTERM)
    return await serving


async def test_workers_are_separate_nodes_on_one_port(settings, started, announced, tmp_path):
    serving = asyncio.create_task(parent._serve(settings))
    grpc_address, http_address, node_id, link = await announced
    assert node_id == "n"
    token = own_admin_token(settings.state_dir)
    assert link.startswith(f"http://{http_address}/login?code=")
    environ = {"RATELIMITD_STATE_DIR": str(settings.state_dir)}
    assert find_admin_token(grpc_address, environ).token == token
    assert await ended(serving) == 0
    first, second = (process.settings for process in started.all)
    assert first.admin_token == second.admin_token == token
    assert first.admin_token_name == "in STATE_DIR/admin-token"
    assert (first.node_id, second.node_id) == ("n/0", "n/1")
    assert first.state_dir == tmp_path / "state" / "worker-0"
    assert str(first.listen) == str(second.listen) == grpc_address
    assert first.http_socket == tmp_path / "state" / "worker-0" / "http.sock"
    assert first.database_url == settings.database_url
    assert first.redis_url == settings.redis_url
    assert not (settings.state_dir / "valkey").exists()


async def test_without_a_shared_state_the_workers_get_a_private_one(settings, started, announced):
    serving = asyncio.create_task(parent._serve(dataclasses.replace(settings, redis_url="")))
    await announced
    first, second = (process.settings for process in started.all)
    path = settings.state_dir / "valkey" / "valkey.sock"
    assert first.redis_url == second.redis_url
    assert parse_redis_url(first.redis_url).servers == (Server(str(path), 0),)
    assert path.is_socket()
    assert await ended(serving) == 0
    assert not path.exists()


async def test_without_any_shared_state_no_worker_is_started(settings, started, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(StartupError, match="WORKERS: more than 1 needs a shared state"):
        await parent._serve(dataclasses.replace(settings, redis_url=""))
    assert started.all == []


async def test_the_parent_serves_metrics_and_probes(settings, started, announced):
    serving = asyncio.create_task(parent._serve(settings))
    _, http_address, *_ = await announced
    async with httpx.AsyncClient(base_url=f"http://{http_address}") as http:
        assert (await http.get("/healthz")).text == "ok\n"
        assert (await http.get("/readyz")).text == "ready\n"
        assert "\nrate_limiter_workers 2.0\n" in (await http.get("/metrics")).text
        # The workers of this test have no pages.
        assert (await http.get("/rules")).status_code == 503
    assert await ended(serving) == 0


async def test_http_can_be_off(settings, started, announced):
    serving = asyncio.create_task(parent._serve(dataclasses.replace(settings, http_listen=None)))
    _, http_address, _, link = await announced
    assert (http_address, link) == ("", "")
    assert await ended(serving) == 0


async def test_checks_that_one_worker_closed_are_closed_by_all_and_by_their_replacements(
    settings, started, announced, tmp_path
):
    """Another worker may not see the entry of TOKENS_FILE: it is removed again."""
    received = tmp_path / "received"
    os.mkfifo(received)
    started.command = command(
        f"""
        until_told()
        say("prepared")
        commands = [questions.readline()]
        if b"n/0" in settings and commands == [b"listen\\n"]:
            say("guarded")
        say("ready")
        while b"guard\\n" not in commands or b"listen\\n" not in commands:
            commands.append(questions.readline())
        with open({str(received)!r}, "ab") as file:
            file.write(b"".join(commands).replace(b"\\n", b" ") + b"\\n")
        time.sleep(60)
        """
    )
    serving = asyncio.create_task(parent._serve(settings))
    await announced
    with os.fdopen(os.open(received, os.O_RDWR), "rb") as file:
        first = [await asyncio.to_thread(file.readline) for _ in range(2)]
        assert first == [b"listen guard \n"] * 2
        for process in tuple(started.all):
            process.kill()
        later = [await asyncio.to_thread(file.readline) for _ in range(2)]
        assert later == [b"guard listen \n"] * 2
    assert await ended(serving) == 0


async def test_a_given_admin_token_is_used_by_all_workers(settings, started, announced):
    settings = dataclasses.replace(settings, admin_token="set")
    serving = asyncio.create_task(parent._serve(settings))
    assert (await announced)[3] == ""
    assert await ended(serving) == 0
    assert {process.settings.admin_token for process in started.all} == {"set"}
    assert not (settings.state_dir / "admin-token").exists()


@pytest.mark.parametrize("setting", ["listen", "spoe_listen"])
async def test_the_parent_reserves_each_port_of_the_workers_while_it_runs(
    settings, started, announced, setting
):
    settings = dataclasses.replace(settings, spoe_listen=Address("127.0.0.1", 0))
    serving = asyncio.create_task(parent._serve(settings))
    await announced
    # Port 0 is one port for all workers.
    [address] = {getattr(process.settings, setting) for process in started.all}
    with socket.socket() as stranger:
        # No worker listens: those of this test never do.
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(address)
    assert await ended(serving) == 0


@pytest.mark.parametrize(
    ("setting", "named"), [("listen", "LISTEN"), ("spoe_listen", "SPOE_LISTEN")]
)
async def test_a_port_in_use_is_a_one_line_error(settings, started, setting, named):
    with socket.socket() as stranger:
        # A listener with SO_REUSEPORT would share it, and get half of the connections.
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = {setting: Address(*stranger.getsockname())}
        with pytest.raises(
            StartupError, match=rf"^{named}: cannot listen on .*: Address already in"
        ):
            await parent._serve(dataclasses.replace(settings, **taken))
    assert started.all == []


async def test_a_state_directory_in_use_is_a_one_line_error(settings, started):
    lock = StateDir.lock(settings.state_dir)
    with pytest.raises(StartupError, match="in use by another node"):
        await parent._serve(settings)
    lock.close()
    assert started.all == []


async def test_a_worker_that_cannot_start_ends_the_others_with_a_one_line_error(settings, started):
    started.command = command(
        """
        until_told()
        if b"n/1" in settings:
            say("failed", "TLS_CERT: no such file")
            sys.exit(1)
        ready()
        time.sleep(60)
        """
    )
    with pytest.raises(StartupError, match=r"^TLS_CERT: no such file$"):
        await parent._serve(settings)
    other, failed = [await process.ended() for process in started.all]
    # The signal may have come before it could handle it.
    assert other in {0, -signal.SIGTERM}
    assert failed == 1


async def test_a_worker_that_does_not_drain_is_a_one_line_error_with_status_1(
    settings, started, announced, capsys
):
    started.command = command(
        'signal.signal(signal.SIGTERM, lambda *_: (say("failed", "it hung"), os._exit(1)))\n'
        "ready()\ntime.sleep(60)"
    )
    serving = asyncio.create_task(parent._serve(settings))
    await announced
    assert await ended(serving) == 1
    assert capsys.readouterr().err == "Error: worker 0: it hung; worker 1: it hung\n"


async def test_a_signal_before_all_workers_are_ready_ends_those_that_are(
    settings, started, announced
):
    started.command = command(
        'if b"n/0" in settings: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)'
    )
    assert await parent._serve(settings) == 0
    assert [await process.ended() for process in started.all] == [-signal.SIGTERM] * 2
    assert not announced.done()


async def test_a_second_signal_kills_all_at_once(settings, started, announced, monkeypatch):
    left = []
    monkeypatch.setattr(mainloop, "leave", left.append)
    started.command = command(
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
        "ready()\nwhile True: time.sleep(60)"
    )
    serving = asyncio.create_task(parent._serve(settings))
    await announced
    assert await ended(serving) == 1
    assert left[0] == 128 + signal.SIGINT
    assert [await process.ended() for process in started.all] == [-signal.SIGKILL] * 2


async def test_the_parent_is_not_ready_while_the_workers_drain(settings, started, announced):
    started.command = command(
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\nready()\n"
        "signal.sigwait({signal.SIGTERM})\nsignal.sigwait({signal.SIGUSR1})"
    )
    serving = asyncio.create_task(parent._serve(settings))
    http_address = (await announced)[1]
    os.kill(os.getpid(), signal.SIGTERM)
    async with httpx.AsyncClient(base_url=f"http://{http_address}") as http:
        while (answer := await http.get("/readyz")).status_code == 200:
            pass
    assert answer.text == "not ready: draining\n"
    for process in started.all:
        process._process.send_signal(signal.SIGUSR1)
    assert await serving == 0


async def test_the_parent_ends_http_before_the_workers_end_theirs(settings, started, announced):
    started.command = command(
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        ready()
        signal.sigwait({signal.SIGTERM})
        say("calls ended")
        assert questions.readline() == b"close\\n"
        os.kill(os.getppid(), signal.SIGUSR1)
        signal.sigwait({signal.SIGUSR1})
        """
    )
    may_close = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, may_close.set)
    serving = asyncio.create_task(parent._serve(settings))
    http_address = (await announced)[1]
    os.kill(os.getpid(), signal.SIGTERM)
    await may_close.wait()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*http_address.split(":"))
    assert [process._process.returncode for process in started.all] == [None] * 2
    for process in started.all:
        process._process.send_signal(signal.SIGUSR1)
    assert await serving == 0


def test_a_node_id_without_room_for_the_workers_number_is_refused(settings):
    longest = dataclasses.replace(settings, workers=64, node_id="n" * 125)
    assert len(parent.settings_of(longest, 63).node_id) == 128
    too_long = dataclasses.replace(settings, workers=64, node_id="n" * 126)
    with pytest.raises(StartupError, match="NODE_ID must be at most 125 characters with 64"):
        parent.settings_of(too_long, 63)


def test_a_failed_start_is_a_one_line_error_with_status_1(settings, monkeypatch, capsys, tmp_path):
    configured = {}
    monkeypatch.setattr(logs, "configure", lambda **given: configured.update(given))
    (tmp_path / "state").write_text("no directory")
    unnamed = dataclasses.replace(settings, node_id="")
    assert parent.run(unnamed) == 1
    assert capsys.readouterr().err.startswith("Error: STATE_DIR: ")
    assert configured["context"].node_id == unnamed.node_name


async def test_two_real_workers_answer_on_one_port(settings, announced):
    serving = asyncio.create_task(parent._serve(dataclasses.replace(settings, redis_url="")))
    grpc_address, http_address, _, link = await announced
    authorization = f"Bearer {own_admin_token(settings.state_dir)}"
    names = set()
    while len(names) < 2:  # the kernel chooses
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(grpc_address, options) as channel:
            health = stubs.RateLimiterHealthStub(channel)
            metadata = [("authorization", authorization)]
            names.add((await health.GetHealthStatus(Empty(), metadata=metadata)).node_id)
    assert names == {"n/0", "n/1"}
    async with httpx.AsyncClient(base_url=f"http://{http_address}") as http:
        assert "\nrate_limiter_connections 0.0\n" in (await http.get("/metrics")).text
        assert (await http.get("/rules")).status_code == 401
        assert (await http.get(link)).headers["location"] == "/"
        page = await http.get("/rules", headers={"Accept": "text/html"})
        assert "<h1>Rules</h1>" in page.text
    for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):  # answered by other workers
        transport = httpx.AsyncHTTPTransport(local_address=host)
        async with httpx.AsyncClient(transport=transport) as other:
            assert (await other.get(link)).status_code == 401
    assert await ended(serving) == 0
