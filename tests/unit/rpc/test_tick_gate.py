"""The tick gate admits one waiter per event-loop iteration, in order, and more after long iterations."""

import asyncio

import pytest

from ratelimitd.rpc.state import EVERY_S, ITERATION_S, LATE_S, MOST_AT_ONCE, TickGate, TimeBudget


class Line:
    """Tasks that pass a gate ``times`` times each, in the order of admission."""

    def __init__(self, gate, people, times=1):
        self.gate = gate
        self.through = []
        self.tasks = [asyncio.create_task(self._wait(number, times)) for number in range(people)]

    async def _wait(self, number, times):
        for _ in range(times):
            await self.gate.passed()
            self.through.append(number)

    async def turns(self, count, on_turn=lambda: None):
        """Run ``count`` iterations of the loop; return the number of admissions in each."""
        in_turn = []
        for _ in range(count):
            before = len(self.through)
            await asyncio.sleep(0)
            on_turn()
            in_turn.append(len(self.through) - before)
        return in_turn


def test_each_iteration_admits_one_waiter_in_order(running):
    async def scenario():
        line = Line(TickGate(), 5)
        assert await line.turns(8) == [0, 1, 1, 1, 1, 1, 0, 0]
        assert line.through == [0, 1, 2, 3, 4]

    running(scenario)


@pytest.mark.parametrize("people", [1, 2, 3])
def test_repeated_waiters_share_all_iterations(running, people):
    async def scenario():
        line = Line(TickGate(), people, times=4)
        assert await line.turns(1 + 4 * people) == [0] + [1] * 4 * people
        assert line.through == [*range(people)] * 4

    running(scenario)


def test_a_cancelled_waiter_costs_no_iteration(running):
    async def scenario():
        line = Line(TickGate(), 4)
        await asyncio.sleep(0)
        line.tasks[1].cancel()
        line.tasks[2].cancel()
        assert await line.turns(3) == [1, 1, 0]
        assert line.through == [0, 3]

    running(scenario)


def test_the_next_waiter_is_admitted_after_all_others_were_cancelled(running):
    async def scenario():
        gate = TickGate()
        left = Line(gate, 3)
        await asyncio.sleep(0)
        for task in left.tasks:
            task.cancel()
        assert await left.turns(2) == [0, 0]
        assert await Line(gate, 2).turns(3) == [0, 1, 1]

    running(scenario)


@pytest.mark.parametrize(
    ("turn_s", "together"),
    [(0.0, 1), (EVERY_S, 1), (6 * EVERY_S, 6), (1_000 * EVERY_S, MOST_AT_ONCE), (-1.0, 1)],
)
def test_with_a_clock_admissions_grow_with_the_length_of_the_iteration(running, turn_s, together):
    async def scenario():
        now_s = 100.0

        def on_turn():
            nonlocal now_s
            now_s += turn_s

        line = Line(TickGate(lambda: now_s), 1 + 3 * together)
        assert await line.turns(6, on_turn) == [0, 1, together, together, together, 0]

    running(scenario)


@pytest.mark.parametrize(("passed_s", "over"), [(0.0, False), (ITERATION_S, False), (0.003, True)])
def test_the_budget_is_used_up_after_its_time(passed_s, over):
    now_s = 0.0
    turn = TimeBudget(lambda: now_s)
    assert not turn.expensive
    turn.expensive = True
    now_s += passed_s
    assert turn.is_over() is over
    assert not turn.expensive


def test_the_next_iteration_has_the_whole_budget():
    turn = TimeBudget(lambda: 5.0)
    assert turn.is_over()
    turn.begin(5.0, 4.0)
    assert not turn.is_over()


@pytest.mark.parametrize(("waited_s", "late"), [(0.0, False), (LATE_S, False), (0.2, True)])
def test_input_that_has_waited_long_is_late(waited_s, late):
    turn = TimeBudget(lambda: 0.0)
    turn.begin(waited_s, 0.0)
    assert turn.is_late is late
    assert (turn.began_s, turn.came_s) == (waited_s, 0.0)
