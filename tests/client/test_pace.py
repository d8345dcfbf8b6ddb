"""What is told once a second tells of all that happened since."""

from ratelimitd_client.pace import INTERVAL_S, Pace
from ratelimitd_client.testing import ManualClock


def test_the_first_is_told_at_once_and_the_next_after_a_pause_with_all_between():
    clock = ManualClock()
    pace = Pace(clock)
    assert [pace.count() for _ in range(3)] == [1, 0, 0]
    clock.advance(INTERVAL_S)
    assert [pace.count() for _ in range(2)] == [3, 0]
    clock.advance(INTERVAL_S)
    assert pace.count() == 2
