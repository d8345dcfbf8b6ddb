import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest

from ratelimitd.rules.sql.notices import (
    CHANNEL,
    KEEPALIVE_S,
    RETRY_FIRST_S,
    RETRY_LONGEST_S,
    follow,
)


class Pauses:
    """A sleep that notes what was asked for and ends when it is told to."""

    def __init__(self):
        self.begun = asyncio.Queue()

    async def __call__(self, seconds):
        ended = asyncio.Event()
        self.begun.put_nowait((seconds, ended))
        await ended.wait()

    async def next_s(self, *, end=False):
        seconds, ended = await self.begun.get()
        if end:
            ended.set()
        return seconds


class Listener:
    """``follow`` on a real server, with what it connected to and how often it called back."""

    def __init__(self, url):
        self.url = url
        self.drivers = asyncio.Queue()
        self.calls = asyncio.Queue()
        self.pauses = Pauses()
        self.refusals = []

    async def connect(self):
        if self.refusals:
            raise self.refusals.pop()
        driver = await asyncpg.connect(self.url, command_timeout=1.0)
        self.drivers.put_nowait(driver)
        return driver

    async def changed(self):
        self.calls.put_nowait("changed")


@asynccontextmanager
async def following(listener):
    task = asyncio.create_task(
        follow(listener.connect, listener.changed, sleep=listener.pauses, random=lambda: 0.5)
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def announce(url, times=1):
    driver = await asyncpg.connect(url)
    async with driver.transaction():
        for n in range(times):
            await driver.execute(f"SELECT pg_notify('{CHANNEL}', '{n}')")
    await driver.close()


async def test_a_connection_and_each_notice_call_back(postgresql_url):
    listener = Listener(postgresql_url)
    async with following(listener):
        for _ in range(3):
            await listener.calls.get()
            assert await listener.pauses.next_s() == KEEPALIVE_S
            await announce(postgresql_url)


async def test_notices_that_come_together_are_one_call(postgresql_url):
    listener = Listener(postgresql_url)
    async with following(listener):
        await listener.calls.get()
        await listener.pauses.next_s()
        await announce(postgresql_url, times=50)
        await listener.calls.get()
        await listener.pauses.next_s()
        assert listener.calls.empty()


async def test_a_silent_connection_is_asked_whether_it_works_and_nobody_is_called(postgresql_url):
    listener = Listener(postgresql_url)
    async with following(listener):
        await listener.calls.get()
        for _ in range(3):
            await listener.pauses.next_s(end=True)
        assert listener.calls.empty()
        assert listener.drivers.qsize() == 1


async def test_a_connection_that_ends_is_replaced_and_calls_back_for_what_was_missed(
    postgres, postgresql_url
):
    listener = Listener(postgresql_url)
    async with following(listener):
        await listener.calls.get()
        await listener.pauses.next_s()
        postgres.stop()
        assert listener.calls.empty()
        postgres.start()
        await announce(postgresql_url)
        assert await listener.pauses.next_s(end=True) == RETRY_FIRST_S * 0.75
        await listener.calls.get()


async def test_a_server_that_hangs_is_found_by_the_next_question(postgres, postgresql_url):
    listener = Listener(postgresql_url)
    async with following(listener):
        await listener.calls.get()
        seconds, ended = await listener.pauses.begun.get()  # its first question is answered
        assert seconds == KEEPALIVE_S
        postgres.pause()
        ended.set()
        assert await listener.pauses.next_s(end=True) == RETRY_FIRST_S * 0.75
        postgres.resume()
        await listener.calls.get()
        assert (await listener.drivers.get()).is_closed()


async def test_retries_back_off_with_jitter_and_begin_anew_after_a_connection(postgresql_url):
    listener = Listener(postgresql_url)
    listener.refusals = [ConnectionRefusedError] * 6 + [asyncpg.InternalClientError]
    async with following(listener):
        pauses = [await listener.pauses.next_s(end=True) for _ in range(7)]
        assert pauses == [min(RETRY_FIRST_S * 2**n, RETRY_LONGEST_S) * 0.75 for n in range(7)]
        await listener.calls.get()
        await listener.pauses.next_s()
        (await listener.drivers.get()).terminate()
        assert await listener.pauses.next_s() == RETRY_FIRST_S * 0.75


async def test_what_the_callback_raises_ends_it_and_the_connection(postgresql_url):
    listener = Listener(postgresql_url)

    async def crash():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await follow(listener.connect, crash)
    assert (await listener.drivers.get()).is_closed()


async def test_when_it_is_cancelled_its_connection_is_closed(postgresql_url):
    listener = Listener(postgresql_url)
    async with following(listener):
        await listener.calls.get()
        await listener.pauses.next_s()
    assert (await listener.drivers.get()).is_closed()
