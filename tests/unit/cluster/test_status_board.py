import asyncio

import pytest

from ratelimitd.cluster.membership import KEPT_S, MAX_NODES, StatusBoard
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.testing import ManualClock


class Statuses:
    """Keeps statuses and answers at once, with ``answer`` if set; if it ``waits``, when the test calls ``done``."""

    def __init__(self):
        self.kept, self.asked, self.answer, self.waits = {}, [], None, False
        self.done = None

    def put_status(self, incarnation, status, ttl_ms):
        assert ttl_ms == KEPT_S * 1_000
        self.kept[incarnation] = status

    def remove_status(self, incarnation):
        del self.kept[incarnation]

    def read_statuses(self, incarnations, done):
        self.asked.append(incarnations)
        self.done = done
        if not self.waits:
            done(self.answer or [self.kept.get(name) for name in incarnations])


class Members:
    alive = ("n1/a", "n2/b")


class Scene:
    def __init__(self):
        self.statuses, self.members, self.clock = Statuses(), Members(), ManualClock()
        self.board = StatusBoard(self.statuses, self.members, "n1/a", self.clock)
        self.statuses.kept["n2/b"] = b"two"


@pytest.fixture
def scene():
    return Scene()


async def test_a_node_reads_the_statuses_of_the_others(scene):
    scene.board.publish(b"one")
    assert scene.statuses.kept == {"n1/a": b"one", "n2/b": b"two"}
    assert await scene.board.read() == {"n2/b": b"two"}
    assert scene.statuses.asked == [["n2/b"]]


async def test_a_node_that_is_alone_sends_no_request(scene):
    scene.members.alive = ()
    assert await scene.board.read() == {}
    assert not scene.statuses.asked


async def test_a_node_without_a_status_is_left_out(scene):
    scene.members.alive = ("n1/a", "n2/b", "n3/c")
    assert await scene.board.read() == {"n2/b": b"two"}


async def test_a_node_without_heartbeats_is_read_for_another_minute(scene):
    await scene.board.read()
    scene.members.alive = ("n1/a",)
    scene.clock.advance(seconds=KEPT_S - 1)
    assert await scene.board.read() == {"n2/b": b"two"}
    scene.clock.advance(seconds=1)
    assert await scene.board.read() == {}


async def test_among_too_many_names_those_alive_are_read(scene):
    scene.members.alive = [f"old{number}/x" for number in range(MAX_NODES)]
    scene.board.note_members()
    scene.members.alive = ("n1/a", "n2/b")
    await scene.board.read()
    assert len(scene.statuses.asked[0]) == MAX_NODES - 1
    assert scene.statuses.asked[0][-1] == "n2/b"


async def test_an_unanswered_read_raises(scene):
    scene.statuses.answer = StoreUnavailableError("no answer")
    with pytest.raises(StoreUnavailableError):
        await scene.board.read()


async def test_an_answer_after_the_caller_left_is_dropped(scene):
    scene.statuses.waits = True
    reading = asyncio.create_task(scene.board.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    scene.statuses.done([b"two"])


async def test_a_leaving_node_removes_its_status(scene):
    scene.board.publish(b"one")
    scene.board.leave()
    assert scene.statuses.kept == {"n2/b": b"two"}
