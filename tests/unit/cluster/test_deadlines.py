import asyncio

import pytest

from ratelimitd.cluster.pending import Deadlines, PendingCheck
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import MS, RULE, ManualTimers


class Scene:
    def __init__(self):
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.given_up, self.refused = [], None
        self.patience = Deadlines(self.clock, self.timers, 0.02, self._give_up)

    def _give_up(self, bucket, question):
        if bucket == self.refused:
            raise RuntimeError
        self.given_up.append((bucket, self.clock.monotonic_us() // MS))
        if not question.answer.done():
            question.answer.set_result(None)

    def wait(self, name):
        answer = asyncio.get_running_loop().create_future()
        question = PendingCheck(RULE, 0, 1, peek=False, answer=answer)
        self.patience.add(name, question)
        return answer


@pytest.fixture
async def scene():
    return Scene()


async def test_a_check_is_given_up_after_20_ms_and_not_before(scene):
    scene.wait("first")
    scene.timers.run(20 * MS - 1)
    assert scene.given_up == []
    scene.timers.run(1)
    assert scene.given_up == [("first", 20)]


async def test_each_has_20_ms_of_its_own(scene):
    scene.wait("first")
    scene.timers.run(7 * MS)
    scene.wait("second")
    scene.wait("third")
    scene.timers.run(100 * MS)
    assert scene.given_up == [("first", 20), ("second", 27), ("third", 27)]


async def test_one_that_is_answered_is_not_given_up_and_one_that_is_left_is(scene):
    answered, left, _late = scene.wait("answered"), scene.wait("left"), scene.wait("late")
    answered.set_result(None)
    left.cancel()
    scene.timers.run(100 * MS)
    assert scene.given_up == [("left", 20), ("late", 20)]


async def test_one_that_was_answered_does_not_hold_up_those_behind_it(scene):
    answered = scene.wait("answered")
    scene.timers.run(10 * MS)
    scene.wait("late")
    answered.set_result(None)
    scene.timers.run(100 * MS)
    assert scene.given_up == [("late", 30)]


async def test_after_all_were_answered_the_next_one_is_waited_for_anew(scene):
    scene.wait("first").set_result(None)
    scene.timers.run(100 * MS)
    scene.wait("second")
    scene.timers.run(100 * MS)
    assert scene.given_up == [("second", 120)]


async def test_those_that_were_answered_need_no_timer_of_their_own(scene):
    for _ in range(100):
        scene.wait("quick").set_result(None)
        scene.timers.run(100)
    scene.timers.run(100 * MS)
    assert scene.given_up == []
    assert scene.timers.set_total == 1


async def test_one_that_cannot_be_given_up_does_not_let_others_wait_for_ever(scene):
    scene.wait("first")
    scene.wait("second")
    scene.refused = "first"
    with pytest.raises(RuntimeError):
        scene.timers.run(20 * MS)
    scene.timers.run()
    assert scene.given_up == [("second", 20)]
    scene.wait("third")
    scene.timers.run(20 * MS)
    assert scene.given_up == [("second", 20), ("third", 40)]
