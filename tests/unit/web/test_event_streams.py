import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse, StreamingResponse

from ratelimitd.web import server
from ratelimitd.web.server import LASTING, EventStreams


@pytest.fixture
def end():
    return asyncio.Event()


@pytest.fixture
def begun():
    """Receives an item for each started stream."""
    return asyncio.Queue()


@pytest.fixture
def scopes():
    return []


@pytest.fixture
async def http(end, begun, scopes):
    async def events():
        await begun.put(None)
        yield b"data: 1\n\n"
        await end.wait()

    async def app(scope, receive, send):
        scopes.append(scope)
        answer = PlainTextResponse("short")
        if scope["path"] == "/events":
            answer = StreamingResponse(events(), media_type="text/event-stream; charset=utf-8")
        if scope["path"] == "/broken":
            answer = StreamingResponse(broken(), media_type="text/event-stream")
        await answer(scope, receive, send)

    async def broken():
        yield b"data: 1\n\n"
        raise ZeroDivisionError

    transport = httpx.ASGITransport(app=EventStreams(app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_streams_beyond_the_bound_are_refused_with_retry_after(http, end, begun, monkeypatch):
    monkeypatch.setattr(server, "MAX_STREAMS", 2)
    streams = [asyncio.create_task(http.get("/events")) for _ in range(2)]
    for _ in streams:
        await begun.get()
    refused = await http.get("/events")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
    end.set()
    assert [(await stream).text for stream in streams] == ["data: 1\n\n"] * 2
    assert (await http.get("/events")).status_code == 200


async def test_concurrent_streams_do_not_exceed_the_bound(http, end, begun):
    streams = [asyncio.create_task(http.get("/events")) for _ in range(60)]
    refused = set()
    while len(refused) < 40:
        done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        refused |= done
        streams = [stream for stream in streams if stream not in done]
    assert {stream.result().status_code for stream in refused} == {503}
    assert len(streams) == server.MAX_STREAMS == 20
    end.set()
    assert {(await stream).status_code for stream in streams} == {200}


async def test_failed_stream_frees_its_slot(http, end, monkeypatch):
    monkeypatch.setattr(server, "MAX_STREAMS", 1)
    end.set()
    await http.get("/broken")
    assert (await http.get("/events")).status_code == 200


async def test_other_answers_are_not_counted(http, scopes, monkeypatch):
    monkeypatch.setattr(server, "MAX_STREAMS", 0)
    assert (await http.get("/")).text == "short"
    assert LASTING not in scopes[0]
