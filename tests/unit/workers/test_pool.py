"""The pool of workers, which are real processes that run scripted programs."""

import asyncio
import logging
from functools import partial

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.observe.metrics import DEFINITIONS
from ratelimitd.settings.table import Settings
from ratelimitd.web.parts import Readiness
from ratelimitd.workers import child
from ratelimitd.workers import metrics as metrics_module
from ratelimitd.workers import pool as pool_module
from ratelimitd.workers.child import ChecksGuard, WorkerProcess
from ratelimitd.workers.metrics import OF_PARENT
from ratelimitd.workers.pool import Respawner, WorkerPool
from tests.fake_worker import ANSWERING, command

SETTINGS = Settings.load({}, {"NODE_ID": "n/0"})
ALLOWED = "rate_limiter_requests_allowed_total"
NOT_READY = """
until_told()
ready()
for question in questions:
    say("readiness", False, "no rules are loaded yet")
"""
SILENT = "until_told()\nready()\ntime.sleep(60)"


async def http_off():
    """There is no HTTP server to end."""


class Started(WorkerPool):
    """A pool that remembers its processes."""

    def __init__(self, *programs):
        self.processes = [[] for _ in programs]

        async def start(number, program, on_report):
            found = await WorkerProcess.start(SETTINGS, ChecksGuard(), on_report, command(program))
            self.processes[number].append(found)
            return found

        super().__init__(
            [
                Respawner(f"worker {number}", partial(start, number, program))
                for number, program in enumerate(programs)
            ]
        )


@pytest.fixture
async def pool():
    """Return a function that creates pools; stop them at the end."""
    pools = []

    def make(*programs):
        pools.append(Started(*programs))
        return pools[-1]

    yield make
    for each in pools:
        each.kill()
        await each.stop(10, http_off, calls_s=60)


async def values(pool):
    """Return every reading: name → label → value."""
    return {
        definition.name: {point.label: point.value for point in points}
        for definition, points in await pool.points()
    }


async def test_the_metrics_of_two_workers_are_those_of_one_node(pool):
    both = pool(ANSWERING, ANSWERING)
    await both.start()
    first, second = await values(both), await values(both)
    assert (first[ALLOWED], second[ALLOWED]) == ({"": 2}, {"": 4})
    assert first["rate_limiter_tasks"] == {"": 2}
    assert first["rate_limiter_workers"] == {"": 2}
    assert first["rate_limiter_worker_restarts_total"] == {"0": 0, "1": 0}


async def test_concurrent_scrapes_share_one_merge_of_the_metrics(pool):
    both = pool(ANSWERING, ANSWERING)
    await both.start()
    first, second = await asyncio.gather(both.points(), both.points())
    assert first is second
    assert await both.points() is not first


