"""A cluster from start to end: real children, in which substitutes for nodes are ready at once."""

import asyncio
import contextlib
import errno
import io
import os
import re
import signal
import sys
import tempfile
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import run as module
from ratelimitd.cli.dev import servers
from ratelimitd.cli.dev.command import Cluster
from ratelimitd.cli.output import Output

NODE = "print('ratelimitd ready grpc=… http=… node=…', flush=True); import time; time.sleep(60)"
REFUSES = "import sys; sys.exit('Error: no room')"


@dataclass
class Scripted:
    """A plan for a substitute of a node; records its arguments."""

    name: str
    script: str = NODE
    grpc_address: str = "127.0.0.1:1"
    http_address: str = "127.0.0.1:2"

    def command(self, directory, **told):
        self.directory, self.told = directory, told
        self.rules = told["rules_file"].read_text()
        return [sys.executable, "-c", self.script]


class Screen(io.StringIO):
    """Records the output, and waits for a text in it."""

    def __init__(self):
        super().__init__()
        self.changed = asyncio.Event()

    def write(self, text):
        self.changed.set()
        return super().write(text)

    async def shows(self, text):
        async with asyncio.timeout(30):
            while text not in self.getvalue():
                self.changed.clear()
                await self.changed.wait()


class Fragile(Screen):
    """A screen whose terminal or reader may disappear."""

    gone = False

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture(autouse=True)
def directory(tmp_path_factory, monkeypatch):
    """The parent of temporary directories, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
        assert list(Path(name).iterdir()) == []


async def run(screen, *nodes, rules_file=None, sqlite=True):
    with contextlib.redirect_stdout(screen):
        await Cluster(
            nodes,
            Output(),
            rules_file=rules_file,
            rules=None,
            sqlite=sqlite,
            identifier_types="",
        ).run()


async def running(screen, *nodes, **options):
    task = asyncio.create_task(run(screen, *nodes, **options))
    shown = asyncio.create_task(screen.shows("stops everything"))
    await asyncio.wait((task, shown), return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task.exception()
    return task


def pid_of(name, screen):
    return int(re.search(rf"^{name} .* (\d+)$", screen.getvalue(), re.MULTILINE)[1])


async def test_everything_is_shown_and_ended_by_ctrl_c(screen):
    nodes = Scripted("n1"), Scripted("n2")
    task = await running(screen, *nodes)
    shown = screen.getvalue()
    assert re.search(r"^n2 +127.0.0.1:1 +http://127.0.0.1:2/ +\d+$", shown, re.MULTILINE)
    assert nodes[0].told == nodes[1].told
    assert nodes[0].told["redis_url"] in shown
    assert nodes[0].told["database_url"] in shown
    assert "kill -9" in shown
    assert "limit: 10" in nodes[0].rules
    pids = [pid_of("n1", screen), pid_of("n2", screen)]
    os.kill(os.getpid(), signal.SIGINT)
    await task
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_everything_ends_when_the_terminal_is_gone():
    screen = Fragile()
    task = await running(screen, Scripted("n1"))
    pid = pid_of("n1", screen)
    screen.gone = True
    os.kill(os.getpid(), signal.SIGHUP)
    await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_rules_file_can_be_given(screen, tmp_path_factory):
    file = tmp_path_factory.mktemp("rules") / "mine.yaml"
    file.write_text("rules: []")
    node = Scripted("n1")
    task = await running(screen, node, rules_file=file)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert node.rules == "rules: []"


async def test_q_stops_everything_and_restores_the_terminal(screen, keyboard):
    before = termios.tcgetattr(keyboard)
    task = await running(screen, Scripted("n1"))
    os.write(keyboard, b"x")
    os.write(keyboard, b"q")
    await task
    assert termios.tcgetattr(keyboard) == before


async def test_dead_child_is_reported_and_the_others_continue(screen):
    task = await running(screen, Scripted("n1"), Scripted("n2"))
    os.kill(pid_of("n2", screen), signal.SIGKILL)
    await screen.shows("n2 ended with SIGKILL: it wrote nothing")
    os.kill(pid_of("n1", screen), 0)
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert "n1 ended" not in screen.getvalue()


@pytest.mark.parametrize("which", [0, 1])
async def test_node_that_fails_to_start_ends_the_run(screen, which):
    nodes = [Scripted("n1"), Scripted("n2")]
    nodes[which].script = REFUSES
    with pytest.raises(CliError, match=f"n{which + 1} ended with status 1: no room"):
        await run(screen, *nodes)


async def test_ctrl_c_during_the_start_ends_the_run(screen, tmp_path_factory):
    started = tmp_path_factory.mktemp("started") / "it"
    node = Scripted("n1", f"open({str(started)!r}, 'w').close(); import time; time.sleep(60)")
    task = asyncio.create_task(run(screen, node))
    async with asyncio.timeout(30):
        while not started.exists():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert "stops everything" not in screen.getvalue()


async def test_rules_are_in_postgresql_which_is_upgraded_first(screen, monkeypatch):
    upgraded = []

    async def start_postgresql(children, directory):
        return await children.start("postgresql", ["sleep", "60"]), "postgresql:///rules"

    class Recorder(module.Children):
        async def run(self, name, command, **options):
            upgraded.append((name, command[-4:]))

    monkeypatch.setattr(servers, "start_postgresql", start_postgresql)
    monkeypatch.setattr(module, "Children", Recorder)
    node = Scripted("n1")
    task = await running(screen, node, sqlite=False)
    os.kill(os.getpid(), signal.SIGINT)
    await task
    upgrade = ["db", "upgrade", "--database-url", "postgresql:///rules"]
    assert upgraded == [("db-upgrade", upgrade)]
    assert node.told["database_url"] == "postgresql:///rules"
