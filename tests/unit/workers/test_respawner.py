"""One worker and its successive processes, which are stand-ins; the clock advances when the respawner sleeps."""

import asyncio
import logging

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import pool
from ratelimitd.workers.pool import LONG_LIFE_S, LONGEST_PAUSE_S, MAX_SILENT_LOOKS, Respawner

ALLOWED = "rate_limiter_requests_allowed_total"


LOOK = object()
"""Replaces the pause between two checks; only the test ends it."""


class Process:
    """Ready at once, unless it has a ``failure``; ends when the test or the respawner ends it."""

    def __init__(self, on_report, failure=""):
        self.on_report = on_report
        self.failure = failure
        self.reason = ""
        self.recorded = []
        self.waited_for = []
        self.hangs = False
        self.waits_to_close = asyncio.Event()
        self._end = asyncio.get_running_loop().create_future()
        if failure:
            self.end(1, failure)

    def end(self, status=-9, reason="ended by signal 9"):
        self.reason = reason
        self.waits_to_close.set()
        self._end.set_result(status)

    async def prepared(self):
        self.waited_for.append("prepared")
        if self.failure:
            raise StartupError(self.failure)

    async def ready(self):
        self.waited_for.append("ready")
        if self.hangs:
            await self.ended()
            raise StartupError(self.reason)
        if self.failure:
            raise StartupError(self.failure)
        self.came.set()

    async def calls_ended(self):
        await self.waits_to_close.wait()

    def close(self):
        if not self._end.done():
            self.recorded.append("close")

    async def ended(self):
        return await asyncio.shield(self._end)

    async def readiness(self):
        return None if self.hangs or self._end.done() else Readiness(ready=False, reason="no rules")

    async def report(self):
        report = {ALLOWED: {"": 5}}
        self.on_report(report)
        return report

    def terminate(self):
        self.recorded.append("terminate")
        if not self._end.done():
            self.end(0, "")

    def kill(self):
        self.recorded.append("kill")
        self.end()


class Kept:
    """A respawner that exposes its processes."""

    def __init__(self):
        self.processes = []
        self.failures = []
        self.next_hangs = False
        self.started = asyncio.Event()
        """A process was started after the first."""
        self.pauses = []
        self._looks = asyncio.Queue()
        self._looked = False
        self.now_s = 0.0
        self._came = asyncio.Event()
        self.respawner = Respawner(
            "worker 0",
            self._start,
            sleep=self._sleep,
            time_s=lambda: self.now_s,
            random=lambda: 0.0,
        )

    async def _start(self, on_report):
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "none at all":
            raise StartupError(failure)
        self.processes.append(Process(on_report, failure))
        if len(self.processes) > 1:
            self.started.set()
        self.processes[-1].hangs, self.next_hangs = self.next_hangs, False
        self.processes[-1].came = self._came
        return self.processes[-1]

    async def _sleep(self, pause_s):
        if pause_s is LOOK:
            if self._looked:
                self._looks.task_done()
            await self._looks.get()
            self._looked = True
            return
        self.pauses.append(pause_s)
        await asyncio.sleep(0)

    async def look(self, times):
        """Let the respawner check its process so many times, and wait until it has."""
        self.begin_looking(times)
        await self._looks.join()

    def begin_looking(self, times=1):
        for _ in range(times):
            self._looks.put_nowait(None)

    async def next_process(self):
        """Wait until another process is up."""
        self._came.clear()
        await self._came.wait()


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    monkeypatch.setattr(pool, "LOOK_S", LOOK)


@pytest.fixture
async def kept():
    found = Kept()
    await found.respawner.start()
    found.keeping = asyncio.create_task(found.respawner.keep())
    yield found
    found.keeping.cancel()


