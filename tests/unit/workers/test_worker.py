"""Messages of a worker to its parent; the test is the parent's end of the socket, the node is a stand-in."""

import asyncio
import contextlib
import json
import logging
import socket
from contextlib import asynccontextmanager

import pytest

from ratelimitd.node import process, supervisor
from ratelimitd.observe.metrics import Definition, Point
from ratelimitd.settings.table import Settings
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import protocol, worker
from ratelimitd.workers.worker import Parent

SETTINGS = Settings.load({}, {"NODE_ID": "n/0"})


class OneMetric:
    def points(self):
        yield Definition("a", "gauge", "", lambda _: ()), [Point(7)]


class Node:
    readiness = Readiness(ready=False, reason="draining")
    metrics = None


class Talk:
    """A parent, and the messages of its worker."""

    def __init__(self):
        ours, self.theirs = socket.socketpair()
        self.node = Node()
        self.overseer = Parent(self.theirs)
        self.stopped = asyncio.Event()
        self._ours = ours

    @asynccontextmanager
    async def attending(self):
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self._ours)
        with self.theirs:
            async with self.overseer.attending(self.node, self.stopped.set):
                yield self
        self.writer.close()

    async def said(self):
        return json.loads(await self.reader.readline())


@pytest.fixture
async def talk():
    async with Talk().attending() as found:
        yield found


async def test_ready_is_reported(talk):
    talk.overseer.ready(talk.node)
    assert await talk.said() == ["ready"]


async def test_closed_checks_are_reported(talk):
    talk.overseer.checks_guarded()
    assert await talk.said() == ["guarded"]


async def test_a_worker_reports_that_it_is_prepared_and_listens_on_command(talk):
    waiting = asyncio.create_task(talk.overseer.may_listen())
    assert await talk.said() == ["prepared"]
    talk.writer.write(protocol.READINESS)
    assert await talk.said() == ["readiness", False, "draining"]
    assert not waiting.done()
    talk.writer.write(protocol.LISTEN)
    await waiting


async def test_an_early_command_to_listen_is_kept(talk):
    talk.writer.write(protocol.LISTEN + protocol.READINESS)
    assert await talk.said() == ["readiness", False, "draining"]
    await talk.overseer.may_listen()


async def test_a_worker_reports_the_end_of_its_calls_and_closes_on_command(talk):
    waiting = asyncio.create_task(talk.overseer.may_close())
    assert await talk.said() == ["calls ended"]
    talk.writer.write(protocol.READINESS)
    assert await talk.said() == ["readiness", False, "draining"]
    assert not waiting.done()
    talk.writer.write(protocol.CLOSE)
    await waiting


async def test_a_worker_closes_when_the_parent_is_gone(talk):
    waiting = asyncio.create_task(talk.overseer.may_close())
    assert await talk.said() == ["calls ended"]
    talk.writer.close()
    await waiting


async def test_requests_are_answered_in_order(talk):
    talk.node.metrics = OneMetric()
    talk.writer.write(protocol.READINESS + protocol.REPORT + b"of tomorrow\n" + protocol.READINESS)
    assert await talk.said() == ["readiness", False, "draining"]
    assert await talk.said() == ["points", "a", [["", 7]]]
    assert await talk.said() == ["reported"]
    assert await talk.said() == ["readiness", False, "draining"]


async def test_a_node_that_has_no_metrics_yet_reports_none(talk):
    talk.writer.write(protocol.REPORT)
    assert await talk.said() == ["reported"]


async def test_the_end_of_the_parent_ends_the_worker(talk, caplog):
    with caplog.at_level(logging.WARNING):
        talk.writer.close()
        await talk.stopped.wait()
    assert caplog.messages == ["the parent process is gone: draining"]


async def test_the_end_of_the_parent_with_an_unread_answer_ends_the_worker(talk):
    talk.overseer.ready(talk.node)
    talk.writer.transport.abort()
    await talk.stopped.wait()


async def test_an_error_is_sent_on_its_own_line_after_the_loop(capsys):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        assert Parent(theirs).failed("LISTEN: taken") == 1
        assert ours.recv(100) == b'\n["failed","LISTEN: taken"]\n'
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("gone", [False, True])
async def test_a_parent_that_does_not_read_the_error_is_not_awaited(monkeypatch, gone):
    monkeypatch.setattr(worker, "REPORT_TIMEOUT_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        if gone:
            ours.close()
        else:
            with contextlib.suppress(BlockingIOError):
                while theirs.send(b"x" * 65_536):
                    pass
        assert Parent(theirs).failed("LISTEN: taken") == 1


def test_a_second_signal_has_no_effect_on_a_worker():
    Parent(None).insist(143)


def test_the_process_exits_directly_after_the_drain(monkeypatch):
    statuses = []
    monkeypatch.setattr(process, "leave", statuses.append)
    Parent(None).drained()
    assert statuses == [0]


def run_main(*octets):
    ours, theirs = socket.socketpair()
    with ours:
        for each in octets:
            ours.sendall(each)
        ours.shutdown(socket.SHUT_WR)
        return worker.main(theirs.detach())


def test_the_process_runs_a_node_with_the_settings_of_its_parent(monkeypatch):
    ran = []
    monkeypatch.setattr(supervisor, "run", lambda *given: ran.append(given) or 4)
    assert run_main(protocol.settings_message(SETTINGS)) == 4
    [(settings, overseer)] = ran
    assert settings == SETTINGS
    assert overseer.reuse_port


def test_without_a_parent_the_process_fails(monkeypatch):
    monkeypatch.setattr(supervisor, "run", None)
    assert run_main() == 1
