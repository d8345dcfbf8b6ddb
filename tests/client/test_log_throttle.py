"""What is told once a second tells of all that happened since."""

from ratelimitd_client.log_throttle import INTERVAL_S, LogThrottle
from ratelimitd_client.testing import ManualClock


def test_the_first_is_told_at_once_and_the_next_after_a_pause_with_all_between():
    clock = ManualClock()
    pace = LogThrottle(clock)
    assert [pace.count() for _ in range(3)] == [1, 0, 0]
    clock.advance(INTERVAL_S)
    assert [pace.count() for _ in range(2)] == [3, 0]
    clock.advance(INTERVAL_S)
    assert pace.count() == 2


def test_nobody_waits_for_a_thread_that_counts():
    pace = LogThrottle(ManualClock())
    with pace._lock:  # as one that was forked away
        assert pace.count() == 0
    assert pace.count() == 1
