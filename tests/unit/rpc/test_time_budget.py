"""How long a turn lasts, and that asking ends what made it worth asking."""

import pytest

from ratelimitd.rpc.state import LATE_S, TURN_S, TimeBudget


@pytest.mark.parametrize(("passed_s", "over"), [(0.0, False), (TURN_S, False), (0.003, True)])
def test_a_turn_is_over_when_more_than_its_time_has_passed(passed_s, over):
    now_s = 0.0
    turn = TimeBudget(lambda: now_s)
    assert not turn.expensive
    turn.expensive = True
    now_s += passed_s
    assert turn.is_over() is over
    assert not turn.expensive


def test_the_next_turn_has_all_its_time():
    turn = TimeBudget(lambda: 5.0)
    assert turn.is_over()
    turn.begin(5.0, 4.0)
    assert not turn.is_over()


@pytest.mark.parametrize(("waited_s", "late"), [(0.0, False), (LATE_S, False), (0.2, True)])
def test_what_has_waited_long_for_its_turn_is_late(waited_s, late):
    turn = TimeBudget(lambda: 0.0)
    turn.begin(waited_s, 0.0)
    assert turn.is_late is late
    assert (turn.began_s, turn.came_s) == (waited_s, 0.0)
