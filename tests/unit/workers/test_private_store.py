"""The private Valkey of a parent: start, requests, and separation from others; with real processes."""

import asyncio
import dataclasses
import importlib.util
import os
import re
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import Login, Server, parse_redis_url
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import pool, private_store
from ratelimitd.workers.pool import Respawner
from ratelimitd.workers.private_store import RIGHTS, PrivateStore, valkey_server

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def settings(tmp_path):
    return Settings.load({}, {"WORKERS": "2", "STATE_DIR": str(tmp_path / "a state")})


@pytest.fixture
def store(settings):
    return PrivateStore.of(settings)


@pytest.fixture
async def running(store):
    process = await store.start(lambda _report: None)
    await process.ready()
    yield process
    process.kill()
    await process.ended()


def test_the_store_is_reached_by_its_url(store):
    url = parse_redis_url(store.url)
    assert url.servers == (Server(str(store.socket), 0),)
    assert url.login == Login("ratelimitd", store.password)


def test_the_password_is_new_each_time_and_not_shown(settings, store):
    assert PrivateStore.of(settings).password != store.password
    assert len(store.password) >= 40
    for told in (repr(store), " ".join(store.command), store.users.decode()):
        assert store.password not in told


def test_the_users_permissions_match_the_documentation():
    page = (DOCS / "cluster.md").read_text(encoding="utf-8")
    assert re.search(r"^ACL SETUSER ratelimitd on >PASSWORD (.+)$", page, re.MULTILINE)[1] == RIGHTS


def test_the_memory_bound_grows_with_cache_entries(settings):
    def bound(entries):
        return PrivateStore.of(dataclasses.replace(settings, cache_entries=entries)).max_bytes

    assert bound(1_000_000) == 1_057_554_432
    assert bound(1) > 32_000_000
    assert str(bound(7)) in PrivateStore.of(dataclasses.replace(settings, cache_entries=7)).command


