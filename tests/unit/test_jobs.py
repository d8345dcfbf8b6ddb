import asyncio

import pytest

from ratelimitd.retry import FIRST_PAUSE_S, LONG_RUN_S, LONGEST_PAUSE_S, Background, cancel_all


class Time:
    """Sleeping moves the clock; it ends for good after ``naps``."""

    def __init__(self, naps):
        self.now_s = 0.0
        self.slept = []
        self.naps = naps

    async def sleep(self, seconds):
        if len(self.slept) == self.naps:
            await asyncio.Event().wait()
        self.slept.append(seconds)
        self.now_s += seconds


async def settled():
    for _ in range(100):
        await asyncio.sleep(0)


def background(restarts, time, share=0.0):
    return Background(
        restarts, sleep=time.sleep, time_s=lambda: time.now_s, random_share=lambda: share
    )


async def test_a_job_that_crashes_is_counted_logged_and_started_again(caplog):
    restarts = {}
    runs = []

    async def job():
        runs.append(1)
        if len(runs) < 3:
            raise ValueError

    jobs = background(restarts, Time(naps=10))
    jobs.start("snapshot", job)
    assert restarts == {"snapshot": 0}
    await settled()
    assert len(runs) == 3
    assert restarts == {"snapshot": 2}
    assert "background job snapshot crashed" in caplog.text


@pytest.mark.parametrize(("share", "part"), [(0.0, 1.0), (1.0, 0.5)])
async def test_the_pause_before_a_restart_doubles_up_to_a_bound_less_a_random_part(share, part):
    async def job():
        raise ValueError

    time = Time(naps=12)
    jobs = background({}, time, share)
    jobs.start("x", job)
    await settled()
    await jobs.stop()
    first_s = FIRST_PAUSE_S * part
    assert time.slept[:3] == [first_s, 2 * first_s, 4 * first_s]
    assert time.slept[-1] == LONGEST_PAUSE_S * part


async def test_a_long_run_forgives_earlier_crashes():
    time = Time(naps=4)
    runs = []

    async def job():
        runs.append(1)
        if len(runs) == 3:
            time.now_s += LONG_RUN_S
        raise ValueError

    jobs = background({}, time)
    jobs.start("x", job)
    await settled()
    await jobs.stop()
    assert time.slept == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]


async def test_a_job_that_returns_has_ended():
    runs = []

    async def job():
        runs.append(1)

    jobs = background({}, Time(naps=0))
    jobs.start("x", job)
    await settled()
    assert runs == [1]


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_tick_is_called_again_and_again_after_a_pause(waiting):
    ticks = []

    async def later():
        ticks.append(1)

    def now():
        ticks.append(1)

    time = Time(naps=3)
    jobs = background({}, time)
    jobs.every(5.0, "x", later if waiting else now)
    await settled()
    await jobs.stop()
    assert (time.slept, len(ticks)) == ([5.0] * 3, 3)


async def test_stopping_cancels_every_job_and_waits_for_it():
    ended = []

    async def job():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(1)

    jobs = Background({})
    jobs.start("x", job)
    jobs.start("y", job)
    await asyncio.sleep(0)
    await jobs.stop()
    assert ended == [1, 1]
    await jobs.stop()


async def test_cancelled_tasks_have_ended_whatever_their_end_was():
    ended = []

    async def wait(what):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(what)
            if what == "error":
                raise ValueError(what)

    tasks = [asyncio.create_task(wait(what)) for what in ("cancelled", "error")]
    await asyncio.sleep(0)
    await cancel_all(*tasks, None)
    assert ended == ["cancelled", "error"]
    assert [task.done() for task in tasks] == [True, True]
