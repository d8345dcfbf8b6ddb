import asyncio
import json

import pytest

from ratelimitd.observe.history import Sample
from ratelimitd.web.pages import overview as live_stream
from ratelimitd.web.pages.overview import MAX_BEHIND, ROWS_PER_EVENT, LiveStream, Look


class FakeLive:
    """A live view whose steps the test triggers."""

    def __init__(self):
        self.past, self.ended, self.newest = [], False, []
        self.listeners = []
        self.listen, self.unlisten = self.listeners.append, self.listeners.remove

    def history(self, span):
        return [one._replace(buckets=span.step_s) for one in [*self.past, *self.newest]]

    async def step(self):
        self.newest = [Sample(7_000)]
        for listener in [*self.listeners]:
            await listener()
        self.newest = []


class Scene:
    def __init__(self):
        self.live, self.made, self.allowed = FakeLive(), [], True
        self.stream = LiveStream(self.live, self.fragments)

    async def fragments(self, look):
        self.made.append(look)
        return {"state": f"named: {look.named}"}

    async def open(self, **look):
        """Open a page and read up to the first step."""
        events = self.stream.events(lambda: self.allowed, Look(**look))
        assert await anext(events) == b"retry: 2000\n\n"
        return events


@pytest.fixture
def scene():
    return Scene()


def parsed(event):
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_page_receives_the_history_in_pieces_and_then_each_step(scene):
    scene.live.past = [Sample(at_ms) for at_ms in range(ROWS_PER_EVENT + 1)]
    events = await scene.open()
    pasts = [parsed(await anext(events)) for _ in range(2)]
    assert [(name, len(rows)) for name, rows in pasts] == [("past", ROWS_PER_EVENT), ("past", 1)]
    assert pasts[1][1][0][0] == ROWS_PER_EVENT
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await scene.live.step()
    name, data = parsed(await waiting)
    assert (name, data["row"][0], data["parts"]) == ("now", 7_000, {"state": "named: False"})
    await events.aclose()


async def test_step_is_rendered_once_per_kind_of_reader(scene):
    pages = [await scene.open() for _ in range(3)]
    pages += [await scene.open(named=True), await scene.open(span="24h")]
    await scene.live.step()
    assert sorted(scene.made) == [Look(), Look(span="24h"), Look(named=True)]
    events = [await anext(page) for page in pages]
    assert events[0] == events[1] == events[2] != events[3]
    assert [parsed(event)[1]["row"][-1] for event in events] == [2, 2, 2, 2, 240]
    for page in pages:
        await page.aclose()


async def test_nothing_listens_without_an_open_page(scene):
    one, other = await scene.open(), await scene.open()
    assert len(scene.live.listeners) == 1
    await one.aclose()
    assert scene.live.listeners
    await other.aclose()
    assert not scene.live.listeners


async def test_slow_page_is_dropped_and_others_continue(scene):
    slow, quick = await scene.open(), await scene.open()
    for _ in range(MAX_BEHIND + 1):
        await scene.live.step()
        await anext(quick)
    assert len([event async for event in slow]) == MAX_BEHIND
    await scene.live.step()
    assert parsed(await anext(quick))[0] == "now"
    await quick.aclose()


async def test_all_streams_end_with_the_node(scene):
    pages = [await scene.open() for _ in range(2)]
    scene.live.ended = True
    await scene.live.step()
    assert [[event async for event in page] for page in pages] == [[], []]
    assert not scene.live.listeners


async def test_stream_ends_after_its_duration(scene, monkeypatch):
    monkeypatch.setattr(live_stream, "STREAM_S", 0.0)
    events = await scene.open()
    assert [event async for event in events] == []


async def test_stream_ends_when_its_visitor_may_no_longer_read(scene):
    events = await scene.open()
    waiting = asyncio.ensure_future(anext(events, None))
    await asyncio.sleep(0)
    scene.allowed = False
    await scene.live.step()
    assert await waiting is None
    assert not scene.live.listeners