async def test_an_ended_process_is_replaced_counted_and_logged(kept, caplog):
    assert kept.respawner.restarts_total == 0
    kept.processes[0].end()
    with caplog.at_level(logging.ERROR):
        await kept.next_process()
    assert kept.respawner.restarts_total == 1
    assert caplog.messages == ["worker 0: ended by signal 9; it is started again in 0.1 s"]


async def test_pauses_grow_up_to_a_bound(kept):
    for _ in range(8):
        kept.processes[-1].end()
        await kept.next_process()
    assert kept.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


async def test_a_long_life_resets_the_pauses(kept):
    for life_s in (0, LONG_LIFE_S - 1, LONG_LIFE_S, 0):
        kept.now_s += life_s
        kept.processes[-1].end()
        await kept.next_process()
    assert kept.pauses == [0.1, 0.2, 0.1, 0.2]


async def test_a_failed_restart_is_retried(kept, caplog):
    kept.failures = ["LISTEN: taken", "none at all"]
    kept.processes[0].end()
    with caplog.at_level(logging.ERROR):
        await kept.next_process()
    assert kept.respawner.restarts_total == 3
    assert [line.split(";")[0] for line in caplog.messages] == [
        "worker 0: ended by signal 9",
        "worker 0: LISTEN: taken",
        "worker 0: none at all",
    ]
    assert (await kept.respawner.readiness()).reason == "no rules"


async def test_a_failed_first_start_raises():
    kept = Kept()
    kept.failures = ["LISTEN: taken"]
    with pytest.raises(StartupError, match="LISTEN: taken"):
        await kept.respawner.start()
    assert await kept.respawner.stop() == ""


async def test_a_prepared_process_is_the_one_that_starts():
    kept = Kept()
    await kept.respawner.prepare()
    assert kept.processes[0].waited_for == ["prepared"]
    assert await kept.respawner.readiness() == Readiness(ready=False, reason="starting")
    await kept.respawner.start()
    assert [process.waited_for for process in kept.processes] == [["prepared", "ready"]]
    assert (await kept.respawner.readiness()).reason == "no rules"


async def test_a_replacement_process_listens_at_once(kept):
    kept.processes[0].end()
    await kept.next_process()
    assert kept.processes[1].waited_for == ["ready"]


async def test_the_counts_of_a_dead_process_are_kept(kept):
    await kept.respawner.report()
    kept.processes[0].end()
    await kept.next_process()
    assert kept.respawner.totals.report() == {ALLOWED: {"": 5}}
    assert await kept.respawner.report() == {ALLOWED: {"": 5}}
    assert kept.respawner.totals.report() == {ALLOWED: {"": 10}}


async def test_the_readiness_of_a_worker_is_that_of_its_process(kept):
    assert await kept.respawner.readiness() == Readiness(ready=False, reason="no rules")
    kept.processes[0].end()  # not noticed yet
    assert await kept.respawner.readiness() == Readiness(ready=False, reason="no answer")


async def test_a_process_that_stops_of_its_own_closes_at_once(kept):
    process = kept.processes[0]
    process.waits_to_close.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert process.recorded == ["close"]
    assert kept.respawner.restarts_total == 0  # it has yet to end


async def test_a_process_that_ends_alone_is_sent_no_requests_before_it_closes(kept):
    process = kept.processes[0]
    assert await kept.respawner.answers()
    process.readiness, answered = hung(process.readiness)
    asked = asyncio.create_task(kept.respawner.answers())
    process.waits_to_close.set()
    while "close" not in process.recorded:  # noqa: ASYNC110 -- the respawner's own task
        await asyncio.sleep(0)
    answered.set()
    assert not await asked
    process.end(0, "")
    await kept.next_process()
    assert await kept.respawner.answers()


def hung(readiness):
    """Delay an answer until the event is set."""
    answered = asyncio.Event()

    async def late():
        await answered.wait()
        return await readiness()

    return late, answered