async def test_cancelled_scrape_leaves_the_others_their_metrics(pool):
    both = pool(ANSWERING, ANSWERING)
    await both.start()
    first, second = (asyncio.create_task(values(both)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second)[ALLOWED] == {"": 2}


async def test_a_parent_shows_its_own_metrics_after_all_others_and_counts_its_memory(pool):
    none = pool(ANSWERING)  # not started
    points = await none.points()
    assert [definition for definition, _ in points] == [*DEFINITIONS, *OF_PARENT]
    found = await values(none)
    assert found["rate_limiter_memory_usage_bytes"][""] > 1_000_000
    assert found["process_start_time_seconds"][""] > 1_600_000_000
    assert found["rate_limiter_workers"] == {"": 0}
    assert found["rate_limiter_healthy"] == {}


async def test_a_worker_that_does_not_answer_is_omitted_and_its_counters_are_kept(
    pool, monkeypatch
):
    both = pool(
        ANSWERING,
        "until_told()\nready()\nquestions.readline()\nmetrics("
        "rate_limiter_requests_allowed_total=40, rate_limiter_tasks=1)\ntime.sleep(60)",
    )
    await both.start()
    assert (await values(both))[ALLOWED] == {"": 41}
    monkeypatch.setattr(child, "REPORT_TIMEOUT_S", 0.2)
    found = await values(both)
    assert found[ALLOWED] == {"": 42}
    assert found["rate_limiter_tasks"] == {"": 1}
    assert found["rate_limiter_workers"] == {"": 1}


async def test_counters_never_decrease_when_a_worker_is_killed(pool, caplog):
    both = pool(ANSWERING, ANSWERING)
    await both.start()
    seen = [(await values(both))[ALLOWED][""]]
    with caplog.at_level(logging.CRITICAL):
        both.processes[0][0].kill()
        while (found := await values(both))["rate_limiter_workers"][""] < 2 or len(
            both.processes[0]
        ) < 2:
            seen.append(found[ALLOWED][""])
    seen.append(found[ALLOWED][""])
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    assert found["rate_limiter_worker_restarts_total"] == {"0": 1, "1": 0}


async def test_a_rule_that_no_worker_reports_is_forgotten_above_the_bound_and_others_are_not(
    pool, monkeypatch
):
    reporting = """
        until_told()
        ready()
        for rules in {}:
            questions.readline()
            say("points", "rate_limiter_rule_allowed_total", [[rule, 1] for rule in rules])
            say("reported")
        time.sleep(60)
        """
    both = pool(reporting.format(["ab", "b"]), reporting.format(["abc", "c"]))
    await both.start()
    monkeypatch.setattr(metrics_module, "MAX_LABELS", 2)
    assert (await values(both))["rate_limiter_rule_allowed_total"] == {"a": 2, "b": 2, "c": 1}
    monkeypatch.setattr(metrics_module, "MAX_LABELS", 1)
    assert (await values(both))["rate_limiter_rule_allowed_total"] == {"b": 2, "c": 1}


async def test_a_pool_is_ready_while_one_worker_is_and_names_those_that_are_not(pool, monkeypatch):
    monkeypatch.setattr(child, "READINESS_TIMEOUT_S", 5.0)
    all_ready = pool(ANSWERING, ANSWERING)
    assert await all_ready.readiness() == Readiness(
        False, "worker 0 (starting), worker 1 (starting)"
    )
    await all_ready.start()
    assert await all_ready.readiness() == Readiness(ready=True)
    some = pool(ANSWERING, NOT_READY)
    await some.start()
    assert await some.readiness() == Readiness(True, "all but worker 1 (no rules are loaded yet)")


async def test_a_pool_whose_workers_do_not_answer_is_not_ready(pool, monkeypatch):
    monkeypatch.setattr(child, "READINESS_TIMEOUT_S", 0.0)
    silent = pool(SILENT)
    await silent.start()
    assert await silent.readiness() == Readiness(False, "worker 0 (no answer)")
    assert not await silent.answers(0)


async def test_a_worker_that_cannot_start_fails_the_pool(pool):
    some = pool(SILENT, 'say("failed", "LISTEN: taken")')
    with pytest.raises(StartupError, match=r"^LISTEN: taken$"):
        await some.start()
    assert await some.stop(10, http_off, calls_s=60) == ""
    assert await some.processes[0][0].ended() in {0, -15}


class Step:
    """A respawner that records its calls, and is prepared when the test allows it."""

    def __init__(self, name, steps):
        self.name = name
        self.steps = steps
        self.may_go_on = asyncio.Event()
        self.up = asyncio.Event()
        self.up.set()

    async def prepare(self):
        self.steps.append(f"prepare {self.name}")
        await self.may_go_on.wait()

    async def start(self):
        self.steps.append(f"start {self.name}")

    async def keep(self):
        await asyncio.Event().wait()

    async def calls_ended(self):
        pass

    def close(self):
        pass

    async def stop(self):
        return ""


async def test_no_worker_listens_before_all_can():
    steps = []
    quick, slow = Step("quick", steps), Step("slow", steps)
    pool = WorkerPool([quick, slow])
    starting = asyncio.create_task(pool.start())
    quick.may_go_on.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert steps == ["prepare quick", "prepare slow"]
    slow.may_go_on.set()
    await starting
    assert steps[2:] == ["start quick", "start slow"]
    await pool.stop(0, http_off, calls_s=60)


async def test_a_worker_that_starts_during_a_stop_is_not_kept():
    class Late(Step):
        async def keep(self):
            self.steps.append("keep")

    steps = []
    late = Late("late", steps)
    late.may_go_on.set()
    pool = WorkerPool([late])
    await pool.stop(0, http_off, calls_s=60)
    await pool.start()
    for _ in range(9):
        await asyncio.sleep(0)
    assert steps == ["prepare late", "start late"]


class Store(Step):
    """A respawner of the private store."""

    restarts_total = 3

    async def keep(self):
        self.steps.append(f"keep {self.name}")
        try:
            await asyncio.Event().wait()
        finally:
            self.steps.append("store is not kept")

    async def stop(self):
        self.steps.append("stop store")
        return "ended with status 1"


class Drained(Step):
    async def stop(self):
        self.steps.append("stop worker")
        return "it hung"


async def test_the_store_runs_from_before_the_workers_until_they_have_drained():
    steps = []
    worker = Drained("worker", steps)
    worker.may_go_on.set()
    pool = WorkerPool([worker], Store("store", steps))
    await pool.start()
    await asyncio.sleep(0)
    assert steps == ["start store", "keep store", "prepare worker", "start worker"]
    reasons = await pool.stop(1, http_off, calls_s=60)
    assert steps[4:] == ["stop worker", "store is not kept", "stop store"]
    assert reasons == "worker: it hung; store: ended with status 1"


async def test_a_store_that_cannot_start_fails_the_pool():
    class Failing(Store):
        async def start(self):
            message = "it cannot be started"
            raise StartupError(message)

    steps = []
    pool = WorkerPool([Step("worker", steps)], Failing("store", steps))
    with pytest.raises(StartupError, match=r"^store: it cannot be started$"):
        await pool.start()
    assert steps == []


async def test_a_stop_during_the_start_of_the_store_starts_no_workers():
    class Late(Store):
        async def start(self):
            await pool.stop(0, http_off, calls_s=60)

    steps = []
    pool = WorkerPool([Step("worker", steps)], Late("store", steps))
    await pool.start()
    assert steps == ["stop store"]


async def test_a_store_is_restarted_counted_and_killed_like_a_worker(pool):
    killed = []
    store = Store("store", [])
    store.kill = lambda: killed.append("store")
    both = pool(ANSWERING)
    both._stores = (store,)
    assert (await values(both))["rate_limiter_worker_restarts_total"] == {"0": 0, "store": 3}
    both.kill()
    assert killed == ["store"]


async def test_a_worker_that_hangs_at_its_start_delays_the_others_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(pool_module, "TOGETHER_S", 0.0)
    steps = []
    pool = WorkerPool([Step("quick", steps), Step("slow", steps)])
    await pool.start()
    assert steps[-2:] == ["start quick", "start slow"]
    await pool.stop(0, http_off, calls_s=60)


async def test_started_workers_are_kept_while_another_hangs_at_its_start(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "TOGETHER_S", 0.0)
    both = pool("time.sleep(60)", ANSWERING)
    starting = asyncio.create_task(both.start())
    while not both.processes[1]:  # noqa: ASYNC110 - a real process
        await asyncio.sleep(0.001)
    await both.processes[1][0].ready()
    both.processes[1][0].kill()
    while len(both.processes[1]) < 2:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.001)
    starting.cancel()


