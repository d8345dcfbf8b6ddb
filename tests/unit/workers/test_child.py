"""The parent's side of one process; the processes are real and run scripted programs."""

import asyncio
import signal
import socket

import pytest
import uvloop

from ratelimitd.errors import StartupError
from ratelimitd.settings.table import Settings
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import child, protocol
from ratelimitd.workers.child import ChecksGuard, WorkerProcess
from tests.fake_worker import ANSWERING, command

SETTINGS = Settings.load({}, {"NODE_ID": "n/0"})
ALLOWED = "rate_limiter_requests_allowed_total"
ON_EACH_LOOP = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@pytest.fixture
async def start():
    """Return a function that starts a process with a program; kill it at the end."""
    started = []
    guard = ChecksGuard()

    async def start(program=ANSWERING, on_report=lambda _: None):
        worker = await WorkerProcess.start(SETTINGS, guard, on_report, command(program))
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()
        await worker.ended()


async def test_a_worker_is_ready_when_it_reports_so_and_ends_on_a_signal(start):
    worker = await start()
    await worker.ready()
    worker.terminate()
    assert await worker.ended() == 0
    for late in (worker.terminate, worker.kill):
        late()


async def test_a_prepared_worker_waits_for_the_command_to_listen(start):
    worker = await start("""
        say("prepared")
        assert questions.readline() == b"listen\\n"
        say("failed", "LISTEN: taken")
        sys.exit(1)
        """)
    await worker.prepared()
    with pytest.raises(StartupError, match=r"^LISTEN: taken$"):
        await worker.ready()


@ON_EACH_LOOP
def test_a_worker_that_ends_before_the_command_to_listen_reports_why(new_loop):
    async def go():
        program = 'say("prepared")\nsay("failed", "no room")\nsys.exit(1)'
        worker = await WorkerProcess.start(
            SETTINGS, ChecksGuard(), lambda _: None, command(program)
        )
        await worker.prepared()
        await worker.ended()
        with pytest.raises(StartupError, match=r"^no room$"):
            await worker.ready()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(go())


async def test_a_draining_worker_waits_for_the_command_to_close(start):
    worker = await start("""
        ready()
        say("calls ended")
        assert questions.readline() == b"close\\n"
        sys.exit(3)
        """)
    await worker.ready()
    await worker.calls_ended()
    worker.close()
    assert await worker.ended() == 3
    worker.close()


async def test_a_worker_that_has_ended_has_no_calls(start):
    worker = await start("ready()\nsys.exit(3)")
    await worker.ready()
    await worker.calls_ended()
    assert await worker.ended() == 3


async def test_a_worker_gets_its_settings(start):
    reports = []
    worker = await start(
        """
        ready()
        say("points", "length", [["", len(settings)]])
        for _ in questions:
            say("reported")
        """,
        reports.append,
    )
    await worker.ready()
    await worker.report()
    assert reports == [{"length": {"": len(protocol.settings_message(SETTINGS)) - 4}}]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('say("failed", "LISTEN: taken"); sys.exit(1)', "LISTEN: taken"),
        ("sys.exit(3)", "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        (r'sock.sendall(b"[\n[]\n[\"failed\",\"torn before\"]\n")', "torn before"),
    ],
)
async def test_the_end_of_an_unready_worker_has_a_reason_from_it_or_the_system(
    start, program, reason
):
    worker = await start(program)
    for wait in (worker.prepared, worker.ready):
        with pytest.raises(StartupError) as caught:
            await wait()
        assert str(caught.value) == reason


async def test_a_worker_may_end_before_it_reads_its_settings():
    worker = await WorkerProcess.start(SETTINGS, ChecksGuard(), lambda _: None, ["false"])
    with pytest.raises(StartupError, match="ended with status 1"):
        await worker.ready()


async def test_requests_get_their_answers(start):
    reports = []
    worker = await start(on_report=reports.append)
    await worker.ready()
    assert await worker.readiness() == Readiness(ready=True)
    report = await worker.report()
    assert report == {ALLOWED: {"": 2}, "rate_limiter_tasks": {"": 1}}
    assert reports == [report]