def test_without_the_wheel_the_error_names_the_extra_and_the_alternative(settings, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(StartupError, match=r"set REDIS_URL, or .* 'ratelimitd\[workers\]'"):
        PrivateStore.of(settings)


def test_a_path_without_room_for_a_socket_is_refused(settings, tmp_path):
    longest = Path("/" + "d" * (107 - len("//valkey/valkey.sock")))
    assert PrivateStore.of(dataclasses.replace(settings, state_dir=longest))
    too_long = dataclasses.replace(settings, state_dir=Path(f"{longest}dd"))
    with pytest.raises(StartupError, match=r"^STATE_DIR: .* 2 bytes too long"):
        PrivateStore.of(too_long)


async def test_the_store_answers_its_user_alone_and_its_files_are_private(store, running):
    assert await running.readiness() == Readiness(ready=True, reason="")
    assert await running.report() is None
    for path in (store.directory, *store.directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    stranger = dataclasses.replace(store, password="wrong")
    assert (await stranger.answer(5)).startswith(b"-WRONGPASS")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(store.socket))
        client.sendall(b"PING\r\n")
        assert client.recv(100).startswith(b"-NOAUTH")


async def test_the_store_ends_cleanly_on_a_signal(running, store):
    running.terminate()
    assert await running.ended() == 0
    assert await running.readiness() is None
    assert not store.socket.exists()


async def test_a_killed_store_reports_the_signal(running):
    running.kill()
    assert await running.ended() == -signal.SIGKILL
    assert running.reason == "ended by signal 9"


async def test_a_failed_start_reports_the_last_log_line(store):
    process = await dataclasses.replace(store, max_bytes=-1).start(lambda _report: None)
    with pytest.raises(StartupError) as failed:
        await process.ready()
    assert await process.ended() == 1
    assert not re.match(r"\d+:", str(failed.value))  # the message without process and time


MANIFEST = b"file appendonly.aof.1.incr.aof seq 1 type i\n"
SET = b"*3\r\n$3\r\nSET\r\n$5\r\nrl1:%d\r\n$1\r\nx\r\n"


def write_files(store, manifest, log):
    files = store.directory / "appendonlydir"
    files.mkdir(parents=True)
    (files / "appendonly.aof.manifest").write_bytes(manifest)
    file = files / "appendonly.aof.1.incr.aof"
    file.write_bytes(log)
    return file


@pytest.mark.parametrize(
    ("manifest", "log"),
    [(b"", b""), (MANIFEST, SET % 1 + b"*what\r\n"), (MANIFEST, b"*1\r\n$1\r\nx\r\n")],
)
async def test_damaged_files_are_set_aside_for_the_next_start(store, manifest, log):
    write_files(store, manifest, log)
    kept = store.directory / "appendonlydir.bad"
    kept.mkdir()  # of an earlier time
    process = await store.start(lambda _report: None)
    with pytest.raises(StartupError, match=f"^its files are damaged, and now in {kept}: "):
        await process.ready()
    assert (kept / "appendonly.aof.1.incr.aof").read_bytes() == log
    successor = await store.start(lambda _report: None)
    await successor.ready()
    successor.kill()
    await successor.ended()


async def test_files_of_a_newer_release_stay(store):
    base = b"file appendonly.aof.1.base.rdb seq 1 type b\n"
    file = write_files(store, base + MANIFEST, b"").with_name("appendonly.aof.1.base.rdb")
    file.write_bytes(b"VALKEY999")
    process = await store.start(lambda _report: None)
    with pytest.raises(StartupError, match=r"appendonly\.aof\.1\.base\.rdb"):
        await process.ready()
    assert file.exists()


@pytest.mark.parametrize("zeros", [1, 512, private_store.LEFT_BYTES + 1])
@pytest.mark.parametrize("commands", [0, 2])
async def test_zeros_at_the_end_of_a_file_cost_nothing_before_them(store, commands, zeros):
    written = b"".join([SET % number for number in range(commands)])
    file = write_files(store, MANIFEST, written + bytes(zeros))
    process = await store.start(lambda _report: None)
    await process.ready()
    assert file.read_bytes() == written
    process.kill()
    await process.ended()


async def test_a_start_beside_another_store_is_refused(store, running, monkeypatch):
    monkeypatch.setattr(private_store, "PREDECESSOR_S", 0.1)
    with pytest.raises(StartupError, match=r"another one listens at .*valkey\.sock"):
        await store.start(lambda _report: None)


async def test_a_start_waits_for_the_end_of_the_previous_store(store, running):
    starting = asyncio.create_task(store.start(lambda _report: None))
    await asyncio.sleep(0)
    running.terminate()
    successor = await starting
    assert running._process.returncode is not None or await running.ended() == 0
    await successor.ready()
    successor.kill()
    await successor.ended()


async def test_a_program_that_does_not_run_is_a_one_line_error(store, tmp_path):
    with pytest.raises(StartupError, match="it cannot be started: No such file"):
        await dataclasses.replace(store, program=tmp_path / "none").start(lambda _report: None)
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(StartupError, match=f"it cannot be started: File exists: {occupied}"):
        await dataclasses.replace(store, directory=occupied).start(lambda _report: None)


def script(tmp_path, text):
    path = tmp_path / "valkey-server"
    path.write_text(f"#!{sys.executable} -ES\n{text}")
    path.chmod(0o700)
    return path


async def test_a_store_that_never_answers_is_killed(store, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_S", 0.0)
    hanging = script(tmp_path, "import time\nwhile True: time.sleep(60)\n")
    respawner = Respawner("store", dataclasses.replace(store, program=hanging).start)
    process = await respawner.start()
    assert await process.readiness() is None
    assert await process.ended() == -signal.SIGKILL
    assert await respawner.stop() == ""


async def test_files_whose_content_makes_it_abort_are_set_aside(store, tmp_path):
    file = write_files(store, MANIFEST, b"")
    text = "import os\nprint('Internal error in RDB reading', flush=True)\nos.abort()\n"
    aborting = dataclasses.replace(store, program=script(tmp_path, text))
    process = await aborting.start(lambda _report: None)
    with pytest.raises(StartupError, match=r"^its files are damaged"):
        await process.ready()
    assert not file.exists()


WRITES_WHEN_KILLED = """\
import os, time
parent = os.getpid()
if not os.fork():
    while os.getppid() == parent:
        time.sleep(0.01)
    os.write(1, b"x" * 1_000_000)
    os._exit(0)
while True:
    print("x" * 60_000, end="")
"""


async def test_a_store_with_an_endless_line_is_killed(store, tmp_path):
    endless = script(tmp_path, WRITES_WHEN_KILLED)
    process = await dataclasses.replace(store, program=endless).start(lambda _report: None)
    assert await process.ended() == -signal.SIGKILL


def test_the_program_is_in_the_wheel():
    assert os.access(valkey_server(), os.X_OK)