async def test_a_draining_process_takes_requests_until_it_is_let_close(kept):
    kept.keeping.cancel()
    kept.processes[0].waits_to_close.set()
    await kept.respawner.calls_ended()
    assert await kept.respawner.answers()
    kept.respawner.close()
    assert kept.processes[0].recorded == ["close"]


async def test_without_a_process_calls_have_no_effect():
    pool = Kept().respawner
    assert await pool.readiness() == Readiness(ready=False, reason="starting")
    assert await pool.report() is None
    pool.kill()
    await pool.calls_ended()
    pool.close()
    assert await pool.stop() == ""


async def test_a_stop_drains_the_process(kept):
    kept.keeping.cancel()
    assert await kept.respawner.stop() == ""
    assert kept.processes[0].recorded == ["terminate"]


async def test_a_stop_returns_why_a_process_failed_to_end_cleanly(kept):
    kept.keeping.cancel()
    kept.processes[0].end(1, "the node did not drain in time")
    assert await kept.respawner.stop() == "the node did not drain in time"


async def test_the_end_of_a_process_that_is_not_up_is_no_failure():
    kept = Kept()
    kept.failures = ["ended by signal 15"]
    with pytest.raises(StartupError):
        await kept.respawner.start()
    assert await kept.respawner.stop() == ""


async def test_a_kill_does_not_wait(kept):
    kept.respawner.kill()
    assert kept.processes[0].recorded == ["kill"]


async def test_a_process_with_any_answer_is_kept(kept):
    await kept.look(3 * MAX_SILENT_LOOKS)
    assert kept.processes[0].recorded == []


async def test_a_process_that_hangs_is_killed_and_replaced(kept, caplog):
    kept.processes[0].hangs = True
    with caplog.at_level(logging.ERROR):
        await kept.look(MAX_SILENT_LOOKS - 1)
        assert kept.processes[0].recorded == []
        kept.begin_looking()
        await kept.next_process()
    assert kept.processes[0].recorded == ["kill"]
    assert kept.respawner.restarts_total == 1
    assert caplog.messages[0] == "worker 0 does not answer, and is killed"


async def test_a_process_that_hangs_at_its_first_start_is_killed_and_replaced(caplog):
    kept = Kept()
    kept.next_hangs = True
    with caplog.at_level(logging.ERROR):
        starting = asyncio.create_task(kept.respawner.start())
        kept.begin_looking(MAX_SILENT_LOOKS)
        await starting
        assert kept.processes[0].recorded == ["kill"]
        assert await kept.respawner.readiness() == Readiness(ready=False, reason="starting")
        assert not kept.respawner.up.is_set()
        keeping = asyncio.create_task(kept.respawner.keep())
        await kept.respawner.up.wait()
    keeping.cancel()
    assert kept.respawner.restarts_total == 1
    assert caplog.messages == [
        "worker 0 does not answer, and is killed",
        "worker 0: ended by signal 9; it is started again in 0.1 s",
    ]


async def test_a_process_that_hangs_at_its_restart_is_killed_and_replaced(kept, caplog):
    kept.next_hangs = True
    kept.processes[0].end()
    await kept.started.wait()
    kept.begin_looking(MAX_SILENT_LOOKS)
    with caplog.at_level(logging.ERROR):
        await kept.next_process()
    assert [process.recorded for process in kept.processes] == [[], ["kill"], []]
    assert kept.respawner.restarts_total == 2
    assert "worker 0 does not answer, and is killed" in caplog.messages


async def test_an_answer_resets_the_count_of_silent_checks(kept):
    for hangs in (True, False, True):
        kept.processes[0].hangs = hangs
        await kept.look(MAX_SILENT_LOOKS - 1)
    assert kept.processes[0].recorded == []


async def test_an_ended_process_is_no_longer_checked(kept):
    first = kept.processes[0]
    first.hangs = True
    first.end()
    await kept.next_process()
    await kept.look(3 * MAX_SILENT_LOOKS)
    assert [process.recorded for process in kept.processes] == [[], []]
