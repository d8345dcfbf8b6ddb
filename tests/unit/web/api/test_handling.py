import asyncio

import pytest
from starlette.requests import ClientDisconnect

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.web.api.http_call import Deadline, handled
from tests.unit.services.fake_call import FakeCall


async def never():
    await asyncio.Event().wait()


def handle(handler, *, receive=never, timeout_s=None):
    return handled(handler, b"in", FakeCall(), receive=receive, deadline=Deadline(timeout_s))


async def test_an_answer_that_is_there_at_once_is_taken():
    assert await handle(lambda data, call: data + call.peer.encode()[:4]) == b"inipv4"


async def test_an_answer_is_waited_for():
    async def later(data, _call):
        await asyncio.sleep(0)
        return data

    assert await handle(later, timeout_s=60) == b"in"


async def test_an_error_comes_through():
    async def fail(_data, _call):
        raise RpcError(StatusCode.NOT_FOUND, "no")

    with pytest.raises(RpcError, match="no"):
        await handle(fail)


async def test_nobody_is_called_after_the_deadline():
    called = []
    with pytest.raises(RpcError) as refused:
        await handle(lambda data, call: called.append(data), timeout_s=0)
    assert refused.value.code is StatusCode.DEADLINE_EXCEEDED
    assert not called


class Work:
    """A handler that takes its time, and knows how it ended."""

    def __init__(self):
        self.started = asyncio.Event()
        self.cancelled = False

    async def __call__(self, _data, _call):
        self.started.set()
        try:
            await never()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_work_ends_when_its_deadline_comes():
    work = Work()
    with pytest.raises(RpcError) as refused:
        await handle(work, timeout_s=0.01)
    assert refused.value.code is StatusCode.DEADLINE_EXCEEDED
    assert work.cancelled


async def test_work_ends_when_its_caller_leaves():
    work = Work()
    events = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def leave():
        await work.started.wait()
        return events.pop(0)

    with pytest.raises(ClientDisconnect):
        await handle(work, receive=leave)
    assert work.cancelled


async def test_work_ends_when_the_request_is_given_up():
    work = Work()
    request = asyncio.create_task(handle(work))
    await work.started.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert work.cancelled


async def test_without_a_timeout_there_is_no_end():
    assert Deadline(None).remaining_s() is None
    assert 0 < Deadline(5).remaining_s() <= 5