async def test_concurrent_requests_share_the_answer(start):
    worker = await start()
    await worker.ready()
    first, second = await asyncio.gather(worker.report(), worker.report())
    assert first is second
    assert (await worker.report())[ALLOWED] == {"": 2}


HELD_UP = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
ready()
for question in questions:
    signal.sigwait({signal.SIGUSR1})
    say("readiness", True, "") if question == b"readiness\\n" else metrics(asked=1)
"""
"""It answers when it gets a signal."""


async def test_a_late_answer_is_not_awaited_but_processed(start, monkeypatch):
    monkeypatch.setattr(child, "REPORT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(child, "READINESS_TIMEOUT_S", 0.0)
    came = asyncio.Queue()
    worker = await start(HELD_UP, came.put_nowait)
    await worker.ready()
    # Repeated calls send one request.
    assert [await worker.readiness() for _ in range(3)] == [None] * 3
    assert [await worker.report() for _ in range(3)] == [None] * 3
    readiness = worker._readiness
    worker._process.send_signal(signal.SIGUSR1)
    assert await readiness == Readiness(ready=True)
    worker._process.send_signal(signal.SIGUSR1)
    assert await came.get() == {"asked": {"": 1}}
    assert await worker.report() is None
    worker._process.send_signal(signal.SIGUSR1)
    assert await came.get() == {"asked": {"": 1}}
    assert came.empty()


async def test_a_worker_that_has_ended_gives_no_answer(start):
    worker = await start()
    await worker.ready()
    worker.kill()
    assert await worker.ended() == -signal.SIGKILL
    assert await worker.report() is None
    assert await worker.readiness() is None


class WatchedGuard(ChecksGuard):
    """Signals that a worker's socket was read to its end."""

    def __init__(self):
        super().__init__()
        self.left = asyncio.Event()

    def discard(self, writer):
        super().discard(writer)
        self.left.set()


@ON_EACH_LOOP
def test_requests_between_the_end_of_the_socket_and_of_the_process_get_no_answer(new_loop):
    async def ask():
        guard = WatchedGuard()
        program = command("ready()\nsock.shutdown(socket.SHUT_RDWR)\nsignal.pause()")
        worker = await WorkerProcess.start(SETTINGS, guard, lambda _: None, program)
        await worker.ready()
        await guard.left.wait()
        questions = [asyncio.ensure_future(ask()) for ask in (worker.report, worker.readiness)]
        await asyncio.sleep(0)
        worker.kill()
        assert await asyncio.gather(*questions) == [None, None]
        await worker.ended()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())


async def test_requests_open_at_the_end_get_no_answer(start):
    worker = await start("ready()\nfor _ in range(2): questions.readline()")
    await worker.ready()
    assert await asyncio.gather(worker.report(), worker.readiness()) == [None, None]


async def test_half_a_report_is_dropped(start):
    reports = []
    worker = await start(
        'ready()\nquestions.readline()\nsay("points", "a", [["", 1]])', reports.append
    )
    await worker.ready()
    assert await worker.report() is None
    assert reports == []


async def test_unrequested_answers_are_ignored(start):
    worker = await start(
        'say("readiness", True, "")\nsay("reported")\nready()\nuntil_told()\ntime.sleep(60)'
    )
    await worker.ready()


async def test_an_endless_line_kills_the_process(start, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 100)
    worker = await start('sock.sendall(b"x" * 1000)\ntime.sleep(60)')
    assert await worker.ended() == -signal.SIGKILL


async def test_a_worker_detects_the_end_of_its_parent(start):
    worker = await start("ready()\nquestions.read()\nsys.exit(5)")
    await worker.ready()
    worker._writer.close()
    assert await worker.ended() == 5


async def test_a_missing_command_is_a_failed_start():
    with pytest.raises(StartupError, match=r"^a worker cannot be started: No such file"):
        await WorkerProcess.start(SETTINGS, ChecksGuard(), lambda _: None, ["/no/such/command"])


async def test_a_system_without_descriptors_is_a_failed_start(monkeypatch):
    def none_left():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(StartupError, match=r"^a worker cannot be started: Too many open files$"):
        await WorkerProcess.start(SETTINGS, ChecksGuard(), lambda _: None, command())