async def test_a_pool_whose_workers_all_hung_has_started_when_one_answers():
    workers = [Step(name, []) for name in ("first", "second")]
    for worker in workers:
        worker.may_go_on.set()
        worker.up.clear()
    pool = WorkerPool(workers)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(pool.start())
    for _ in range(9):
        await asyncio.sleep(0)
    assert not starting.done()
    workers[1].up.set()
    await starting
    await pool.stop(0, http_off, calls_s=60)
    assert asyncio.all_tasks() == before


async def test_all_workers_drain_at_once_and_the_pool_is_not_ready_meanwhile(pool):
    both = pool(ANSWERING, ANSWERING)
    await both.start()
    stopping = asyncio.create_task(both.stop(10, http_off, calls_s=60))
    await asyncio.sleep(0)
    assert await both.readiness() == Readiness(ready=False, reason="draining")
    assert await stopping == ""


class Draining(Step):
    """A respawner whose process ends its calls when the test allows it, and itself when it is let close."""

    def __init__(self, name, steps):
        super().__init__(name, steps)
        self.may_end = asyncio.Event()

    async def calls_ended(self):
        await self.may_go_on.wait()
        self.steps.append(f"{self.name}: calls ended")

    def close(self):
        self.steps.append(f"{self.name}: close")
        self.may_end.set()

    async def stop(self):
        await self.may_end.wait()
        return ""

    def kill(self):
        self.steps.append(f"{self.name}: killed")
        self.may_go_on.set()
        self.may_end.set()


async def test_http_ends_when_no_worker_has_calls_and_before_any_closes():
    steps = []

    async def end_http():
        steps.append("HTTP ends")
        await asyncio.sleep(0)
        steps.append("HTTP has ended")

    quick, slow = Draining("quick", steps), Draining("slow", steps)
    stopping = asyncio.create_task(WorkerPool([quick, slow]).stop(10, end_http, calls_s=60))
    quick.may_go_on.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert steps == ["quick: calls ended"]
    slow.may_go_on.set()
    assert await stopping == ""
    assert steps[1:] == [
        "slow: calls ended",
        "HTTP ends",
        "HTTP has ended",
        "quick: close",
        "slow: close",
    ]


async def test_http_ends_also_when_workers_are_killed():
    steps = []

    async def end_http():
        steps.append("HTTP ends")

    await WorkerPool([Draining("slow", steps)]).stop(0, end_http, calls_s=60)
    assert steps == ["slow: killed", "slow: calls ended", "HTTP ends", "slow: close"]


async def test_http_ends_after_the_time_for_calls_although_a_worker_hangs():
    steps = []

    async def end_http():
        steps.append("HTTP ends")

    await WorkerPool([Draining("hung", steps)]).stop(60, end_http, calls_s=0)
    assert steps == ["HTTP ends", "hung: close"]


async def test_a_worker_that_fails_to_end_cleanly_is_named_by_number(pool):
    some = pool(
        ANSWERING,
        """
        signal.signal(signal.SIGTERM, lambda *_: (say("failed", "it hung"), os._exit(1)))
        ready()
        questions.readline()
        """,
    )
    await some.start()
    assert await some.stop(10, http_off, calls_s=60) == "worker 1: it hung"


async def test_a_worker_that_takes_too_long_is_killed(pool):
    some = pool("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)")
    await some.start()
    assert await some.stop(0, http_off, calls_s=60) == "worker 0: ended by signal 9"
