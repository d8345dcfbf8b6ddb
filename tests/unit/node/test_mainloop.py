"""The frame of a process around its event loop, run in this process with real signals and event loops."""

import asyncio
import logging
import os
import signal
import socket
import sys

import pytest

from ratelimitd.errors import SettingsError, StartupError
from ratelimitd.node import process
from ratelimitd.node.process import StopSignals


def serving(end):
    """Return a coroutine function that raises this error, or returns this status."""

    async def serve():
        if isinstance(end, Exception):
            raise end
        return end

    return serve


def test_the_status_is_the_result_of_the_coroutine():
    assert process.run_process(serving(3)) == 3


@pytest.mark.parametrize("kind", [SettingsError, StartupError])
def test_an_expected_failure_is_its_own_line_with_status_1(kind, capsys):
    assert process.run_process(serving(kind("LISTEN: taken"))) == 1
    assert capsys.readouterr() == ("", "Error: LISTEN: taken\n")


def test_an_unexpected_error_is_one_line_with_its_place_but_without_its_text(capsys):
    assert process.run_process(serving(KeyError("a secret"))) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: unexpected KeyError at ")
    assert error.endswith("in serve\n")
    assert error.count("\n") == 1
    assert "secret" not in error


def test_a_failure_goes_to_the_given_handler(capsys):
    told = []
    ended = process.run_process(serving(StartupError("no")), lambda line: told.append(line) or 9)
    assert ended == 9
    assert told == ["no"]
    assert capsys.readouterr() == ("", "")


def test_the_ready_line_has_the_addresses_and_the_name(capsys):
    process.announce("127.0.0.1:1", "127.0.0.1:2", "n1")
    process.announce("127.0.0.1:1", "", "n1")
    process.announce("127.0.0.1:1", "127.0.0.1:2", "n1", "http://127.0.0.1:2/login?code=c")
    assert capsys.readouterr().out.splitlines() == [
        "ratelimitd ready grpc=127.0.0.1:1 http=127.0.0.1:2 node=n1",
        "ratelimitd ready grpc=127.0.0.1:1 http=off node=n1",
        "ratelimitd ready grpc=127.0.0.1:1 http=127.0.0.1:2 node=n1",
        "page: http://127.0.0.1:2/login?code=c (logs in once, within 30 s)",
    ]


def test_a_closed_stdout_does_not_prevent_serving(monkeypatch):
    class Closed:
        def write(self, _text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    process.announce("127.0.0.1:1", "", "n1")


def test_an_unawaited_exception_is_logged_without_its_text(caplog):
    async def serve():
        loop = asyncio.get_running_loop()
        loop.call_soon({}.__getitem__, "user:alice")
        loop.call_exception_handler({"message": "user:alice"})
        await asyncio.sleep(0)
        return 0

    with caplog.at_level(logging.ERROR):
        process.run_process(serve)
    kinds = [record.exc_info and record.exc_info[0] for record in caplog.records]
    assert kinds == [None, KeyError]
    assert all("alice" not in record.getMessage() for record in caplog.records)


def test_the_error_of_a_lookup_that_outlasted_its_connection_is_not_logged(caplog):
    async def lookup():
        raise socket.gaierror

    async def serve():
        asyncio.get_running_loop().create_future().set_exception(socket.gaierror())
        asyncio.create_task(lookup())  # noqa: RUF006 - the defect: nothing awaits it
        await asyncio.sleep(0)
        return 0

    with caplog.at_level(logging.ERROR):
        process.run_process(serve)
    assert [record.exc_info[0] for record in caplog.records] == [socket.gaierror]  # the task's


def test_the_event_loop_is_uvloop_if_available(monkeypatch):
    loop = process.new_event_loop()
    loop.close()
    assert type(loop).__module__ == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = process.new_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("asyncio")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_requests_the_end_and_each_further_one_insists(number):
    insisted = asyncio.Queue()
    stop = StopSignals(insisted.put_nowait)
    os.kill(os.getpid(), number)
    await stop.wait()
    assert insisted.empty()
    for _ in range(2):
        os.kill(os.getpid(), number)
        assert await insisted.get() == 128 + number


async def test_a_closed_terminal_requests_the_end_and_never_insists():
    insisted = asyncio.Queue()
    stop = StopSignals(insisted.put_nowait)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGHUP)
        await stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await insisted.get() == 128 + signal.SIGTERM


async def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopSignals(lambda _: None)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_is_one_line_without_control_characters(capsys):
    assert process.failed("a\nratelimitd ready\x1b[31m") == 1
    assert capsys.readouterr().err == "Error: a ratelimitd ready\ufffd[31m\n"


async def test_the_end_may_be_requested_without_a_signal_and_a_later_signal_insists():
    insisted = asyncio.Queue()
    stop = StopSignals(insisted.put_nowait)
    stop.ask()
    await stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await insisted.get() == 128 + signal.SIGTERM


async def test_a_start_that_ends_before_any_signal_is_kept():
    stop = StopSignals(lambda _: None)
    starting = asyncio.create_task(asyncio.sleep(0))
    assert not await stop.comes_before(starting)
    assert not starting.cancelled()


async def test_a_signal_during_the_start_cancels_it():
    stop = StopSignals(lambda _: None)
    starting = asyncio.create_task(asyncio.Event().wait())
    stop.ask()
    assert await stop.comes_before(starting)
    assert starting.cancelled()


def test_a_child_whose_parent_has_ended_exits(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(os, "umask", lambda _mask: None)
    monkeypatch.setattr(process, "_libc", type("NoOther", (), {"prctl": print}))
    process.ending_with(os.getppid())()
    assert left == []
    process.ending_with(os.getpid())()
    assert left == [1]
