"""One in a turn of the loop, in the order in which they came."""

import asyncio

from ratelimitd.rpc.turnstile import Turnstile


async def test_each_turn_of_the_loop_lets_one_through_in_the_order_they_came():
    turnstile, through, in_turn = Turnstile(), [], []

    async def wait(number):
        await turnstile.passed()
        through.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    while len(through) < 5:
        before = len(through)
        await asyncio.sleep(0)
        in_turn.append(len(through) - before)
    assert through == [0, 1, 2, 3, 4]
    assert max(in_turn) == 1
    await asyncio.gather(*tasks)


async def test_one_who_leaves_the_line_holds_up_nobody():
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.passed()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    async with asyncio.timeout(10):
        await tasks[2]
