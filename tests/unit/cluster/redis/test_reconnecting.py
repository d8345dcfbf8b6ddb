import asyncio

from ratelimitd.cluster.redis.link import FIRST_S, LONGEST_S, pauses, repeat_step
from tests.unit.cluster.redis.asking import soon


def test_a_recovered_server_is_found_within_a_second():
    backoff = pauses(lambda: 0.0)
    assert [backoff.next_s() for _ in range(7)] == [FIRST_S, 0.1, 0.2, 0.4, 0.8, 1.0, LONGEST_S]


async def test_a_defect_is_reported_and_the_loop_continues():
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

    task = asyncio.create_task(repeat_step(step, sleep))
    await soon(lambda: len(steps) >= 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (reported, slept) == ([ValueError], [LONGEST_S])
