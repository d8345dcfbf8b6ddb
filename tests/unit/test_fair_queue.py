"""Steps of many callers under one budget per event-loop iteration, with a clock that each step moves."""

import asyncio

import pytest

from ratelimitd.fair_queue import BUDGET_S, FairQueue, FairSlots


class Work:
    """Steps that each take ``step_s``; ``done`` has their names by iteration."""

    def __init__(self, step_s=BUDGET_S):
        self.now_s = 0.0
        self.step_s = step_s
        self.queue = FairQueue(lambda: self.now_s)
        self.done = []

    def submit(self, peer, name):
        def step():
            self.now_s += self.step_s
            self.done[-1].append(name)

        self.queue.submit(peer, step)

    async def iterations(self, number):
        for _ in range(number):
            self.done.append([])
            await asyncio.sleep(0)
        return self.done


async def test_addresses_then_connections_then_submissions_take_turns():
    work = Work()
    for peer, name in [("a:1", "a1"), ("a:1", "a2"), ("a:1", "a3"), ("a:2", "b1"), ("b:1", "c1")]:
        work.submit(peer, name)
    assert await work.iterations(6) == [["a1"], ["c1"], ["b1"], ["a2"], ["a3"], []]


async def test_steps_share_an_iteration_until_its_budget_is_used():
    work = Work(step_s=BUDGET_S / 2.5)
    for number in range(5):
        work.submit(f"peer:{number}", number)
    assert await work.iterations(3) == [[0, 1, 2], [3, 4], []]


async def test_a_flood_from_one_address_leaves_another_every_second_step():
    work = Work()
    for number in range(1_000):
        work.submit(f"flood:{number % 50}", "flood")
    for _ in range(3):
        work.submit("honest:1", "honest")
    done = await work.iterations(6)
    assert done == [["flood"], ["honest"]] * 3


async def test_a_step_may_submit_more_and_waits_behind_those_that_are_there():
    work = Work()
    work.submit("a:1", "a1")
    work.submit("b:1", "b1")
    await work.iterations(1)
    work.submit("a:1", "a2")
    assert await work.iterations(2) == [["a1"], ["b1"], ["a2"]]


async def test_a_step_runs_at_once_while_no_other_waits_and_the_budget_lasts():
    work = Work()
    for _ in range(2):
        assert work.queue.begin()
        work.now_s += BUDGET_S / 2
        work.queue.end()
    assert not work.queue.begin()
    await work.iterations(1)
    assert work.queue.begin()
    work.queue.end()
    work.submit("a:1", "a1")
    assert not work.queue.begin()
    assert await work.iterations(2) == [[], ["a1"], []]


async def test_a_step_that_raises_is_logged_and_keeps_no_other_waiting(caplog):
    work = Work()
    work.queue.submit("a:1", lambda: 1 // 0)
    work.submit("b:1", "b1")
    assert await work.iterations(3) == [[], ["b1"], []]
    assert "ZeroDivisionError" in caplog.text


async def test_results_and_errors_reach_the_task_that_waits():
    queue = FairQueue(lambda: 0.0)
    assert await queue.run("a:1", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await queue.run("a:1", lambda: 1 // 0)


async def test_the_step_of_a_cancelled_task_is_not_run():
    work = Work()
    ran = []
    waiting = asyncio.ensure_future(work.queue.run("a:1", lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting.cancelled()
    assert ran == []


async def test_slots_go_to_the_next_in_rotation_and_cancelled_waiters_take_none():
    slots, order = FairSlots(1), []

    async def hold(peer):
        async with slots.held(peer):
            order.append(peer)
            await asyncio.sleep(0)

    holding = [asyncio.ensure_future(hold(peer)) for peer in ("a:1", "a:1", "a:1", "a:2", "b:1")]
    await asyncio.sleep(0)
    holding[1].cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    assert order == ["a:1", "b:1", "a:2", "a:1"]
    await asyncio.wait_for(slots.take("a:1"), 1)


async def test_a_slot_that_is_given_to_a_task_that_is_cancelled_goes_to_the_next():
    slots = FairSlots(1)
    await slots.take("a:1")
    first, second = [asyncio.ensure_future(slots.take(f"a:{port}")) for port in (1, 2)]
    await asyncio.sleep(0)
    slots.release()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert (first.cancelled(), second.cancelled()) == (True, False)
