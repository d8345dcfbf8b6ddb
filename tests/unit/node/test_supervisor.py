"""The process around a node, in this process: the node is a stand-in, signals and event loop are real."""

import asyncio
import gc
import os
import signal
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.node import jobs, process, supervisor
from ratelimitd.observe import logs
from ratelimitd.settings.table import Settings


class StandIn:
    """Stands in for a node, as each test defines; ``happened`` records its calls in order."""

    grpc_address = "127.0.0.1:1"
    http_address = "127.0.0.1:2"
    node_id = "n1"
    login_link = ""
    happened: ClassVar[list[str]]

    def __init__(
        self, _settings, *, context, whole_load, reuse_port, may_listen, may_close, on_guard
    ):
        self.context = context
        self.reuse_port = reuse_port
        self.may_listen = may_listen
        self.may_close = may_close
        self.on_guard = on_guard
        assert whole_load is jobs.whole_load

    async def start(self):
        self.happened.append("start")
        self.on_guard()
        await self.may_listen()
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    async def drain(self):
        self.happened.append("drain")
        await self.may_close()


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Replace what affects the whole test run: logging, the garbage collector, and the exit."""
    statuses = []
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(process, "leave", statuses.append)
    return statuses


@pytest.fixture
def node(monkeypatch):
    class Node(StandIn):
        happened: ClassVar = []

    monkeypatch.setattr(supervisor, "Node", Node)
    return Node


def run(overseer=None, **settings):
    return supervisor.run(
        Settings.load({}, {name.upper(): text for name, text in settings.items()}), overseer
    )


class Overseer(supervisor.Overseer):
    """Another overseer of the process; ``recorded`` records its calls."""

    reuse_port = True

    def __init__(self):
        self.recorded = []

    @asynccontextmanager
    async def attending(self, node, stop):
        self.recorded.append("attends")
        self.stop = stop
        self.shares_port = node.reuse_port
        yield
        self.recorded.append("leaves")

    async def may_listen(self):
        self.recorded.append("lets it listen")

    async def may_close(self):
        self.recorded.append("lets it close")

    def checks_guarded(self):
        self.recorded.append("hears of closed checks")

    def ready(self, node):
        self.recorded.append(f"ready {node.grpc_address}")

    def failed(self, line):
        self.recorded.append(line)
        return 7

    def insist(self, status):
        self.recorded.append(status)
        self.insisted.set()

    def drained(self):
        self.recorded.append("drained")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_node_and_the_status_is_0(node, monkeypatch, number):
    monkeypatch.setattr(signal, "SIGTERM", number)
    assert run() == 0
    assert node.happened == ["start", "drain"]


def test_readiness_is_one_line_on_stdout(node, capsys):
    run()
    line = "ratelimitd ready grpc=127.0.0.1:1 http=127.0.0.1:2 node=n1\n"
    assert capsys.readouterr() == (line, "")


@pytest.fixture
def unable(node):
    """A node that cannot start."""

    async def start(_self):
        message = "LISTEN: taken"
        raise StartupError(message)

    node.start = start


def test_a_node_that_cannot_start_is_a_one_line_error_with_status_1(unable, capsys):
    assert run() == 1
    assert capsys.readouterr() == ("", "Error: LISTEN: taken\n")


def test_a_signal_during_the_start_cancels_it_and_closes_open_parts(node, capsys):
    async def start(self):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            self.happened.append("broken off")

    node.start = start
    assert run() == 0
    assert node.happened == ["broken off", "drain"]
    assert capsys.readouterr().out == ""


def test_a_second_signal_ends_the_process_at_once(node, monkeypatch):
    ended = []

    async def drain(_self):
        left = asyncio.Event()
        monkeypatch.setattr(process, "leave", lambda status: (ended.append(status), left.set()))
        os.kill(os.getpid(), signal.SIGINT)
        await left.wait()

    node.drain = drain
    run()
    assert ended == [128 + signal.SIGINT]


def test_a_drain_that_hangs_ends_the_process_with_status_1(node, ended, capsys, monkeypatch):
    async def drain(_self):
        await asyncio.Event().wait()

    monkeypatch.setattr(supervisor, "OVERDUE_S", 0.0)
    node.drain = drain
    run(drain_s="0")
    assert ended == [1]
    assert capsys.readouterr().err.startswith("Error: the node did not drain in time")


def test_loaded_objects_are_frozen_before_and_after_the_start(node, monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: node.happened.append("freeze"))
    run()
    assert node.happened == ["freeze", "start", "freeze", "drain"]


def test_logging_is_configured_by_the_settings(node, monkeypatch):
    seen = {}
    monkeypatch.setattr(logs, "configure", lambda **given: seen.update(given))
    run(log_level="debug", log_format="json", node_id="n7")
    assert (seen["level"], seen["log_format"], seen["context"].node_id) == ("debug", "json", "n7")


def test_an_overseer_gets_the_events_that_a_terminal_shows(node, capsys):
    overseer = Overseer()
    assert run(overseer) == 0
    assert overseer.recorded == [
        "attends",
        "hears of closed checks",
        "lets it listen",
        "ready 127.0.0.1:1",
        "lets it close",
        "drained",
        "leaves",
    ]
    assert overseer.shares_port
    assert capsys.readouterr() == ("", "")


def test_an_overseer_may_request_the_end(node):
    overseer = Overseer()

    async def start(self):
        self.happened.append("start")
        asyncio.get_running_loop().call_soon(overseer.stop)

    node.start = start
    assert run(overseer) == 0
    assert node.happened == ["start", "drain"]


def test_an_overseer_decides_the_status_of_a_failed_start(unable, capsys):
    overseer = Overseer()
    assert run(overseer) == 7
    assert overseer.recorded == ["attends", "LISTEN: taken"]
    assert capsys.readouterr() == ("", "")


def test_an_overseer_decides_the_effect_of_a_second_signal(node):
    async def drain(_self):
        overseer.insisted = asyncio.Event()
        os.kill(os.getpid(), signal.SIGINT)
        await overseer.insisted.wait()

    node.drain = drain
    overseer = Overseer()
    assert run(overseer) == 0
    assert overseer.recorded[4:] == [128 + signal.SIGINT, "drained", "leaves"]
