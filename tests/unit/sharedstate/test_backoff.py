import asyncio

from ratelimitd.sharedstate.backoff import FIRST_S, LONGEST_S, Backoff, for_ever
from tests.unit.sharedstate.asking import soon


def test_pauses_double_up_to_a_second():
    backoff = Backoff(lambda: 0.0)
    pauses = [backoff.next_s() for _ in range(8)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert (FIRST_S, LONGEST_S) == (0.05, 1.0)


def test_after_a_success_the_first_pause_comes_again():
    backoff = Backoff(lambda: 0.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == FIRST_S


def test_pauses_are_shortened_at_random_so_that_nodes_do_not_move_in_step():
    assert Backoff(lambda: 1.0).next_s() == FIRST_S / 2


async def test_a_defect_is_reported_and_not_the_end():
    reported, slept, steps = [], [], []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(type(context["exception"]))
    )

    async def step():
        steps.append(1)
        await asyncio.sleep(0)
        if len(steps) == 2:
            raise ValueError

    async def sleep(seconds):
        slept.append(seconds)

    task = asyncio.create_task(for_ever(step, sleep))
    await soon(lambda: len(steps) >= 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (reported, slept) == ([ValueError], [LONGEST_S])
